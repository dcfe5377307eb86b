"""Unbiased stochastic quantisers: one norm a block, and a small signed level a coordinate.

A vector is cut into blocks of B coordinates; the last may be shorter. With N = ||v||_p of a block v
and s levels,

    C(v)_j = N * L_j / s,    L_j = floor(t_j) or floor(t_j) + 1,  E L_j = t_j = s * v_j / N

so that E C(v) = v and E||C(v) - v||^2 = (N/s)^2 * sum f_j (1 - f_j), f_j the fractional part of t_j; for s = 1
that is ||v||_1 ||v||_p - ||v||_2^2. |t_j| = s is met exactly, and a block of zeros gives zeros.

| constructor   | p   | s   | source                                             |
|---------------|-----|-----|----------------------------------------------------|
| quant(p, B)   | any | 1   | Quant_p, Mishchenko et al., DIANA (2019)           |
| qsgd(s, B)    | 2   | any | Alistarh et al., QSGD (2017)                       |
| one_bit_qsgd  | 2   | 1   | the same with s = 1: Quant_2                       |
| terngrad      | inf | 1   | Wen et al., TernGrad (2017): Quant_inf             |

**Norms.** N is rounded to the layer's dtype first (and cut to its largest finite value), and the levels are
drawn for the rounded N: no N >= max|v| biases C. With norms = "fp16" N then becomes h * 2**e: h a half
rounded at random to one of its two neighbours, E h * 2**e = N, independently of the levels; e is the layer's,
and brings its largest N into [2**14, 2**15).

**Draws.** They are functions of their key alone (compression/randomness.py), never of a platform: 8 bits a
coordinate (16 beyond 127 levels), and 53 more for the one in 256 (65536) that those leave open. A probability is
met within 2**-61; t itself has two roundings of the layer's dtype. Sums of norms are NumPy's
pairwise ones in float64 over at most CHUNK numbers, then in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from compression.errors import ConfigError, UpdateError
from compression.randomness import uniforms, words

CHUNK = 1 << 15  # coordinates handled at once: the buffers stay in the second-level cache
MAX_LEVELS = 1 << 14  # 2**16 times as much fits an int32
NORMS = ("native", "fp16")
_HALF_TOP = 15  # largest norm of a layer in fp16: below 2**15

# Random bits a coordinate, their dtype, one that holds s * 2**bits and them, and one of just as many bits.
_NARROW = 8, np.dtype("u1"), np.dtype(np.int16), np.dtype(np.int8)
_WIDE = 16, np.dtype("<u2"), np.dtype(np.int32), np.dtype(np.int16)


class _Key(TypedDict):
    seed: int
    client: str
    round_: int


@dataclass(frozen=True, slots=True)
class Quantiser:
    """How coordinates become levels.

    Args:
        p: of the norm: 1, 2 or inf.
        levels: s, in 1 .. 2**14; 1 is ternary.
        block: coordinates that share a norm, >= 1.
        norms: "native": in the layer's dtype; "fp16": 2 bytes, rounded at random.

    Raises:
        ConfigError: all that is wrong.
    """

    p: float
    levels: int = 1
    block: int = 512
    norms: str = "native"

    def __post_init__(self) -> None:
        wrong = []
        if self.p not in (1, 2, math.inf):
            wrong.append(f"p is 1, 2 or inf, got {self.p}")
        if not 1 <= self.levels <= MAX_LEVELS:
            wrong.append(f"levels is in 1 .. {MAX_LEVELS}, got {self.levels}")
        if self.block < 1:
            wrong.append(f"block is at least 1, got {self.block}")
        if self.norms not in NORMS:
            wrong.append(f"norms is one of {', '.join(NORMS)}, got {self.norms!r}")
        if wrong:
            raise ConfigError(wrong)

    def blocks(self, d: int) -> int:
        """Number of blocks, and so of norms, of d coordinates."""
        return -(-d // self.block)

    @property
    def level_dtype(self) -> np.dtype[Any]:
        """int8 up to 127 levels, else int16."""
        return np.dtype(np.int8 if self.levels <= 127 else np.int16)


FINEST_BLOCK, FINEST_BITS = 16, 10


@dataclass(frozen=True, slots=True)
class Ladder:
    """Quantisers that differ in one argument; which is used is chosen later, for each layer.

    Args:
        p: of the norm: 1, 2 or inf.
        levels, block: one of both a tuple of numbers, ascending, or "auto"; the other a number. "auto" levels are
            2**m - 1 for m = 1 .. 10, which fill m + 1 bits each; "auto" blocks are 16, 32, 64, ... up to
            the first that holds the longest layer.
        norms: as in `Quantiser`.

    Raises:
        ConfigError: all that is wrong.
    """

    p: float
    levels: int | tuple[int, ...] | str
    block: int | tuple[int, ...] | str
    norms: str

    def __post_init__(self) -> None:
        if not isinstance(self.levels, int) and not isinstance(self.block, int):
            raise ConfigError("levels and block are both ladders: give one of them as a number")
        problems: list[str] = []
        for levels, block in self._pairs(1):
            try:
                Quantiser(self.p, levels, block, self.norms)
            except ConfigError as error:
                problems += [problem for problem in error.problems if problem not in problems]
        if problems:
            raise ConfigError(problems)

    def _pairs(self, longest: int) -> list[tuple[int, int]]:
        levels, blocks = self.levels, self.block
        if levels == "auto":
            levels = tuple((1 << m) - 1 for m in range(1, FINEST_BITS + 1))
        if blocks == "auto":
            doublings = max(0, (max(1, longest) - 1).bit_length() - (FINEST_BLOCK - 1).bit_length())
            blocks = tuple(FINEST_BLOCK << j for j in range(doublings + 1))
        assert not isinstance(levels, str)
        assert not isinstance(blocks, str)
        many_levels = (levels,) if isinstance(levels, int) else levels
        many_blocks = (blocks,) if isinstance(blocks, int) else blocks[::-1]
        return [(s, b) for s in many_levels for b in many_blocks]

    def rungs(self, longest: int) -> tuple[Quantiser, ...]:
        """The quantisers for layers of at most this many coordinates, the coarsest first.

        >>> [rung.block for rung in Ladder(2.0, 1, "auto", "fp16").rungs(100)]
        [128, 64, 32, 16]
        >>> [rung.levels for rung in Ladder(2.0, (1, 5), 64, "fp16").rungs(100)]
        [1, 5]
        """
        return tuple(Quantiser(self.p, levels, block, self.norms) for levels, block in self._pairs(longest))


def quant(p: float, block: int = 512, norms: str = "native") -> Quantiser:
    """Quant_p of DIANA: ternary."""
    return Quantiser(p, 1, block, norms)


def qsgd(levels: int, block: int = 512, norms: str = "native") -> Quantiser:
    """QSGD: s levels of the 2-norm."""
    return Quantiser(2, levels, block, norms)


def one_bit_qsgd(block: int = 512, norms: str = "native") -> Quantiser:
    """QSGD with one level: Quant_2."""
    return Quantiser(2, 1, block, norms)


def terngrad(block: int = 512, norms: str = "native") -> Quantiser:
    """TernGrad without clipping: Quant_inf."""
    return Quantiser(math.inf, 1, block, norms)


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A quantised vector, as both ends know it.

    Args:
        quantiser: what made it.
        norms: N of each block: in the layer's dtype, or float16 in units of 2**exponent; shape (blocks,).
        exponent: of fp16 norms, else 0.
        levels: L in -s .. s, int8 or int16, shape (d,).
    """

    quantiser: Quantiser
    norms: NDArray[Any]
    exponent: int
    levels: NDArray[Any]

    def norm_values(self) -> NDArray[np.float64]:
        """The norms themselves, shape (blocks,); infinite only where a peer says so."""
        with np.errstate(over="ignore"):
            return np.ldexp(self.norms.astype(np.float64), self.exponent)


