"""Index streams through zstd: smaller where supports repeat themselves, and never anything else."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import LayerUpdate, Record, Scheme, compress, decode, encode, predicted_bytes
from compression.errors import UpdateError, WireError
from compression.frames import varint
from compression.indices import decode_gaps, encode_gaps, encode_rice
from compression.operators import TOPK
from compression.values import FP32
from tests.compression.support import flat_layout, header_of, same_update

zstandard = pytest.importorskip("zstandard")


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**40)), min_size=1, max_size=60), st.integers(0, 9))
@settings(max_examples=200)
def test_round_trip(gaps: list[int], spare: int) -> None:
    """Positions beyond 2**31, and gaps of 65535 and more, too."""
    support = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    stream = encode_gaps(support)
    assert stream is not None
    d = int(support[-1]) + 1 + spare
    found, used = decode_gaps(memoryview(stream + bytes(3)), support.size, d)
    assert np.array_equal(found, support)
    assert used == len(stream)
    if spare == 0:
        with pytest.raises(WireError):
            decode_gaps(memoryview(stream), support.size, d - 1)


def test_golden_stream() -> None:
    """Positions 1, 70000: gaps 1 and 69998, of which 65535 stand in the frame: low bytes 01 ff, high 00 ff."""
    stream = encode_gaps(np.array([1, 70_000]))
    assert stream is not None
    length = stream[0]
    frame = stream[1 : 1 + length]
    assert zstandard.ZstdDecompressor().decompress(frame) == bytes((1, 255, 0, 255))
    assert stream[1 + length :] == varint(69_998 - 65_535)


def repeating(layers: int = 3, d: int = 20_000) -> list[np.ndarray]:
    """Layers whose large values stand in the same places of every row of 100, as in filters of a convolution."""
    rng = np.random.default_rng(1)
    rows = (rng.random(100) < 0.03) * 10.0
    return [(rng.standard_normal(d) * (0.01 + np.tile(rows, d // 100))).astype(np.float32) for _ in range(layers)]


@pytest.mark.parametrize("allocation", ["hull", "uniform", "global"])
def test_what_is_saved_is_spent(allocation: str) -> None:
    x = repeating()
    layout = flat_layout([v.size for v in x])
    for values in ("bf16", "auto") if allocation == "hull" else ("bf16",):
        auto, portable = (
            compress(
                layout, header_of(layout), x, None, Scheme(allocation=allocation, values=values, codec=codec), 3000
            )
            for codec in ("auto", "portable")
        )
        assert 0.9 * 3000 <= len(auto.payload) <= 3000  # sizes jump where zstd finds more: the least error wins
        assert sum(auto.kept) > 1.05 * sum(portable.kept)
        assert sum(auto.error_sq) < sum(portable.error_sq)
        found = decode(layout, auto.payload)
        assert all(same_update(a, b) for a, b in zip(auto.updates, found.updates, strict=True))


def test_a_fixed_ratio_takes_fewer_bytes() -> None:
    x = repeating()
    layout = flat_layout([v.size for v in x])
    auto, portable = (
        compress(layout, header_of(layout), x, None, Scheme(ratio=0.03, codec=codec), None)
        for codec in ("auto", "portable")
    )
    assert auto.kept == portable.kept
    assert len(auto.payload) < 0.95 * len(portable.payload)


def test_without_zstandard_the_portable_message_is_made_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: what a device without zstandard sends is the portable message, and it reads that."""
    x = repeating()
    layout = flat_layout([v.size for v in x])
    framed = compress(layout, header_of(layout), x, None, Scheme(ratio=0.03), None)
    portable = compress(layout, header_of(layout), x, None, Scheme(ratio=0.03, codec="portable"), None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    without = compress(layout, header_of(layout), x, None, Scheme(ratio=0.03), None)
    assert without.payload == portable.payload != framed.payload
    decode(layout, portable.payload)
    with pytest.raises(WireError, match="needs zstandard, which is not installed"):
        decode(layout, framed.payload)


def test_a_frame_that_claims_more_than_the_layer_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(200_000_000))
    stream = memoryview(varint(len(bomb)) + bomb)
    with pytest.raises(WireError, match="does not state its 200 bytes"):
        decode_gaps(stream, 100, 10_000)
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(200))
    with pytest.raises(WireError, match="does not state its 200 bytes"):
        decode_gaps(memoryview(varint(len(hidden)) + hidden), 100, 10_000)
    with pytest.raises(WireError, match="2 indices for a layer of 1"):
        decode_gaps(stream, 2, 1)


def test_damage() -> None:
    support = np.unique(np.random.default_rng(2).integers(0, 10**7, 300))
    stream = encode_gaps(support)
    assert stream is not None
    refused = 0
    for at in range(len(stream)):
        for damaged in (stream[:at], stream[:at] + bytes((stream[at] ^ 16,)) + stream[at + 1 :]):
            try:
                found, _ = decode_gaps(memoryview(damaged), support.size, 10**7)
            except WireError:
                refused += 1
                continue
            assert found.shape == support.shape
            assert found[0] >= 0
            assert found[-1] < 10**7
            assert bool(np.all(np.diff(found) > 0))
    assert refused >= len(stream)


def test_records_are_checked_and_their_size_is_predicted() -> None:
    layout = flat_layout([5000])
    support = np.arange(0, 5000, 10)
    update = LayerUpdate(support, np.ones(support.size, np.float32))
    stream = encode_gaps(support)
    assert stream is not None
    assert len(stream) < len(encode_rice(support, 5000))
    good = Record(TOPK, FP32, update, gaps=stream)
    assert len(encode(layout, header_of(layout), [good])) == predicted_bytes(layout, header_of(layout), [good])
    other = encode_gaps(support + 1)
    for gaps, says in (
        (other, "another support"),
        (b"\x05abc", "no index stream"),
        (stream + b"\0", "another support"),
    ):
        with pytest.raises(UpdateError, match=says):
            encode(layout, header_of(layout), [Record(TOPK, FP32, update, gaps=gaps)])
