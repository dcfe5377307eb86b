"""A state machine of a whole run, in which everything goes wrong: messages, processes, disks, power and people.

The strategy, the mod and the stores are the real ones; the grid loses and delays, the disks
are lossy (tests/protocol/lossy.py), and the app never computes the same twice, so that a reply
that is made anew is another one. After every step both ends of every memory are compared
with each other and with a reference: the sum of the payloads that the server accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import recorddict_from_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp.strategy import Result
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from clients import kimad_mod
from compression import Decoded, Layout, decode, move
from compression.errors import ConfigError
from protocol import Attempt, Entry, NodeReply, Store, chain, read_reply, write_reply
from protocol.store import Updates
from strategies import InProcessGrid, Kimad, LinkSettings, Settings, SimulatedNetwork
from strategies.asking import Stop
from strategies.memory import ServerMemory
from strategies.receive import Receiver
from tests.protocol.lossy import DiedError, LossyFileSystem

EXPERIMENT = "e"
MODEL: dict[str, NDArray[Any]] = {
    "w": np.zeros((4, 3), np.float32),
    "b": np.zeros(5, np.float64),
    "n": np.zeros((), np.int64),
}
LAYOUT = Layout.of(MODEL)
LINKS = LinkSettings("cellular", 2400.0, 6000.0, overhead_s=0.01, compute_s=0.1, seed=3)
TIMEOUT_S = 20.0
FATES = (
    *("lose request", "lose reply", "silence", "request late", "reply late", "twice", "twice, second", "corrupt"),
    *("replay", "die", "power off"),
)
Floats = tuple[NDArray[Any], ...]


@dataclass
class Node:
    """A SuperNode, with the disk of its machine."""

    client: str
    disk: LossyFileSystem
    context: Context
    fates: list[tuple[str, int]] = field(default_factory=list)
    said: list[NodeReply] = field(default_factory=list)


class FakeTime:
    """Real seconds pass when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.5)


@lru_cache(maxsize=4096)
def reference(payloads: tuple[bytes, ...]) -> Floats:
    """h after these payloads, by a loop of its own."""
    if not payloads:
        return tuple(np.zeros(LAYOUT.layers[i].size, LAYOUT.layers[i].dtype) for i in LAYOUT.compressed)
    h = tuple(part.copy() for part in reference(payloads[:-1]))
    for part, update in zip(h, decode(LAYOUT, payloads[-1]).updates, strict=True):
        if update is not None:
            indices = range(part.size) if update.indices is None else update.indices.tolist()
            for at, value in zip(indices, update.values, strict=True):
                part[at] = part[at] + part.dtype.type(value)
    return h


class WatchedMemory(ServerMemory):
    """The server's memories, and beside them every payload that they took, in order."""

    timeline: dict[str, list[tuple[Attempt, bytes]]]
    opened: dict[str, Attempt]
    made: dict[tuple[Attempt, bytes], tuple[int, int]]

    def accept(self, attempt: Attempt, payload: bytes, decoded: Decoded, weight: float) -> None:
        of = self.timeline.setdefault(attempt.client, [])
        header = decoded.header
        assert str(attempt) == str(self.opened[attempt.client]), f"{attempt} is not the open one"
        assert (header.incarnation, header.round) == (attempt.incarnation, attempt.round), f"{attempt} has another's"
        assert str(attempt) not in [str(a) for a, _ in of], f"{attempt} is accepted twice"
        assert (attempt, payload) in self.made, f"{attempt} was never answered so"
        of.append((attempt, payload))
        super().accept(attempt, payload, decoded, weight)

    def go_back(self) -> None:
        """Forget what came after the checkpoint that was restored."""
        for client, of in self.timeline.items():
            last = self.client(client).accepted
            end = 0 if last is None else [a for a, _ in of].index(last) + 1
            del of[end:]


