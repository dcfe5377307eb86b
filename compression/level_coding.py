"""Level codings: how levels and norms of a quantiser, and exponents of powers of two, become bytes.

Levels L in -s .. s, shape (d,); the mode says which stream follows. d = 0 has no stream.

| mode | name      | stream                                                                      |
|------|-----------|-----------------------------------------------------------------------------|
| 0    | sparse    | subset of the K positions with L != 0; K signs; for s > 1 the number stream  |
|      |           | of the K numbers abs(L) - 1                                                 |
| 1    | base3     | s = 1: 5 digits a byte, d_0 + 3 d_1 + ... + 81 d_4, digit L mod 3           |
| 2    | packed    | L + s in bits of 2 s, most significant bit first                            |
| 3    | base3zstd | varint length, then base3 as one zstd frame that states its content size    |
| 4    | nested    | 1 < s <= 16: as sparse, but instead of the numbers, for j = 1, 2, ... s - 1 |
|      |           | while there are any: of those with abs(L) >= j, the subset with abs(L) > j  |

Exponents (`Powers`): subset of the n positions whose value is not zero; n signs; and if n > 0 one of

| mode | name     | stream                                                                        |
|------|----------|-------------------------------------------------------------------------------|
| 0    | distance | i16 largest exponent e; number stream of the n numbers e - e_j                |
| 1    | ranked   | i16 e; varint m; the m distances in use, most frequent first, as varints;     |
|      |          | number stream of the n ranks                                                  |
| 2    | zstd     | i16 e; varint length; the n numbers e - e_j < 256, a byte each, as a zstd frame |

A subset of k out of n positions: varint k, and the rice stream (compression/indices.py) of those positions,
or of the n - k others where 2 k > n.
Signs: one bit each, 1 is negative. A number stream of n numbers in 0 .. m is the rice stream
whose gaps they are. All bits are packed most significant first, and zero-padded to
a byte; varints are as in compression/wire.py. Every stream says itself where it ends.

A number stream is no longer than with parameter r = bits of m (no quotient above zero): its decoder looks no
further. So decoding never needs more than some d * bits of s bytes, whatever arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.errors import WireError
from compression.frames import framed, read_framed, read_varint, varint, varint_bytes
from compression.indices import (
    Buffer,
    decode_rice,
    encode_rice,
    pack_bits,
    rice_bytes_bound,
    rice_parameter,
    unpack_bits,
)
from compression.quantise import ZERO, Powers, Quantised, Quantiser

SPARSE, BASE3, PACKED, BASE3_ZSTD, NESTED = 0, 1, 2, 3, 4
NESTED_MOST = 16  # levels: each costs its reader a pass
DISTANCE, RANKED, ZSTD = 0, 1, 2
_WHAT = "level stream"
_PLACES = np.array([1, 3, 9, 27, 81], np.uint8)
_DIGITS = ((np.arange(243)[:, None] // _PLACES) % 3).astype(np.uint8)  # of each byte
_TRITS = np.where(_DIGITS == 2, -1, _DIGITS).astype(np.int8)


# ---- parts of streams -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Subset:
    """Some positions of range(n), and what their stream takes.

    Args:
        chosen: ascending, shape (k,).
        listed: those of the stream.
        n: size of the whole.
        r: parameter of the rice stream.
        size: bytes of the subset.
    """

    chosen: NDArray[np.int64]
    listed: NDArray[np.int64]
    n: int
    r: int
    size: int

    @classmethod
    def of(cls, mask: NDArray[np.bool_]) -> _Subset:
        chosen = np.flatnonzero(mask).astype(np.int64, copy=False)
        listed = chosen
        if 2 * chosen.size > mask.size:
            listed = np.flatnonzero(~mask).astype(np.int64, copy=False)
        r, size = rice_parameter(listed)
        return cls(chosen, listed, mask.size, r, size + varint_bytes(chosen.size))

    def write(self) -> bytes:
        return varint(self.chosen.size) + encode_rice(self.listed, self.n, self.r)


def _read_subset(data: memoryview, n: int) -> tuple[NDArray[np.int64], int]:
    """(the positions chosen, ascending; bytes read)."""
    k, at = read_varint(data, _WHAT, 0, n)
    listed, used = decode_rice(data[at:], min(k, n - k), n)
    if 2 * k > n:
        others = np.ones(n, np.bool_)
        others[listed] = False
        listed = np.flatnonzero(others).astype(np.int64, copy=False)
    return listed, at + used


def _positions_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions whose gaps are these numbers."""
    positions = numbers + 1
    np.cumsum(positions, out=positions)
    positions -= 1
    return positions


