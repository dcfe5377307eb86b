"""Byte streams of levels, norms and exponents: round trips, sizes, damage."""

from __future__ import annotations

import math
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression.errors import WireError
from compression.level_coding import (
    BASE3,
    BASE3_ZSTD,
    DISTANCE,
    NESTED,
    NESTED_MOST,
    PACKED,
    RANKED,
    SPARSE,
    ZSTD,
    decode_exponents,
    decode_levels,
    decode_norms,
    encode_exponents,
    encode_levels,
    encode_norms,
    exponents_bytes_bound,
    levels_bytes,
    levels_bytes_bound,
    norms_bytes,
)
from compression.quantise import (
    ZERO,
    Powers,
    Quantiser,
    exponent_range,
    natural,
    qsgd,
    quant,
    quantise,
    terngrad,
)
from tests.compression.support import vector


def levels_of(d: int, s: int, density: float, seed: int) -> NDArray[Any]:
    """Random levels: so many not zero, their sizes falling off or even."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.geometric(0.5, d), s) if seed % 2 else rng.integers(1, s + 1, d)
    found = np.where(rng.random(d) < density, sizes * rng.choice([-1, 1], d), 0)
    return found.astype(np.int8 if s <= 127 else np.int16)


def powers_of(d: int, zeros: float, seed: int, dtype: str = "float32") -> Powers:
    """Random powers of two of the dtype, even over its range or like a Gaussian's."""
    rng = np.random.default_rng(seed)
    least, most = exponent_range(dtype)
    wide = rng.integers(least, most + 1, d) if seed % 3 == 0 else -rng.geometric(0.4, d) if seed % 3 == 1 else [-7] * d
    exponents = np.where(rng.random(d) < zeros, ZERO, wide).astype(np.int16)
    return Powers((rng.random(d) < 0.5) & (exponents != ZERO), exponents)


def entropy(symbols: NDArray[Any]) -> float:
    """Bits a symbol of the empirical distribution."""
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(share * np.log2(share)).sum())


# ---- round trips ------------------------------------------------------------------------------


@given(
    st.integers(0, 700),
    st.sampled_from([1, 2, 7, 16, 17, 127, 128, 3000]),
    st.sampled_from([0.0, 0.003, 0.1, 0.5, 0.9, 1.0]),
    st.integers(0, 1000),
    st.booleans(),
)
@settings(max_examples=300)
def test_levels_come_back(d: int, s: int, density: float, seed: int, portable: bool) -> None:
    levels = levels_of(d, s, density, seed)
    mode, data = encode_levels(levels, s, portable=portable)
    back, used = decode_levels(mode, data + b"more", d, s)
    assert used == len(data)
    assert back.dtype == levels.dtype
    assert np.array_equal(back, levels)
    assert len(data) <= levels_bytes(levels, s) <= levels_bytes_bound(d, s)
    if portable:
        assert len(data) == levels_bytes(levels, s)
        assert mode != BASE3_ZSTD


def test_every_mode_of_levels_is_chosen_where_it_is_smallest() -> None:
    def mode_of(s: int, density: float, portable: bool = True, seed: int = 1) -> int:
        return encode_levels(levels_of(4000, s, density, seed), s, portable=portable)[0]

    assert mode_of(1, 0.05) == SPARSE
    assert mode_of(1, 0.66) == BASE3
    assert mode_of(4, 0.1) == SPARSE  # sizes fall off by halves, as unary numbers do
    assert mode_of(NESTED_MOST + 1, 0.1) == SPARSE
    steep = quantise(vector("gauss", 4000, "float32", 1), qsgd(4), seed=1, purpose="l").levels
    assert encode_levels(steep, 4)[0] == NESTED
    assert len(encode_levels(steep, 4)[1]) < len(encode_levels(steep, NESTED_MOST + 1)[1])
    assert mode_of(127, 1.0, seed=2) == PACKED
    repeated = np.tile(np.array([1, -1, 0, 1], np.int8), 1000)
    mode, data = encode_levels(repeated, 1, portable=False)
    assert mode == BASE3_ZSTD
    assert len(data) < 60
    assert np.array_equal(decode_levels(mode, data, 4000, 1)[0], repeated)


