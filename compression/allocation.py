"""Allocations: how a budget of bytes is split over layers.

An allocation is a path: a vector of K (one a layer) that grows element by element with one
number, the bytes a model of the sizes gives it. The model (geometric gaps) only steers; `fit`
walks the path with exact sizes.

- `uniform` (Kimad): one ratio rho, K_i = max(floor, floor(rho d_i)).
- `hull` (fast Kimad+): the lower convex hull of each layer's (bytes, squared error) points,
  spent in the order of slope. On convex points greedy is optimal at every vertex (Lagrange),
  and real tables of TopK errors are convex but for padding and the step to dense.
- `global`: one threshold of magnitude for all layers, a TopK of the concatenated model: the
  least squared error at its total K, whatever the bytes.
- `knapsack` (the paper's Kimad+) is no path: a dynamic programme over 50 ratios (knapsack.py).

For a seeded support the error is the expected one (`DrawnTable`): K depends on norms, sizes and the budget, never on
the draw.
What a path counts is `Sizes.model`: bytes, or values when the budget counts those.
(algorithms.md, section 4: Kimad, Kimad+; docs/allocation.md compares them.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compression.indices import SEED_BYTES
from compression.levels import SAMPLE, TOP, Sample
from compression.registry import Registry
from compression.selection import SMALL, stride_to

Counts = NDArray[np.int64]
POINTS, DENSE_POINTS = 40, 25  # K values of a layer between its floor and its size
TABLE_SAMPLE = 1 << 13
SLACK = 0.004  # share of a budget that a walk may leave unused
FINE_SLACK = 0.0005  # the same for allocations that weigh errors


SizeModel = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """The layers a budget is split over; every array has shape (L,), L compressed layers.

    Args:
        d: elements.
        itemsize: bytes a value takes on the wire.
        floor: least K; cap: largest K.
        model: (K, d, itemsize), arrays that broadcast -> expected size of a record in the budget's unit.
    """

    d: Counts
    itemsize: NDArray[np.float64]
    floor: Counts
    cap: Counts
    model: SizeModel = field(default_factory=lambda: modelled_bytes)


class Path(Protocol):
    """K vectors ordered by one number."""

    @property
    def least(self) -> float:
        """Modelled bytes of the floor."""

    @property
    def most(self) -> float:
        """Modelled bytes of the cap."""

    def counts(self, size: float) -> Counts:
        """K of each layer, shape (L,), at this many modelled bytes; never falls as `size` grows."""


@dataclass(frozen=True, slots=True, eq=False)
class ErrorTable:
    """Squared error of TopK at every K: sum of the d - K smallest squares.

    Args:
        counts: how many elements stay out, ascending from 0 to d, shape (n,).
        errors: sum of their squares (float64), shape (n,).
        magnitudes: what the table was made from, ascending, shape (s,); each stands for d/s.
        known: of how many of the largest it is exact.
        sample: a smaller one with the largest in full, where the loss of fitted levels is asked for.
        rounding: what the values' coding adds: (K, ascending; share of the sent values' squared
            norm that is lost), two arrays of one shape; None: nothing to speak of.
    """

    counts: NDArray[np.float64]
    errors: NDArray[np.float64]
    magnitudes: NDArray[np.float64] | None = None
    known: int = 0
    sample: Sample | None = None
    rounding: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def at(self, k: NDArray[Any], d: int) -> NDArray[np.float64]:
        """Error at each of these K; linear between the points."""
        left_out = np.interp(d - k.astype(np.float64), self.counts, self.errors)
        if self.rounding is None:
            return left_out
        share = np.interp(np.log(np.maximum(k, 1)), np.log(self.rounding[0]), self.rounding[1])
        return np.asarray(left_out + share * (self.errors[-1] - left_out))


def error_table(x: NDArray[Any]) -> ErrorTable:
    """Exact table of a layer below 16 Ki elements, else one estimated from as many strided samples.

    Squares are added from the small end in float64: the total minus the largest would lose
    the small errors that matter.
    """
    stride = 1 if x.size <= SMALL else stride_to(x.size, TABLE_SAMPLE)
    wide = np.sort(np.abs(x[::stride])).astype(np.float64)
    errors = np.zeros(wide.size + 1, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses what is not finite
        np.cumsum(wide * wide, out=errors[1:])
    scale = x.size / max(1, wide.size)
    return ErrorTable(
        np.arange(wide.size + 1, dtype=np.float64) * scale, errors * np.float64(scale), wide, wide.size * (stride == 1)
    )


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """Expected squared error of a seeded support at every K: the draw is not looked at.

    Args:
        norm_sq: ||x||^2.
        unbiased: values are sent times d/K: (d/K - 1) ||x||^2, convex in K; else (1 - K/d) ||x||^2.
    """

    norm_sq: float
    unbiased: bool

    def at(self, k: NDArray[Any], d: int) -> NDArray[np.float64]:
        """Error at each of these K, 1 <= K <= d."""
        wide = k.astype(np.float64)
        found: NDArray[np.float64] = self.norm_sq * ((d - wide) / np.maximum(1.0, wide if self.unbiased else d))
        return found


Table = ErrorTable | DrawnTable


def with_sample(table: ErrorTable, d: int, largest: NDArray[Any]) -> ErrorTable:
    """The table with a sample for fitted levels: they weigh the largest most, so TOP of them are in it in full.

    Args:
        table: from `error_table`.
        d: size of the layer.
        largest: at least its TOP largest magnitudes, or all, ascending.
    """
    ascending = table.magnitudes
    if ascending is None or not d:
        return table
    if ascending.size == d and d <= SAMPLE:
        return replace(table, sample=Sample.of(ascending, ascending[:0], 1.0))
    every = max(1, ascending.size // SAMPLE)
    return replace(table, sample=Sample.of(largest[-TOP:], ascending[::every], d / ascending.size * every))


def exact_table(x: NDArray[Any]) -> NDArray[np.float64]:
    """Sum of the n smallest squares for n = 0 .. d, added from the small end in float64; shape (d + 1,)."""
    squares = np.sort(np.abs(x)).astype(np.float64)
    errors = np.zeros(x.size + 1, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(squares, squares, out=squares)
        np.cumsum(squares, out=errors[1:])
    return errors


def refined_table(table: ErrorTable, d: int, largest: NDArray[Any], rest_sq: float) -> ErrorTable:
    """The table made exact where the n largest magnitudes, ascending, are known; the rest is scaled to meet it."""
    wide = largest.astype(np.float64)
    exact = np.cumsum(wide * wide) + rest_sq
    out = d - wide.size
    below = table.counts < out
    meet = float(np.interp(out, table.counts, table.errors))
    scale = rest_sq / meet if meet > 0 else 0.0
    counts = np.concatenate((table.counts[below], [out], out + 1.0 + np.arange(wide.size)))
    errors = np.concatenate((table.errors[below] * scale, [rest_sq], exact))
    return replace(table, counts=counts, errors=errors, known=wide.size)


def index_bytes(k: NDArray[Any], d: NDArray[Any]) -> NDArray[np.float64]:
    """Expected bytes of a record with a random support, without its values; arrays that broadcast together.

    Gaps of a random support are geometric; a rice code with parameter r spends
    r + 1 / (1 - (1 - K/d)**(2**r)) bits on each.
    """
    share = np.clip(k / np.maximum(d, 1).astype(np.float64), 1e-15, 1 - 1e-12)
    log_miss = np.log1p(-share)
    start = np.maximum(0.0, np.floor(np.log2(np.log(2.0) / -log_miss)))
    bits = np.full(share.shape, np.inf)
    for r in (np.maximum(0.0, start - 1), start, start + 1):
        bits = np.minimum(bits, r - 1.0 / np.expm1(np.exp2(r) * log_miss))
    lead = 3.0 + np.maximum(0.0, np.floor(np.log2(np.maximum(k, 1)) / 7))
    return np.asarray(lead + np.where(k > 0, 2.0 + k * bits / 8, 0.0))


def modelled_bytes(k: NDArray[Any], d: NDArray[Any], itemsize: NDArray[Any]) -> NDArray[np.float64]:
    """Expected bytes of a record with a random support; arrays that broadcast together."""
    size: NDArray[np.float64] = np.minimum(index_bytes(k, d) + k * itemsize, 2.0 + d * itemsize)
    return size


def seeded_bytes(k: NDArray[Any], d: NDArray[Any], itemsize: NDArray[Any]) -> NDArray[np.float64]:
    """Bytes of a record whose positions travel as a seed; arrays that broadcast together."""
    lead = 3.0 + np.maximum(0.0, np.floor(np.log2(np.maximum(k, 1)) / 7))
    sparse = lead + np.where(k > 0, SEED_BYTES + k * itemsize, 0.0)
    size: NDArray[np.float64] = np.minimum(sparse, 2.0 + d * itemsize)
    return size


def coordinates(k: NDArray[Any], d: NDArray[Any], itemsize: NDArray[Any]) -> NDArray[np.float64]:
    """Values sent, as the Kimad paper's toy counts them; arrays that broadcast together."""
    return np.asarray(k + 0.0 * (d + itemsize), dtype=np.float64)


