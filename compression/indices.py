"""Index codings: how the support of an update becomes bytes.

| id | name   | stream                                                          |
|----|--------|-----------------------------------------------------------------|
| 0  | dense  | none: all d values follow                                       |
| 1  | rice   | u8 r, remainders, quotients (below)                             |
| 2  | seed   | 4 bytes: the seed that the support is drawn from (below)        |
| 3  | gaps   | one zstd frame of the gaps, then what does not fit (below)      |
| 15 | absent | none, and no values: this layer is not in this part             |

**rice.** For ascending indices i_0 < i_1 < ... < i_(K-1) the gaps are g_0 = i_0 and
g_j = i_j - i_(j-1) - 1. With parameter r:

- one byte r;
- the K remainders g_j mod 2**r, r bits each, most significant bit first, zero-padded to a byte;
- the K quotients g_j div 2**r in unary (that many zeros, then a one), zero-padded to a byte.

K = 0 has no stream at all. No length is stored: the second part has ceil(K r / 8) bytes, and
the third ends in the byte of the K-th one, which lies within ceil((K + (d - K) div 2**r) / 8)
bytes. The size is an exact function of the support and of r; the encoder takes the smallest r
of least size. (Rice 1971; split streams as measured in our codec study.)

**gaps.** Real supports repeat themselves, which rice cannot see. The gaps as 16-bit numbers, those of
65535 and more as 65535; all low bytes, then all high bytes, as one zstd frame after its length as a varint; then,
for each gap of 65535 or more, g - 65535 as a varint. Only where it is smaller than rice and both ends have zstandard.

**seed.** A support that looked at no value (RandK) travels as the number it was drawn from. With
seed s, the support is {P(0), ..., P(K-1)} in ascending order, P a permutation of range(d). All
arithmetic is on unsigned 64-bit numbers that wrap; G = 0x9E3779B97F4A7C15;
mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
(SplitMix64).

- d <= 4096: P lists the positions x in the order of mix(mix(s) + (x + 1) * G), ties by position;
- d > 4096: P walks the cycles of a Feistel network E on the b bits of d - 1: P(x) is the first of
  E(x), E(E(x)), ... below d. Its keys are key_i = mix(s + (i + 1) * G). E splits x into its upper
  b // 2 bits u and the rest l; in rounds i = 0 to 7 it replaces u by u xor (the upper 32 bits of
  mix(l + key_i), cut to as many bits as u has), then swaps u and l; after an even number of rounds
  both have their old widths, and E(x) joins them.

K = 0 has no stream. Cost: O(K) for large d. A Feistel network on few bits is no fair draw, hence
the sorting of small d.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compression.errors import WireError
from compression.frames import framed, read_framed, read_varint, varint

DENSE, RICE, SEED, GAPS, ABSENT = 0, 1, 2, 3, 15
LONG_GAP = 0xFFFF

Buffer = bytes | bytearray | memoryview


def _gaps(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    gaps = np.empty(indices.size, dtype=np.int64)
    gaps[:1] = indices[:1]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:])
    gaps[1:] -= 1
    return gaps


def _stream_bytes(k: int, quotients: int, r: int) -> int:
    return 1 + (k * r + 7) // 8 + (k + quotients + 7) // 8


def _parameter(gaps: NDArray[np.int64]) -> tuple[int, int]:
    """(r, bytes of the stream) for the smallest r of least size.

    sum(g >> r) falls with r by ever smaller steps, so the unpadded size in bits is convex in r.
    Padding adds less than 16 bits: walking both ways from the bottom until the bits exceed
    it by 16 meets every r of least size.
    """
    k = gaps.size
    if k <= 64:
        shifts = np.arange(int(gaps.max()).bit_length() + 1)
        sizes = 1 + (k * shifts + 7) // 8 + ((gaps[:, None] >> shifts).sum(axis=0) + (k + 7)) // 8
        r = int(np.argmin(sizes))
        return r, int(sizes[r])
    total = int(gaps.sum())
    at = max(0, (total * 89 // (k * 128) + 1).bit_length() - 1)  # mean gap * ln 2, rounded down to a power of two

    def quotients(r: int) -> int:
        return int((gaps >> r).sum()) if r else total

    found = {at: quotients(at)}

    def bits(r: int) -> int:
        if r not in found:
            found[r] = quotients(r)
        return k * r + found[r]

    while bits(at + 1) < bits(at):
        at += 1
    while at and bits(at - 1) <= bits(at):
        at -= 1
    low = high = at
    while low and bits(low - 1) < bits(at) + 16:
        low -= 1
    while bits(high + 1) < bits(at) + 16 and high < 62:
        high += 1
    return min(((r, _stream_bytes(k, found[r], r)) for r in range(low, high + 1)), key=lambda pair: (pair[1], pair[0]))


def rice_parameter(indices: NDArray[np.int64]) -> tuple[int, int]:
    """(r, exact bytes) of the rice stream of ascending positions, shape (K,); nothing is built."""
    return _parameter(_gaps(indices)) if indices.size else (0, 0)


def rice_bytes(indices: NDArray[np.int64], d: int) -> int:
    """Exact size of the rice stream of this support, in bytes; nothing is built.

    Args:
        indices: ascending positions in range(d), int64, shape (K,).
        d: size of the layer; the stream does not depend on it, its decoder's bounds do.
    """
    return _parameter(_gaps(indices))[1] if indices.size and d else 0


def rice_bytes_bound(k: int, d: int) -> int:
    """The most that the rice stream of any k positions in range(d) can take, in bytes.

    >>> rice_bytes_bound(1, 1000)
    3
    """
    if k == 0:
        return 0
    return min(_stream_bytes(k, (d - k) >> r, r) for r in range(d.bit_length() + 1))


def pack_bits(numbers: NDArray[np.int64], r: int) -> bytes:
    """The low r bits of each number, most significant first; eight numbers fill r bytes."""
    if numbers.size <= 1024:  # few calls matter more than few operations
        bits = (numbers[:, None] >> np.arange(r - 1, -1, -1)) & 1
        return np.packbits(bits.astype(np.bool_).reshape(-1)).tobytes()
    groups = -(-numbers.size // 8)
    kind = np.uint16 if r <= 9 else np.uint32 if r <= 25 else np.uint64  # holds r + 7 bits
    padded = np.zeros((groups, 8), dtype=kind)
    np.bitwise_and(numbers, (1 << r) - 1, out=padded.reshape(-1)[: numbers.size], casting="unsafe")
    columns = np.ascontiguousarray(padded.T)
    packed = np.zeros((r, groups), dtype=np.uint8)
    for column in range(8):
        end = (column + 1) * r
        for byte in range(column * r // 8, (end + 7) // 8):
            shift = 8 * (byte + 1) - end
            part = columns[column] << kind(shift) if shift > 0 else columns[column] >> kind(-shift)
            packed[byte] |= part.astype(np.uint8)
    return packed.T.tobytes()[: (numbers.size * r + 7) // 8]


def unpack_bits(data: NDArray[np.uint8], k: int, r: int) -> NDArray[np.int64]:
    """The first k numbers of r bits each in packed bytes; shape (k,)."""
    groups = -(-k // 8)
    padded = np.zeros(groups * r, dtype=np.uint8)
    padded[: data.size] = data
    packed = padded.reshape(groups, r)
    numbers = np.zeros((groups, 8), dtype=np.int64)
    mask = np.int64((1 << r) - 1)
    for column in range(8):
        end = (column + 1) * r
        for byte in range(column * r // 8, (end + 7) // 8):
            shift = 8 * (byte + 1) - end
            part = packed[:, byte].astype(np.int64)
            numbers[:, column] |= part >> shift if shift > 0 else part << -shift
        numbers[:, column] &= mask
    return numbers.reshape(-1)[:k]


def encode_rice(indices: NDArray[np.int64], d: int, r: int | None = None) -> bytes:
    """The rice stream of this support; ascending int64 positions in range(d), shape (K,); r where it is known."""
    k = indices.size
    if k == 0:
        return b""
    gaps = _gaps(indices)
    if r is None:
        r, _ = _parameter(gaps)
    ends = gaps >> r
    ends += 1
    np.cumsum(ends, out=ends)
    ones = np.zeros(int(ends[-1]), dtype=np.bool_)
    ends -= 1
    ones[ends] = True
    return bytes((r,)) + (pack_bits(gaps, r) if r else b"") + np.packbits(ones).tobytes()


def decode_rice(data: Buffer, k: int, d: int) -> tuple[NDArray[np.int64], int]:
    """The support at the start of `data` and the number of bytes it took.

    Args:
        data: bytes from a peer; more may follow the stream.
        k: number of indices, already known to be in 0 .. d.
        d: size of the layer.

    Returns:
        (ascending unique int64 positions in range(d), shape (k,); bytes read).

    Raises:
        WireError: too short, an index beyond d, or padding that is not zero.
    """
    if k == 0:
        return np.empty(0, dtype=np.int64), 0
    if not 0 < k <= d:
        raise WireError("K", f"{k} indices for a layer of {d} elements")
    if len(data) < 1:
        raise WireError("index stream", "ends before its parameter")
    r = data[0]
    if r > d.bit_length():
        raise WireError("index stream", f"parameter {r} for a layer of {d} elements")
    middle = 1 + (k * r + 7) // 8
    if len(data) < middle + (k + 7) // 8:
        raise WireError("index stream", f"{len(data)} bytes left, {k} indices need more")
    if k * r % 8 and data[middle - 1] & ((1 << (8 - k * r % 8)) - 1):
        raise WireError("index stream", "padding of the remainders is not zero")
    longest = (k + ((d - k) >> r) + 7) // 8
    window = np.frombuffer(data, dtype=np.uint8, offset=middle, count=min(longest, len(data) - middle))
    ones = np.flatnonzero(np.unpackbits(window).view(np.bool_))
    if ones.size < k:
        raise WireError("index stream", f"{ones.size} of {k} quotients end within {window.size} bytes")
    ends = ones[:k].astype(np.int64)
    last = int(ends[-1])
    if window[last // 8] & ((1 << (7 - last % 8)) - 1):
        raise WireError("index stream", "padding of the quotients is not zero")
    gaps = _gaps(ends)
    # The sum of quotients is at most (d - k) >> r by the window, up to its last byte: no shift can overflow.
    gaps <<= r
    if r:
        gaps |= unpack_bits(np.frombuffer(data, dtype=np.uint8, offset=1, count=middle - 1), k, r)
    gaps += 1
    np.cumsum(gaps, out=gaps)
    gaps -= 1
    if int(gaps[-1]) >= d:
        raise WireError("index stream", f"index {int(gaps[-1])} in a layer of {d} elements")
    return gaps, middle + last // 8 + 1


def encode_gaps(indices: NDArray[np.int64]) -> bytes | None:
    """The gaps stream of ascending positions, shape (K,), K > 0; None where zstandard is not installed."""
    gaps = _gaps(indices)
    narrow = np.minimum(gaps, LONG_GAP).astype("<u2")
    frame = framed(narrow.view(np.uint8).reshape(-1, 2).T.tobytes())
    if frame is None:
        return None
    return frame + b"".join(map(varint, (gaps[narrow == LONG_GAP] - LONG_GAP).tolist()))


def decode_gaps(data: memoryview, k: int, d: int) -> tuple[NDArray[np.int64], int]:
    """The support at the start of `data` and the number of bytes it took; as decode_rice.

    Raises:
        WireError: too short, an index beyond d, no frame of 2 k bytes, or zstandard is not installed.
    """
    if not 0 < k <= d:
        raise WireError("K", f"{k} indices for a layer of {d} elements")
    plain, at = read_framed(data, 2 * k, "index stream")
    planes = np.frombuffer(plain, np.uint8).astype(np.int64).reshape(2, k)
    gaps = planes[0] | planes[1] << 8
    room = d - k - int(gaps.sum())
    for place in np.flatnonzero(gaps == LONG_GAP).tolist() if room >= 0 else ():
        more, used = read_varint(data[at:], "index stream", 0, max(0, room))
        at += used
        room -= more
        gaps[place] += more
    if room < 0:
        raise WireError("index stream", f"the last index is {-room} beyond a layer of {d} elements")
    gaps += 1
    np.cumsum(gaps, out=gaps)
    gaps -= 1
    return gaps, at


SEED_BYTES = 4
_GOLDEN, _MIX_1, _MIX_2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FEISTEL_ROUNDS, _SORTED_BELOW = 8, 4096


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def seeded_support(seed: int, k: int, d: int) -> NDArray[np.int64]:
    """The support that a seed stands for: k distinct positions of range(d), ascending, int64, shape (k,).

    Args:
        seed: in [0, 2**32).
        k: number of positions, in 0 .. d.
        d: size of the layer.

    >>> seeded_support(1, 3, 10).tolist()
    [4, 7, 8]
    """
    if d <= _SORTED_BELOW:
        order = np.argsort(
            _mix(_mix(np.array([seed], np.uint64)) + np.arange(1, d + 1, dtype=np.uint64) * _GOLDEN), kind="stable"
        )
        return np.sort(order[:k].astype(np.int64))
    bits = (d - 1).bit_length()
    keys = _mix(np.uint64(seed) + np.arange(1, _FEISTEL_ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    widths = (bits // 2, bits - bits // 2)

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        upper_bits, lower_bits = widths
        upper, lower = x >> np.uint64(lower_bits), x & np.uint64((1 << lower_bits) - 1)
        for key in keys:
            hashed = _mix(lower + key) >> np.uint64(32)
            upper ^= hashed & np.uint64((1 << upper_bits) - 1)
            upper, lower = lower, upper
            upper_bits, lower_bits = lower_bits, upper_bits
        return (upper << np.uint64(lower_bits)) | lower

    drawn = network(np.arange(k, dtype=np.uint64))
    while (outside := np.flatnonzero(drawn >= np.uint64(d))).size:
        drawn[outside] = network(drawn[outside])
    return np.sort(drawn.astype(np.int64))