@given(st.integers(0, 500), st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]), st.integers(0, 1000), st.booleans())
@settings(max_examples=300)
def test_exponents_come_back(d: int, zeros: float, seed: int, portable: bool) -> None:
    for dtype in ("float32", "float64"):
        powers = powers_of(d, zeros, seed, dtype)
        mode, data = encode_exponents(powers, portable=portable)
        back, used = decode_exponents(mode, data + b"more", d, *exponent_range(dtype))
        assert used == len(data) <= exponents_bytes_bound(d, *exponent_range(dtype))
        assert back.exponents.dtype == np.int16
        assert np.array_equal(back.exponents, powers.exponents)
        assert np.array_equal(back.negative, powers.negative)
        assert not portable or mode != ZSTD


def test_every_mode_of_exponents_is_chosen_where_it_is_smallest() -> None:
    assert encode_exponents(powers_of(10, 0.0, 2))[0] == DISTANCE
    assert encode_exponents(natural(vector("gauss", 3000, "float32", 1), seed=1, purpose="l"))[0] == RANKED
    cycle = Powers(np.zeros(4000, np.bool_), np.tile(np.arange(20, dtype=np.int16), 200))
    mode, data = encode_exponents(cycle, portable=False)
    assert mode == ZSTD
    assert np.array_equal(decode_exponents(mode, data, 4000, -149, 127)[0].exponents, cycle.exponents)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("norms", ["native", "fp16"])
def test_norms_come_back(dtype: str, norms: str) -> None:
    quantiser = quant(2, 64, norms)
    for d in (0, 1, 1000):
        q = quantise(vector("heavy", d, dtype, 1), quantiser, seed=1, purpose="l")
        data = encode_norms(q)
        back, exponent, used = decode_norms(data + b"more", q.norms.size, quantiser, dtype)
        assert used == len(data) == norms_bytes(q.norms.size, quantiser, dtype)
        assert exponent == q.exponent
        assert back.dtype == q.norms.dtype
        assert np.array_equal(back, q.norms)
        if data:
            with pytest.raises(WireError, match="norms need"):
                decode_norms(data[:-1], q.norms.size, quantiser, dtype)
    for bad in (math.nan, math.inf, -1.0, -0.0):
        kind = np.float16 if norms == "fp16" else dtype
        head = b"\0\0" if norms == "fp16" else b""
        with pytest.raises(WireError, match="negative or not finite"):
            decode_norms(head + np.array([1.0, bad], kind).tobytes(), 2, quantiser, dtype)


# ---- golden -----------------------------------------------------------------------------------


def test_golden_streams_of_levels() -> None:
    # K = 2; gaps 1, 6 with r = 0 (r = 2 takes as much): 01 0000001; signs 0 1
    sparse = np.zeros(100, np.int8)
    sparse[[1, 8]] = 1, -1
    assert encode_levels(sparse, 1) == (SPARSE, bytes((2, 0, 0b01000000, 0b10000000, 0b01000000)))
    # digits 1 2 0 1 2 | 2 1: 1 + 6 + 0 + 27 + 162 = 196; 2 + 3 = 5
    base3 = np.array([1, -1, 0, 1, -1, -1, 1], np.int8)
    assert encode_levels(base3, 1) == (BASE3, bytes((196, 5)))
    # L + 3 in 3 bits: 0 6 3 5 | 000 110 011 101 and padding
    assert encode_levels(np.array([-3, 3, 0, 2], np.int8), 3) == (PACKED, bytes((0b00011001, 0b11010000)))
    # 7 of 8 are not zero: the one other is 2 (r = 1: remainder 0, quotient 01); 7 signs 1000000; beyond 1 the
    # second of them (r = 0: 01); beyond 2 none
    nested = bytes((7, 1, 0, 0b01000000, 0b10000000, 1, 0, 0b01000000, 0))
    back, used = decode_levels(NESTED, nested, 8, 3)
    assert used == len(nested)
    assert back.tolist() == [-1, 2, 0, 1, 1, 1, 1, 1]


def test_golden_stream_of_exponents() -> None:
    # n = 3 of 4; the other is 3: r = 0: 0001; signs 010; largest 5; distances 0, 2, 1: r = 0: 1 001 01
    powers = Powers(np.array([False, True, False, False]), np.array([5, 3, 4, ZERO], np.int16))
    mode, data = encode_exponents(powers)
    assert mode == DISTANCE
    assert data == bytes((3, 0, 0b00010000, 0b01000000, 5, 0, 0, 0b10010100))
    # 2 distances in use, 2 and then 0; ranks 0 0 1 0: 1 1 01 1
    ranked = bytes((4, 0, 5, 0, 2, 2, 0, 0, 0b11011000))
    back, used = decode_exponents(RANKED, ranked, 4, -149, 127)
    assert used == len(ranked)
    assert back.exponents.tolist() == [3, 3, 5, 3]


# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantiser", "most"),
    [
        (quant(2, 512), 1.02),
        (quant(2, 10_000), 1.02),
        (terngrad(512), 1.02),
        (terngrad(10_000), 1.02),
        (qsgd(2, 512), 1.02),
        (qsgd(4, 512), 1.02),
        (qsgd(8, 512), 1.02),
        (Quantiser(math.inf, 7, 512), 1.02),
    ],
    ids=str,
)
def test_levels_of_a_gaussian_come_near_their_entropy(quantiser: Quantiser, most: float) -> None:
    d = 300_000
    levels = quantise(vector("gauss", d, "float32", 1), quantiser, seed=1, purpose="l").levels
    bits = 8 * len(encode_levels(levels, quantiser.levels)[1]) / d
    assert bits <= most * entropy(levels)
    if quantiser == quant(2, 512):
        density = float(np.count_nonzero(levels)) / d
        support = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
        assert bits <= 1.02 * (support + density)


def test_exponents_of_a_gaussian_come_near_their_entropy() -> None:
    d = 300_000
    powers = natural(vector("gauss", d, "float32", 1), seed=1, purpose="l")
    bits = 8 * len(encode_exponents(powers)[1]) / d
    assert bits <= 1.03 * (1 + entropy(powers.exponents))


def test_few_zeros_cost_little() -> None:
    powers = powers_of(100_000, 0.0, 1)
    some = Powers(powers.negative.copy(), powers.exponents.copy())
    some.exponents[::10_000], some.negative[::10_000] = ZERO, False
    assert len(encode_exponents(some)[1]) <= len(encode_exponents(powers)[1]) + 30


# ---- damage -----------------------------------------------------------------------------------

LEVEL_STREAMS = [
    (levels_of(301, s, density, seed), s, portable)
    for s, density, seed, portable in (
        (1, 0.1, 1, True),
        (1, 0.66, 1, True),
        (3, 0.2, 1, True),
        (3, 0.8, 2, True),
        (40, 0.2, 1, True),
        (127, 1.0, 2, True),
        (2000, 0.3, 1, True),
    )
] + [(np.tile(np.array([1, -1, 0, 1], np.int8), 1000), 1, False)]


@pytest.mark.parametrize("at", range(len(LEVEL_STREAMS)))
def test_damaged_levels_are_a_wire_error_or_other_levels(at: int) -> None:
    levels, s, portable = LEVEL_STREAMS[at]
    d = levels.size
    mode, data = encode_levels(levels, s, portable=portable)
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode_levels(mode, data[:end], d, s)
    refused = 0
    for flipped in damaged(data):
        try:
            back, used = decode_levels(mode, flipped, d, s)
        except WireError:
            refused += 1
            continue
        assert used <= len(flipped)
        assert back.shape == (d,)
        assert np.abs(back.astype(int)).max() <= s
    assert refused
    for other in range(-1, 8):  # as another mode: refused, or legal
        try:
            back, used = decode_levels(other, data, d, s)
        except WireError:
            continue
        assert used <= len(data)
        assert np.abs(back.astype(int)).max(initial=0) <= s


def damaged(data: bytes) -> list[bytes]:
    """Every byte changed in three ways, and 300 with several changed."""
    rng = np.random.default_rng(0)
    found = [
        data[:at] + bytes((data[at] ^ bits,)) + data[at + 1 :] for at in range(len(data)) for bits in (1, 128, 255)
    ]
    for _ in range(300):
        body = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            body[int(at)] = int(rng.integers(256))
        found.append(bytes(body))
    return found


@pytest.mark.parametrize(
    ("zeros", "seed", "portable"), [(0.0, 1, True), (0.1, 0, True), (0.9, 1, True), (0.0, 4, False)]
)
def test_damaged_exponents_are_a_wire_error_or_other_exponents(zeros: float, seed: int, portable: bool) -> None:
    d = 300
    powers = powers_of(d, zeros, seed)
    if not portable:
        powers = Powers(powers.negative, np.tile(np.arange(20, dtype=np.int16), 15))
    mode, data = encode_exponents(powers, portable=portable)
    for end in range(len(data)):
        with pytest.raises(WireError):
            decode_exponents(mode, data[:end], d, -149, 127)
    refused = 0
    for flipped in damaged(data):
        try:
            back, used = decode_exponents(mode, flipped, d, -149, 127)
        except WireError:
            refused += 1
            continue
        assert used <= len(flipped)
        kept = back.exponents[back.exponents != ZERO]
        assert kept.size == 0 or (kept.min() >= -149 and kept.max() <= 127)
        assert not back.negative[back.exponents == ZERO].any()
    assert refused


