"""Who is there: nodes are greeted, and the clients they answer with are entered."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flwr.serverapp import Grid

from compression.errors import ConfigError, ProtocolError
from protocol import LOST, Assignment, Report, chain, write_request
from strategies.exchange import Answer, Exchange, message_for
from strategies.network import Network
from strategies.receive import Receiver
from strategies.send import Sender

FIRST_HELLO_S: Final = 120.0  # the start of an engine included
HELLO_AGAIN_S: Final = 4.0  # after a hello that failed; twice that after the next, and so on
OUR_ERRORS: Final = "compression.errors."  # a client error that the mod raised itself
NO_MOD: Final = (
    "The mod answers a hello without calling the app's code, so the client has no mod: write "
    "ClientApp(mods=[kimad_mod]), before mods that look at arrays, and install kimad-fl on the node"
)
_log = logging.getLogger("flwr.kimad")


@dataclass(slots=True)
class Client:
    """A client that said hello.

    Args:
        node_id: the node it lives on.
        report: its newest report.
        excluded: why it is not asked any more, or None.
        max_bytes_per_day: its own limit, as it said in its hello.
        lost: whether its memory is lost, so that the next message carries the server's copy.
    """

    node_id: int
    report: Report
    excluded: str | None = None
    max_bytes_per_day: int | None = None
    lost: bool = False


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
        self._again: set[int] = set()
        self._wrong: dict[int, str] = {}
        self._failed: dict[int, int] = {}
        self._index: dict[str, int] = {}
        self._complete = False
        self._claims: dict[str, tuple[int, Report]] = {}
        self.absent: dict[str, int] = {}
        self.before: frozenset[str] = frozenset()

    def greet(self) -> None:
        """Say hello to nodes never met; again where it failed, after a while, or where nobody answered for long."""
        patience_s = self._hello_patience_s
        now_s = time.monotonic()
        self._greeted = {node: since_s for node, since_s in self._greeted.items() if now_s - since_s <= patience_s}
        there = set(self.grid.get_node_ids())
        self._settle_claims(there)
        met = {client.node_id for client in self.clients.values()} | set(self._greeted)
        new = sorted((there - met) | (self._again & there))
        self._again.clear()
        if not new:
            return
        request = self.sender.request("hello", (Assignment("", incarnation=self.sender.incarnation),))
        self._greeted.update(dict.fromkeys(new, now_s))
        self.exchange.push("hello", [message_for(self.grid, write_request(request), "train", node) for node in new])

    @property
    def _hello_patience_s(self) -> float:
        return max(self.sender.settings.patience_s, FIRST_HELLO_S)

    def online(self) -> frozenset[int]:
        """Nodes that are there now; messages to those that are not are waited for no longer."""
        there = frozenset(self.grid.get_node_ids())
        self._settle_claims(there)
        self.exchange.give_up([c.node_id for c in self.clients.values() if c.node_id not in there])
        return there

    def greet_again(self, client: str) -> None:
        """Greet the node of a client that has forgotten the layout."""
        self._again.add(self.clients[client].node_id)

    def claimed(self) -> frozenset[str]:
        """Clients that another node claims to be, while it is not known whether theirs is still alive."""
        return frozenset(self._claims)

    def _settle_claims(self, online: Collection[int]) -> None:
        """A claim on a client whose node is gone is an honest restart: the new node takes over."""
        for client, (node, report) in list(self._claims.items()):
            if self.clients[client].node_id not in online:
                del self._claims[client]
                if node in online:
                    self._enter(report, node, set(online))
                    _log.info("client %r came back on node %d", client, node)

    def count_absent(self) -> list[str]:
        """Count a round for clients whose node is gone; those that are gone for leave_after rounds now."""
        there = set(self.grid.get_node_ids())
        gone = {client for client, known in self.clients.items() if known.node_id not in there}
        gone |= self.before - self.clients.keys()
        self.absent = {client: self.absent.get(client, 0) + 1 for client in sorted(gone)}
        return [client for client, rounds in self.absent.items() if rounds == self.sender.settings.leave_after]

    def state(self) -> dict[str, Any]:
        """Numbers of links and rounds of absence, as plain values; nodes say anew who they are."""
        return {"index": dict(self._index), "count": self.expected(), "absent": dict(self.absent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was, and wait for the clients that it knew."""
        self._index, self.absent = dict(state["index"]), dict(state["absent"])
        self.before = frozenset(self._index)
        known, count = sorted(self._index.items()), state["count"]
        self.network.register([(client, index, max(count, index + 1)) for client, index in known])

    def on_node(self, node_id: int) -> frozenset[str]:
        """The clients that live on a node."""
        return frozenset(name for name, client in self.clients.items() if client.node_id == node_id)

    def take_hellos(self, answers: Iterable[Answer]) -> list[Answer]:
        """Enter the clients that answered a hello; the other answers come back."""
        rest: list[Answer] = []
        entered: list[str] = []
        online: set[int] | None = None
        for answer in answers:
            if answer.asked.kind != "hello":
                rest.append(answer)
                continue
            online = set(self.grid.get_node_ids()) if online is None else online
            node = answer.asked.node_id
            try:
                for report in self.receiver.read(answer.message).reports:
                    self._enter(report, node, online)
                    entered.append(report.client)
                if all(node != claimant for claimant, _ in self._claims.values()):
                    self._greeted.pop(node, None)
                self._wrong.pop(node, None)
                self._failed.pop(node, None)
            except ProtocolError as error:  # its process may have died, so it is greeted again
                failed = self._failed[node] = self._failed.get(node, 0) + 1
                wait_s = min(self._hello_patience_s, HELLO_AGAIN_S * 2 ** (failed - 1))
                self._greeted[node] = time.monotonic() - self._hello_patience_s + wait_s
                self._wrong[node] = detail = error.detail + ("" if OUR_ERRORS in error.detail else f". {NO_MOD}")
                self.receiver.fault(error.kind, f"node {node} did not say who it is: {detail}")
        if self._complete:
            self._register(entered)
        return rest

    def wait_for_first(self, timeout_s: float) -> None:
        """Wait until all partitions that nodes speak of, and at least min_clients, are known.

        Nodes that are there and owe an answer are waited for to the end of `timeout_s` where there are too few without
        them: a node first goes through the messages of runs that were killed, which Flower takes minutes to give up.

        Raises:
            ConfigError: too few answered in time, or none that can take part.
        """
        least = self.sender.settings.min_clients
        patience_s = min(timeout_s, FIRST_HELLO_S)
        began_s = time.monotonic()
        until_s = began_s + patience_s
        while True:
            self.greet()
            self.take_hellos(self.exchange.poll())
            expected = max([least, 1, *(c.report.count for c in self.clients.values() if c.report.count)])
            expected = max(expected, len(self.before | self.clients.keys()))
            if len(self.clients) >= expected:
                break
            if not self.clients and self._wrong and self._wrong.keys() >= set(self.grid.get_node_ids()):
                raise ConfigError(
                    f"none of the {len(self._wrong)} nodes said who it is; node {next(iter(self._wrong))}: "
                    f"{next(iter(self._wrong.values()))}"
                )
            if (now_s := time.monotonic()) > until_s:
                if len(self.clients) < max(least, 1):
                    owing = self.exchange.unanswered("hello") & set(self.grid.get_node_ids())
                    text = f"{len(self.clients)} clients answered within {now_s - began_s:.0f} s, expected at least "
                    text += f"min-clients = {least}"
                    if not owing or now_s > began_s + timeout_s:
                        raise ConfigError(f"{text}: start more nodes or lower min-clients")
                    _log.warning("%s; waiting for %d nodes that are there and have not answered", text, len(owing))
                    until_s = now_s + patience_s
                    continue
                _log.warning("starting with %d of %d clients; others may join later", len(self.clients), expected)
                break
            time.sleep(0.05)
        if all(client.excluded is not None for client in self.clients.values()):
            raise ConfigError(
                f"none of the {len(self.clients)} clients can take part: they hold state of another run under the same "
                f"id {self.sender.settings.experiment!r}; choose another experiment id, or remove that run's folder "
                "from the clients' state directories"
            )
        self._complete = True
        self._register(list(self.clients))
        _log.info("%d clients said hello", len(self.clients))

    def expected(self) -> int:
        """How many clients there are, with those that nodes speak of and that have not come yet."""
        return max([len(self.clients), len(self.before), *(c.report.count or 0 for c in self.clients.values())])

    def _register(self, clients: list[str]) -> None:
        """Tell the network of clients, in the order of their ids: by partition, else by the next free number."""
        count = self.expected()
        entered: list[tuple[str, int, int]] = []
        for client in sorted(clients):
            index = self.clients[client].report.index
            if client not in self._index:
                self._index[client] = index if index is not None else len(self._index)
            entered.append((client, self._index[client], max(count, self._index[client] + 1)))
        self.network.register(entered)

    def _enter(self, report: Report, node_id: int, online: set[int]) -> None:
        client = report.client
        known = self.clients.get(client)
        if known is not None and known.node_id != node_id and known.node_id in online:
            # An honest restart comes back while its old node still looks alive: ask the old one.
            _log.info("node %d says it is client %r of node %d; asking node %d", node_id, client, *[known.node_id] * 2)
            self._claims[client] = (node_id, report)
            self._again.add(known.node_id)
            return
        if client in self._claims and known is not None and known.node_id == node_id:
            second, _ = self._claims.pop(client)
            both = f"nodes {node_id} and {second} both call themselves client {client!r}"
            self.receiver.fault("cloned-client", f"{both}; give each its own client-id; the second is refused")
        if report.status != "hello":
            raise ProtocolError("bad-record", f"client {client!r} answered a hello with {report.status!r}")
        entry = self.receiver.memory.client(client)
        excluded = known.excluded if known is not None else None
        lost = entry.accepted is not None and report.digest in (LOST, self._at_zero(client))
        if self.sender.incarnation == 1 and entry.accepted is None and report.digest not in (LOST, entry.digest):
            # Nothing was accepted from it in this run, so it can only be another run's memory. A client that comes
            # back later settles by the acknowledgement in the next message, and says then if its memory is lost.
            excluded = "it holds state of another run under the same id"
            self.receiver.fault("lost-memory", f"client {client!r}: {excluded}; it takes no further part")
        if known is not None and known.node_id != node_id:
            self.exchange.give_up([known.node_id])
        lost = lost and self.receiver.memory.mirrors is not None
        self.clients[client] = Client(node_id, report, excluded, report.max_bytes_per_day, lost)

    def _at_zero(self, client: str) -> bytes:
        """Digest of a memory that nothing was accepted into."""
        return chain.start(self.receiver.experiment, self.receiver.layout.digest, client)
