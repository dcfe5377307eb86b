"""Replies of a peer that means harm: no run ends, and nobody else's memory moves.

One client of three answers with tens of thousands of mutated replies, at every place where the
server reads one: to a hello, in a round, to an evaluation. Each is a real reply of that round
with something changed: bytes of the payload (with its checksum put right again), of the whole
message, a field, a record, a name, a type.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from google.protobuf.message import DecodeError

from compression.wire import CHECKSUM_BYTES
from protocol.records import CLIENTS, MESSAGE, PAYLOADS
from strategies import InProcessGrid, Kimad, Settings, SimulatedNetwork
from strategies.exchange import Answer, Asked
from strategies.receive import readable
from tests.apps import SIZE, LeastSquares, cut, join, least_squares_app, read, record
from tests.strategies.test_faults import BASE, LINKS

LIAR = 2  # the node; its client is "1"
EVIL: list[Any] = [
    *(0, 1, -1, 2**31, 2**62, -(2**62), 0.0, -0.0, 1e308, -1e308, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), True, "", "0", "1", "update", "\x00", "../../x", "9" * 5000),
    *(b"", b"\x00" * 8, b"\xff" * 100),
]
Mutation = Callable[[random.Random, RecordDict], None]


def payload_bytes(rng: random.Random, content: RecordDict) -> None:
    """Other bytes in the payload, mostly with a right checksum."""
    key, array = rng.choice(list(content.array_records[PAYLOADS].items()))
    data = bytearray(array.data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del data[at : at + rng.choice([1, 2, 8])]
            case 3:
                data[at:at] = rng.randbytes(rng.choice([1, 2, 8]))
            case _:
                data[at : at + 8] = rng.randbytes(8)
        if len(data) <= CHECKSUM_BYTES:
            break
    if rng.random() < 0.9:
        body = bytes(data[:-CHECKSUM_BYTES])
        data = bytearray(body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little"))
    content.array_records[PAYLOADS][key] = Array("uint8", (len(data),), array.stype, bytes(data))


def a_field(rng: random.Random, content: RecordDict) -> None:
    """Another value, of any type and number, in a report or in the head; or none."""
    of: ConfigRecord = content.config_records[rng.choice([CLIENTS, CLIENTS, MESSAGE])]
    name = rng.choice([*of, "up_bps", "examples", "detail", "index", "count", "n", "version", "norm_sq"])
    value = rng.choice(EVIL)
    if rng.random() < 0.1:
        of.pop(name, None)
    elif rng.random() < 0.7:
        of[name] = [value] * rng.choice([1, 1, 1, 0, 2, 1000])
    else:
        of[name] = value


def a_record(rng: random.Random, content: RecordDict) -> None:
    """A record too few or too many, or under another's name."""
    name = rng.choice(list(content))
    match rng.randrange(4):
        case 0:
            del content[name]
        case 1:
            content[rng.choice([CLIENTS, MESSAGE, PAYLOADS, "kimad.sums", "kimad.verdicts", "arrays"])] = content[name]
        case 2:
            content[f"kimad.metrics.{rng.choice(['0', '1', '2', 'zz', ''])}"] = MetricRecord(
                {"num-examples": rng.choice([-1, 2**62, float("nan"), 1e308]), "loss": float("inf")}
            )
        case _:
            content["kimad.sums"] = ArrayRecord({"0": Array(np.full(3, np.nan))})


def a_key(rng: random.Random, content: RecordDict) -> None:
    """Payloads under other keys, or of another kind."""
    record = content.array_records[PAYLOADS]
    key, array = rng.choice(list(record.items()))
    if rng.random() < 0.5:
        other = rng.choice(["0/0", "0/2", "1/1", "-1/1", "1", "/", "²/1", "99999999999/1", "0/" + "9" * 3000])
        record[other] = record.pop(key)
    else:
        stype, dtype = rng.choice(["pickle", "numpy.ndarray", array.stype]), rng.choice(["object", "float64", "uint8"])
        record[key] = Array(dtype, rng.choice([(), (0,), (2**40,), (-1,)]), stype, array.data)


