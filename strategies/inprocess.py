"""A Flower grid that calls the ClientApp directly: no Ray, no server, one process.

For tests, experiments of thousands of rounds, and the dense run beside a main run. A node
is a Context; a message is answered while it is pushed, one node after another.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from protocol.messages import outside_of_a_run

NodeConfig = Mapping[str, bool | int | float | str]


class InProcessGrid(Grid):
    """Nodes of one ClientApp in this process.

    Args:
        client_app: the app that every node runs.
        node_configs: one configuration a node; node ids count from 1.
        run_config: run configuration that every node's Context carries.
        run_id: run id that messages and Contexts carry.
    """

    def __init__(
        self,
        client_app: ClientApp,
        node_configs: Iterable[NodeConfig],
        run_config: NodeConfig | None = None,
        run_id: int = 0,
    ) -> None:
        self._app = client_app
        self._run_id = run_id
        self._replies: dict[str, Message] = {}
        self.contexts = {
            node_id: Context(
                run_id=run_id,
                node_id=node_id,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node_id, config in enumerate(node_configs, start=1)
        }

    @classmethod
    def of_partitions(
        cls, client_app: ClientApp, count: int, run_config: NodeConfig | None, state_dir: Path
    ) -> InProcessGrid:
        """A grid of `count` nodes, configured as Flower's simulation configures its own; state goes to state_dir."""
        configs: list[NodeConfig] = [
            {"partition-id": i, "num-partitions": count, "state-dir": str(state_dir)} for i in range(count)
        ]
        return cls(client_app, configs, run_config)

    def set_run(self, run: Run) -> None:
        """Take a run's id."""
        self._run_id = run.run_id

    @property
    def run(self) -> Run:
        """There is no Flower run here."""
        raise RuntimeError("InProcessGrid has no Flower run: it calls the ClientApp directly")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to one of this grid's nodes."""
        return outside_of_a_run(
            content, node_id=dst_node_id, message_type=message_type, run_id=self._run_id, group_id=group_id
        )

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer each message at once; an exception of the app becomes an error reply, as in Flower."""
        ids: list[str] = []
        for message in messages:
            if message.metadata.dst_node_id not in self.contexts:
                continue  # the node is gone: nothing is sent
            message_id = str(uuid.uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            context = self.contexts[message.metadata.dst_node_id]
            try:
                reply = self._app(message, context)
            except Exception as error:
                reason = f"{type(error)}:<{str(error)!r}>"
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
            self._replies[message_id] = reply
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages; each is given once."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and pull their replies."""
        return self.pull_messages(self.push_messages(messages))
