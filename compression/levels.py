"""Fitted levels: b bits a value, its sign and one of 2**(b-1) magnitudes that the record brings along.

Values that survive a TopK have no mass near zero and a heavy tail: levels fitted to them lose a
few times less than a fixed grid of as many bits. A record's cells of magnitude are cut where
sum (gap between neighbouring magnitudes)**(2/3) falls into equal parts, which is the point
density f**(1/3) of the best quantiser for many levels (Panter and Dite 1951), and moved by four of
Lloyd's iterations, which gain up to a quarter at 4 bits and little elsewhere; a cell's level is the
mean of its magnitudes.

Means make it contractive whatever the input is: with m_c the mean of the n_c magnitudes in cell c,

    ||y - q||^2 = ||y||^2 - sum_c n_c m_c^2

so delta = ||y - q||^2/||y||^2 < 1, measured exactly for each message; at worst, one level for n
values, delta = 1 - ||y||_1^2/(n ||y||^2) <= 1 - 1/n. (A grid fitted without regard to zero can
lose more than everything; algorithms.md, section 2.)

Stream of n > 0 values: the levels as fp16 writes them (2 bytes of exponent, 2 a level,
ascending), then n codes of b bits, most significant bit first and zero-padded to a byte; the top
bit of a code is the sign, the others number the level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.errors import WireError
from compression.indices import unpack_bits

SAMPLE, TOP = 2048, 512  # magnitudes from which a loss is estimated: in steps, and the largest in full
FIT_SAMPLE, FIT_TOP = 4096, 1024  # the same for the levels themselves
ITERATIONS = 4
Buffer = bytes | bytearray | memoryview


def level_count(bits: int) -> int:
    """How many magnitudes b bits tell apart."""
    return 1 << (bits - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Magnitudes that stand for many.

    Args:
        descending: the largest of all, and of the others every s-th, largest first, shape (n,).
        counts: how many of all are as large as each, shape (n,).
        steps: sum of (gap)**(2/3) over all of them down to each, shape (n,).
    """

    descending: NDArray[np.float64]
    counts: NDArray[np.float64]
    steps: NDArray[np.float64]

    @classmethod
    def of(cls, top: NDArray[Any], rest: NDArray[Any], stride: float) -> Sample:
        """From the largest magnitudes, and one in `stride` of those below; both ascending.

        Of the others each stands for s: its gap is s times as wide and there are s times fewer, so
        that the sum of gap**(2/3) is smaller by s**(1/3).
        """
        if top.size:
            rest = rest[: np.searchsorted(rest, top[0])]
        descending = np.concatenate((top[::-1], rest[::-1])).astype(np.float64)
        weights = np.ones(descending.size)
        weights[top.size :] = stride
        steps = np.zeros(descending.size)
        with np.errstate(invalid="ignore"):  # the caller refuses what is not finite
            gaps = np.cbrt(descending[:-1] - descending[1:]) ** 2
        gaps[max(0, top.size - 1) :] *= np.cbrt(stride)
        np.cumsum(gaps, out=steps[1:])
        return cls(descending, np.cumsum(weights), steps)

    def cuts(self, ranks: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
        """Where the cells of the first `ranks` magnitudes end.

        Args:
            ranks: each in 1 .. n, shape (m,).
            bits: b.

        Returns:
            ascending ranks from 0 on, shape (m, 2**(b-1) + 1): cell c holds ranks [r_c, r_(c+1)).
        """
        levels = level_count(bits)
        wanted = self.steps[ranks - 1][:, None] * (np.arange(1, levels) / levels)
        inner = np.minimum(np.searchsorted(self.steps, wanted), ranks[:, None])
        ends = np.concatenate((np.zeros((ranks.size, 1), np.int64), inner, ranks[:, None]), axis=1)
        return np.maximum.accumulate(ends, axis=1)

    def settled(self, ends: NDArray[np.int64], iterations: int) -> NDArray[np.int64]:
        """Ends of cells after some of Lloyd's iterations: each moves to the middle of its neighbours' means."""
        counts = np.concatenate(([0.0], self.counts))
        sums = np.concatenate(([0.0], np.cumsum(np.diff(counts) * self.descending)))
        ascending = self.descending[::-1]
        for _ in range(iterations):
            held = np.diff(counts[ends])
            means = np.diff(sums[ends]) / np.where(held > 0, held, 1.0)
            between = (held[:-1] > 0) & (held[1:] > 0)
            middle = ascending.size - np.searchsorted(ascending, (means[:-1] + means[1:]) / 2)
            moved = ends.copy()
            moved[1:-1] = np.where(between, middle, ends[1:-1])
            ends = np.maximum.accumulate(moved)
        return ends

    def lost_shares(self, k: NDArray[np.int64], widths: Sequence[int]) -> NDArray[np.float64]:
        """delta: the share of the squared norm of the k largest magnitudes that b bits lose, from above.

        Without Lloyd's iterations: what is really lost is up to a quarter less.

        Args:
            k: how many of all, shape (m,).
            widths: values of b.

        Returns:
            shape (len(widths), m).
        """
        ranks = np.clip(np.searchsorted(self.counts, k), 1, self.counts.size)
        counts = np.concatenate(([0.0], self.counts))
        weights = np.diff(counts)
        unit = self.descending / (self.descending[0] or 1.0)  # shares have no scale, and squares would overflow
        sums = np.concatenate(([0.0], np.cumsum(weights * unit)))
        squares = np.concatenate(([0.0], np.cumsum(weights * unit**2)))
        finest = max(widths)
        ends = self.cuts(ranks, finest)  # those of fewer bits are among them
        held, total, whole = counts[ends], sums[ends], squares[ranks]
        shares = np.zeros((len(widths), k.size))
        for at, bits in enumerate(widths):
            step = level_count(finest) // level_count(bits)
            kept = np.diff(total[:, ::step], axis=1) ** 2 / np.maximum(np.diff(held[:, ::step], axis=1), 1e-300)
            shares[at] = 1.0 - kept.sum(axis=1) / np.where(whole > 0, whole, 1.0)
        return np.clip(np.where(whole > 0, shares, 0.0), 0.0, 1.0)


def sample_of(magnitudes: NDArray[Any]) -> Sample:
    """A sample of these magnitudes: the FIT_TOP largest, and about FIT_SAMPLE of the others; all if there are few."""
    n = magnitudes.size
    if n <= FIT_SAMPLE + FIT_TOP:
        return Sample.of(np.sort(magnitudes), magnitudes[:0], 1.0)
    parted = np.partition(magnitudes, n - FIT_TOP)
    stride = (n - FIT_TOP) // FIT_SAMPLE
    return Sample.of(np.sort(parted[n - FIT_TOP :]), np.sort(magnitudes[::stride]), float(stride))


def _bounds(magnitudes: NDArray[Any], bits: int) -> tuple[NDArray[np.float64], bool]:
    """(ascending bounds between the cells, shape (2**(b-1) - 1,); whether each magnitude has a level of its own)."""
    levels = level_count(bits)
    few = np.unique(magnitudes[:: max(1, magnitudes.size // FIT_SAMPLE)])
    if few.size <= levels:
        few = np.unique(magnitudes)
    if few.size <= levels:  # a level for each: nothing is lost, and coding twice changes nothing
        padded = np.concatenate((few, np.full(levels - few.size, few[-1]))).astype(np.float64)
        return np.asarray((padded[1:] + padded[:-1]) / 2), True
    sample = sample_of(magnitudes)
    descending = sample.descending
    ends = sample.settled(sample.cuts(np.array([descending.size]), bits)[0], ITERATIONS)[1:-1]
    beyond = np.minimum(ends, descending.size - 1)
    return np.asarray((descending[np.maximum(ends, 1) - 1] + descending[beyond]) / 2)[::-1], False


def _cells(magnitudes: NDArray[Any], bounds: NDArray[np.float64]) -> NDArray[Any]:
    """How many bounds lie below each magnitude; of many float32 by a table over their upper 16 bits.

    The table sees magnitudes and bounds as bf16 cuts them off: a bound moves by less than 2**-7 of itself.
    """
    if magnitudes.dtype != np.float32 or magnitudes.size < 8192:
        return np.searchsorted(bounds, magnitudes, side="left")
    edges = (bounds.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.int64)
    first = int(edges[0])
    table = np.searchsorted(edges, np.arange(first, int(edges[-1]) + 2), side="left").astype(np.uint8)
    upper = (magnitudes.view(np.uint32) >> np.uint32(16)).astype(np.int32)
    upper -= np.int32(first)
    np.clip(upper, 0, table.size - 1, out=upper)
    return np.asarray(table[upper])


def fit(values: NDArray[Any], bits: int) -> tuple[NDArray[np.float64], NDArray[Any]]:
    """Levels, ascending, shape (2**(b-1),), and the code of each value, small integers, shape (n,)."""
    levels = level_count(bits)
    magnitudes = np.abs(values)
    bounds, own = _bounds(magnitudes, bits)
    if not bounds.size:
        cell: NDArray[Any] = np.zeros(values.size, np.uint8)
    else:
        cell = np.searchsorted(bounds, magnitudes, side="left") if own else _cells(magnitudes, bounds)
    count = np.bincount(cell, minlength=levels)
    total = np.bincount(cell, weights=magnitudes, minlength=levels)
    mean = np.divide(total, count, out=np.zeros(levels), where=count > 0)
    filled = np.maximum.accumulate(mean)  # an empty cell repeats the level below it
    codes = cell.astype(np.uint8)
    codes |= np.signbit(values).view(np.uint8) << np.uint8(bits - 1)
    return filled, codes


def values_of(data: Buffer, n: int, bits: int, levels: NDArray[Any]) -> NDArray[Any]:
    """The values of n codes; shape (n,), in the levels' dtype.

    Raises:
        WireError: padding that is not zero.
    """
    packed = np.frombuffer(data, dtype=np.uint8, count=(n * bits + 7) // 8)
    if n * bits % 8 and packed[-1] & ((1 << (8 - n * bits % 8)) - 1):
        raise WireError("value stream", "padding of the codes is not zero")
    signed = np.concatenate((levels, -levels))
    return np.asarray(signed[unpack_bits(packed, n, bits)])