def the_whole(rng: random.Random, content: RecordDict) -> None:
    """Other bytes in the whole message, where Flower still reads it."""
    data = bytearray(recorddict_to_proto(content).SerializeToString())
    for _ in range(rng.choice([1, 2, 5])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    changed = recorddict_from_proto(ProtoRecordDict.FromString(bytes(data)))
    content.clear()
    content.update(changed)


MUTATIONS: list[Mutation] = [payload_bytes, payload_bytes, a_field, a_field, a_record, a_key, the_whole]


def mutated(rng: random.Random, content: RecordDict) -> RecordDict:
    """A reply with one to three things changed, as it comes out of Flower's serialisation."""
    while True:
        changed = copy.deepcopy(content)
        try:
            for _ in range(rng.choice([1, 1, 2, 3])):
                rng.choice(MUTATIONS)(rng, changed)
            proto = recorddict_to_proto(changed).SerializeToString()
            return recorddict_from_proto(ProtoRecordDict.FromString(proto))
        except (DecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            continue  # Flower itself does not carry such a message, or there is nothing left to change


class HostileGrid(InProcessGrid):
    """The liar's replies, each with so many mutations of it before."""

    hurt: Callable[[Message], None]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        messages = list(super().pull_messages(message_ids))
        for message in messages:
            if message.metadata.src_node_id == LIAR and not message.has_error():
                self.hurt(message)
        return messages


class Attack:
    """A run of three clients, of which one lies."""

    def __init__(self, folder: Path, settings: Settings, mutations: int, seed: int) -> None:
        self.rng, self.mutations = random.Random(seed), mutations
        self.tried: Counter[str] = Counter()
        grid = HostileGrid.of_partitions(least_squares_app(LeastSquares.make(3), 1e-3), 3, {}, folder)
        assert isinstance(grid, HostileGrid)
        grid.hurt = self.hurt
        self.grid, self.rows = grid, list[dict[str, Any]]()
        self.strategy = Kimad(settings, SimulatedNetwork(LINKS), on_round=lambda row, _: self.rows.append(row))

    def start(self, rounds: int) -> np.ndarray[Any, Any]:
        start = record(cut(np.ones(SIZE), "float64"))
        return join(read(self.strategy.start(grid=self.grid, initial_arrays=start, num_rounds=rounds).arrays))

    def hurt(self, message: Message) -> None:
        s = self.strategy
        status = message.content.config_records[CLIENTS]["status"][0]  # type: ignore[index]
        for _ in range(self.mutations):
            evil = copy.copy(message)
            evil.__dict__["_content"] = mutated(self.rng, message.content)
            self.tried[str(status)] += 1
            if status == "hello":
                roster = copy.copy(s.roster)
                roster.clients, roster._wrong, roster._claims = dict(roster.clients), {}, {}
                roster.take_hellos([Answer(Asked("hello", LIAR), evil)])
                assert {c: k for c, k in roster.clients.items() if k.node_id != LIAR} == {
                    c: k for c, k in s.clients.items() if k.node_id != LIAR
                }
            elif status == "evaluated":
                s._evaluated(s._round.number, [Answer(Asked("evaluate", LIAR), evil)])
            elif status == "update":
                self._in_a_round(evil)

    def _in_a_round(self, evil: Message) -> None:
        """Take the reply and accept what it says, then put everything back."""
        s = self.strategy
        current, receiver, memory = s._round, s.receiver, s.memory
        kept = copy.copy(current)
        current.replies, current.refused = dict(current.replies), dict(current.refused)
        current.failures = {}
        clients = dict(s.roster.clients)
        s.roster.clients = {name: copy.copy(known) for name, known in clients.items()}
        before, sums = copy.deepcopy(memory.state()), tuple(part.copy() for part in memory.sums)
        assert memory.mirrors is not None
        number = memory.mirrors.number
        s._take(Answer(Asked("train", LIAR), evil))
        taken = [c for c, reply in current.replies.items() if reply is not kept.replies.get(c)]
        assert set(taken) <= {"1"}
        accepted = False
        for client in taken:
            receiver.open(current.asked[client].attempt)
            s.allowance.spend(client, len(current.replies[client].payload), current.start_s)
            reply = s._accept(current.replies[client], in_time=True)
            accepted = reply is not None
            memory.take([] if reply is None else [reply])
            receiver.close(client)
        after = memory.state()
        if accepted:
            self.tried["accepted"] += 1
            assert {c: e for c, e in after.items() if c != "1"} == {c: e for c, e in before.items() if c != "1"}
            assert all(np.isfinite(part).all() for part in memory.sums)
            assert all(np.isfinite(part).all() for part in memory.mirrors.read("1"))
        else:
            assert after == before
            assert memory.mirrors.number == number
            assert all(np.array_equal(a, b) for a, b in zip(memory.sums, sums, strict=True))
        memory.restore(before, sums)
        memory.mirrors.flush()
        memory.mirrors.rewind(number)
        s.roster.clients = clients
        for name in ("replies", "refused", "failures"):
            setattr(current, name, getattr(kept, name))


def attack(folder: Path, mutations: int, seed: int) -> None:
    """Rounds under attack end like those without."""
    rounds = 4
    settings = replace(BASE, evaluate="clients", max_bytes_per_day=10**9)
    run = Attack(folder / "a", settings, mutations // (1 + 2 * rounds), seed)
    x = run.start(rounds)
    calm = Attack(folder / "b", settings, 0, seed)
    expected = calm.start(rounds)
    assert np.array_equal(x, expected)
    assert [r["accepted"] for r in run.rows] == [r["accepted"] for r in calm.rows]
    assert sum(run.tried[status] for status in ("hello", "update", "evaluated")) >= 0.95 * mutations
    assert run.tried["accepted"] > 0  # a client may say what it likes of itself
    assert sum(run.strategy.counts.values()) > mutations / 10


def test_a_peers_text_cannot_forge_lines_of_the_log() -> None:
    assert readable("a\nWARNING: b\x1b[2J\r\u202e") == "a | WARNING: b\\x1b[2J\\r\\u202e"
    assert len(readable("9" * 100_000)) < 2100
    assert readable("é - 10 %") == "é - 10 %"


def test_mutated_replies_move_no_memory_and_end_no_run(tmp_path: Path) -> None:
    attack(tmp_path, 5_000, seed=1)


@pytest.mark.slow
def test_a_hundred_thousand_mutated_replies(tmp_path: Path) -> None:
    attack(tmp_path, 100_000, seed=2)