def _at_ratio(sizes: Sizes, ratio: Any) -> Counts:
    counts: Counts = np.floor(ratio * sizes.d).astype(np.int64)
    return np.minimum(np.maximum(counts, sizes.floor), sizes.cap)


class _Uniform:
    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        longest = float(max(int(sizes.d.max(initial=1)), 2))
        ratios = np.concatenate(([0.0], np.geomspace(0.5 / longest, 1.0, 96)))
        rows, times = np.unique(np.stack((sizes.d, sizes.itemsize, sizes.floor, sizes.cap)), axis=1, return_counts=True)
        unlike = Sizes(rows[0].astype(np.int64), rows[1], rows[2].astype(np.int64), rows[3].astype(np.int64))
        totals = sizes.model(_at_ratio(unlike, ratios[:, None]), unlike.d, unlike.itemsize) @ times
        totals = np.maximum.accumulate(totals)
        first = np.concatenate((totals[1:] > totals[:-1], [True]))
        self._ratios, self._totals = ratios[first], totals[first]
        self.least, self.most = float(totals[0]), float(totals[-1])

    def counts(self, size: float) -> Counts:
        if size >= self.most:
            return _at_ratio(self._sizes, 1.0)
        if size <= self.least:
            return _at_ratio(self._sizes, 0.0)
        return _at_ratio(self._sizes, float(np.interp(size, self._totals, self._ratios)))


