"""Exact selection of the K largest magnitudes without a sort.

A threshold that almost surely lies below the K-th largest magnitude is read off a strided
sample; one pass in chunks that stay in cache collects what reaches it; the few candidates
are then partitioned exactly. When the sample misled, the pass is repeated lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 16  # elements a pass handles at once: the buffers stay in the second-level cache
SAMPLE = 1 << 15  # most strided samples a threshold is read from
SMALL = 1 << 13  # layers up to this size are partitioned whole
BLOCK = 1 << 13  # longest dot product: BLAS splits none this short over threads, so sums do not depend on their number


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Every element of a vector with magnitude at least some bound.

    Args:
        indices: ascending positions, int64, shape (n,).
        values: the elements themselves, in the vector's dtype, shape (n,).
        magnitudes: their absolute values, shape (n,).
        rest_sq: sum of squares of all other elements (float64); NaN when one of them is NaN.
        complete: all non-zero elements are among them.
    """

    indices: NDArray[np.int64]
    values: NDArray[Any]
    magnitudes: NDArray[Any]
    rest_sq: float
    complete: bool


class Buffers:
    """Scratch memory of one pass, kept from layer to layer; not shared between threads."""

    def __init__(self) -> None:
        self._held: dict[np.dtype[Any], tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.float64]]] = {}

    def of(self, dtype: np.dtype[Any], size: int) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.float64]]:
        """(magnitudes in this dtype, a mask, float64): with room for `size` elements."""
        held = self._held.get(dtype)
        if held is None or held[0].size < size:
            held = np.empty(size, dtype), np.empty(size, np.bool_), np.empty(size, np.float64)
            self._held[dtype] = held
        return held


def _sum_squares(x: NDArray[Any], wide: NDArray[np.float64]) -> float:
    """Sum of squares of at most CHUNK elements: blocks of BLOCK in order, what is left over last."""
    here = wide[: x.size]
    np.copyto(here, x)
    whole = x.size - x.size % BLOCK
    rest = here[whole:]
    total = float(np.dot(rest, rest))
    if whole:
        blocks = here[:whole].reshape(-1, 1, BLOCK)
        total += sum(np.matmul(blocks, blocks.transpose(0, 2, 1)).ravel().tolist())
    return total


