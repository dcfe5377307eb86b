"""What the memories cost at both ends: time against compress(), disk, RAM, opening, cohorts.

One client of a ResNet-18's layers (vectors.py) plays rounds as clients/mod.py does: open the store,
settle what the server accepted, u - h, compress, pend, commit; the server's mirror takes the payload.
u is fixed, so every round's support is another. A checkpoint after every tenth round, the last two
kept, as by default. Medians over rounds; everything is interleaved with a memcpy of the model.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.vectors import Arrays, prepared, t3
from compression import UP, Compressed, Header, Layout, Scheme, Slot, compress, difference, tag4
from protocol import Attempt, Store
from protocol.filesystem import LOCAL
from strategies.mirrors import Mirrors

EXPERIMENT, CLIENT = "benchmark", "client"
CHECKPOINT_EVERY, CHECKPOINTS_KEPT = 10, 2
RATIO: Final = 0.01
FIXED, JOINT = "fixed 1 %", "hull budget, joint"
MOST_SHARE, MOST_SLOT_MEMCPYS, MOST_MODELS, MOST_COHORT_MS, MOST_GROWTH = 0.25, 3.0, 2.0, 50.0, 2.0
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Args:
        name: what was measured.
        value: the figure, in `unit`.
        unit: "ms", "x encode", "memcpys", "models", "x", ...
        target: most that it may be, or None.
        note: how it comes about.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else self.value <= self.target


@dataclass(slots=True)
class Stopwatch:
    """Seconds of named steps, one entry a round."""

    times: Times = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is done in here as a step of this name."""
        start = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - start)

    def ms(self, name: str, of: Callable[[Sequence[float]], float] = statistics.median) -> float:
        """Milliseconds of a step, its first round left out."""
        return 1e3 * of(self.times[name][1:])


@contextmanager
def timed_flushes() -> Iterator[list[float]]:
    """While in here, the seconds of every fsync are appended to the list."""
    seconds: list[float] = []
    sync = os.fsync

    def timed(handle: int) -> None:
        start = time.perf_counter()
        sync(handle)
        seconds.append(time.perf_counter() - start)

    with patch("os.fsync", timed):
        yield seconds