def uniform(sizes: Sizes, tables: Sequence[Table]) -> Path:
    """Kimad: one ratio for all layers. The tables are not used."""
    return _Uniform(sizes)


def grids(floor: Counts, cap: Counts) -> Counts:
    """K from floor to cap of each layer: even ratios where it is sparse, even steps where it is dense.

    Shape (L, P), ascending; short layers repeat some.
    """
    low, high = floor[:, None], np.maximum(floor, cap)[:, None]
    first = np.maximum(low, 1)
    ratios = first * (np.maximum(high, 1) / first) ** np.linspace(0.0, 1.0, POINTS)
    steps = low + (high - low) * np.linspace(0.0, 1.0, DENSE_POINTS)
    found = np.concatenate((low, np.ceil(ratios), np.floor(steps), high), axis=1).astype(np.int64)
    found = np.sort(np.minimum(np.maximum(found, low), high), axis=1)
    return np.asarray(found)


class _Hull:
    def __init__(self, sizes: Sizes, tables: Sequence[Table]) -> None:
        self._first = sizes.floor.copy()
        layers: list[int] = []
        before: list[int] = []
        after: list[int] = []
        spent: list[float] = []
        slopes: list[float] = []
        self.least = 0.0
        d = sizes.d[:, None]
        grid = grids(sizes.floor, sizes.cap)
        size = sizes.model(grid, d, sizes.itemsize[:, None])
        dense = size >= sizes.model(d, d, sizes.itemsize[:, None])
        for layer, table in enumerate(tables):
            low, high = int(sizes.floor[layer]), int(sizes.cap[layer])
            k, bytes_ = grid[layer], size[layer]
            if high == int(sizes.d[layer]) and bool(dense[layer, -1]):
                at = int(np.argmax(dense[layer]))  # dense sends all values: the first dense point has no error
                k, bytes_ = np.append(k[:at], high), bytes_[: at + 1]
            if int(k[0]) > low:  # dense at the floor already, as far as the model knows: take it all first
                layers.append(layer)
                before.append(low)
                after.append(high)
                spent.append(1.0)
                slopes.append(np.inf)
            kept = lower_hull(bytes_.tolist(), table.at(k, int(sizes.d[layer])).tolist())
            self.least += float(bytes_[0])
            for a, b in itertools.pairwise(kept):
                layers.append(layer)
                before.append(int(k[a[0]]))
                after.append(int(k[b[0]]))
                spent.append(b[1] - a[1])
                slopes.append((a[2] - b[2]) / (b[1] - a[1]))
        order = np.argsort(-np.array(slopes), kind="stable")
        self._layers = np.array(layers, dtype=np.int64)[order]
        self._before = np.array(before, dtype=np.int64)[order]
        self._after = np.array(after, dtype=np.int64)[order]
        self._spent = np.array(spent)[order]
        self._ends = np.cumsum(self._spent)
        self._last = sizes.cap
        self.most = self.least + (float(self._ends[-1]) if order.size else 0.0)

    def counts(self, size: float) -> Counts:
        if size >= self.most:
            return self._last.copy()
        counts = self._first.copy()
        left = max(0.0, size - self.least)
        whole = int(np.searchsorted(self._ends, left, side="right"))
        np.maximum.at(counts, self._layers[:whole], self._after[:whole])
        if whole < self._ends.size and left > 0:
            begun = left - (float(self._ends[whole - 1]) if whole else 0.0)
            step = (self._after[whole] - self._before[whole]) * (begun / self._spent[whole])
            at = self._layers[whole]
            counts[at] = max(counts[at], self._before[whole] + int(step))
        return counts