class WatchedStore(Store):
    """A client's store; what it gave up because the server said so is known.

    A server that then goes back to a checkpoint in which that reply was still under way, and lives another
    life from there on, may accept it after all: the one way to lose a memory without losing a disk.
    """

    def __init__(self, root: Path, experiment: str, node: str, machine: ExactlyOnce, *, durable: bool) -> None:
        super().__init__(root, experiment, node, durable=durable, fs=machine.disks[root.name])
        self.machine = machine

    def settle(self, entry: Entry, accepted: Attempt | None, digest: bytes | None) -> str:
        pending = entry.pending
        outcome = super().settle(entry, accepted, digest)
        if pending is not None and entry.pending is None and outcome != "accepted" and self.machine.run is not None:
            self.machine.given_up[str(pending.attempt)] = self.machine.run.incarnation
        return outcome

    def pend(self, entry: Entry, attempt: Attempt, payload: bytes, updates: Updates, **more: Any) -> None:
        super().pend(entry, attempt, payload, updates, **more)
        self.machine.made[(attempt, payload)] = (self.machine.calls, self.machine.step)

    def replace(self, entry: Entry, h: Sequence[NDArray[Any]] | None, digest: bytes, accepted: Attempt | None) -> None:
        super().replace(entry, h, digest, accepted)
        if self.machine.was_given_up(accepted):
            self.machine.lost_at[entry.client] = self.machine.step


class LossyGrid(InProcessGrid):
    """Messages meet the fates that were decided for their node."""

    def __init__(self, app: ClientApp, machine: ExactlyOnce) -> None:
        super().__init__(app, [])
        self.machine = machine
        self.held_requests: list[tuple[int, Message]] = []
        self.held_replies: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            node_id = message.metadata.dst_node_id
            if node_id not in self.machine.nodes:
                continue
            message_id = f"m{self.machine.count()}"
            message.metadata.__dict__["_message_id"] = message_id
            reply = self._meet(node_id, self.machine.nodes[node_id], message, message_id)
            if reply is not None:
                self._replies[message_id] = reply
            ids.append(message_id)
        return ids

    def _meet(self, node_id: int, node: Node, message: Message, message_id: str) -> Message | None:
        machine = self.machine
        fate, number = node.fates.pop(0) if node.fates else ("", 0)
        failed = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, fate), reply_to=message)
        if fate == "lose request":
            return failed
        if fate == "silence":
            return None
        if fate == "request late":
            self.held_requests.append((node_id, message))
            return None
        if fate in ("die", "power off"):
            node.disk.die_in(number)
        reply = machine.execute(node, message)
        if node.disk.dead and fate == "power off":
            machine.cut_power(node)
        node.disk.restart()
        if fate.startswith("twice"):
            second = machine.execute(node, message)
            reply = second if fate.endswith("second") else reply
        if reply is None or fate == "lose reply":
            return failed
        if fate == "reply late":
            self.held_replies[message_id] = reply
            return None
        if not reply.has_error() and fate in ("corrupt", "replay"):
            said = read_reply(reply.content)
            if fate == "replay":
                said = node.said[number % len(node.said)]
            elif said.payloads:
                said = NodeReply(
                    said.experiment, said.reports, {k: _spoilt(p, number) for k, p in said.payloads.items()}
                )
            reply.content.clear()
            reply.content.update(write_reply(said))
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        return [self._replies.pop(i) for i in ids if i in self._replies]


def _spoilt(payload: bytes, number: int) -> bytes:
    at = number % len(payload)
    return payload[:at] + bytes([payload[at] ^ 0x10]) + payload[at + 1 :]