def _pieces(d: int, block: int) -> Iterator[tuple[slice, slice, int]]:
    """(coordinates, their blocks, number of rows): some whole blocks, or a part of one, at most CHUNK at once."""
    rows = max(1, CHUNK // block)
    whole = d // block
    if block > CHUNK:
        for at in range(-(-d // block)):
            end = min(d, (at + 1) * block)
            for start in range(at * block, end, CHUNK):
                yield slice(start, min(end, start + CHUNK)), slice(at, at + 1), 1
        return
    for first in range(0, whole, rows):
        last = min(whole, first + rows)
        yield slice(first * block, last * block), slice(first, last), last - first
    if d % block:
        yield slice(whole * block, d), slice(whole, whole + 1), 1


def _powers_below(x: NDArray[np.float64], quantiser: Quantiser) -> NDArray[np.float64]:
    """For each block of float64 a power of two that keeps squares and sums finite; shape (blocks,)."""
    largest = np.zeros(quantiser.blocks(x.size))
    for part, at, rows in _pieces(x.size, quantiser.block):
        np.maximum(largest[at], np.abs(x[part]).reshape(rows, -1).max(axis=1), out=largest[at])
    power: NDArray[np.float64] = np.ldexp(1.0, np.clip(np.frexp(largest)[1], -1000, 1000))
    return power


def block_norms(x: NDArray[Any], quantiser: Quantiser) -> NDArray[Any]:
    """||v||_p of each block, rounded to the dtype of x, at most its largest finite value.

    Args:
        x: float32 or float64, shape (d,).

    Returns:
        shape (blocks,), in the dtype of x; not finite exactly where a coordinate of the block is not.
    """
    found = np.zeros(quantiser.blocks(x.size))
    wide = np.empty(min(CHUNK, x.size), x.dtype if quantiser.p == math.inf else np.float64)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        scaled = x.dtype == np.float64 and quantiser.p != math.inf
        power = _powers_below(x, quantiser) if scaled else np.ones(found.size)
        for part, at, rows in _pieces(x.size, quantiser.block):
            here = wide[: part.stop - part.start].reshape(rows, -1)
            rows_of_x = x[part].reshape(rows, -1)
            if quantiser.p == math.inf:
                np.abs(rows_of_x, out=here)
                found[at] = np.maximum(found[at], here.max(axis=1))
                continue
            np.copyto(here, rows_of_x)
            if scaled:
                here /= power[at, None]
            np.multiply(here, here, out=here) if quantiser.p == 2 else np.abs(here, out=here)
            found[at] += np.add.reduce(here, axis=1)
        if quantiser.p == 2:
            np.sqrt(found, out=found)
        finite = np.isfinite(found)
        found *= power
        limit = float(np.finfo(x.dtype).max)
        np.minimum(found, limit, out=found, where=finite)
        return found.astype(x.dtype)


def _divisors(norms: NDArray[Any]) -> NDArray[Any]:
    return np.where(norms > 0, norms, norms.dtype.type(1))


def _half_exponent(norms: NDArray[Any]) -> int:
    largest = float(norms.max(initial=0))
    return math.frexp(largest)[1] - _HALF_TOP if largest else 0


def _half_neighbours(norms: NDArray[Any], exponent: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float64]]:
    """(the half below or equal, the one above, probability of the latter) for norms in units of 2**exponent."""
    wide = np.ldexp(norms.astype(np.float64), -exponent)
    nearest = wide.astype(np.float16)
    below = np.where(nearest > wide, np.nextafter(nearest, np.float16(0)), nearest)
    above = np.nextafter(below, np.float16(np.inf))
    gap = above.astype(np.float64) - below
    return below, above, (wide - below) / gap


def quantise(
    x: NDArray[Any], quantiser: Quantiser, *, seed: int, client: str = "", round_: int = 0, purpose: str
) -> Quantised:
    """One draw of C(x).

    Args:
        x: finite, float32 or float64, shape (d,).
        quantiser: p, s, block and how norms are written.
        seed, client, round_, purpose: key of the draw (compression/randomness.py).

    Raises:
        UpdateError: x is no flat float32 or float64 array, or not finite; names `purpose` as the layer.

    >>> quantise(np.array([3.0, 0.0, -3.0]), terngrad(), seed=1, purpose="a").levels
    array([ 1,  0, -1], dtype=int8)
    """
    _check(x, purpose)
    norms = block_norms(x, quantiser)
    if not np.isfinite(norms).all():
        raise UpdateError(purpose, int(np.flatnonzero(~np.isfinite(x))[0]), "is not finite")
    key: _Key = {"seed": seed, "client": client, "round_": round_}
    levels = _draw_levels(x, _divisors(norms), quantiser, key, purpose)
    if quantiser.norms == "native":
        return Quantised(quantiser, norms, 0, levels)
    exponent = _half_exponent(norms)
    below, above, share = _half_neighbours(norms, exponent)
    up = uniforms(norms.size, purpose=f"{purpose}/norms", **key) < share
    return Quantised(quantiser, np.where(up, above, below), exponent, levels)


def _lanes(n: int, lane: np.dtype[Any], key: _Key, purpose: str) -> NDArray[Any]:
    drawn = words(-(-n * lane.itemsize // 8), purpose=purpose, **key)
    return drawn.astype("<u8", copy=False).view(lane)[:n]


def _draw_levels(
    x: NDArray[Any], divisors: NDArray[Any], quantiser: Quantiser, key: _Key, purpose: str
) -> NDArray[Any]:
    """floor(t + U), U uniform in [0, 1): t in whole units of 2**-bits, plus a drawn number of units."""
    levels = np.empty(x.size, quantiser.level_dtype)
    bits, lane, wide, low = _NARROW if quantiser.levels <= 127 else _WIDE
    lanes = _lanes(x.size, lane, key, f"{purpose}/levels")
    steps = x.dtype.type(quantiser.levels << bits)
    size = min(CHUNK, x.size)
    scaled, floors = np.empty((2, size), x.dtype)
    units, shifted = np.empty((2, size), wide)
    open_: list[NDArray[np.int64]] = []
    rests: list[NDArray[np.float64]] = []
    with np.errstate(under="ignore"):
        for part, at, rows in _pieces(x.size, quantiser.block):
            n = part.stop - part.start
            t, floor, unit, level = scaled[:n], floors[:n], units[:n], shifted[:n]
            np.divide(x[part].reshape(rows, -1), divisors[at, None], out=t.reshape(rows, -1))
            t *= steps
            np.floor(t, out=floor)
            np.copyto(unit, floor, casting="unsafe")
            np.copyto(level, lanes[part])
            unit += level
            np.right_shift(unit, bits, out=level)
            np.copyto(levels[part], level, casting="unsafe")
            # One unit short of the next level: what t has below a unit decides.
            short = np.flatnonzero(unit.astype(low) == -1)
            open_.append(short + part.start)
            rests.append(t[short].astype(np.float64) - floor[short])
    if open_:
        positions, rest = np.concatenate(open_), np.concatenate(rests)
        levels[positions] += uniforms(positions.size, purpose=f"{purpose}/rest", **key) < rest
    return levels


def _check(x: NDArray[Any], purpose: str) -> None:
    if x.ndim != 1 or x.dtype not in (np.float32, np.float64):
        raise UpdateError(purpose, None, f"expected a flat float32 or float64 array, got {x.dtype} {x.shape}")


def _finite_norms(q: Quantised, dtype: np.dtype[Any]) -> NDArray[np.float64]:
    return np.minimum(q.norm_values(), float(np.finfo(dtype).max))


def restore(q: Quantised, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """What was sent: N * (L/s) in float64, each operation rounded once, then rounded to dtype; shape (d,).

    A norm beyond the dtype counts as its largest finite value; so no value is infinite.
    """
    dtype = np.dtype(dtype)
    norms = _finite_norms(q, dtype)
    values = np.empty(q.levels.size, dtype)
    if q.quantiser.levels == 1:  # N * (+-1) is exact: round N first
        norms = norms.astype(dtype)
    wide = np.empty(min(CHUNK, values.size), norms.dtype)
    for part, at, rows in _pieces(values.size, q.quantiser.block):
        here = wide[: part.stop - part.start]
        np.copyto(here, q.levels[part])
        if q.quantiser.levels > 1:
            here /= q.quantiser.levels
        np.multiply(here.reshape(rows, -1), norms[at, None], out=here.reshape(rows, -1))
        values[part] = here
    return values


def restore_nonzero(q: Quantised, dtype: str | np.dtype[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """(ascending positions of non-zero levels, int64; `restore`'s values there): shapes (n,)."""
    dtype = np.dtype(dtype)
    positions = np.flatnonzero(q.levels != 0).astype(np.int64, copy=False)
    norms = _finite_norms(q, dtype)[positions // q.quantiser.block]
    values = norms * (q.levels[positions].astype(np.float64) / q.quantiser.levels)
    return positions, values.astype(dtype)


def variance(x: NDArray[Any], quantiser: Quantiser) -> float:
    """E||C(x) - x||^2 over the draws, exactly up to roundoff; infinite where float64 cannot hold it.

    Args:
        x: finite, float32 or float64, shape (d,).
    """
    norms = block_norms(x, quantiser)
    divisors = _divisors(norms).astype(np.float64)
    extra = np.zeros(norms.size)  # variance of a norm, in units of its square
    if quantiser.norms == "fp16":
        below, above, share = _half_neighbours(norms, exponent := _half_exponent(norms))
        gap = np.ldexp(above.astype(np.float64) - below, exponent) / divisors
        extra = share * (1 - share) * gap**2
    total = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for part, at, rows in _pieces(x.size, quantiser.block):
            t = np.abs(x[part].reshape(rows, -1).astype(np.float64)) / divisors[at, None] * quantiser.levels
            f = t - np.floor(t)
            f *= 1 - f
            spread = np.add.reduce(f, axis=1) * (1 + extra[at])
            if quantiser.norms == "fp16":
                spread += np.add.reduce(t * t, axis=1) * extra[at]
            total += float(np.add.reduce(spread * (divisors[at] / quantiser.levels) ** 2))
    return total


def omega(quantiser: Quantiser, d: int) -> float:
    """The least omega we know with E||C(x) - x||^2 <= omega ||x||^2 for every x of d coordinates.

    With n = min(block, d) coordinates a block, s levels, and r = n for p = 1, sqrt(n) for p = 2:

    - s = 1: 1/alpha_p(n) - 1, alpha_p = 1/n, 1/sqrt(n), 2/(1 + sqrt(n)) for p = 1, 2, inf (DIANA); attained;
    - p = inf: (sqrt(1 + (n - 1)/s^2) - 1)/2; attained by one coordinate at N, the others at N/(2 s (1 + omega));
    - p = 1, 2, r >= 2 s: r/s - 1; attained by equal coordinates, t = s/r;
    - p = 1, 2, r < 2 s: r^2/(4 s^2); each f (1 - f) is at most 1/4, and N^2 at most r^2 ||v||^2/n.

    Norms in fp16 add a relative 2**-22, and what those far below the layer's largest lose as subnormal halves.
    N's rounding to the layer's dtype is not counted (2**-24 of 1 + omega in float32).
    """
    n = min(quantiser.block, d)
    if n <= 1:
        found = 0.0
    elif quantiser.p == math.inf:
        found = (math.sqrt(1 + (n - 1) / quantiser.levels**2) - 1) / 2
    else:
        root = n if quantiser.p == 1 else math.sqrt(n)
        few = quantiser.levels == 1 or root >= 2 * quantiser.levels
        found = root / quantiser.levels - 1 if few else root**2 / (4 * quantiser.levels**2)
    if quantiser.norms == "fp16" and d:
        found = (1 + found) * (1 + 2.0**-22) - 1 + 2.0**-78 * d * (n if quantiser.p == 1 else 1)
    return found


# ---- powers of two ----------------------------------------------------------------------------

ZERO = -(1 << 15)  # exponent that stands for the value 0
NATURAL_OMEGA, NEAREST_ALPHA = 1 / 8, 8 / 9


@dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Signed powers of two: +-2**e, or 0 where e is ZERO (then not negative).

    Args:
        negative: shape (d,).
        exponents: int16, shape (d,).
    """

    negative: NDArray[np.bool_]
    exponents: NDArray[np.int16]


def exponent_range(dtype: str | np.dtype[Any]) -> tuple[int, int]:
    """Least and greatest e with 2**e > 0 finite in float32 or float64, subnormal numbers included.

    >>> exponent_range("float32"), exponent_range("float64")
    ((-149, 127), (-1074, 1023))
    """
    info = np.finfo(dtype)
    return int(info.minexp) - int(info.nmant), int(info.maxexp) - 1


def _mantissas(x: NDArray[Any]) -> tuple[NDArray[np.int16], NDArray[Any]]:
    """(e, fraction bits f of 52) with |x| = 2**e (1 + f/2**52), for x != 0; shape (d,) each."""
    bits = np.abs(x).astype(np.float64).view(np.uint64)
    exponents = (bits >> np.uint64(52)).astype(np.int16)
    exponents -= 1023
    small = np.flatnonzero(exponents == -1023)  # float64's own subnormals
    if small.size:
        bits[small] = np.ldexp(np.abs(x[small]).astype(np.float64), 64).view(np.uint64)
        exponents[small] = (bits[small] >> np.uint64(52)).astype(np.int16) - (1023 + 64)
    bits &= np.uint64((1 << 52) - 1)
    return exponents, bits


def _powers(x: NDArray[Any], exponents: NDArray[np.int16]) -> Powers:
    np.minimum(exponents, exponent_range(x.dtype)[1], out=exponents)
    exponents[x == 0] = ZERO
    return Powers(x < 0, exponents)


def natural(x: NDArray[Any], *, seed: int, client: str = "", round_: int = 0, purpose: str) -> Powers:
    """Natural compression: each |x_j| = 2**e (1 + f) becomes 2**(e+1) with probability f, else 2**e.

    Unbiased with omega = 1/8, met at f = 1/3 (Horvath et al. 2019). Draws as for levels: 8 bits of f, and
    the other 44 where those leave it open; exact. A value above the dtype's largest power of two becomes that
    power, and is biased.

    Args:
        x: finite, float32 or float64, shape (d,).
        seed, client, round_, purpose: key of the draw (compression/randomness.py).

    Raises:
        UpdateError: x is no flat float32 or float64 array, or not finite; names `purpose` as the layer.
    """
    _check_finite(x, purpose)
    key: _Key = {"seed": seed, "client": client, "round_": round_}
    lanes = _lanes(x.size, _NARROW[1], key, f"{purpose}/natural")
    exponents = np.empty(x.size, np.int16)
    open_: list[NDArray[np.int64]] = []
    rests: list[NDArray[np.float64]] = []
    for start in range(0, x.size, CHUNK):
        part = slice(start, start + CHUNK)
        exponents[part], fractions = _mantissas(x[part])
        unit = (fractions >> np.uint64(44)).astype(np.int16)
        unit += lanes[part]
        exponents[part] += unit >> 8
        short = np.flatnonzero(unit == 255)
        open_.append(short + start)
        rests.append((fractions[short] & np.uint64((1 << 44) - 1)).astype(np.float64) * 2.0**-44)
    if open_:
        positions, rest = np.concatenate(open_), np.concatenate(rests)
        exponents[positions] += uniforms(positions.size, purpose=f"{purpose}/rest", **key) < rest
    return _powers(x, exponents)


def nearest_power(x: NDArray[Any]) -> Powers:
    """The nearest power of two; 1.5 * 2**e goes up. Contractive with alpha = 8/9, met at 1.5 * 2**e.

    A value above the dtype's largest power of two becomes that power: up to there alpha is only 3/4.

    Raises:
        UpdateError: x is no flat float32 or float64 array, or not finite.
    """
    _check_finite(x, "nearest power")
    exponents = np.empty(x.size, np.int16)
    for start in range(0, x.size, CHUNK):
        part = slice(start, start + CHUNK)
        exponents[part], fractions = _mantissas(x[part])
        exponents[part] += (fractions >> np.uint64(51)).astype(np.int16)
    return _powers(x, exponents)


def restore_powers(powers: Powers, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """The values in float32 or float64, exact within `exponent_range`, cut to it beyond; shape (d,)."""
    least, most = exponent_range(dtype)
    values = np.empty(powers.exponents.size, dtype)
    for start in range(0, values.size, CHUNK):
        part = slice(start, start + CHUNK)
        e = np.clip(powers.exponents[part], least, most).astype(np.int64)
        bits = (e + 1023) << 52
        small = np.flatnonzero(e < -1022)
        bits[small] = 1 << (e[small] + 1074)
        bits[powers.exponents[part] == ZERO] = 0
        bits |= powers.negative[part].astype(np.int64) << 63
        values[part] = bits.view(np.float64)
    return values


def natural_variance(x: NDArray[Any]) -> float:
    """E||C(x) - x||^2 of natural compression below the largest power: sum 4**e f (1 - f); x has shape (d,)."""
    total = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, x.size, CHUNK):
            part = x[start : start + CHUNK]
            exponents, fractions = _mantissas(part[part != 0])
            f = fractions.astype(np.float64) * 2.0**-52
            total += float(np.add.reduce(np.ldexp(f * (1 - f), 2 * exponents.astype(np.int32))))
    return total


def _check_finite(x: NDArray[Any], purpose: str) -> None:
    _check(x, purpose)
    finite = np.isfinite(x)
    if not finite.all():
        raise UpdateError(purpose, int(np.flatnonzero(~finite)[0]), "is not finite")