def _number_parameter(counts: NDArray[np.int64]) -> tuple[int, int]:
    """(r, exact bytes) of the number stream of counts[v] numbers v, the smallest r of least size; (0, 0) of none."""
    n = int(counts.sum())
    if not n:
        return 0, 0
    values = np.arange(counts.size)
    sizes = []
    for r in range((counts.size - 1).bit_length() + 1):
        quotients = int((counts * (values >> r)).sum())
        sizes.append((1 + (n * r + 7) // 8 + (n + quotients + 7) // 8, r))
    size, r = min(sizes)
    return r, size


def _write_numbers(numbers: NDArray[np.int64], most: int, r: int) -> bytes:
    return encode_rice(_positions_of(numbers), numbers.size * (most + 1), r)


def _number_bytes_bound(n: int, most: int) -> int:
    return 1 + (n * most.bit_length() + 7) // 8 + (n + 7) // 8


def _read_numbers(data: memoryview, n: int, most: int) -> tuple[NDArray[np.int64], int]:
    positions, used = decode_rice(data[: _number_bytes_bound(n, most)], n, n * (most + 1))
    numbers = np.diff(positions, prepend=-1) - 1
    if n and int(numbers.max()) > most:
        raise WireError(_WHAT, f"number {int(numbers.max())}, at most {most} is possible")
    return numbers, used


def _read_signs(data: memoryview, n: int) -> tuple[NDArray[np.bool_], int]:
    used = (n + 7) // 8
    if len(data) < used:
        raise WireError(_WHAT, f"{len(data)} bytes left, {n} signs need {used}")
    if n % 8 and data[used - 1] & ((1 << (8 - n % 8)) - 1):
        raise WireError(_WHAT, "padding of the signs is not zero")
    return np.unpackbits(np.frombuffer(data, np.uint8, count=used), count=n).view(np.bool_), used


# ---- levels -----------------------------------------------------------------------------------


def levels_bytes_bound(d: int, s: int) -> int:
    """The most that `encode_levels` can take, in bytes.

    >>> levels_bytes_bound(1000, 1), levels_bytes_bound(1000, 4)
    (200, 500)
    """
    return (d + 4) // 5 if s == 1 else (d * (2 * s).bit_length() + 7) // 8


@dataclass(frozen=True, slots=True, eq=False)
class _Sparse:
    """What the sparse and the nested stream of levels are made of.

    Args:
        support: the levels that are not zero.
        kept: those levels, shape (k,).
        nested: for j = 1, 2, ...: which of the ones of at least j are larger.
        r, numbers_size: parameter and bytes of the stream of abs(L) - 1, for s > 1.
        s: the largest level.
    """

    support: _Subset
    kept: NDArray[Any]
    nested: list[_Subset]
    r: int
    numbers_size: int
    s: int

    @classmethod
    def of(cls, levels: NDArray[Any], s: int) -> _Sparse:
        support = _Subset.of(levels != 0)
        kept = levels[support.chosen]
        if s == 1:
            return cls(support, kept, [], 0, 0, s)
        sizes = np.abs(kept)
        r, numbers_size = _number_parameter(np.bincount(sizes)[1:])
        nested: list[_Subset] = []
        while sizes.size and len(nested) < s - 1 < NESTED_MOST:
            nested.append(_Subset.of(sizes > len(nested) + 1))
            sizes = sizes[nested[-1].chosen]
        return cls(support, kept, nested, r, numbers_size, s)

    def smallest(self) -> tuple[int, int]:
        """(bytes, mode)."""
        k = self.kept.size
        head = self.support.size + (k + 7) // 8
        found = head + self.numbers_size, SPARSE
        if not self.nested:
            return found
        return min(found, (head + sum(subset.size for subset in self.nested), NESTED))

    def write(self, mode: int) -> bytes:
        rest = []
        if mode == NESTED:
            rest = [subset.write() for subset in self.nested]
        elif self.s > 1:
            rest = [_write_numbers(np.abs(self.kept).astype(np.int64) - 1, self.s - 1, self.r)]
        return b"".join((self.support.write(), np.packbits(self.kept < 0).tobytes(), *rest))


def levels_bytes(levels: NDArray[Any], s: int) -> int:
    """Exact size of `encode_levels(levels, s)`, in bytes; nothing is built."""
    d = levels.size
    return min(_Sparse.of(levels, s).smallest()[0], levels_bytes_bound(d, s)) if d else 0


def encode_levels(levels: NDArray[Any], s: int, *, portable: bool = True) -> tuple[int, bytes]:
    """(mode, stream) of the smallest stream.

    Args:
        levels: integers in -s .. s, shape (d,).
        s: at least 1.
        portable: every peer can read it; else zstd may be used where it is installed and makes less.
    """
    d = levels.size
    if not d:
        return SPARSE, b""
    fixed = levels_bytes_bound(d, s)
    sparse = _Sparse.of(levels, s)
    least, mode = sparse.smallest()
    if s == 1 and not portable and 10 * sparse.kept.size > d:  # zstd makes more of few
        packed = framed(_encode_base3(levels))
        if packed is not None and len(packed) < min(least, fixed):
            return BASE3_ZSTD, packed
    if least <= fixed:
        return mode, sparse.write(mode)
    if s == 1:
        return BASE3, _encode_base3(levels)
    return PACKED, pack_bits(levels.astype(np.int64) + s, (2 * s).bit_length())


def decode_levels(mode: int, data: Buffer, d: int, s: int) -> tuple[NDArray[Any], int]:
    """The levels at the start of `data`.

    Args:
        mode: how they were written.
        data: bytes from a peer; more may follow the stream.
        d: size of the layer.
        s: the largest level, at least 1.

    Returns:
        (levels, int8 up to s = 127, else int16, shape (d,); bytes read).

    Raises:
        WireError: no legal stream of this mode, or it needs zstandard and that is not installed.
    """
    view = memoryview(data).cast("B")
    kind = np.dtype(np.int8 if s <= 127 else np.int16)
    ternary = s == 1
    legal = {SPARSE: True, BASE3: ternary, PACKED: True, BASE3_ZSTD: ternary, NESTED: 1 < s <= NESTED_MOST}
    if not legal.get(mode, False):
        raise WireError(_WHAT, f"unknown mode {mode} for {s} levels")
    if not d:
        return np.empty(0, kind), 0
    if mode in (SPARSE, NESTED):
        return _decode_sparse(view, d, s, kind, nested=mode == NESTED)
    if mode == PACKED:
        return _decode_packed(view, d, s, kind)
    size = levels_bytes_bound(d, 1)
    if mode == BASE3_ZSTD:
        plain, used = read_framed(view, size, _WHAT)
        return _decode_base3(memoryview(plain), d), used
    return _decode_base3(view, d), size


def _decode_sparse(view: memoryview, d: int, s: int, kind: np.dtype[Any], *, nested: bool) -> tuple[NDArray[Any], int]:
    positions, at = _read_subset(view, d)
    k = positions.size
    negative, used = _read_signs(view[at:], k)
    at += used
    found = np.ones(k, kind)
    if nested:
        inside = np.arange(k)
        for _ in range(1, s):
            if not inside.size:
                break
            beyond, used = _read_subset(view[at:], inside.size)
            at += used
            inside = inside[beyond]
            found[inside] += 1
    elif s > 1:
        numbers, used = _read_numbers(view[at:], k, s - 1)
        at += used
        found += numbers.astype(kind)
    levels = np.zeros(d, kind)
    np.negative(found, out=found, where=negative)
    levels[positions] = found
    return levels, at


def _encode_base3(levels: NDArray[Any]) -> bytes:
    whole = -(-levels.size // 5)
    digits = np.zeros(5 * whole, np.uint8)
    np.copyto(digits[: levels.size], levels, casting="unsafe")
    digits[digits == 255] = 2  # -1
    columns = digits.reshape(whole, 5)
    packed = columns[:, 4] * np.uint8(3)
    for place in (3, 2, 1):
        packed += columns[:, place]
        packed *= np.uint8(3)
    packed += columns[:, 0]
    return packed.tobytes()


def _decode_base3(view: memoryview, d: int) -> NDArray[np.int8]:
    size = (d + 4) // 5
    if len(view) < size:
        raise WireError(_WHAT, f"{len(view)} bytes left, {d} levels need {size}")
    packed = np.frombuffer(view, np.uint8, count=size)
    if int(packed.max()) >= 243:
        raise WireError(_WHAT, f"byte {int(packed.max())} is no five digits of base 3")
    levels: NDArray[np.int8] = _TRITS[packed].reshape(-1)
    if levels[d:].any():
        raise WireError(_WHAT, "padding of the digits is not zero")
    return levels[:d]


def _decode_packed(view: memoryview, d: int, s: int, kind: np.dtype[Any]) -> tuple[NDArray[Any], int]:
    bits = (2 * s).bit_length()
    size = (d * bits + 7) // 8
    if len(view) < size:
        raise WireError(_WHAT, f"{len(view)} bytes left, {d} levels need {size}")
    if d * bits % 8 and view[size - 1] & ((1 << (8 - d * bits % 8)) - 1):
        raise WireError(_WHAT, "padding of the levels is not zero")
    codes = unpack_bits(np.frombuffer(view, np.uint8, count=size), d, bits)
    if int(codes.max()) > 2 * s:
        raise WireError(_WHAT, f"level {int(codes.max()) - s}, at most {s} is possible")
    codes -= s
    return codes.astype(kind), size


# ---- exponents --------------------------------------------------------------------------------


def exponents_bytes_bound(d: int, least: int, most: int) -> int:
    """More than `encode_exponents` can take for exponents in least .. most, in bytes.

    >>> exponents_bytes_bound(1000, -149, 127)
    1506
    """
    if not d:
        return 0
    return varint_bytes(d) + rice_bytes_bound(d // 2, d) + (d + 7) // 8 + 2 + _number_bytes_bound(d, most - least)


def encode_exponents(powers: Powers, *, portable: bool = True) -> tuple[int, bytes]:
    """(mode, stream) of the smallest stream.

    Args:
        powers: signs and exponents, shape (d,).
        portable: every peer can read it; else zstd may be used where it is installed and makes less.
    """
    exponents = powers.exponents
    d = exponents.size
    if not d:
        return DISTANCE, b""
    used = _Subset.of(exponents != ZERO)
    n = used.chosen.size
    head = used.write()
    if not n:
        return DISTANCE, head
    kept, negative = (exponents, powers.negative) if n == d else (exponents[used.chosen], powers.negative[used.chosen])
    largest = int(kept.max())
    head += np.packbits(negative).tobytes() + largest.to_bytes(2, "little", signed=True)
    distances = largest - kept.astype(np.int64)
    counts = np.bincount(distances)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ranks = np.zeros(counts.size, np.int64)
    ranks[order] = np.arange(order.size)
    table = varint(order.size) + b"".join(map(varint, order.tolist()))
    plain_r, plain_size = _number_parameter(counts)
    ranked_r, ranked_size = _number_parameter(counts[order])
    ranked_size += len(table)
    if not portable and counts.size <= 256:
        packed = framed(distances.astype(np.uint8).tobytes())
        if packed is not None and len(packed) < min(plain_size, ranked_size):
            return ZSTD, head + packed
    if plain_size <= ranked_size:
        return DISTANCE, head + _write_numbers(distances, counts.size - 1, plain_r)
    return RANKED, head + table + _write_numbers(ranks[distances], order.size - 1, ranked_r)


def decode_exponents(mode: int, data: Buffer, d: int, least: int, most: int) -> tuple[Powers, int]:
    """The signs and exponents at the start of `data`.

    Args:
        mode: how they were written.
        data: bytes from a peer; more may follow the stream.
        d: size of the layer.
        least, most: exponents that the layer's dtype can hold (`exponent_range`).

    Returns:
        (powers, shape (d,); bytes read).

    Raises:
        WireError: no legal stream of this mode, or it needs zstandard and that is not installed.
    """
    view = memoryview(data).cast("B")
    if mode not in (DISTANCE, RANKED, ZSTD):
        raise WireError(_WHAT, f"unknown mode {mode} of exponents")
    powers = Powers(np.zeros(d, np.bool_), np.full(d, ZERO, np.int16))
    if not d:
        return powers, 0
    kept, at = _read_subset(view, d)
    n = kept.size
    if not n:
        return powers, at
    negative, used = _read_signs(view[at:], n)
    at += used
    if len(view) < at + 2:
        raise WireError(_WHAT, "ends before its largest exponent")
    largest = int.from_bytes(view[at : at + 2], "little", signed=True)
    at += 2
    if not least <= largest <= most:
        raise WireError(_WHAT, f"exponent {largest} is outside {least} to {most}")
    distances, used = _read_distances(mode, view[at:], n, largest - least)
    powers.negative[kept] = negative
    powers.exponents[kept] = largest - distances
    return powers, at + used


def _read_distances(mode: int, view: memoryview, n: int, furthest: int) -> tuple[NDArray[np.int64], int]:
    if mode == DISTANCE:
        return _read_numbers(view, n, furthest)
    if mode == ZSTD:
        plain, used = read_framed(view, n, _WHAT)
        distances = np.frombuffer(plain, np.uint8).astype(np.int64)
        if int(distances.max()) > furthest:
            raise WireError(_WHAT, f"an exponent is {int(distances.max())} below the largest, at most {furthest} is")
        return distances, used
    count, at = read_varint(view, _WHAT, 0, min(n, furthest + 1))
    if not count:
        raise WireError(_WHAT, "no exponent is in use")
    table = []
    for _ in range(count):
        distance, used = read_varint(view[at:], _WHAT, 0, furthest)
        table.append(distance)
        at += used
    if len(set(table)) < count:
        raise WireError(_WHAT, "an exponent is listed twice")
    ranks, used = _read_numbers(view[at:], n, count - 1)
    return np.array(table, np.int64)[ranks], at + used


# ---- norms ------------------------------------------------------------------------------------


def norms_bytes(blocks: int, quantiser: Quantiser, dtype: str | np.dtype[Any]) -> int:
    """Exact bytes of the norms of so many blocks; 0 for none."""
    if quantiser.norms == "fp16":
        return 2 + 2 * blocks if blocks else 0
    return blocks * np.dtype(dtype).itemsize


def encode_norms(q: Quantised) -> bytes:
    """Norms in the layer's dtype; or, in fp16, i16 exponent and the halves. Little-endian; no block, no bytes."""
    head = b""
    if q.quantiser.norms == "fp16" and q.norms.size:
        head = q.exponent.to_bytes(2, "little", signed=True)
    return head + q.norms.astype(q.norms.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_norms(
    data: Buffer, blocks: int, quantiser: Quantiser, dtype: str | np.dtype[Any]
) -> tuple[NDArray[Any], int, int]:
    """(norms, exponent, bytes read) at the start of `data`, for a layer of this dtype.

    Raises:
        WireError: too short, or a norm that is negative or not finite.
    """
    size = norms_bytes(blocks, quantiser, dtype)
    if len(data) < size:
        raise WireError("norms", f"{len(data)} bytes left, {blocks} norms need {size}")
    half = quantiser.norms == "fp16"
    kind = np.dtype(np.float16 if half else dtype)
    head = 2 if half and blocks else 0
    exponent = int.from_bytes(data[:head], "little", signed=True)
    norms = np.frombuffer(data, kind.newbyteorder("<"), count=blocks, offset=head).astype(kind)
    if not np.isfinite(norms).all() or np.signbit(norms).any():
        raise WireError("norms", "a norm is negative or not finite")
    return norms, exponent, size
