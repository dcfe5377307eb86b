"""Value codings: how one kept value becomes bytes.

| id | name | bytes | unit roundoff |
|----|------|-------|---------------|
| 0  | fp64 | 8     | 2**-53        |
| 1  | fp32 | 4     | 2**-24        |
| 2  | bf16 | 2     | 2**-8         |
| 3  | fp16 | 2     | 2**-11        |
| 4-8 | 2bit to 6bit | 1/4 to 3/4 | fitted levels: see levels.py |
| 9  | 1bit | 1/8   | one fitted level |
| 15 | (raw bytes of a whole layer; not a coding)  |

All little-endian. Rounding is to nearest, ties to even; a finite value beyond the largest
finite one of the coding becomes that largest one, never infinite.

**fp16.** Two bytes come first, when there are values: a signed exponent e. Then half-precision
numbers h; the values are h * 2**e. e is the one that brings the largest magnitude, rounded,
into [2**14, 2**15), so neither tiny nor huge values are lost whatever their scale (half
precision alone has 6e-8 to 65504). All zeros: e = 0. A value below 2**-28 of the largest is
subnormal there and keeps an absolute error of at most 2**-39 of the largest: over n <= 2**40
values that adds less than 2**-38 to the relative squared error, and the roundoff below counts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.indices import pack_bits
from compression.levels import fit, level_count, values_of
from compression.registry import Registry

RAW = 15
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class ValueCoding:
    """One way to write values.

    Args:
        id: low nibble of a record's coding byte.
        name: name in a configuration.
        bits: bits a value.
        roundoff: largest relative error of a value in its normal range; fp16: of the values' norm.
        encode: finite float array (n,) -> stream_bytes(n) bytes.
        decode: (bytes, n, dtype or its name) -> new array (n,) in that dtype.
        overhead_bytes: bytes before the values, where there are any.
        fitted: its levels are fitted to the values: it has no zero, and what it loses is measured.
    """

    id: int
    name: str
    bits: int
    roundoff: float
    encode: Callable[[NDArray[Any]], bytes]
    decode: Callable[[Buffer, int, str | np.dtype[Any]], NDArray[Any]]
    overhead_bytes: int = 0
    fitted: bool = False

    @property
    def itemsize(self) -> float:
        """Bytes a value."""
        return self.bits / 8

    def stream_bytes(self, n: int) -> int:
        """Exact bytes of the stream of n values; 0 for none."""
        return (n * self.bits + 7) // 8 + self.overhead_bytes if n else 0

    def round(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values as the decoder will see them, in their own dtype; shape (n,)."""
        if self.itemsize >= values.dtype.itemsize:
            return values.copy()
        return self.decode(self.encode(values), values.size, values.dtype)


def _to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    if values.dtype == np.float32:
        return values
    limit = float(np.finfo(np.float32).max)
    narrow: NDArray[np.float32] = np.clip(values, -limit, limit).astype(np.float32)
    return narrow


def _float32_bits_round_to_odd(values: NDArray[Any]) -> NDArray[np.uint32]:
    """Bits of float32 for a second rounding; inexact float64 goes toward zero with the last bit set."""
    narrow = _to_float32(values)
    bits = narrow.view(np.uint32)
    if values.dtype == np.float32:
        return bits
    bits = bits - (np.abs(narrow.astype(np.float64)) > np.abs(values)).astype(np.uint32)
    odd: NDArray[np.uint32] = bits | (narrow.astype(np.float64) != values).astype(np.uint32)
    return odd


def _encode_bf16(values: NDArray[Any]) -> bytes:
    bits = _float32_bits_round_to_odd(np.ascontiguousarray(values))
    wide = bits >> np.uint32(16)
    wide &= np.uint32(1)
    wide += np.uint32(0x7FFF)
    wide += bits
    wide >>= np.uint32(16)
    rounded = wide.astype("<u2")
    rounded -= (rounded & np.uint16(0x7FFF)) == np.uint16(0x7F80)  # rounded up past the largest finite value
    return rounded.tobytes()