def lower_hull(sizes: Sequence[float], errors: Sequence[float]) -> list[tuple[int, float, float]]:
    """Vertices (position, size, error) of the lower convex hull, from the first point on; sizes ascend."""
    hull: list[tuple[int, float, float]] = []
    for at, (size, error) in enumerate(zip(sizes, errors, strict=True)):
        if hull and size <= hull[-1][1]:
            if len(hull) == 1 or error >= hull[-1][2]:
                continue
            hull.pop()
        while len(hull) > 1:
            (_, size_a, error_a), (_, size_b, error_b) = hull[-2], hull[-1]
            if (error_a - error_b) * (size - size_b) > (error_b - error) * (size_b - size_a):
                break
            hull.pop()
        hull.append((at, size, error))
    return hull


def hull(sizes: Sizes, tables: Sequence[Table]) -> Path:
    """Fast Kimad+: convex hulls of the layers' (bytes, squared error) points, greedy by slope."""
    return _Hull(sizes, tables)


class _Scaled:
    """A path in values, ordered by the modelled size of its vectors."""

    def __init__(self, sizes: Sizes, inner: Path, points: Sequence[float]) -> None:
        self._inner = inner
        totals = [float(sizes.model(inner.counts(at), sizes.d, sizes.itemsize).sum()) for at in points]
        self._totals = np.maximum.accumulate(np.array(totals))
        self._points = np.array(points)
        self.least, self.most = float(self._totals[0]), float(self._totals[-1])

    def counts(self, size: float) -> Counts:
        if size >= self.most:
            return self._inner.counts(float(self._points[-1]))
        if size <= self.least:
            return self._inner.counts(float(self._points[0]))
        at = max(1, int(np.searchsorted(self._totals, size, side="right")))
        low, high = self._totals[at - 1], self._totals[at]
        share = (size - low) / (high - low)
        return self._inner.counts(float(self._points[at - 1] + share * (self._points[at] - self._points[at - 1])))


def _points(least: float, most: float) -> list[float]:
    return [least, *(least + np.geomspace(1.0, most - least, 64)).tolist()] if most > least + 1 else [least, most]


def global_(sizes: Sizes, tables: Sequence[Table]) -> Path:
    """One threshold for all layers, as far as tables of errors know it.

    With a value's squared magnitude as the error that sending it saves, the greedy of slopes per
    value IS the threshold. `GlobalTopK` is the exact one.
    """
    inner = _Hull(Sizes(sizes.d, sizes.itemsize, sizes.floor, sizes.cap, coordinates), tables)
    return _Scaled(sizes, inner, _points(inner.least, inner.most))


class _Threshold:
    """The exact global TopK: a path over its total, as far down as all magnitudes are known."""

    def __init__(self, sizes: Sizes, magnitudes: Sequence[NDArray[Any]], complete: Sequence[bool]) -> None:
        self._floor, self._cap = sizes.floor, sizes.cap
        everything = np.concatenate([m.astype(np.float64) for m in magnitudes])
        layers = np.repeat(np.arange(len(magnitudes)), [m.size for m in magnitudes])
        order = np.argsort(-everything, kind="stable")  # ties: the earlier layer first
        self._layers = layers[order]
        bounds = [float(m.min()) for m, done in zip(magnitudes, complete, strict=True) if not done and m.size]
        unknown = any(not done and not m.size and d for m, done, d in zip(magnitudes, complete, sizes.d, strict=True))
        known = int(np.searchsorted(-everything[order], -max(bounds), side="left")) if bounds else everything.size
        self.least, self.most = 0.0, 0.0 if unknown else float(known)

    def counts(self, size: float) -> Counts:
        found = np.bincount(self._layers[: int(size)], minlength=self._floor.size)
        return np.minimum(np.maximum(found.astype(np.int64), self._floor), self._cap)