class ExactlyOnce(RuleBasedStateMachine):
    """The run, and what may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rng = random.Random(0)
        self.time = FakeTime()
        self._count = 0
        self.step = 0
        self.nodes: dict[int, Node] = {}
        self.disks: dict[str, LossyFileSystem] = {}
        self.away: list[tuple[str, LossyFileSystem]] = []
        self.snapshots: dict[str, LossyFileSystem] = {}
        self.examples: dict[str, int] = {}
        self.lost_at: dict[str, int] = {}
        self.serving: dict[str, LossyFileSystem] = {}
        self.trained_on: dict[str, LossyFileSystem] = {}
        self.made: dict[tuple[Attempt, bytes], tuple[int, int]] = {}
        self.timeline: dict[str, list[tuple[Attempt, bytes]]] = {}
        self.opened: dict[str, Attempt] = {}
        self.given_up: dict[str, int] = {}
        self.calls = 0
        self.recovered = 0
        self.acting: LossyFileSystem | None = None
        self.run: Kimad | None = None
        self.number = 0

    def count(self) -> int:
        self._count += 1
        return self._count

    # ---- what stands around the run --------------------------------------------------------

    @initialize(
        seed=st.integers(0, 2**20),
        full=st.booleans(),
        retry=st.booleans(),
        drop=st.booleans(),
        fraction=st.sampled_from([0.5, 1.0, 1.0]),
        clients=st.integers(2, 3),
    )
    def begin(self, seed: int, full: bool, retry: bool, drop: bool, fraction: float, clients: int) -> None:
        self.rng = random.Random(seed)
        self.server_disk = LossyFileSystem()
        self.settings = Settings(
            experiment=EXPERIMENT,
            seed=seed,
            ratio=0.4,
            time_budget_s=0.5,
            deadline_s=0.55,
            checkpoint_every=2,
            leave_after=2,
            fraction=fraction,
            evaluate="none",
            server_lr=0.1,
            durability="full" if full else "process",
            on_failure="retry" if retry else "drop",
            late="drop" if drop else "absorb",
            forget=False,
        )
        watched = type("Watched", (WatchedMemory,), vars_of(self))
        patches: list[tuple[str, object]] = [
            ("strategies.kimad.time", self.time),
            ("strategies.roster.time", self.time),
            ("strategies.kimad.LOCAL", self.server_disk),
            ("strategies.kimad.ServerMemory", watched),
            ("strategies.kimad.Receiver", partial(watched_receiver, self)),
            ("strategies.kimad._log.disabled", True),
            ("clients.mod.Store", self._store),
            ("protocol.store._SMALLEST_LOG_BYTES", 700),
            ("protocol.store.move", self._ticking(move)),
            ("protocol.store.decode", self._ticking(decode)),
        ]
        for name, new in patches:
            self.stack.enter_context(patch(name, new))
        self.grid = LossyGrid(self._app(), self)
        for number in range(clients):
            self.join(str(number))
        self._start(resume=False)

    def teardown(self) -> None:
        self.stack.close()

    def _store(self, root: Path, experiment: str, node: str, *, durable: bool = False) -> Store:
        return WatchedStore(root, experiment, node, self, durable=durable)

    def _ticking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A place where a client's process can die although it touches no file."""

        def ticking(*args: Any, **more: Any) -> Any:
            if self.acting is not None:
                self.acting.tick()
            return function(*args, **more)

        return ticking

    def _app(self) -> ClientApp:
        app = ClientApp(mods=[kimad_mod])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            self.calls += 1
            rng = np.random.default_rng(self.calls)  # never the same twice
            arrays = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
            trained = {n: a if n == "n" else (a - rng.normal(size=a.shape)).astype(a.dtype) for n, a in arrays.items()}
            context.state["app"] = ConfigRecord({"calls": self.calls})
            client = str(context.node_config["client-id"])
            content = RecordDict(
                {
                    "arrays": ArrayRecord({name: Array(np.asarray(array)) for name, array in trained.items()}),
                    "metrics": MetricRecord({"num-examples": self.examples.get(client, 10)}),
                }
            )
            return Message(content, reply_to=message)

        return app

    def join(self, client: str, disk: LossyFileSystem | None = None) -> Node:
        """A node comes online."""
        node_id = self.count()
        disk = disk or LossyFileSystem()
        disk.rng = self.rng
        name = f"disk{node_id}"
        self.disks[name] = disk
        config: dict[str, bool | int | float | str] = {"client-id": client, "state-dir": f"/{name}"}
        context = Context(run_id=0, node_id=node_id, node_config=config, state=RecordDict(), run_config={})
        # a disk keeps its paths when it moves to another node
        root = Path(f"/{name}")
        disk.names_now = {root.joinpath(*p.parts[2:]): f for p, f in disk.names_now.items()}
        disk._names_synced = {root.joinpath(*p.parts[2:]): f for p, f in disk._names_synced.items()}
        disk._unsynced = [{root.joinpath(*p.parts[2:]): f for p, f in c.items()} for c in disk._unsynced]
        self.nodes[node_id] = node = Node(client, disk, context)
        self.grid.contexts[node_id] = context
        return node

    def leave(self, node_id: int) -> Node:
        """A node goes offline; what is under way to it is gone."""
        self.grid.contexts.pop(node_id)
        self.grid.held_requests = [(i, m) for i, m in self.grid.held_requests if i != node_id]
        return self.nodes.pop(node_id)

    def execute(self, node: Node, message: Message) -> Message | None:
        """A node's ClientApp answers a message, or dies."""
        self.acting, before = node.disk, self.calls
        try:
            reply = self.grid._app(message, node.context)
        except DiedError:
            return None
        except Exception as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
        finally:
            self.acting = None
        said = read_reply(reply.content)
        node.said.append(said)
        if said.payloads and self.trained_on.setdefault(node.client, node.disk) is not node.disk:
            self.trained_on[node.client], self.lost_at[node.client] = node.disk, self.step  # a clone, or back from one
        for report in said.reports:
            payload = said.payloads.get((report.client, report.part))
            if payload is not None:
                calls, _ = self.made[(report.attempt, payload)]
                assert self.calls == before or calls == self.calls
        return reply

    def was_given_up(self, accepted: Attempt | None) -> bool:
        """Whether a client gave this reply up at an earlier life of the server."""
        assert self.run is not None
        return self.given_up.get(str(accepted), self.run.incarnation) < self.run.incarnation

    def cut_power(self, node: Node) -> None:
        node.disk.cut_power(self.rng)
        if self.settings.durability == "process":
            self.lost_at[node.client] = self.step

    # ---- the server ------------------------------------------------------------------------

    def _start(self, *, resume: bool) -> None:
        """Start a server, with calm around it: what happens to it meanwhile is a rule of its own."""
        self.grid._replies.clear()
        self.grid.held_replies.clear()
        self.server_disk.restart()
        model = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
        for _ in range(5):
            self.opened.clear()
            self.run = run = Kimad(
                self.settings,
                SimulatedNetwork(LINKS),
                on_round=lambda row, wall: None,
                state_dir=Path("/server"),
                resume=resume,
            )
            self.number = run._prepare(self.grid, model)
            assert isinstance(run.memory, WatchedMemory)
            run.memory.go_back()
            self.result = Result(arrays=ArrayRecord({n: Array(np.asarray(a)) for n, a in run.arrays.items()}))
            try:
                run.roster.wait_for_first(TIMEOUT_S)
                return
            except ConfigError as error:
                if "can take part" in str(error):
                    raise
                resume = True
                for node in self.nodes.values():
                    node.fates.clear()
                self._calm()
        raise AssertionError("the server does not come up again")

    def _round(self) -> None:
        run = self.run
        assert run is not None
        self.number += 1
        run._train(self.number, self.result, self.grid, TIMEOUT_S, ConfigRecord(), Stop(wanted=False))
        run._write_row(0.0, 0.0)
        if run._is_due(self.number):
            run._checkpoint(self.number)

    @rule(rounds=st.integers(1, 3))
    def train(self, rounds: int) -> None:
        for _ in range(rounds):
            self._round()

    @rule(operations=st.integers(0, 40), power=st.booleans(), damage=st.booleans())
    def server_dies(self, operations: int, power: bool, damage: bool) -> None:
        """In the middle of anything, and comes back."""
        self.server_disk.die_in(operations)
        try:
            for _ in range(3):
                self._round()
            self.server_disk.tick()
        except DiedError:
            pass
        self.run = None
        if power:
            self.server_disk.cut_power(self.rng)
        self.server_disk.restart()
        kept = sorted(p for p in self.server_disk.names_now if p.name.startswith("round-"))
        if damage and len(kept) == 2 and not power:
            self.server_disk.damage(kept[-1])
        self._start(resume=True)

    # ---- messages and processes ------------------------------------------------------------

    def _pick(self, which: int) -> int | None:
        ids = sorted(self.nodes)
        return ids[which % len(ids)] if ids else None

    @rule(which=st.integers(0, 9), fate=st.sampled_from(FATES), number=st.integers(0, 60))
    def message_goes_wrong(self, which: int, fate: str, number: int) -> None:
        """The next message to a node meets a fate."""
        if (node_id := self._pick(which)) is not None:
            self.nodes[node_id].fates.append((fate, number))

    @rule()
    def late_requests_arrive(self) -> None:
        """Requests that everybody has forgotten are executed; nobody hears the answer."""
        held, self.grid.held_requests = self.grid.held_requests, []
        for node_id, message in held:
            self.execute(self.nodes[node_id], message)

    @rule()
    def late_replies_arrive(self) -> None:
        self.grid._replies |= self.grid.held_replies
        self.grid.held_replies.clear()

    @rule(which=st.integers(0, 9), power=st.booleans())
    def client_restarts(self, which: int, power: bool) -> None:
        """Its node comes back under a new id."""
        if (node_id := self._pick(which)) is not None:
            node = self.leave(node_id)
            if power:
                self.cut_power(node)
            self.join(node.client, node.disk)

    @rule(which=st.integers(0, 9))
    def client_restarts_while_its_node_looks_alive(self, which: int) -> None:
        """As with Flower, which notices a dead node half a minute later: here, after a round."""
        if (node_id := self._pick(which)) is not None:
            old = self.nodes[node_id]
            old.fates = [("silence", 0)] * 20
            self.join(old.client, old.disk)
            self.disks[f"disk{node_id}"] = LossyFileSystem()
            self._round()
            self.leave(node_id)

    @rule(which=st.integers(0, 9))
    def client_leaves(self, which: int) -> None:
        if len(self.nodes) > 1 and (node_id := self._pick(which)) is not None:
            node = self.leave(node_id)
            if all(n.client != node.client for n in self.nodes.values()):
                self.away.append((node.client, node.disk))

    @precondition(lambda self: self.away)
    @rule()
    def client_comes_back(self) -> None:
        client, disk = self.away.pop(0)
        if all(n.client != client for n in self.nodes.values()):
            self.join(client, disk)

    @precondition(lambda self: len(self.nodes) < 5)
    @rule()
    def another_client_joins(self) -> None:
        known = {n.client for n in self.nodes.values()} | {c for c, _ in self.away} | self.timeline.keys()
        self.join(str(1 + max((int(c) for c in known), default=0)))

    @rule(which=st.integers(0, 9), examples=st.integers(1, 30))
    def client_changes_its_weight(self, which: int, examples: int) -> None:
        if (node_id := self._pick(which)) is not None:
            self.examples[self.nodes[node_id].client] = examples

    @rule()
    def time_passes(self) -> None:
        """Long enough for a hello to be said again."""
        self.time.now_s += 200.0

    # ---- disks -----------------------------------------------------------------------------

    @rule(which=st.integers(0, 9))
    def disk_is_copied(self, which: int) -> None:
        if (node_id := self._pick(which)) is not None:
            self.snapshots[self.nodes[node_id].client] = self.nodes[node_id].disk.copy()

    @rule(which=st.integers(0, 9))
    def disk_is_rolled_back(self, which: int) -> None:
        node_id = self._pick(which)
        if node_id is not None and self.nodes[node_id].client in self.snapshots:
            node = self.leave(node_id)
            self.lost_at[node.client] = self.step
            self.join(node.client, self.snapshots[node.client].copy())

    @rule(which=st.integers(0, 9))
    def disk_is_lost(self, which: int) -> None:
        if (node_id := self._pick(which)) is not None:
            node = self.leave(node_id)
            self.lost_at[node.client] = self.step
            self.join(node.client)

    @precondition(lambda self: len(self.nodes) < 5)
    @rule(which=st.integers(0, 9), empty=st.booleans())
    def client_is_cloned(self, which: int, empty: bool) -> None:
        if (node_id := self._pick(which)) is not None:
            node = self.nodes[node_id]
            self.join(node.client, None if empty else node.disk.copy())

    # ---- what must hold --------------------------------------------------------------------

    @rule()
    def everything_recovers(self) -> None:
        """When nothing goes wrong any more, everybody takes part again."""
        if self.recovered >= 2:  # enough for one run
            return
        for node in self.nodes.values():
            node.fates.clear()
        self._calm()
        assert self.run is not None
        before = {c: len(self.timeline.get(c, [])) for c in self.run.clients}
        waiting = set(before)
        for _ in range(400):  # a link may be down for a while
            self.time.now_s += 200.0
            self._round()
            waiting = {
                client
                for client, known in self.run.clients.items()
                if known.node_id in self.nodes and len(self.timeline.get(client, [])) <= before.get(client, 0)
            }
            if not waiting:
                break
        if self.settings.late == "absorb":  # else a slow link may never be in time
            assert not waiting, f"{waiting} take no part"
        self.recovered += 1

    def _calm(self) -> None:
        """Everybody who is silent starts again, and clones are switched off."""
        self.late_replies_arrive()
        for node_id in sorted(self.nodes):
            if node_id not in self.nodes:
                continue
            node = self.leave(node_id)
            serving = self.serving.get(node.client)
            others = [n for n in self.nodes.values() if n.client == node.client]
            if not others or node.disk is serving:
                for other in [i for i, n in self.nodes.items() if n.client == node.client]:
                    self.leave(other)
                self.join(node.client, node.disk)

    @invariant()
    def both_ends_agree(self) -> None:
        self.step += 1
        run = self.run
        if run is None:
            return
        memory, total = run.memory, [np.zeros(LAYOUT.layers[i].size) for i in LAYOUT.compressed]
        assert memory.mirrors is not None
        for client in memory:
            known, of = memory.client(client), self.timeline.get(client, [])
            h = reference(tuple(payload for _, payload in of))
            assert known.accepted == (of[-1][0] if of else None)
            digest = chain.start(EXPERIMENT, LAYOUT.digest, client)
            for _, payload in of:
                digest = chain.extend(digest, payload)
            assert known.digest == digest
            _same(memory.mirrors.read(client), h)
            if known.weight is not None and not known.left:
                for part, values in zip(total, h, strict=True):
                    part += known.weight * values.astype(np.float64)
        for part, expected in zip(memory.sums, total, strict=True):
            np.testing.assert_allclose(part, expected, rtol=1e-9, atol=1e-9)
        for client, entered in run.clients.items():
            assert entered.excluded is None, (client, entered.excluded)
            if entered.node_id in self.nodes:
                self._check_client(run, client, self.nodes[entered.node_id].disk, entered.node_id)

    def _check_client(self, run: Kimad, client: str, disk: LossyFileSystem, node_id: int) -> None:
        if self.serving.setdefault(client, disk) is not disk:
            self.serving[client], self.lost_at[client] = disk, self.step  # a clone took over
        known, of = run.memory.client(client), self.timeline.get(client, [])
        made = self.made[of[-1]] if of else (0, -1)
        may_be_lost = client in self.lost_at and made[1] <= self.lost_at[client]
        may_be_lost |= bool(of) and self.was_given_up(of[-1][0])
        copy = disk.copy()
        with Store(
            Path(f"/disk{node_id}"), EXPERIMENT, client, durable=self.settings.durability == "full", fs=copy
        ) as s:
            if s.layout is None:
                assert known.accepted is None or may_be_lost, f"{client} has forgotten everything"
                return
            entry = s.entry(client)
            if s.settle(entry, known.accepted, known.digest) == "lost":
                assert may_be_lost, f"{client} has lost its memory"
                return
            assert entry.digest == known.digest
            _same(s.h(entry), reference(tuple(payload for _, payload in of)))
            state = _calls(entry.slots.get("state"))
            right = state == (made[0] or None) or (state is None and client in self.lost_at)
            assert right, f"{client}: state {state}, expected {made[0]}"


def vars_of(machine: ExactlyOnce) -> dict[str, Any]:
    return {"timeline": machine.timeline, "opened": machine.opened, "made": machine.made}


def watched_receiver(machine: ExactlyOnce, *args: Any) -> Receiver:
    """A receiver whose open attempts are known here."""
    receiver = Receiver(*args)
    plain_open, plain_restore = receiver.open, receiver.restore

    def opens(attempt: Attempt) -> None:
        machine.opened[attempt.client] = attempt
        plain_open(attempt)

    def restore(state: Any) -> None:
        plain_restore(state)
        machine.opened |= receiver._open

    receiver.open, receiver.restore = opens, restore  # type: ignore[method-assign]
    return receiver


def _calls(state: bytes | None) -> int | None:
    if state is None:
        return None
    return int(recorddict_from_proto(ProtoRecordDict.FromString(state)).config_records["app"]["calls"])  # type: ignore[arg-type]


def _same(got: Sequence[NDArray[Any]], expected: Floats) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b), f"{a} is not {b}"