def _decode_bf16(data: Buffer, n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    bits = np.frombuffer(data, dtype="<u2", count=n).astype(np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # a peer's signalling NaN, which the caller refuses
        return bits.view(np.float32).astype(dtype, copy=False)


def _encode_fp32(values: NDArray[Any]) -> bytes:
    return _to_float32(values).astype("<f4", copy=False).tobytes()


def _decode_fp32(data: Buffer, n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    with np.errstate(invalid="ignore"):  # as in _decode_bf16
        return np.frombuffer(data, dtype="<f4", count=n).astype(dtype)


def _encode_fp64(values: NDArray[Any]) -> bytes:
    return values.astype("<f8", copy=False).tobytes()


def _decode_fp64(data: Buffer, n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype="<f8", count=n).astype(dtype)


def _encode_fp16(values: NDArray[Any]) -> bytes:
    if values.size == 0:
        return b""
    wide = values.astype(np.float64)
    largest = float(np.max(np.abs(wide)))
    exponent = math.frexp(largest)[1] - 15 if largest else 0
    if float(np.float16(math.ldexp(largest, -exponent))) == 2.0**15:  # rounded up: else a second rounding would differ
        exponent += 1
    halves = np.ldexp(wide, -exponent).astype("<f2")
    return exponent.to_bytes(2, "little", signed=True) + halves.tobytes()


def _decode_fp16(data: Buffer, n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    if n == 0:
        return np.empty(0, dtype=dtype)
    exponent = int.from_bytes(data[:2], "little", signed=True)
    limit = float(np.finfo(dtype).max)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # a peer's NaN is the caller's to refuse
        halves = np.frombuffer(data, dtype="<f2", count=n, offset=2).astype(np.float64)
        wide = np.ldexp(halves, exponent)
        np.clip(wide, -limit, limit, out=wide, where=np.isfinite(halves))
        return wide.astype(dtype)


def _encode_fitted(values: NDArray[Any], bits: int) -> bytes:
    if values.size == 0:
        return b""
    levels, codes = fit(values, bits)
    return _encode_fp16(levels) + pack_bits(codes, bits)


def _decode_fitted(data: Buffer, n: int, dtype: str | np.dtype[Any], bits: int) -> NDArray[Any]:
    if n == 0:
        return np.empty(0, dtype=dtype)
    count = level_count(bits)
    head = 2 + 2 * count
    return values_of(data[head:], n, bits, _decode_fp16(data[:head], count, dtype))


def _fitted(number: int, bits: int) -> ValueCoding:
    def encode(values: NDArray[Any]) -> bytes:
        return _encode_fitted(values, bits)

    def decode(data: Buffer, n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
        return _decode_fitted(data, n, dtype, bits)

    return ValueCoding(number, f"{bits}bit", bits, 1.0, encode, decode, 2 + 2 * level_count(bits), fitted=True)


VALUES: Registry[ValueCoding] = Registry("value coding")
FP64 = VALUES.register(ValueCoding(0, "fp64", 64, 2.0**-53, _encode_fp64, _decode_fp64))
FP32 = VALUES.register(ValueCoding(1, "fp32", 32, 2.0**-24, _encode_fp32, _decode_fp32))
BF16 = VALUES.register(ValueCoding(2, "bf16", 16, 2.0**-8, _encode_bf16, _decode_bf16))
FP16 = VALUES.register(ValueCoding(3, "fp16", 16, 2.0**-11 * (1 + 2.0**-16), _encode_fp16, _decode_fp16, 2))
FITTED = tuple(
    VALUES.register(_fitted(number, bits)) for bits, number in ((1, 9), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8))
)

NATIVE = {"float32": FP32, "float64": FP64}


def coding_for(name: str, dtype: str) -> ValueCoding:
    """The named coding ("native": the dtype's own), never wider than the dtype itself.

    Raises:
        ConfigError: there is no such coding.
    """
    native = NATIVE[dtype]
    if name == "native":
        return native
    coding = VALUES[name]
    return coding if coding.itemsize <= native.itemsize else native
