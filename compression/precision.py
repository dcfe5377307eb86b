"""Precision and K together: how many bits the values of each layer get within one byte budget.

For every layer all pairs of K (a grid) and precision are points (bytes, squared error); the choice
minimises the errors' sum. By Lagrange: for a price lambda of a byte every layer takes the point of least
error + lambda * bytes, and lambda is halved down to where the sum of bytes meets the budget. That is the
greedy walk along all lower convex hulls without building them. The K of the message is then
found with exact sizes at these precisions (allocation.py).

What fitted levels lose is estimated from samples; without Lloyd's iterations, so from above.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compression.allocation import Counts, ErrorTable, Sizes, grids, index_bytes

HALVINGS = 100.0  # a byte that saves 2**-100 of all error is worth nothing
STEPS = 30
ROUGH_BITS, ROUGH_EXCESS = 3, 1.15
EVERY = 5  # points of the grid at which the loss of levels is estimated; between them it is interpolated

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Width:
    """One precision that a layer's values may have.

    Args:
        itemsize: bytes a value.
        overhead_bytes: bytes before the values.
        bits: of fitted levels (levels.py), whose loss is estimated; 0: a loss that is too small to matter.
    """

    itemsize: float
    overhead_bytes: int
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Precision:
    """What was chosen.

    Args:
        option: position of each layer's width, shape (L,).
        tables: with the rounding error of that width.
        counts: K of each layer where the budget is just passed, shape (L,): none will be much larger.
    """

    option: NDArray[np.int64]
    tables: list[ErrorTable]
    counts: Counts


class _Points(NamedTuple):
    """All points of all layers, shape (L, W * P): size, error as a share of all error."""

    size: Floats
    error: Floats


class _Met(NamedTuple):
    """Points of each layer, shape (L,), just within a budget and just beyond it, and the least error there can be."""

    within: NDArray[np.int64]
    beyond: NDArray[np.int64]
    bound: float


def choose(sizes: Sizes, tables: Sequence[ErrorTable], widths: Sequence[Width], budget: float) -> Precision:
    """The precision of each layer.

    Args:
        sizes: the layers; their itemsize is not used.
        tables: of each layer.
        widths: that a layer may have; the same for all.
        budget: bytes for all records together.
    """
    k = grids(sizes.floor, sizes.cap)
    shares = np.stack([_lost(table, row, widths) for table, row in zip(tables, k, strict=True)], axis=1)
    points = _points(sizes, tables, widths, k, shares)
    places = k.shape[1]
    met = _meet(points, budget)
    found = [met.within // places]
    filled = _filled(points, met, budget) // places
    if not np.array_equal(filled, found[0]):
        found.append(filled)
    bounds = [_meet(_of_width(points, option, places), budget) for option in found] if len(found) > 1 else [met]
    best = min(range(len(found)), key=lambda at: bounds[at].bound)
    option = found[best]
    precise = [
        replace(table, rounding=(row.astype(np.float64), shares[at, layer])) if widths[at].bits else table
        for layer, (table, row, at) in enumerate(zip(tables, k, option.tolist(), strict=True))
    ]
    return Precision(option, precise, k[np.arange(len(k)), bounds[best].beyond % places])


def rough_counts(sizes: Sizes, tables: Sequence[ErrorTable], budget: float) -> Counts:
    """About what K of each layer will be, and rather more, before losses are known: at ROUGH_BITS a value."""
    k = grids(sizes.floor, sizes.cap)
    width = Width(ROUGH_BITS / 8, 0, 0)
    met = _meet(_points(sizes, tables, (width,), k, np.zeros((1, *k.shape))), budget)
    return np.minimum(sizes.cap, np.asarray(ROUGH_EXCESS * k[np.arange(len(k)), met.beyond]).astype(np.int64))


def _lost(table: ErrorTable, k: NDArray[np.int64], widths: Sequence[Width]) -> Floats:
    """Share of the sent values' squared norm that each width loses at each K; shape (W, P)."""
    shares = np.zeros((len(widths), k.size))
    fitted = [at for at, width in enumerate(widths) if width.bits]
    if table.sample is None or not fitted:
        return shares
    few = np.unique(np.concatenate((k[::EVERY], k[-1:])))
    known = table.sample.lost_shares(few, [widths[at].bits for at in fitted])
    place, wanted = np.log(np.maximum(few, 1)), np.log(np.maximum(k, 1))
    for at, share in zip(fitted, known, strict=True):
        shares[at] = np.interp(wanted, place, share)
    return shares