@dataclass(slots=True)
class Play:
    """One client's rounds.

    Args:
        folder: of the store and of the server's mirrors.
        layout: of the model.
        u: the update, flat, one array a compressed layer.
        schemes: timed by name, in turn; the last makes the payload, whose length is the budget of the others.
        durable: as durability = full.
        slot_bytes: length of a slot "v" beside h; 0: none.
        kept: replies stay undoable as the checkpoints have it; else until the next is accepted.
        flushed: seconds of every fsync since the last commit (timed_flushes).
    """

    folder: Path
    layout: Layout
    u: Sequence[NDArray[Any]]
    schemes: Mapping[str, Scheme]
    durable: bool = False
    slot_bytes: int = 0
    kept: bool = True
    flushed: list[float] = field(default_factory=list)
    watch: Stopwatch = field(default_factory=Stopwatch)
    round: int = 0
    last: Compressed | None = None
    accepted: Attempt | None = None

    def run(self, rounds: int, *, encode: bool = True) -> Stopwatch:
        """Play rounds; without `encode` every round sends what the last one sent."""
        flat = np.concatenate([part.view(np.uint8) for part in self.u])
        copy = np.empty_like(flat)
        slots = {"v": bytes(self.slot_bytes)} if self.slot_bytes else {}
        mirrors = Mirrors(LOCAL, self.folder / "mirrors", self.layout)
        for _ in range(rounds):
            self.round += 1
            attempt = Attempt(1, self.round, CLIENT)
            with self.watch("memcpy"):
                np.copyto(copy, flat)
            with self.watch("open"):
                store = Store(self.folder, EXPERIMENT, CLIENT, durable=self.durable)
                store.__enter__()
            try:
                store.use(self.layout)
                with self.watch("entry"):
                    entry = store.entry(CLIENT)
                with self.watch("settle"):
                    verdict = store.settle(entry, self.accepted, None)
                assert verdict == ("nothing" if self.accepted is None else "accepted")
                store.pass_horizon(entry, self._horizon())
                if encode or self.last is None:
                    with self.watch("u - h"):
                        deltas = [difference(u, h) for u, h in zip(self.u, store.h(entry), strict=True)]
                    for name, scheme in self.schemes.items():
                        header = Header(
                            *(UP, self.layout.digest, tag4(EXPERIMENT), tag4(CLIENT), 1, self.round),
                            slots=((int(Slot.H), entry.digest),),
                        )
                        budget = None
                        if scheme.ratio is None:  # the first round is not counted
                            budget = len(self.last.payload) if self.last else self.layout.compressed_size // 30
                        with self.watch(name):
                            self.last = compress(self.layout, header, deltas, None, scheme, budget)
                assert self.last is not None
                with self.watch("pend"):
                    store.pend(entry, attempt, self.last.payload, self.last.updates, report={}, slots=slots)
                with self.watch("commit"):
                    store.commit()
            finally:
                store.__exit__(None, None, None)
            self.watch.times.setdefault("fsync", []).append(sum(self.flushed))
            self.flushed.clear()
            self.accepted = attempt
            with self.watch("mirror"):
                mirrors.accept(CLIENT, self.last.payload)
                mirrors.flush()
        return self.watch

    def _horizon(self) -> Attempt | None:
        """The oldest accepted attempt that a checkpoint can return to."""
        if not self.kept:
            return self.accepted
        oldest = (self.round - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY - CHECKPOINT_EVERY * (CHECKPOINTS_KEPT - 1)
        return Attempt(1, oldest, CLIENT) if oldest > 0 else None


PARTS: Final = ("settle", "pend", "commit", "mirror")


def per_message(folder: Path, model: Arrays, rounds: int) -> list[Row]:
    """Settle, pend and commit, and the mirror's append, beside the encoding of the same update."""
    layout, _, u = prepared(model)
    watch = Play(folder, layout, u, {JOINT: Scheme(), FIXED: Scheme(ratio=RATIO)}).run(rounds + 1)
    encode = watch.ms(FIXED)
    together = sum(watch.ms(name) for name in PARTS)
    means = sum(watch.ms(name, statistics.fmean) for name in PARTS)
    return [
        *(Row(name, watch.ms(name), "ms") for name in ("memcpy", "open", "entry", "u - h")),
        *(Row(f"compress, {name}", watch.ms(name), "ms") for name in (FIXED, JOINT)),
        *(Row(name, watch.ms(name), "ms", note=f"{watch.ms(name) / encode:.3f} x encode") for name in PARTS),
        Row("the longest commit", watch.ms("commit", max), "ms", note="with a compaction"),
        Row("settle + pend + commit + mirror", together / encode, "x encode", MOST_SHARE, f"{together:.2f} ms"),
        Row("the same, means", means / encode, "x encode", MOST_SHARE, "compactions included"),
        Row(f"of compress, {JOINT}", together / watch.ms(JOINT), "x encode", note="the default run keys"),
    ]


def durable(folder: Path, model: Arrays, rounds: int) -> list[Row]:
    """The same with durability = full, the flush apart."""
    layout, _, u = prepared(model)
    with timed_flushes() as flushed:
        play = Play(folder, layout, u, {FIXED: Scheme(ratio=RATIO)}, durable=True, flushed=flushed)
        play.run(1 + rounds // 5)
        watch = play.run(rounds - rounds // 5, encode=False)
    times = watch.times
    times["the rest"] = [c - f for c, f in zip(times["commit"], times["fsync"], strict=True)]
    rest = sum(watch.ms(name) for name in ("settle", "pend", "the rest", "mirror"))
    return [
        Row("commit, flush included", watch.ms("commit"), "ms"),
        Row("fsync", watch.ms("fsync"), "ms", note="of the log, a round"),
        Row("the longest fsync", watch.ms("fsync", max), "ms", note="of the memory and the log, at a compaction"),
        Row("all without fsync", rest / watch.ms(FIXED), "x encode", MOST_SHARE, f"{rest:.2f} ms"),
    ]


def dense_slot(folder: Path, model: Arrays, rounds: int) -> list[Row]:
    """What a slot of the model's size beside h adds to settle, pend and commit, in memcpys."""
    layout, _, u = prepared(model)
    schemes = {FIXED: Scheme(ratio=RATIO)}
    parts = ("settle", "pend", "commit", "open")
    plain = Play(folder / "plain", layout, u, schemes, kept=False).run(rounds + 1, encode=False)
    slot = sum(layout.layers[at].nbytes for at in layout.compressed)
    dense = Play(folder / "dense", layout, u, schemes, slot_bytes=slot, kept=False).run(rounds + 1, encode=False)
    memcpy = dense.ms("memcpy")
    rows = [Row("memcpy", memcpy, "ms", note=f"{slot:,} bytes")]
    added = {name: dense.ms(name) - plain.ms(name) for name in parts}
    for name in parts:
        rows.append(Row(f"{name}, added", added[name], "ms", note=f"{added[name] / memcpy:.1f} memcpys"))
    mean = sum(dense.ms(n, statistics.fmean) - plain.ms(n, statistics.fmean) for n in parts) / memcpy
    rows.append(
        Row("a dense slot", sum(added.values()) / memcpy, "memcpys", MOST_SLOT_MEMCPYS, f"with compactions {mean:.1f}")
    )
    return rows


def cohort(folder: Path, clients: int, values: int, rounds: int) -> list[Row]:
    """Many small clients in one store: all settle, all pend, one commit."""
    rng = np.random.default_rng(1)
    layout, _, u = prepared({"w": rng.standard_normal(values).astype(np.float32)})
    names = [f"client-{at:04}" for at in range(clients)]
    watch = Stopwatch()
    accepted: dict[str, Attempt] = {}
    scheme = Scheme(ratio=RATIO)
    for number in range(1, rounds + 2):
        with watch("open"):
            store = Store(folder, EXPERIMENT, "cohort")
            store.__enter__()
        with watch("round"):
            try:
                store.use(layout)
                with watch("entries"):
                    entries = [store.entry(name) for name in names]
                with watch("settles"):
                    for entry in entries:
                        assert store.settle(entry, accepted.get(entry.client), None) in ("nothing", "accepted")
                for entry in entries:
                    store.pass_horizon(entry, accepted.get(entry.client))
                header = Header(
                    UP, layout.digest, tag4(EXPERIMENT), tag4("c"), 1, number, slots=((int(Slot.H), bytes(8)),)
                )
                got = compress(layout, header, u, None, scheme, None)
                with watch("pends"):
                    for entry in entries:
                        attempt = accepted[entry.client] = Attempt(1, number, entry.client)
                        store.pend(entry, attempt, got.payload, got.updates, report={})
                with watch("commit"):
                    store.commit()
            finally:
                store.__exit__(None, None, None)
    longest = watch.ms("commit", max)
    first = 1e3 * watch.times["entries"][0]
    return [
        Row("open", watch.ms("open"), "ms"),
        Row(f"{clients:,} entries", watch.ms("entries"), "ms", note=f"{first:.0f} ms where all are new"),
        Row(f"{clients:,} settles", watch.ms("settles"), "ms"),
        Row(f"{clients:,} pends", watch.ms("pends"), "ms"),
        Row(f"commit of {clients:,}", watch.ms("commit"), "ms", MOST_COHORT_MS, f"{values:,} values each"),
        Row("the longest commit", longest, "ms", MOST_COHORT_MS, "with a compaction"),
        Row("settles + commit", watch.ms("settles") + watch.ms("commit"), "ms"),
    ]


def opening(folder: Path, model: Arrays, rounds: Sequence[int]) -> list[Row]:
    """Opening after so many rounds: the median and the longest of the last half of them."""
    layout, _, u = prepared(model)
    play = Play(folder, layout, u, {FIXED: Scheme(ratio=RATIO)})
    rows: list[Row] = []
    for upto in rounds:
        play.run(upto - play.round, encode=False)
        late = play.watch.times["open"][upto // 2 :]
        size = sum(path.stat().st_size for path in play.folder.rglob("log-*") if "mirrors" not in path.parts)
        note = f"longest {1e3 * max(late):.2f} ms; log {size:,} bytes"
        rows.append(Row(f"open, rounds {upto // 2 + 1} to {upto}", 1e3 * statistics.median(late), "ms", note=note))
    growth = rows[-1].value / rows[-2].value
    rows.append(
        Row(f"{rounds[-1]:,} over {rounds[-2]:,} rounds", growth, "x", MOST_GROWTH, "independent of history: 1")
    )
    return rows


def _memory_kib() -> dict[str, int]:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines) if "kB" in value}


def _peak(end: Connection, folder: Path, model: Arrays, name: str) -> None:
    """In a process of its own: resident memory of one message, in KiB, without the model received and trained."""
    layout, _, after = prepared(model)
    before = [np.full_like(part, 0.1) for part in after]
    play = Play(folder, layout, after, {FIXED: Scheme(ratio=RATIO)})
    play.run(2)
    assert play.last is not None
    fixed = name == FIXED
    scheme, budget = (Scheme(ratio=RATIO), None) if fixed else (Scheme(), len(play.last.payload))
    _CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
    start = _memory_kib()
    with Store(folder, EXPERIMENT, CLIENT) as store:
        entry = store.entry(CLIENT)
        store.settle(entry, play.accepted, None)
        deltas = [difference(difference(b, a), h) for b, a, h in zip(before, after, store.h(entry), strict=True)]
        header = Header(UP, layout.digest, tag4(EXPERIMENT), tag4(CLIENT), 1, 9, slots=((int(Slot.H), entry.digest),))
        got = compress(layout, header, deltas, None, scheme, budget)
        store.pend(entry, Attempt(1, 9, CLIENT), got.payload, got.updates, report={})
        store.commit()
        here = _memory_kib()
    end.send((here["VmHWM"] - start["VmRSS"], here["RssFile"] - start["RssFile"]))


def ram(folder: Path, model: Arrays) -> list[Row]:
    """Peak resident memory of settle, u - h, compress, pend and commit, in models; Linux only."""
    if not _CLEAR.exists():
        return []
    kib = sum(array.nbytes for array in model.values()) / 1024
    rows: list[Row] = []
    for name in (FIXED, JOINT):
        here, there = multiprocessing.Pipe(duplex=False)
        at = folder / name.replace(" ", "-")
        process = multiprocessing.get_context("spawn").Process(target=_peak, args=(there, at, model, name))
        process.start()
        there.close()
        try:
            peak, mapped = here.recv()
        finally:
            process.join()
        note = f"{mapped / kib:.2f} of them h's own pages, mapped, which the kernel can take back"
        rows.append(Row(f"peak beyond the user's arrays, {name}", peak / kib, "models", MOST_MODELS, note))
    return rows


def mirror_disk(folder: Path, clients: int, values: int, rounds: int) -> list[Row]:
    """Disk of the mirrors over the bound, after every round, and the time of a fold."""
    rng = np.random.default_rng(2)
    layout, header, u = prepared({"w": rng.standard_normal(values).astype(np.float32)})
    payload = compress(layout, header, u, None, Scheme(ratio=0.1), None).payload
    mirrors = Mirrors(LOCAL, folder, layout)
    watch = Stopwatch()
    checkpoints = [0]
    worst, worst_at, late = 0.0, 0, 0.0
    for number in range(1, rounds + 1):
        for client in range(clients):
            mirrors.accept(f"client-{client}", payload)
        mirrors.flush()
        if number % CHECKPOINT_EVERY == 0:
            mirrors.checkpoint()
            checkpoints = [*checkpoints, number][-CHECKPOINTS_KEPT:]
            with watch("fold"):
                mirrors.fold(checkpoints[0] * clients)
        disk = sum(path.stat().st_size for path in folder.iterdir())
        since = (number - checkpoints[0]) * len(payload)
        bound = clients * (min(number * len(payload), mirrors.dense_bytes) + since)
        if disk / bound > worst:
            worst, worst_at = disk / bound, number
        late = max(late, (disk / clients - since) / mirrors.dense_bytes)
    sizes = f"a model of {mirrors.dense_bytes:,} bytes, payloads of {len(payload):,}"
    note = f"in round {worst_at}; {clients} clients, {sizes}"
    return [
        Row("disk over its bound, worst", worst, "x", 1.0, note),
        Row("a client's, without what is newer than the checkpoints", late, "models", note="the most of all rounds"),
        Row(
            "fold", watch.ms("fold"), "ms", note=f"median of a checkpoint's; the longest {watch.ms('fold', max):.1f} ms"
        ),
    ]


Sections = Mapping[str, Callable[[Path], list[Row]]]


def sections(model: Arrays, rounds: int) -> Sections:
    """What is measured, by title.

    Args:
        model: the large client's arrays.
        rounds: of the first section; the others follow from it.
    """
    few = max(2, rounds // 5)
    clients = min(1000, 10 * rounds)
    return {
        "one message, durability = process": lambda at: per_message(at, model, rounds),
        "one message, durability = full": lambda at: durable(at, model, rounds),
        "a slot of the model's size beside h": lambda at: dense_slot(at, model, few),
        "a cohort in one store": lambda at: cohort(at, clients, 1000, few),
        "opening": lambda at: opening(at, model, (rounds // 10, rounds, 10 * rounds)),
        "RAM of one message": lambda at: ram(at, model),
        "the mirrors' disk": lambda at: mirror_disk(at, 10, 100_000, 2 * rounds),
    }


def table(title: str, rows: Sequence[Row]) -> str:
    """Rows of a section as aligned text."""
    lines = [f"\n{title}"]
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        met = {None: "", True: "met", False: "NOT MET"}[row.met]
        lines.append(f"  {row.name:54}{row.value:>9.3f} {row.unit:9}{target:>6} {met:8}{row.note}".rstrip())
    return "\n".join(lines)


def run(rounds: int, folder: Path | None, json_path: Path | None, model: Arrays | None = None) -> int:
    """Measure, print and write; returns 0.

    Args:
        rounds: that medians are taken over.
        folder: where the stores are made and removed; None: the system's temporary folder.
        json_path: also write the results to this file.
        model: other arrays than those of a ResNet-18.
    """
    from benchmarks.codec import conditions

    under = conditions()
    print("; ".join(f"{name} {value}" for name, value in under.items()), flush=True)
    report: dict[str, Any] = {"conditions": under, "rounds": rounds, "sections": {}}
    for title, section in sections(t3() if model is None else model, rounds).items():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            rows = section(Path(made))
        print(table(title, rows), flush=True)
        report["sections"][title] = [{**asdict(row), "met": row.met} for row in rows]
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0
