"""The node's store: a reply moves a memory once or never, and what a crash leaves is put right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compression import Header, Layout, Scheme, Slot, compress, move, tag4
from compression.compressor import Compressed
from compression.errors import StateError
from protocol import LOST, Attempt, Store, chain
from protocol.filesystem import MemoryFileSystem
from protocol.store import FloatArray

LAYOUT = Layout.of({"w": np.zeros((5, 3), np.float32), "b": np.zeros(4, np.float64), "n": np.zeros((), np.int64)})
FIRST, SECOND = Attempt(1, 1, "c"), Attempt(1, 2, "c")
START = chain.start("e", LAYOUT.digest, "c")


def message(attempt: Attempt, seed: int = 0) -> Compressed:
    rng = np.random.default_rng([seed, attempt.round])
    deltas: list[FloatArray] = [rng.normal(size=15).astype(np.float32), rng.normal(size=4)]
    slots = ((int(Slot.H), bytes(8)),)
    header = Header(0, LAYOUT.digest, tag4("e"), tag4("c"), attempt.incarnation, attempt.round, 0, 1, slots)
    return compress(LAYOUT, header, deltas, None, Scheme(ratio=0.4), None, seed=1)


def opened(folder: Path, **more: object) -> Store:
    return Store(folder, "e", "c", **more)  # type: ignore[arg-type]


def pend(folder: Path, attempt: Attempt, accepted: Attempt | None, digest: bytes, seed: int = 0) -> bytes:
    """One train message: settle, make a reply pending, commit; the digest that its acceptance leads to."""
    with opened(folder) as store:
        store.use(LAYOUT)
        entry = store.entry("c")
        assert store.settle(entry, accepted, digest) != "lost"
        made = message(attempt, seed)
        state = {"state": f"after {attempt.round}".encode()}
        store.pend(entry, attempt, made.payload, made.updates, report={"x": 1.5}, slots=state)
        store.commit()
        return chain.extend(entry.digest, made.payload)


def memory_after(*attempts: Attempt) -> list[FloatArray]:
    h: list[FloatArray] = [np.zeros(15, np.float32), np.zeros(4)]
    for attempt in attempts:
        for part, update in zip(h, message(attempt).updates, strict=True):
            move(part, update)
    return h


def settled(
    folder: Path, accepted: Attempt | None, digest: bytes, *, commit: bool = True
) -> tuple[str, list[FloatArray]]:
    with opened(folder) as store:
        entry = store.entry("c")
        outcome = store.settle(entry, accepted, digest)
        if commit:
            store.commit()
        return outcome, [part.copy() for part in store.h(entry)]


def same(a: list[FloatArray], b: list[FloatArray]) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def test_an_accepted_reply_moves_the_memory_exactly_once(tmp_path: Path) -> None:
    digest = pend(tmp_path, FIRST, None, START)
    outcome, h = settled(tmp_path, FIRST, digest)
    assert outcome == "accepted"
    assert same(h, memory_after(FIRST))
    outcome, h = settled(tmp_path, FIRST, digest)
    assert outcome == "nothing"
    assert same(h, memory_after(FIRST))


def test_a_process_killed_between_moving_and_writing_leaves_what_was_known(tmp_path: Path) -> None:
    digest = pend(tmp_path, FIRST, None, START)
    outcome, h = settled(tmp_path, FIRST, digest, commit=False)  # h has moved, the log has not
    assert (outcome, same(h, memory_after(FIRST))) == ("accepted", True)
    outcome, h = settled(tmp_path, None, START)
    assert (outcome, same(h, memory_after())) == ("rolled-back", True)


@pytest.mark.parametrize("accepted", [None, Attempt(2, 2, "c"), Attempt(1, 2, "d"), Attempt(1, 2, "c", 1)])
def test_a_reply_that_was_not_accepted_leaves_the_memory_alone(tmp_path: Path, accepted: Attempt | None) -> None:
    pend(tmp_path, SECOND, None, START)
    outcome, h = settled(tmp_path, accepted, START)
    assert outcome == "rolled-back"
    assert same(h, memory_after())


def test_a_server_that_goes_back_is_followed_with_every_slot(tmp_path: Path) -> None:
    attempts = [Attempt(1, number, "c") for number in range(1, 6)]
    digests = [START]
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        digests.append(pend(tmp_path, attempt, before, digests[-1]))
    outcome, h = settled(tmp_path, attempts[1], digests[2])
    assert outcome == "undone"
    assert same(h, memory_after(*attempts[:2]))
    with opened(tmp_path) as store:
        assert store.entry("c").slots == {"state": b"after 2"}
        assert store.entry("c").accepted == attempts[1]
    outcome, h = settled(tmp_path, None, START)
    assert (outcome, same(h, memory_after())) == ("undone", True)


def test_what_the_horizon_has_passed_cannot_be_undone(tmp_path: Path) -> None:
    attempts = [Attempt(1, number, "c") for number in range(1, 5)]
    digests = [START]
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        digests.append(pend(tmp_path, attempt, before, digests[-1]))
    with opened(tmp_path) as store:
        entry = store.entry("c")
        store.pass_horizon(entry, attempts[1])
        store.commit()
    assert settled(tmp_path, attempts[0], digests[1])[0] == "lost"
    outcome, h = settled(tmp_path, attempts[1], digests[2])  # the horizon itself can still be reached
    assert (outcome, same(h, memory_after(*attempts[:2]))) == ("undone", True)


def test_a_memory_other_than_the_servers_is_lost_and_takes_the_servers(tmp_path: Path) -> None:
    digest = pend(tmp_path, FIRST, None, START, seed=7)
    known = chain.extend(START, message(FIRST).payload)
    assert known != digest
    assert settled(tmp_path, FIRST, known)[0] == "lost"
    with opened(tmp_path) as store:
        store.replace(store.entry("c"), memory_after(FIRST), known, FIRST)
    outcome, h = settled(tmp_path, FIRST, known)
    assert (outcome, same(h, memory_after(FIRST))) == ("nothing", True)


def test_opening_reads_a_log_that_does_not_grow_with_history(tmp_path: Path) -> None:
    digest, accepted = START, None
    for number in range(1, 400):
        attempt = Attempt(1, number, "c")
        digest = pend(tmp_path, attempt, accepted, digest)
        accepted = attempt
        with opened(tmp_path) as store:
            store.pass_horizon(store.entry("c"), Attempt(1, number - 5, "c"))
            store.commit()
    logs = list((tmp_path / "run-e" / "node-c").glob("log-*"))
    assert len(logs) == 1
    assert logs[0].stat().st_size < 80_000
    outcome, h = settled(tmp_path, accepted, digest)
    assert outcome == "accepted"
    assert same(h, memory_after(*(Attempt(1, n, "c") for n in range(1, 400))))


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_tail_is_cut_off(tmp_path: Path, cut: int) -> None:
    digest = pend(tmp_path, FIRST, None, START)
    settled(tmp_path, FIRST, digest)
    pend(tmp_path, SECOND, FIRST, digest)
    log = tmp_path / "run-e" / "node-c" / "log-00000001"
    log.write_bytes(log.read_bytes()[:-cut])
    outcome, h = settled(tmp_path, FIRST, digest)
    assert (outcome, same(h, memory_after(FIRST))) == ("nothing", True)


def test_damage_with_whole_records_after_it_gives_the_memory_up(tmp_path: Path) -> None:
    digest = pend(tmp_path, FIRST, None, START)
    settled(tmp_path, FIRST, digest)
    log = tmp_path / "run-e" / "node-c" / "log-00000001"
    data = bytearray(log.read_bytes())
    data[10] ^= 1
    log.write_bytes(bytes(data))
    with opened(tmp_path) as store:
        store.use(LAYOUT)
        assert store.entry("c").digest == LOST
        assert store.settle(store.entry("c"), FIRST, digest) == "lost"
        assert not np.concatenate(store.h(store.entry("c"))).any()


def test_a_power_cut_costs_a_memory_that_was_not_synced_and_not_one_that_was(tmp_path: Path) -> None:
    for durable in (False, True):
        fs = MemoryFileSystem()
        with opened(tmp_path, fs=fs, durable=durable) as store:
            store.use(LAYOUT)
            entry = store.entry("c")
            made = message(FIRST)
            store.pend(entry, FIRST, made.payload, made.updates, report={})
            store.commit()
        fs._boot = f"another boot {durable}"
        with opened(tmp_path, fs=fs, durable=durable) as store:
            digest = chain.extend(START, made.payload)
            assert store.settle(store.entry("c"), FIRST, digest) == ("accepted" if durable else "lost")


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StateError, match="in use by another process"), opened(tmp_path):
        raise AssertionError("two at once")
    with opened(tmp_path):
        pass


def test_a_newer_version_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("protocol.store.VERSION", 2)
        pend(tmp_path, FIRST, None, START)
    log = tmp_path / "run-e" / "node-c" / "log-00000001"
    before = log.read_bytes()
    with pytest.raises(StateError, match="upgrade"), opened(tmp_path):
        raise AssertionError("opened")
    assert log.read_bytes() == before


def test_another_layout_in_the_same_experiment_is_refused(tmp_path: Path) -> None:
    pend(tmp_path, FIRST, None, START)
    with opened(tmp_path) as store, pytest.raises(StateError, match="another model"):
        store.use(Layout.of({"w": np.zeros(3, np.float32)}))


def test_an_unwritable_folder_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run-e").write_text("a file where the folder should be")
    with pytest.raises(StateError, match="cannot be made"), opened(tmp_path):
        raise AssertionError("opened")


@pytest.mark.parametrize("experiment", ["..", "../../etc", ""])
def test_strange_ids_stay_inside_their_folder(tmp_path: Path, experiment: str) -> None:
    with Store(tmp_path, experiment, "../passwd/..") as store:
        assert tmp_path in store.folder.resolve().parents
