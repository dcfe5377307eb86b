"""Kimad+ as the paper states it: a dynamic programme over a grid of ratios.

    minimise sum_i err_i(j_i)  subject to  sum_i size_i(j_i) <= c,   ratios .01, .03, ..., .99

The paper states the problem, the grid and D = 1000 error buckets. The programme is ours
(algorithms.md, section 4): E_max is the error of the largest ratio that fits when all layers
share it; errors are rounded UP to buckets of E_max/D; S[i][e] is the least size of the first i
layers at a rounded error of at most e, e up to D + N. Its answer never exceeds the budget, is
never worse than that shared ratio, and its error is at most the optimum + N E_max/D. That bound is
absolute; where the answer is much better than E_max it says little, so the programme runs again
with E_max = the error found, up to three times in all.

L-GreCo (Alimohammadi et al., 2022) solves the dual: least size for a given error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

RATIOS: Final = tuple((1 + 2 * k) / 100 for k in range(50))
BUCKETS: Final = 1000
PASSES: Final = 3

Floats = NDArray[np.float64]
Choice = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What the programme chose.

    Args:
        choice: grid position of each layer, shape (N,).
        fits: whether its size is within the budget; else it is the least size there is.
    """

    choice: Choice
    fits: bool


def totals(table: NDArray[Any], choice: Choice) -> float:
    """Exactly rounded sum of the chosen entries of a table of shape (N, J)."""
    return math.fsum(table[np.arange(len(table)), choice].tolist())


def choose(errors: Floats, sizes: Floats, budget: float) -> Chosen:
    """Solve it.

    Args:
        errors: of layer i at grid position j, >= 0, shape (N, J); falling along j.
        sizes: in the budget's unit, shape (N, J); rising along j.
        budget: most that the sizes may add up to.

    Returns:
        A choice within the budget whose error is at most OPT + N E_max/D, with OPT the least
        error of any choice that fits; or the smallest choice, when none does.
    """
    layers, positions = errors.shape
    shared = next((j for j in reversed(range(positions)) if math.fsum(sizes[:, j].tolist()) <= budget), None)
    best = np.argmin(sizes, axis=1) if shared is None else np.full(layers, shared)
    if totals(sizes, best) > budget:
        return Chosen(best, False)
    for _ in range(PASSES):
        most = totals(errors, best)
        if most <= 0.0:
            break
        found = _programme(errors, sizes, budget, most)
        if found is None or totals(errors, found) >= most:
            break
        best = found
    return Chosen(best, True)


def _programme(errors: Floats, sizes: Floats, budget: float, most: float) -> Choice | None:
    """One pass with E_max = most; None when no bucket holds a choice that fits."""
    layers, positions = errors.shape
    buckets = BUCKETS + layers + 1
    scaled = errors * (BUCKETS / most) if math.isfinite(BUCKETS / most) else errors / most * BUCKETS
    rounded = np.minimum(np.ceil(scaled), buckets).astype(np.int64)
    least = np.zeros(buckets)  # nothing to send at any error so far
    taken = np.zeros((layers, buckets), dtype=np.int64)
    for i in range(layers):
        now = np.full(buckets, np.inf)
        for j in range(positions):
            q = int(rounded[i, j])
            if q >= buckets:
                continue
            size = least[: buckets - q] + sizes[i, j]
            better = size < now[q:]
            now[q:][better] = size[better]
            taken[i, q:][better] = j
        least = now
    fitting = np.flatnonzero(least <= budget)
    for e in fitting[:1].tolist():
        choice = np.empty(layers, dtype=np.int64)
        at = e
        for i in reversed(range(layers)):
            choice[i] = taken[i, at]
            at -= int(rounded[i, choice[i]])
        if totals(sizes, choice) <= budget:
            return choice
    return None
