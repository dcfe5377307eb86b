from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression.errors import ConfigError, WireError
from compression.indices import decode_rice, encode_rice, rice_bytes, rice_bytes_bound
from compression.values import BF16, FP32, FP64, VALUES, ValueCoding, coding_for

supports = st.integers(1, 3000).flatmap(
    lambda d: st.tuples(st.just(d), st.sets(st.integers(0, d - 1), max_size=200).map(sorted))
)


def brute_force_bytes(indices: list[int]) -> int:
    gaps = [b - a - 1 for a, b in zip([-1, *indices], indices, strict=False)]
    k = len(gaps)
    return min(1 + math.ceil(k * r / 8) + math.ceil((k + sum(g >> r for g in gaps)) / 8) for r in range(50))


@given(supports)
def test_rice_round_trip_and_exact_size(case: tuple[int, list[int]]) -> None:
    d, support = case
    indices = np.array(support, dtype=np.int64)
    stream = encode_rice(indices, d)
    assert len(stream) == rice_bytes(indices, d) <= rice_bytes_bound(len(support), d)
    if support:
        assert len(stream) == brute_force_bytes(support)
    for tail in (b"", b"\xff" * 40, b"\0" * 40):
        got, used = decode_rice(stream + tail, len(support), d)
        assert used == len(stream)
        assert got.tolist() == support


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("clustered", [False, True])
def test_rice_of_large_supports(density: float, clustered: bool) -> None:
    d = 400_000
    rng = np.random.default_rng(5)
    keep = rng.random(d) < density * (np.sin(np.arange(d) / 9000) > 0.7 if clustered else 1.0)
    indices = np.flatnonzero(keep)
    stream = encode_rice(indices, d)
    assert len(stream) == rice_bytes(indices, d) == brute_force_bytes(indices.tolist())
    got, used = decode_rice(stream + bytes(1000), indices.size, d)
    assert used == len(stream)
    assert np.array_equal(got, indices)


def test_rice_is_near_the_entropy_of_random_supports() -> None:
    d, k = 1_000_000, 10_000
    indices = np.sort(np.random.default_rng(1).permutation(d)[:k])
    entropy = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert rice_bytes(indices, d) * 8 <= 1.02 * entropy


def test_rice_golden() -> None:
    # indices 1, 2, 9: gaps 1, 0, 6. r = 1 gives 3 remainder bits 1 0 0 -> 0b10000000 = 80 and quotients
    # 0, 0, 3 -> 1 1 0001 -> 0b11000100 = c4: three bytes in all; r = 0 gives 1 + ceil(10 / 8) = 3 bytes, too,
    # and the smallest r of least size is taken: unary 01 1 0000001 -> 0b01100000 01...... = 60 40.
    assert encode_rice(np.array([1, 2, 9]), 16).hex() == "006040"
    got, used = decode_rice(bytes.fromhex("0180c4"), 3, 16)
    assert (got.tolist(), used) == ([1, 2, 9], 3)


def test_positions_beyond_two_to_the_31() -> None:
    d = 5 << 40
    indices = np.array([3, 1 << 31, (1 << 31) + 1, 1 << 40, d - 1], dtype=np.int64)
    stream = encode_rice(indices, d)
    assert len(stream) == rice_bytes(indices, d) < 40
    got, _ = decode_rice(stream, 5, d)
    assert got.tolist() == indices.tolist()


@pytest.mark.parametrize(
    ("stream", "k", "d", "what"),
    [
        ("", 1, 8, "ends before"),
        ("00", 1, 8, "need more"),
        ("09ffff80", 1, 8, "parameter 9"),
        ("0000", 1, 8, "0 of 1 quotients"),
        ("0080", 9, 8, "9 indices"),
        ("00c0", 1, 8, "padding of the quotients"),
        ("01c080", 1, 8, "padding of the remainders"),
        ("0001", 1, 4, "index 7"),
        ("0008", 1, 4, "index 4"),
        ("0000c0", 2, 8, "quotients"),
    ],
)
def test_illegal_rice_streams(stream: str, k: int, d: int, what: str) -> None:
    with pytest.raises(WireError, match=what):
        decode_rice(bytes.fromhex(stream), k, d)


