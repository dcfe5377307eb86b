"""The client's store and settling: a reply moves memory once or never."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compression import Header, Layout, Scheme, compress, tag4
from compression.errors import StateError
from protocol import Attempt, ClientStore, Memory, Pending, chain, fresh_memory, settle

LAYOUT = Layout.of({"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float64), "n": np.zeros((), np.int64)})
FIRST, SECOND = Attempt(1, 1, "c"), Attempt(1, 2, "c")


def payload(attempt: Attempt, scale: float = 1.0) -> bytes:
    deltas = [np.arange(6, dtype=np.float32) * np.float32(scale), np.array([scale, -scale])]
    header = Header(0, LAYOUT.digest, tag4("e"), tag4("c"), attempt.incarnation, attempt.round, 0, 1, ())
    return compress(LAYOUT, header, deltas, None, Scheme(operator="identity"), None).payload


def store_in(folder: Path, *, durable: bool = False) -> ClientStore:
    return ClientStore(folder, "e", "c", durable=durable)


def same(a: Memory, b: Memory) -> bool:
    return replace(a, h=()) == replace(b, h=()) and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a.h, b.h, strict=True)
    )


@pytest.mark.parametrize("durable", [False, True])
def test_everything_stored_is_read_back(tmp_path: Path, durable: bool) -> None:
    store = store_in(tmp_path, durable=durable)
    store.save_layout(LAYOUT)
    memory = Memory(
        (np.arange(6, dtype=np.float32), np.array([1e-300, 2.0])),
        b"12345678",
        SECOND,
        {"up": {"rate": 1.5, "n": 2, "source": "simulated"}},
        3.25,
    )
    store.save_memory(LAYOUT, memory)
    store.save_pending(Pending(SECOND, b"payload"))
    again = store_in(tmp_path)
    assert again.load_layout() == LAYOUT
    assert same(again.load_memory(LAYOUT), memory)
    assert again.load_pending() == Pending(SECOND, b"payload")
    again.drop_pending()
    assert again.load_pending() is None
    again.forget()
    assert list(tmp_path.iterdir()) == []


def test_a_new_client_starts_at_zero(tmp_path: Path) -> None:
    memory = store_in(tmp_path).load_memory(LAYOUT)
    assert [(part.dtype.name, part.tolist()) for part in memory.h] == [("float32", [0.0] * 6), ("float64", [0.0, 0.0])]
    assert memory.digest == chain.start("e", LAYOUT.digest, "c")


def test_accepted_reply_moves_memory_exactly_once() -> None:
    start = fresh_memory(LAYOUT, "e", "c")
    blob = payload(FIRST)
    digest = chain.extend(start.digest, blob)
    settled = settle(start, Pending(FIRST, blob), LAYOUT, FIRST, digest)
    assert settled.outcome == "accepted"
    assert settled.memory.h[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert start.h[0].tolist() == [0.0] * 6  # the old memory is untouched until the new one is stored
    # killed after storing the memory and before dropping the pending reply: settled again, it stays
    twice = settle(settled.memory, Pending(FIRST, blob), LAYOUT, FIRST, digest)
    assert twice.outcome == "nothing"
    assert same(twice.memory, settled.memory)


@pytest.mark.parametrize("accepted", [None, FIRST, Attempt(2, 2, "c"), Attempt(1, 2, "d"), Attempt(1, 2, "c", 1)])
def test_reply_that_was_not_accepted_leaves_memory_alone(accepted: Attempt | None) -> None:
    start = fresh_memory(LAYOUT, "e", "c")
    settled = settle(start, Pending(SECOND, payload(SECOND)), LAYOUT, accepted, start.digest)
    assert settled.outcome == "rolled-back"
    assert same(settled.memory, start)


def test_memory_other_than_the_servers_is_lost() -> None:
    start = fresh_memory(LAYOUT, "e", "c")
    blob = payload(FIRST)
    known = chain.extend(start.digest, blob)
    assert settle(start, None, LAYOUT, FIRST, known).outcome == "lost"
    other = payload(FIRST, scale=2.0)
    assert settle(start, Pending(FIRST, other), LAYOUT, FIRST, known).outcome == "lost"


@pytest.mark.parametrize("name", ["memory.safetensors", "pending.safetensors", "layout.json"])
def test_damaged_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    store = store_in(tmp_path)
    store.save_layout(LAYOUT)
    store.save_memory(LAYOUT, fresh_memory(LAYOUT, "e", "c"))
    store.save_pending(Pending(FIRST, payload(FIRST)))
    path = store.folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StateError, match=name):
        (store.load_layout(), store.load_memory(LAYOUT), store.load_pending())


def test_unwritable_folder_is_a_clear_error_and_keeps_the_old_state(tmp_path: Path) -> None:
    (tmp_path / "run-e").write_text("a file where the folder should be")
    with pytest.raises(StateError, match="old state is intact"):
        store_in(tmp_path).save_pending(Pending(FIRST, b"x"))


@pytest.mark.parametrize("experiment", ["..", "../../etc", ""])
def test_strange_ids_stay_inside_their_folder(tmp_path: Path, experiment: str) -> None:
    store = ClientStore(tmp_path, experiment, "../passwd/..")
    store.save_pending(Pending(FIRST, b"x"))
    assert tmp_path in store.folder.resolve().parents
    assert store.load_pending() is not None
