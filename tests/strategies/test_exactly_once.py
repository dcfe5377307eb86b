"""Whatever is lost, killed, copied or cut off: both ends of every memory stay equal, and nothing counts twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import clients.mod
from compression.errors import ConfigError, StateError
from protocol import Attempt, Entry, Store
from protocol.log import Log
from strategies.memory import ServerMemory
from strategies.mirrors import Mirrors
from strategies.receive import Receiver
from tests.protocol.lossy import LossyFileSystem
from tests.strategies.exactly_once import ExactlyOnce

STEPS = 50


def run(examples: int, **more: Any) -> None:
    """Run the machine so many times."""
    calm = settings(deadline=None, suppress_health_check=list(HealthCheck), stateful_step_count=STEPS)
    run_state_machine_as_test(ExactlyOnce, settings=settings(calm, max_examples=examples, **more))


def test_memories_stay_equal_whatever_happens() -> None:
    run(200)


@pytest.mark.slow
def test_memories_stay_equal_whatever_happens_long() -> None:
    run(1000, derandomize=False)


# ---- the machine finds what it is for: every one of these mistakes is noticed --------------------


def nothing(*args: Any, **more: Any) -> None:
    """A step that is left out."""


@contextmanager
def replaced(where: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a function by one that is handed the old one first."""
    old = getattr(where, name)
    with patch.object(where, name, lambda *args, **more: new(old, *args, **more)):
        yield


def missing_flush() -> Any:
    def init(old: Any, *args: Any, durable: bool, **more: Any) -> None:
        old(*args, durable=False, **more)

    return replaced(Log, "__init__", init)


def slots_not_synced_at_compaction() -> Any:
    def sync(old: Any, fs: Any, path: Path) -> None:
        if path.name != "slots.bin":
            old(fs, path)

    return replaced(LossyFileSystem, "sync", sync)


@contextmanager
def number_instead_of_attempt() -> Iterator[None]:
    def check(old: Any, receiver: Receiver, header: Any, attempt: Attempt) -> None:
        old(receiver, header, Attempt(header.incarnation, attempt.round, attempt.client, attempt.part))

    with ExitStack() as stack:
        for patched in (
            patch.object(Attempt, "__eq__", lambda a, b: b is not None and (a.client, a.round) == (b.client, b.round)),
            patch.object(Attempt, "__hash__", lambda a: hash((a.client, a.round))),
            patch.object(clients.mod, "_order", lambda a: (0, a.round if a is not None else 0)),
            replaced(Receiver, "_check", check),
        ):
            stack.enter_context(patched)
        yield


def undo_of_h_only() -> Any:
    def undo(old: Any, store: Store, entry: Entry, left: int) -> None:
        with patch.object(Store, "_slots_after", lambda _, entry, left: dict(entry.slots)):
            old(store, entry, left)

    return replaced(Store, "_undo", undo)


def horizon_one_short() -> Any:
    def passes(old: Any, store: Store, entry: Entry, horizon: Attempt | None) -> None:
        old(store, entry, horizon)
        if horizon is not None and len(entry.kept):
            store._write(entry, {"kind": "horizon", "passed": 1}, [])
            del entry.kept[:1]

    return replaced(Store, "pass_horizon", passes)


def row_left_as_a_crash_left_it() -> Any:
    return patch.object(Store, "_make_clean", nothing)


def checksums_of_nothing() -> Any:
    return patch("protocol.log.zlib", SimpleNamespace(crc32=lambda data, before=0: 0))


def retry_trains_anew() -> Any:
    def answer(old: Any, turn: Any, client: str) -> Any:
        if turn.store.layout is not None and turn.request.kind == "train":
            entry = turn.store.entry(client)
            if entry.pending is not None and entry.pending.attempt == turn.assignment.attempt:
                entry.pending = None
        return old(turn, client)

    return replaced(clients.mod, "_answer", answer)


def mirrors_not_rewound() -> Any:
    return patch.object(Mirrors, "rewind", nothing)


def weights_leave_the_sums_alone() -> Any:
    return patch.object(ServerMemory, "_add", nothing)


def digests_not_compared() -> Any:
    def settle(old: Any, store: Store, entry: Entry, accepted: Attempt | None, digest: bytes | None) -> Any:
        return old(store, entry, accepted, None)

    return replaced(Store, "settle", settle)


def checkpoints_not_synced() -> Any:
    def replace(old: Any, fs: Any, path: Path, data: Any, *, durable: bool) -> None:
        old(fs, path, data, durable=durable and "server" not in path.parts)

    return replaced(LossyFileSystem, "replace", replace)


def reply_sent_before_it_is_stored() -> Any:
    return patch.object(Store, "pend", nothing)


MUTANTS = [
    missing_flush,
    slots_not_synced_at_compaction,
    number_instead_of_attempt,
    undo_of_h_only,
    horizon_one_short,
    row_left_as_a_crash_left_it,
    checksums_of_nothing,
    retry_trains_anew,
    mirrors_not_rewound,
    weights_leave_the_sums_alone,
    digests_not_compared,
    checkpoints_not_synced,
    reply_sent_before_it_is_stored,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_a_mistake_is_found(mutant: Callable[[], Any]) -> None:
    with mutant(), pytest.raises((AssertionError, StateError, ConfigError, JSONDecodeError)):
        run(300, phases=[Phase.generate], report_multiple_bugs=False)