@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 300))
@settings(max_examples=500)
def test_any_bytes_give_a_legal_support_or_a_wire_error(data: bytes, k: int, d: int) -> None:
    try:
        got, used = decode_rice(data, k, d)
    except WireError:
        return
    assert got.size == k
    assert used <= len(data)
    assert all(a < b for a, b in zip([-1, *got.tolist()], [*got.tolist(), d], strict=True))


def nearest_bf16(value: float) -> float:
    """Nearest bf16 by exact comparison with the two neighbours; ties to the even one; never infinite."""
    largest = struct.unpack(">f", bytes.fromhex("7f7f0000"))[0]
    if abs(value) >= largest:
        return math.copysign(float(largest), value)
    low, high = 0, 0x7F7F

    def of(code: int) -> float:
        return float(struct.unpack(">f", struct.pack(">HH", code, 0))[0])

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle) <= abs(value) else (low, middle)
    below, above = abs(value) - of(low), of(high) - abs(value)
    code = low if below < above or (below == above and low % 2 == 0) else high
    return math.copysign(of(code), value)


floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(floats32)
@settings(max_examples=400)
def test_bf16_of_float32_is_the_nearest(value: float) -> None:
    got = BF16.round(np.array([value], dtype=np.float32))
    assert struct.pack("d", float(got[0])) == struct.pack("d", nearest_bf16(value))


@given(st.one_of(floats32, st.floats(allow_nan=False, allow_infinity=False), st.floats(0.99, 1.02)))
@settings(max_examples=400)
def test_bf16_of_float64_is_rounded_once(value: float) -> None:
    got = BF16.round(np.array([value], dtype=np.float64))
    assert struct.pack("d", float(got[0])) == struct.pack("d", nearest_bf16(value))


def test_bf16_golden() -> None:
    # 1 + 2**-8 is half way between 3f80 and 3f81: to the even 3f80. 1 + 3 * 2**-8 lies between 3f81 and 3f82: to 3f82.
    # 1 + 2**-8 + 2**-40 (float64 only) is above the first half way: 3f81. float32's largest would round to infinity.
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-40, -3.4028235e38, 1e300, -0.0, 1e-320])
    codes = np.frombuffer(BF16.encode(x), dtype="<u2")
    assert [f"{code:04x}" for code in codes] == ["3f80", "3f80", "3f82", "3f81", "ff7f", "7f7f", "8000", "0000"]


def test_fp32_of_float64_never_overflows() -> None:
    x = np.array([1e300, -1e300, 0.1])
    assert FP32.round(x).tolist() == [3.4028234663852886e38, -3.4028234663852886e38, 0.10000000149011612]


@pytest.mark.parametrize("coding", list(VALUES), ids=lambda coding: coding.name)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_coding_keeps_its_promises(coding: object, dtype: str) -> None:
    assert isinstance(coding, type(BF16))
    x = np.random.default_rng(0).standard_normal(1001).astype(dtype)
    data = coding.encode(x)
    assert len(data) == coding.stream_bytes(1001) == (1001 * coding.bits + 7) // 8 + coding.overhead_bytes
    once = coding.decode(data, 1001, dtype)
    assert once.dtype.name == dtype
    if coding.fitted:
        assert float(np.sum((once - x).astype(np.float64) ** 2)) < float(np.sum(x.astype(np.float64) ** 2))
    else:
        assert np.max(np.abs(once - x) / np.abs(x)) <= coding.roundoff
    assert coding.encode(once) == data  # rounding twice changes nothing
    if coding.itemsize >= x.itemsize:
        assert once.tobytes() == x.tobytes()


def test_a_coding_is_never_wider_than_its_layer() -> None:
    assert coding_for("fp64", "float32") is FP32
    assert coding_for("native", "float64") is FP64
    with pytest.raises(ConfigError, match="did you mean 'bf16'"):
        coding_for("bf61", "float32")


@pytest.mark.parametrize(("coding", "data"), [(BF16, b"\x81\x7f"), (FP32, b"\x01\x00\x80\x7f")])
def test_a_signalling_nan_of_a_peer_gives_no_warning(coding: ValueCoding, data: bytes) -> None:
    """Widened to float64 it raises the processor's invalid flag, and warnings are errors here. (Found by fuzzing.)"""
    assert np.isnan(coding.decode(data, 1, "float64")).all()
