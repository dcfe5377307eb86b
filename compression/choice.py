"""K and precision of each layer within a budget: the allocations of allocation.py, walked with exact sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from compression import allocation as al
from compression import knapsack
from compression import precision as pr
from compression.allocation import ALLOCATIONS, Counts, ErrorTable, Sizes
from compression.indices import encode_gaps, rice_bytes
from compression.levels import TOP
from compression.scheme import Scheme
from compression.values import BF16, FITTED
from compression.work import SLACK, Piece, SeededWork, Work, refuse

REFILL, REFILLS = 0.005, 6  # share of a budget that zstd must save before the choice is made again, and how often
PROBED = 2048  # indices of a long stream that say whether zstd is worth its time
FEW_INDICES = 64  # a frame costs about 20 bytes
Sent = list[Piece]


def send(works: Sequence[Work], counts: Counts) -> Sent:
    """What is sent at these K."""
    return [work.update(int(k)) for work, k in zip(works, counts, strict=True)]


def total_size(works: Sequence[Work], counts: Counts, base: int) -> int:
    """Exact size of a message at these K, in the budget's unit; base is what is outside the compressed layers."""
    return base + sum(work.size(int(k)) for work, k in zip(works, counts, strict=True))


def choose(works: Sequence[Work], sizes: Sizes, base: int, scheme: Scheme, budget_bytes: int) -> tuple[Counts, Sent]:
    """K of each layer within a budget (the floor when not even that fits), and what is sent.

    Of a seeded operator, K is a function of norms, sizes and the budget alone: an unbiased one would
    not be if K depended on the draw.
    """

    def total(counts: Counts) -> int:
        return total_size(works, counts, base)

    def prepare(counts: Counts) -> None:
        for work, k in zip(works, counts, strict=True):
            if not work.must_be_dense(int(k)):
                work.prepare(int(k) + int(k) // 16 + 8, 2.0)

    tables: list[ErrorTable] | None = None
    if scheme.joint:
        sizes, tables = _precision(works, sizes, budget_bytes - base, prepare)
    # The model of sizes leaves out what a value coding puts before the values; every layer sends some.
    modelled = base if scheme.unit == "coordinates" else base + sum(w.coding.overhead_bytes for w in works if w.d)
    shifted = max(0, budget_bytes - modelled)
    even = al.uniform(sizes, ())

    def walked(path: al.Path, slack: float = al.SLACK) -> tuple[Counts, bool]:
        return al.fit(_Shifted(path, modelled), total, budget_bytes, 0.0 if works[0].counted else slack)

    chosen = ALLOCATIONS[scheme.allocation]
    if chosen is al.UNIFORM:
        prepare(even.counts(shifted))
        return _sent_at(works, walked(even)[0])
    drawn = [work for work in works if isinstance(work, SeededWork)]  # all of them, or none
    if drawn:
        if chosen.path is None:
            counts, fits = _on_grid(works, sizes, scheme, total, budget_bytes)
        else:
            counts, fits = walked(chosen.path(sizes, [work.table for work in drawn]))
        even_counts, even_fits = walked(even)
        if fits and even_fits and _expected(drawn, even_counts) < _expected(drawn, counts):
            counts = even_counts
        return _sent_at(works, counts)
    if chosen.path is None:
        counts, fits = _on_grid(works, sizes, scheme, total, budget_bytes)
    else:
        if tables is None:
            tables = [_table(work) for work in works]
            prepare(np.maximum(chosen.path(sizes, tables).counts(shifted), even.counts(shifted)))
        if chosen is al.GLOBAL:
            counts, fits = _by_threshold(works, sizes, prepare, walked)
            return _sent_at(works, counts)
        else:
            tables = [_refined(work, table) for work, table in zip(works, tables, strict=True)]
            counts, fits = walked(chosen.path(sizes, tables), al.FINE_SLACK)
    sent = send(works, counts)
    if not fits:
        return counts, sent
    if scheme.joint:
        return _or_uniform(works, sizes, base, budget_bytes, tables or (), counts, sent)
    even_counts, _ = walked(even)
    even_sent = send(works, even_counts)
    if _lost(even_sent) < _lost(sent):
        return even_counts, even_sent
    return counts, sent


def _precision(
    works: Sequence[Work], sizes: Sizes, budget: float, prepare: Callable[[Counts], None]
) -> tuple[Sizes, list[ErrorTable]]:
    """Set the precision of each layer: (sizes with it, tables with its rounding error)."""
    rough = [_table(work) for work in works]
    prepare(pr.rough_counts(sizes, rough, budget))
    tables = [_sampled(work, table) for work, table in zip(works, rough, strict=True)]
    codings = (BF16, *FITTED)
    widths = [pr.Width(c.itemsize, c.overhead_bytes, c.bits if c.fitted else 0) for c in codings]
    precision = pr.choose(sizes, tables, widths, budget)
    for work, at in zip(works, precision.option.tolist(), strict=True):
        work.write_as(codings[at])
    prepare(precision.counts)
    return replace(sizes, itemsize=np.array([work.coding.itemsize for work in works])), precision.tables


def _sampled(work: Work, table: ErrorTable) -> ErrorTable:
    """The table refined where candidates are known, with a sample for fitted levels."""
    found = work.found
    if table.known == work.d and table.magnitudes is not None:
        return al.with_sample(table, work.d, table.magnitudes)
    if found is None or found.magnitudes.size < min(TOP, work.d):
        found = work.prepare(TOP, SLACK)
    ascending = np.sort(found.magnitudes)
    return al.with_sample(al.refined_table(table, work.d, ascending, found.rest_sq), work.d, ascending)


def short_streams(works: Sequence[Work], sent: Sent, scheme: Scheme) -> dict[int, bytes]:
    """Index streams that are smaller by zstd than by rice, by the layer's number."""
    if scheme.codec != "auto":
        return {}
    found: dict[int, bytes] = {}
    for number, (work, piece) in enumerate(zip(works, sent, strict=True)):
        support = piece.update.indices
        if support is None or work.seed is not None or support.size < FEW_INDICES:
            continue
        if support.size > 2 * PROBED and not _repeats(support[:PROBED]):
            continue
        stream = encode_gaps(support)
        if stream is not None and len(stream) < rice_bytes(support, work.d):
            found[number] = stream
    return found


def _lost(sent: Sent) -> float:
    return math.fsum(piece.error_sq for piece in sent)


def _expected(works: Sequence[SeededWork], counts: Counts) -> float:
    return math.fsum(float(w.expected_sq(counts[i : i + 1])[0]) for i, w in enumerate(works))


def _repeats(support: NDArray[np.int64]) -> bool:
    """Whether zstd makes these smaller than rice does."""
    stream = encode_gaps(support)
    return stream is not None and len(stream) < rice_bytes(support, int(support[-1]) + 1)


def _saved(works: Sequence[Work], sent: Sent, gaps: Mapping[int, bytes]) -> int:
    """Bytes that these streams are shorter than rice's."""
    supports = {at: sent[at].update.indices for at in gaps}
    return sum(rice_bytes(s, works[at].d) - len(gaps[at]) for at, s in supports.items() if s is not None)


def refilled(
    works: Sequence[Work],
    sizes: Sizes,
    base: int,
    scheme: Scheme,
    budget_bytes: int,
    counts: Counts,
    sent: Sent,
) -> tuple[Counts, Sent, dict[int, bytes]]:
    """Spend what zstd saves on the index streams: chosen again for a budget that is larger by that."""
    gaps = short_streams(works, sent, scheme)
    saved = _saved(works, sent, gaps)
    if scheme.unit != "bytes" or saved < REFILL * budget_bytes:
        return counts, sent, gaps
    best, least = (counts, sent, gaps, [work.coding for work in works]), _lost(sent)
    # (budget asked for, bytes made of it): of one that fits, and of one that does not
    low, high = (budget_bytes, total_size(works, counts, base) - saved), (0, 0)
    wider = budget_bytes + saved
    for _ in range(REFILLS):
        counts, sent = choose(works, sizes, base, scheme, wider)
        gaps = short_streams(works, sent, scheme)
        nbytes = total_size(works, counts, base) - _saved(works, sent, gaps)
        if nbytes > budget_bytes:
            high = (wider, nbytes)
        else:
            low = (wider, nbytes)
            if (lost := _lost(sent)) < least:
                best, least = (counts, sent, gaps, [work.coding for work in works]), lost
            if nbytes >= (1 - REFILL / 2) * budget_bytes:
                break
        if high[1] > low[1]:
            share = (0.998 * budget_bytes - low[1]) / (high[1] - low[1])
            wider = low[0] + int((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        else:
            wider += 2 * (budget_bytes - nbytes)
    counts, sent, gaps, codings = best
    for work, coding in zip(works, codings, strict=True):
        work.write_as(coding)
    return counts, sent, gaps


def _or_uniform(
    works: Sequence[Work],
    sizes: Sizes,
    base: int,
    budget_bytes: int,
    tables: Sequence[ErrorTable],
    counts: Counts,
    sent: Sent,
) -> tuple[Counts, Sent]:
    """A joint choice, or one ratio at bf16 where that loses less: tried where the tables say that it might."""
    lost = _lost(sent)
    plain = replace(sizes, itemsize=np.full(len(works), BF16.itemsize))
    path = al.uniform(plain, ())
    guess = path.counts(max(0, budget_bytes - base))
    expected = [
        replace(t, rounding=None).at(guess[i : i + 1], w.d)[0]
        for i, (t, w) in enumerate(zip(tables, works, strict=True))
    ]
    if math.fsum(expected) > 1.5 * lost:
        return counts, sent
    chosen = [work.coding for work in works]
    for work in works:
        work.write_as(BF16)
    even_counts, _ = al.fit(_Shifted(path, base), lambda k: total_size(works, k, base), budget_bytes)
    even_sent = send(works, even_counts)
    if _lost(even_sent) < lost:
        return even_counts, even_sent
    for work, coding in zip(works, chosen, strict=True):
        work.write_as(coding)
    return counts, sent


def _sent_at(works: Sequence[Work], counts: Counts) -> tuple[Counts, Sent]:
    return counts, send(works, counts)


def _by_threshold(
    works: Sequence[Work],
    sizes: Sizes,
    prepare: Callable[[Counts], None],
    walked: Callable[[al.Path], tuple[Counts, bool]],
) -> tuple[Counts, bool]:
    """K of each layer by one exact threshold; more magnitudes are collected until it is among those known."""
    while True:
        found = [work.prepare(0, SLACK) for work in works]
        whole = [f.complete or f.indices.size >= work.d for f, work in zip(found, works, strict=True)]
        path = al.global_topk(sizes, [f.magnitudes for f in found], whole)
        counts, fits = walked(path)
        if all(whole) or not fits or not np.array_equal(counts, path.counts(path.most)):
            return counts, fits
        for work, f in zip(works, found, strict=True):
            work.prepare(min(work.d, 2 * f.indices.size + 64), SLACK)


def _on_grid(
    works: Sequence[Work], sizes: Sizes, scheme: Scheme, total: Callable[[Counts], int], budget_bytes: int
) -> tuple[Counts, bool]:
    """K of each layer by the paper's dynamic programme.

    Its sizes are the model's (exact in unit "coordinates"); the exact size of what it chose is
    tested, and it runs again for a smaller budget while that is too large.
    """
    ratios = np.array(knapsack.RATIOS)[:, None]
    counts = np.minimum(np.maximum(np.floor(ratios * sizes.d).astype(np.int64), sizes.floor), sizes.cap).T
    errors = np.stack([_grid_errors(work, k, scheme.errors) for work, k in zip(works, counts, strict=True)])
    model = sizes.model(counts, sizes.d[:, None], sizes.itemsize[:, None])
    rows = np.arange(len(works))
    floor_bytes = total(sizes.floor)
    constant = floor_bytes - math.fsum(sizes.model(sizes.floor, sizes.d, sizes.itemsize).tolist())
    room = budget_bytes - constant
    for _ in range(8):
        chosen = knapsack.choose(errors, model, room)
        picked = counts[rows, chosen.choice]
        over = total(picked) - budget_bytes
        if over <= 0:
            return picked, True
        if not chosen.fits:
            break
        room -= over + 1
    return sizes.floor.copy(), floor_bytes <= budget_bytes


def _grid_errors(work: Work, counts: Counts, measure: str) -> NDArray[np.float64]:
    """Error of a layer at each of these K: exact for TopK, expected for a seeded support."""
    if isinstance(work, SeededWork):
        errors = work.expected_sq(counts)
    else:
        table = al.exact_table(work.x)
        if not math.isfinite(float(table[-1])):
            refuse(work.layer, work.x)
        errors = table[work.d - counts]
    return np.sqrt(errors) if measure == "plain" else np.asarray(errors, dtype=np.float64)


def _table(work: Work) -> ErrorTable:
    table = al.error_table(work.x)
    if not math.isfinite(float(table.errors[-1])):
        refuse(work.layer, work.x)
    return table


def _refined(work: Work, table: ErrorTable) -> ErrorTable:
    """The table made exact where the candidates are known, unless it is already."""
    found = work.found
    if found is None or table.known >= found.magnitudes.size:
        return table
    return al.refined_table(table, work.d, np.sort(found.magnitudes), found.rest_sq)


class _Shifted:
    """A path whose number counts the bytes outside the compressed layers, too."""

    def __init__(self, path: al.Path, base: int) -> None:
        self._path, self._base = path, base
        self.least, self.most = path.least + base, path.most + base

    def counts(self, size: float) -> Counts:
        ends = {self.least: -math.inf, self.most: math.inf}  # subtracting would round past them
        return self._path.counts(ends.get(size, size - self._base))