@pytest.mark.parametrize(
    ("mode", "data", "d", "s", "says"),
    [
        (7, b"", 4, 1, "unknown mode 7"),
        (BASE3, b"", 4, 2, "unknown mode 1 for 2 levels"),
        (NESTED, b"\0", 4, 17, "unknown mode 4"),
        (NESTED, b"\0", 4, 1, "unknown mode 4"),
        (BASE3, b"\xf3", 5, 1, "byte 243"),
        (BASE3, b"\x51", 4, 1, "padding of the digits"),
        (BASE3, b"\x01", 6, 1, "6 levels need 2"),
        (PACKED, b"\xe0\x00", 4, 3, "level 4, at most 3"),
        (PACKED, b"\x00\x01", 4, 3, "padding of the levels"),
        (SPARSE, b"\x05", 4, 1, "expected 0 to 4"),
        (SPARSE, b"\x80", 4, 1, "ends within a number"),
        (SPARSE, b"\x81\x00", 4, 1, "shortest form"),
        (SPARSE, b"\x80" * 9, 4, 1, "longer than 63 bits"),
        (SPARSE, bytes((1, 0, 0x80)), 4, 1, "1 signs need 1"),
        (SPARSE, bytes((1, 0, 0x80, 0xC0)), 4, 1, "padding of the signs"),
        (SPARSE, bytes((2, 0, 0xC0, 0, 0, 0b00110000)), 4, 2, "number 2, at most 1"),
        (BASE3_ZSTD, b"\x05abc", 4, 1, "the frame has 5"),
        (BASE3_ZSTD, b"\x03abc", 4, 1, "no zstd frame"),
    ],
)
def test_what_is_wrong_is_said(mode: int, data: bytes, d: int, s: int, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_levels(mode, data, d, s)


def test_a_list_of_distances_is_checked() -> None:
    head = bytes((2, 0, 5, 0))  # two positions, both positive, largest exponent 5
    for rest, says in (
        (b"\0", "no exponent is in use"),
        (b"\3\0\1\2", "expected 0 to 2"),
        (b"\2\0\0\0\xc0", "listed twice"),
        (b"\1\x9b\1\0\xc0", "expected 0 to 154"),  # 2**5 is 154 steps above 2**-149
        (b"\2\0\1\0\x90", "number 2, at most 1"),
    ):
        with pytest.raises(WireError, match=says):
            decode_exponents(RANKED, head + rest, 2, -149, 127)
    with pytest.raises(WireError, match="ends before its largest exponent"):
        decode_exponents(DISTANCE, bytes((2, 0, 5)), 2, -149, 127)
    for largest in (128, -150):
        with pytest.raises(WireError, match=f"exponent {largest} is outside"):
            decode_exponents(DISTANCE, bytes((2, 0)) + largest.to_bytes(2, "little", signed=True), 2, -149, 127)


def test_a_frame_cannot_claim_more_than_the_layer_has() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(20))
    lying = zstandard.ZstdCompressor().compress(bytes(20))[:-3] + b"\0\0\0"
    twice = zstandard.ZstdCompressor().compress(bytes(20)) * 2
    for frame in (bomb, unsized, lying, twice):
        data = bytes((len(frame) & 127 | 128, len(frame) >> 7)) if len(frame) >= 128 else bytes((len(frame),))
        with pytest.raises(WireError, match=r"content|zstd frame"):
            decode_levels(BASE3_ZSTD, data + frame, 100, 1)


def test_without_zstandard_streams_are_portable_and_its_modes_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = np.tile(np.array([1, -1, 0, 1], np.int8), 1000)
    mode, data = encode_levels(levels, 1, portable=False)
    assert mode == BASE3_ZSTD
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert encode_levels(levels, 1, portable=False) == encode_levels(levels, 1)
    with pytest.raises(WireError, match="needs zstandard, which is not installed"):
        decode_levels(mode, data, 4000, 1)


def test_a_short_stream_of_a_large_layer_allocates_little_more_than_the_layer() -> None:
    d, s = 1_000_000, 127
    # K = d, so no position is listed; signs; and numbers in unary that never end
    claims = bytes((0xC0, 0x84, 0x3D)) + bytes(125_000) + bytes(16_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="quotients end"):
            decode_levels(SPARSE, claims, d, s)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * d  # 7 bits a level, unpacked; all 16 MB would be 127 * d