def global_topk(sizes: Sizes, magnitudes: Sequence[NDArray[Any]], complete: Sequence[bool]) -> Path:
    """One threshold for all layers, exactly.

    Args:
        sizes: the layers.
        magnitudes: of each layer's largest values, in any order: a superset of its K largest.
        complete: whether these are all that are not zero.

    Returns:
        a path that ends where some layer's magnitudes are no longer known.
    """
    inner = _Threshold(sizes, magnitudes, complete)
    return _Scaled(sizes, inner, _points(inner.least, inner.most))


@dataclass(frozen=True, slots=True)
class Allocation:
    """One way to split a budget.

    Args:
        id: not on the wire; keeps the registry's order.
        name: name in a configuration.
        tables: needs a table of errors for each layer (else it gets none).
        path: (sizes, tables) -> path; None: no path but a choice on a grid (knapsack.py).
    """

    id: int
    name: str
    tables: bool
    path: Callable[[Sizes, Sequence[Table]], Path] | None


ALLOCATIONS: Registry[Allocation] = Registry("allocation")
UNIFORM = ALLOCATIONS.register(Allocation(0, "uniform", False, uniform))
HULL = ALLOCATIONS.register(Allocation(1, "hull", True, hull))
GLOBAL = ALLOCATIONS.register(Allocation(2, "global", True, global_))
KNAPSACK = ALLOCATIONS.register(Allocation(3, "knapsack", False, None))


def fit(path: Path, total: Callable[[Counts], int], budget_bytes: int, slack: float = SLACK) -> tuple[Counts, bool]:
    """The K vector on the path whose exact size is just within a budget.

    A bracketed secant on the path; where the path jumps, the jump is taken one element at a
    time, layer by layer, so that the result ends within the slack below the budget unless even
    one element more does not fit.

    Args:
        path: an allocation's.
        total: exact bytes of the message at a K vector; never falls as K grows.
        budget_bytes: what the message may take.
        slack: share of the budget that may stay unused.

    Returns:
        (K of each layer, True), or (the floor, False) when not even that fits.
    """
    enough = budget_bytes - int(budget_bytes * slack)
    aim = budget_bytes - budget_bytes * slack / 2
    low: tuple[float, Counts, int] | None = None
    high: tuple[float, Counts, int] | None = None
    at = min(max(aim, path.least), path.most)
    for step in range(48):
        counts = path.counts(at)
        size = total(counts)
        if size > budget_bytes:
            if at <= path.least:
                return counts, False
            high = (at, counts, size)
        elif size >= enough or at >= path.most:
            return counts, True
        else:
            low = (at, counts, size)
        if low is None:
            at = path.least if step >= 8 else max(path.least, at * aim / size - (step > 1) * at / 8)
        elif high is None:
            at = path.most if step >= 6 else min(path.most, at * aim / max(size, 1) + step * at / 4)
        else:
            if int((high[1] - low[1]).sum()) <= 1:
                return low[1], True
            width = high[0] - low[0]
            if step > 16 or width < 1e-3:
                break
            guess = (aim - low[2]) / (high[2] - low[2]) if step % 4 != 3 else 0.5
            at = low[0] + width * min(max(guess, 0.02), 0.98)
    if low is None or high is None:
        raise AssertionError("the walk along an allocation's path did not bracket the budget")
    return _fill(low, high, total, budget_bytes, enough), True


def _fill(
    low: tuple[float, Counts, int],
    high: tuple[float, Counts, int],
    total: Callable[[Counts], int],
    budget_bytes: int,
    enough: int,
) -> Counts:
    """Between a K vector that fits and a larger one that does not: one element after the other."""
    steps = high[1] - low[1]
    before = np.cumsum(steps) - steps
    fits, over = 0, int(steps.sum())
    best, size_low, size_high = low[1], low[2], high[2]
    turn = 0
    while over - fits > 1 and size_low < enough:
        share = (budget_bytes - size_low) / max(1, size_high - size_low) if turn % 3 != 2 else 0.5
        middle = min(max(fits + int((over - fits) * share), fits + 1), over - 1)
        counts = low[1] + np.clip(middle - before, 0, steps)
        size = total(counts)
        if size <= budget_bytes:
            fits, best, size_low = middle, counts, size
        else:
            over, size_high = middle, size
        turn += 1
    return best