def sum_squares(x: NDArray[Any]) -> float:
    """Sum of squares in float64, in an order that no number of threads changes; x has shape (d,).

    Infinite or NaN where an element is, or where the sum is beyond float64; never a warning.
    """
    wide = np.empty(min(CHUNK, x.size), dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return sum((_sum_squares(x[start : start + CHUNK], wide) for start in range(0, x.size, CHUNK)), 0.0)


def stride_to(d: int, wanted: int) -> int:
    """A stride that gives at least `wanted` samples of d elements, and no factor of 2, 3, 5 or 7.

    Layers repeat: every 9th element of a convolution is the same corner of its filters, which may be all zeros.
    """
    stride = max(1, d // max(1, wanted))
    while math.gcd(stride, 210) > 1:
        stride -= 1
    return stride


def _lower_bound(x: NDArray[Any], k: int, slack: float) -> float:
    """A magnitude that about k elements reach; `slack` standard deviations on the low side."""
    if x.size <= SMALL:
        magnitudes = np.abs(x)
        return float(np.partition(magnitudes, x.size - k)[x.size - k])
    sample = np.abs(x[:: stride_to(x.size, min(SAMPLE, max(1 << 11, x.size // 160)))])
    mean = k * sample.size / x.size
    rank = int(mean + slack * (mean + 1) ** 0.5) + 1
    return float(np.partition(sample, sample.size - rank)[sample.size - rank]) if rank < sample.size else 0.0


def collect(x: NDArray[Any], bound: float, *, squares: bool = True, buffers: Buffers | None = None) -> Candidates:
    """All elements with |x| >= bound in one pass; zeros only when bound < 0.

    Args:
        x: one-dimensional float array, shape (d,).
        bound: smallest magnitude to collect; 0 collects all non-zero elements.
        squares: also add up the squares of the rest (else rest_sq is 0).
        buffers: scratch memory shared by several calls.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite shows in rest_sq
        return _collect(x, bound, squares, buffers or Buffers())


def _collect(x: NDArray[Any], bound: float, squares: bool, buffers: Buffers) -> Candidates:
    tiny = np.finfo(x.dtype).smallest_subnormal
    least = x.dtype.type(bound) if bound < 0 else max(x.dtype.type(bound), tiny)
    magnitude, reached, wide = buffers.of(x.dtype, min(CHUNK, x.size))
    positions: list[NDArray[np.int64]] = []
    values: list[NDArray[Any]] = []
    rest_sq = 0.0
    for start in range(0, x.size, CHUNK):
        chunk = x[start : start + CHUNK]
        n = chunk.size
        here, hit = magnitude[:n], reached[:n]
        np.abs(chunk, out=here)
        np.greater_equal(here, least, out=hit)
        found = np.flatnonzero(hit)
        values.append(chunk[found])
        if squares:
            here[found] = 0.0
            rest_sq += _sum_squares(here, wide)
        found += start
        positions.append(found)
    if not positions:
        return Candidates(np.empty(0, np.int64), np.empty(0, x.dtype), np.empty(0, x.dtype), 0.0, True)
    found_values = np.concatenate(values)
    return Candidates(
        np.concatenate(positions).astype(np.int64, copy=False),
        found_values,
        np.abs(found_values),
        rest_sq,
        bool(least <= tiny),
    )


def candidates(
    x: NDArray[Any], k: int, *, slack: float = 4.0, squares: bool = True, buffers: Buffers | None = None
) -> Candidates:
    """A superset of the k largest magnitudes, or all non-zero elements when there are fewer.

    Args:
        x: finite one-dimensional float array, shape (d,).
        k: how many are wanted, k >= 0.
        slack: standard deviations by which the sampled bound is lowered.
        squares, buffers: see `collect`.
    """
    if k <= 0 or x.size == 0:
        rest = sum_squares(x) if squares else 0.0
        return Candidates(np.empty(0, np.int64), np.empty(0, x.dtype), np.empty(0, x.dtype), rest, x.size == 0)
    wanted = min(k, x.size)
    while True:
        bound = _lower_bound(x, wanted, slack)
        if bound != bound:  # a NaN came up: nothing below has a meaning, and the caller sees it in rest_sq
            return Candidates(np.empty(0, np.int64), np.empty(0, x.dtype), np.empty(0, x.dtype), float("nan"), False)
        found = collect(x, bound, squares=squares, buffers=buffers)
        if found.indices.size >= min(k, x.size) or found.complete:
            return found
        wanted, slack = min(2 * wanted, x.size), 2 * slack


def largest(magnitudes: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Ascending positions of the k largest of these magnitudes; the lowest position wins ties."""
    n = magnitudes.size
    if k >= n:
        return np.arange(n, dtype=np.int64)
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    kth = np.partition(magnitudes, n - k)[n - k]
    keep = magnitudes >= kth
    extra = int(np.count_nonzero(keep)) - k
    if extra:
        keep[np.flatnonzero(magnitudes == kth)[-extra:]] = False
    return np.flatnonzero(keep).astype(np.int64, copy=False)


def topk_indices(x: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Ascending positions of exactly min(k, d) entries of largest magnitude.

    Among equal magnitudes the lowest position wins; -0.0 equals 0.0. Never a full sort.

    Args:
        x: finite one-dimensional float array, shape (d,).
        k: how many, k >= 0.

    >>> topk_indices(np.array([1.0, -3.0, 0.0, 3.0, -3.0]), 2)
    array([1, 3])
    """
    if x.ndim != 1:
        raise ValueError(f"expected one dimension, got shape {x.shape}")
    k = min(k, x.size)
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if x.size <= SMALL:
        return largest(np.abs(x), k)
    found = candidates(x, k, squares=False)
    if found.indices.size < k:
        found = collect(x, -1.0, squares=False)
    return found.indices[largest(found.magnitudes, k)]
