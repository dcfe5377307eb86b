"""Who is there: nodes are greeted, and the clients they answer with are entered."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from flwr.app import Message
from flwr.serverapp import Grid

from compression.errors import ConfigError, ProtocolError
from protocol import Assignment, Report, write_request
from strategies.exchange import Exchange, message_for
from strategies.network import Network
from strategies.receive import Receiver
from strategies.send import Sender

FIRST_HELLO_S: Final = 120.0  # the start of an engine included
_log = logging.getLogger("flwr.kimad")


@dataclass(slots=True)
class Client:
    """A client that said hello.

    Args:
        node_id: the node it lives on.
        report: its newest report.
        excluded: why it is not asked any more, or None.
    """

    node_id: int
    report: Report
    excluded: str | None = None


class Roster:
    """The clients of a run.

    Args:
        grid: any Flower grid.
        exchange: carries the hellos.
        sender, receiver: write them and read their answers.
        network: told of every client that is entered.
    """

    def __init__(
        self, grid: Grid, exchange: Exchange, sender: Sender, receiver: Receiver, network: Network[Any]
    ) -> None:
        self.grid, self.exchange, self.sender, self.receiver, self.network = grid, exchange, sender, receiver, network
        self.clients: dict[str, Client] = {}
        self._greeted: dict[int, float] = {}

    def greet(self) -> None:
        """Say hello to nodes never met. A hello that stays silent for give_up_after time budgets is said again."""
        s = self.sender.settings
        patience_s = max(s.give_up_after * s.time_budget_s, FIRST_HELLO_S)
        now_s = time.monotonic()
        self._greeted = {node: since_s for node, since_s in self._greeted.items() if now_s - since_s <= patience_s}
        met = {client.node_id for client in self.clients.values()} | set(self._greeted)
        new = sorted(set(self.grid.get_node_ids()) - met)
        request = self.sender.request("hello", (Assignment("", incarnation=self.sender.incarnation),))
        self._greeted.update(dict.fromkeys(new, now_s))
        self.exchange.push([message_for(self.grid, write_request(request), "train", node) for node in new])

    def take_hellos(self, replies: Iterable[Message]) -> list[Message]:
        """Enter the clients that answered a hello; the other replies come back."""
        rest: list[Message] = []
        entered: list[tuple[str, int, int]] = []
        online = set(self.grid.get_node_ids()) if self._greeted else set()
        for reply in replies:
            node = reply.metadata.src_node_id
            if node not in self._greeted:
                rest.append(reply)
                continue
            del self._greeted[node]
            try:
                entered.extend(self._enter(report, node, online) for report in self.receiver.read(reply).reports)
            except ProtocolError as error:
                self.receiver.fault(error.kind, f"node {node} did not say who it is: {error.detail}")
        self.network.register(entered)
        return rest

    def wait_for_first(self, timeout_s: float) -> None:
        """Wait until all partitions that nodes speak of, and at least min_clients, are known.

        Raises:
            ConfigError: too few answered in time.
        """
        least = self.sender.settings.min_clients
        until_s = time.monotonic() + min(timeout_s, FIRST_HELLO_S)
        while True:
            self.greet()
            self.take_hellos(self.exchange.poll())
            expected = max([least, 1, *(c.report.count for c in self.clients.values() if c.report.count)])
            if len(self.clients) >= expected:
                break
            if time.monotonic() > until_s:
                if len(self.clients) < max(least, 1):
                    raise ConfigError(
                        f"{len(self.clients)} clients answered within {FIRST_HELLO_S:g} s, expected at least "
                        f"min-clients = {least}: start more nodes or lower min-clients"
                    )
                _log.warning("starting with %d of %d clients; others may join later", len(self.clients), expected)
                break
            time.sleep(0.05)
        _log.info("%d clients said hello", len(self.clients))

    def _enter(self, report: Report, node_id: int, online: set[int]) -> tuple[str, int, int]:
        """Enter one client: (id, index, count) for the network."""
        client = report.client
        known = self.clients.get(client)
        if known is not None and known.node_id != node_id and known.node_id in online:
            both = f"nodes {known.node_id} and {node_id} both call themselves client {client!r}"
            raise ProtocolError("cloned-client", f"{both}; give each its own client-id; the second is refused")
        excluded = None
        if report.status != "hello" or report.digest != self.receiver.memory.client(client).digest:
            excluded = f"answered the hello with {report.status}: its memory is not the one known here"
            self.receiver.fault("lost-memory", f"client {client!r} {excluded}; it takes no further part")
        self.clients[client] = Client(node_id, report, excluded)
        count = max(report.count or 0, len(self.clients))
        index = report.index if report.index is not None and report.index < count else len(self.clients) - 1
        return client, index, count