def _points(
    sizes: Sizes, tables: Sequence[ErrorTable], widths: Sequence[Width], k: NDArray[np.int64], shares: Floats
) -> _Points:
    d = sizes.d[:, None]
    left_out = np.stack([table.at(row, int(n)) for table, row, n in zip(tables, k, sizes.d, strict=True)])
    all_sq = np.array([table.errors[-1] for table in tables])[:, None]
    itemsize = np.array([width.itemsize for width in widths])[:, None, None]
    overhead = np.array([float(width.overhead_bytes) for width in widths])[:, None, None]
    sparse = index_bytes(k, d) + k * itemsize + overhead
    dense = 2.0 + d * itemsize + overhead
    size = np.minimum(sparse, dense)
    error = np.where(sparse < dense, left_out + shares * (all_sq - left_out), shares[:, :, -1:] * all_sq)
    total = math.fsum(all_sq[:, 0].tolist())
    if total > 0.0:
        error = error / total
    layers = len(tables)
    return _Points(size.transpose(1, 0, 2).reshape(layers, -1), error.transpose(1, 0, 2).reshape(layers, -1))


def _meet(points: _Points, budget: float) -> _Met:
    """The price of a byte at which the budget is met."""
    rows = np.arange(len(points.size))

    def at(price: float) -> tuple[NDArray[np.int64], float, float]:
        cost = points.error + price * points.size
        chosen = np.argmin(cost, axis=1)
        return chosen, float(points.size[rows, chosen].sum()), float(cost[rows, chosen].sum()) - price * budget

    high, low = 0.0, HALVINGS  # the price is 2**-this
    within, spent, bound = at(2.0**-high)
    beyond, most, _ = at(2.0**-low)
    if most <= budget:
        return _Met(beyond, beyond, float(points.error[rows, beyond].sum()))
    if spent > budget:
        return _Met(within, within, float(points.error[rows, within].sum()))
    for _ in range(STEPS):
        middle = (high + low) / 2
        chosen, spent, dual = at(2.0**-middle)
        bound = max(bound, dual)
        if spent <= budget:
            high, within = middle, chosen
        else:
            low, beyond = middle, chosen
    return _Met(within, beyond, bound)


def _of_width(points: _Points, option: NDArray[np.int64], places: int) -> _Points:
    """The points of one width a layer."""
    rows = np.arange(len(option))
    size, error = (part.reshape(len(option), -1, places)[rows, option] for part in points)
    return _Points(size, error)


def _filled(points: _Points, met: _Met, budget: float) -> NDArray[np.int64]:
    """What the next step would pass is spent by the best point that fits, layer by layer."""
    chosen = met.within.copy()
    rows = np.arange(len(chosen))
    left = budget - float(points.size[rows, chosen].sum())
    largest_first = np.argsort(-points.error[rows, chosen], kind="stable")
    for layer in dict.fromkeys((*np.flatnonzero(met.within != met.beyond).tolist(), *largest_first.tolist())):
        if left <= 0.0:
            break
        size, error = points.size[layer], points.error[layer]
        room = size[chosen[layer]] + left
        best = int(np.argmin(np.where(size <= room, error, np.inf)))
        if error[best] < error[chosen[layer]]:
            left -= float(size[best] - size[chosen[layer]])
            chosen[layer] = best
    return chosen
