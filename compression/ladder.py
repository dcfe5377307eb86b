"""Ladders: of several quantisers (`Ladder`) one for each layer, within a budget in bytes.

    minimise sum_i V_i(r_i)  subject to  base + sum_i b_i(r_i) <= budget

over the rungs r_i, with V_i(r) = E||C_r(x_i) - x_i||^2, exactly (quantise.variance), and b_i(r) the most bytes that the
record can take, whatever is drawn (`most_bytes`). Both depend on x and on the layout, never on the draw, and so does
the choice: a rung chosen by the bytes of the levels that were drawn would bias C. What entropy coding saves
below b_i is not spent.

The last rung of every ladder is the layer as it is, without error; it also stands for every rung whose record
could take as many bytes. So short layers, whose norms and heads cost more than their values, go as they are.

- hull: the lower convex hull of each layer's points (b, V), steps in the order of slope; one that does not
  fit is left out, and with it the later ones of its layer. The sum is above the best there is by less than the
  first step left out would save. More bytes never give a larger sum: the first step that only the larger of
  two budgets takes saves more than all that the other can still take.
- uniform: the rung that is the same everywhere, fits, and has the least sum.

Where not even the smallest rungs fit, these are sent. Without a budget every layer goes as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from compression.allocation import lower_hull
from compression.coded import CODED
from compression.layout import Layer
from compression.operators import QUANT
from compression.quantise import Ladder, Quantiser, omega, variance
from compression.selection import sum_squares
from compression.values import NATIVE
from compression.wire import dense_record_bytes
from compression.work import CodedWork, refuse

Rung = Quantiser | None  # None: the layer as it is
LARGEST = 1e300  # error of a rung, at most: differences stay numbers


def rungs(ladder: Ladder, layer: Layer, longest: int) -> list[tuple[Rung, int]]:
    """(rung, most bytes of its record) of one layer, coarsest first and the layer as it is last.

    Args:
        ladder: its quantisers.
        layer: not empty.
        longest: elements of the layout's longest layer; all layers have as many rungs.
    """
    dense = dense_record_bytes(layer.size, NATIVE[layer.dtype])
    found: list[tuple[Rung, int]] = []
    for rung in ladder.rungs(longest):
        cut = replace(rung, block=min(rung.block, layer.size))
        most = 1 + CODED[QUANT.name].most_bytes(cut, layer)
        found.append((cut, most) if most < dense else (None, dense))
    return [*found, (None, dense)]


def least_bytes(ladder: Ladder, layer: Layer, longest: int) -> int:
    """Most bytes of the smallest rung's record."""
    return min(size for _, size in rungs(ladder, layer, longest))


def largest_omega(ladder: Ladder, layer: Layer, longest: int) -> float:
    """Omega of the worst rung that may be used."""
    return max(0.0 if rung is None else omega(rung, layer.size) for rung, _ in rungs(ladder, layer, longest))


def use(works: Sequence[CodedWork], ladder: Ladder, longest: int, room: int | None, *, even: bool) -> None:
    """Set the rung of each layer.

    Args:
        works: layers that are not empty.
        ladder: their quantisers.
        longest: elements of the layout's longest layer.
        room: bytes for these records; None: as many as they take, so that every layer goes as it is.
        even: the same rung for all layers.

    Raises:
        UpdateError: an element is not finite, or too large for its square.
    """
    if room is None or not works:
        for work in works:
            work.use(None)
        return
    ladders = [rungs(ladder, work.layer, longest) for work in works]
    sizes = np.array([[size for _, size in steps] for steps in ladders], dtype=np.int64)
    errors = np.zeros(sizes.shape)
    for i, (work, steps) in enumerate(zip(works, ladders, strict=True)):
        if not math.isfinite(sum_squares(work.x)):
            refuse(work.layer, work.x)
        unlike = {rung for rung, _ in steps if rung is not None}
        known: dict[Rung, float] = {rung: min(variance(work.x, rung), LARGEST) for rung in unlike}
        errors[i] = [known.get(rung, 0.0) for rung, _ in steps]
    for work, steps, at in zip(works, ladders, choose(sizes, errors, room, even=even).tolist(), strict=True):
        work.use(steps[at][0])


def choose(sizes: NDArray[np.int64], errors: NDArray[np.float64], room: int, *, even: bool) -> NDArray[np.int64]:
    """Rung of each layer, shape (L,).

    Args:
        sizes, errors: of layer i at rung j, shape (L, P).
        room: most that the sizes may add up to.
        even: the same rung for all layers.

    Returns:
        each layer's smallest rung, of least error, where these do not fit or nothing that does is better.
    """
    layers = np.arange(len(sizes))
    orders = np.lexsort((errors, sizes), axis=1)
    least = orders[:, 0]
    if int(sizes[layers, least].sum()) > room:
        return least
    shared = [np.full(len(sizes), j) for j in range(sizes.shape[1]) if int(sizes[:, j].sum()) <= room]
    found = [least, *shared] if even else [_steepest(sizes, errors, orders, room), *shared]
    return min(found, key=lambda at: (math.fsum(errors[layers, at].tolist()), int(sizes[layers, at].sum())))


def _steepest(
    sizes: NDArray[np.int64], errors: NDArray[np.float64], orders: NDArray[np.int64], room: int
) -> NDArray[np.int64]:
    chosen = orders[:, 0].copy()
    left = room - int(sizes[np.arange(len(sizes)), chosen].sum())
    steps: list[tuple[float, int, int, int]] = []  # (saved a byte, layer, rung, bytes)
    for i, order in enumerate(orders):
        kept = lower_hull(sizes[i, order].tolist(), errors[i, order].tolist())
        for (_, size, error), (at, next_size, next_error) in pairwise(kept):
            if next_error < error:
                more = int(next_size - size)
                steps.append(((error - next_error) / more, i, int(order[at]), more))
    over: set[int] = set()
    for _, i, rung, more in sorted(steps, key=lambda step: -step[0]):
        if i in over or more > left:
            over.add(i)
            continue
        chosen[i] = rung
        left -= more
    return chosen
