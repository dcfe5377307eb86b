"""Fitted levels, and precision chosen together with K."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import Scheme, compress, decode
from compression.allocation import Sizes, error_table, modelled_bytes, with_sample
from compression.errors import WireError
from compression.levels import Sample, fit, level_count, sample_of
from compression.precision import Width, choose
from compression.values import BF16, FITTED, FP16
from tests.compression.support import KINDS, dense_of, flat_layout, header_of, same_update, vector

Floats = NDArray[np.float64]


def lost(exact: NDArray[np.generic], rounded: NDArray[np.generic]) -> float:
    """delta = ||y - q||^2/||y||^2."""
    y, q = exact.astype(np.float64), rounded.astype(np.float64)
    return float(np.sum((y - q) ** 2) / np.sum(y**2))


@given(
    st.sampled_from(["float32", "float64"]),
    st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=40).filter(any),
    st.integers(1, 6),
)
@settings(max_examples=300)
def test_whatever_the_values_less_than_all_is_lost(dtype: str, values: list[float], bits: int) -> None:
    """delta <= 1 - ||y||_1^2/(n ||y||^2) with one level, and more levels never do worse than that."""
    y = np.array(values, dtype=dtype)
    coding = FITTED[bits - 1]
    stream = coding.encode(y)
    assert len(stream) == coding.stream_bytes(y.size)
    q = coding.decode(stream, y.size, dtype)
    wide = y.astype(np.float64)
    worst = 1 - np.sum(np.abs(wide)) ** 2 / (y.size * np.sum(wide**2))
    assert lost(y, q) <= worst + 1e-3
    assert lost(y, q) < 1
    assert np.array_equal(np.signbit(q), np.signbit(y))
    assert coding.round(q).tobytes() == q.tobytes()  # rounding twice changes nothing


@pytest.mark.parametrize("bits", range(1, 7))
def test_the_loss_is_near_the_best_quantisers(bits: int) -> None:
    """Against Lloyd's iteration on all values, from the same start until it stands still."""
    rng = np.random.default_rng(bits)
    for y in (rng.standard_normal(20_000), rng.standard_t(3, 20_000), np.exp(rng.standard_normal(20_000))):
        q = FITTED[bits - 1].round(y.astype(np.float64))
        assert lost(y, q) <= 1.1 * lloyd(np.abs(y), bits) + 1e-4


def lloyd(magnitudes: Floats, bits: int) -> float:
    a = np.sort(magnitudes)
    levels = a[np.linspace(0, a.size - 1, level_count(bits) + 2).astype(int)[1:-1]]
    for _ in range(300):
        cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, a)
        count = np.bincount(cell, minlength=levels.size)
        levels = np.where(count > 0, np.bincount(cell, a, levels.size) / np.maximum(count, 1), levels)
    return float(np.sum((a - levels[cell]) ** 2) / np.sum(a**2))


def test_golden_stream() -> None:
    """2 bits: cells {1, 1} and {4, 5}, levels 1 and 4.5; exponent -12 brings 4.5 to 18432: halves 0x6c00 and 0x7480."""
    y = np.array([1.0, -4.0, 5.0, -1.0])
    levels, codes = fit(y, 2)
    assert levels.tolist() == [1.0, 4.5]
    assert codes.tolist() == [0b00, 0b11, 0b01, 0b10]
    stream = FITTED[1].encode(y)
    assert stream == bytes.fromhex("f4ff006c8074") + bytes([0b00110110])
    assert FITTED[1].decode(stream, 4, "float64").tolist() == [1.0, -4.5, 4.5, -1.0]


def test_few_magnitudes_are_exact() -> None:
    y = np.array([2.0, -2.0, 0.5, 0.5, -8.0] * 500)
    assert FITTED[2].round(y).tolist() == y.tolist()
    assert FITTED[0].round(np.full(9, -3.0)).tolist() == [-3.0] * 9
    assert FITTED[4].round(np.zeros(3)).tolist() == [0.0] * 3


def test_a_sample_knows_what_all_would_lose() -> None:
    rng = np.random.default_rng(0)
    y = rng.standard_t(2.5, 400_000)
    magnitudes = np.sort(np.abs(y))
    estimate = sample_of(magnitudes).lost_shares(np.array([400_000]), [1, 2, 3, 4, 5])[:, 0]
    whole = Sample.of(magnitudes, magnitudes[:0], 1.0).lost_shares(np.array([400_000]), [1, 2, 3, 4, 5])[:, 0]
    np.testing.assert_allclose(estimate, whole, rtol=0.1)
    real = [lost(y, FITTED[b - 1].round(y)) for b in (1, 2, 3, 4, 5)]
    assert np.all(real <= 1.02 * whole)  # Lloyd's iterations gain something, never much
    assert np.all(real >= 0.7 * whole)


def test_widths_are_the_best_of_all_by_brute_force() -> None:
    """Two layers, all K, all widths: no choice of the same modelled bytes loses less than what was chosen."""
    x = [vector("gauss", 400, "float64", 1), 5 * vector("heavy", 300, "float64", 2)]
    d = np.array([400, 300])
    sizes = Sizes(d, np.full(2, 2.0), np.array([1, 1]), d)
    tables = [with_sample(error_table(v), v.size, np.sort(np.abs(v))) for v in x]
    widths = [Width(2.0, 0, 0), *(Width(c.itemsize, c.overhead_bytes, c.bits) for c in FITTED)]
    points: list[list[tuple[float, float]]] = []
    for table, n in zip(tables, d.tolist(), strict=True):
        assert table.sample is not None
        k = np.arange(1, n + 1)
        left = table.at(k, n)
        share = np.concatenate((np.zeros((1, n)), table.sample.lost_shares(k, range(1, 7))))
        size = [modelled_bytes(k, np.array([n]), np.array([w.itemsize])) + w.overhead_bytes for w in widths]
        points.append(
            [
                (float(s), float(e))
                for at in range(7)
                for s, e in zip(size[at], left + share[at] * (table.errors[-1] - left), strict=True)
                if s < 2.0 + n * widths[at].itemsize + widths[at].overhead_bytes
            ]
        )
    for budget in (60.0, 120.0, 250.0):
        precision = choose(sizes, tables, widths, budget)
        chosen, rounded = precision.option, precision.tables
        best = min(
            (e1 + e2 for s1, e1 in points[0] for s2, e2 in points[1] if s1 + s2 <= budget),
        )
        reached = min(
            float(rounded[0].at(np.array([k1]), 400)[0] + rounded[1].at(np.array([k2]), 300)[0])
            for k1 in range(1, 400)
            for k2 in range(1, 300, 3)
            if cost(k1, 400, widths[chosen[0]]) + cost(k2, 300, widths[chosen[1]]) <= budget
        )
        assert reached <= 1.06 * best


def cost(k: int, d: int, width: Width) -> float:
    one = modelled_bytes(np.array([k]), np.array([d]), np.array([width.itemsize]))
    return float(one[0]) + width.overhead_bytes


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "zero"])
def test_joint_choice_keeps_its_budget_and_beats_bf16(kind: str, dtype: str) -> None:
    sizes = [60_000, 9000, 500, 40, 1, 0]
    layout = flat_layout(sizes, dtype)
    x = [vector(kind, d, dtype, 3 + d) for d in sizes]
    codec = "portable" if kind in ("equal", "clustered") else "auto"  # zstd makes sizes jump: less bytes, less error
    for budget in (1500, 6000, 30_000):
        joint, plain = (
            compress(layout, header_of(layout), x, None, Scheme(values=values, codec=codec), budget)
            for values in ("auto", "bf16")
        )
        assert not joint.miss
        assert len(joint.payload) <= budget
        found = decode(layout, joint.payload)
        assert all(same_update(a, b) for a, b in zip(joint.updates, found.updates, strict=True))
        assert sum(joint.error_sq) <= 1.02 * sum(plain.error_sq) + 1e-12 * sum(plain.norm_sq)
        for at, (v, update) in enumerate(zip(x, joint.updates, strict=True)):
            left = v.astype(np.float64) - dense_of(update, v.size)
            assert joint.error_sq[at] == pytest.approx(float(left @ left), rel=1e-9, abs=1e-300)
            if kind == "tiny":  # 1e-40 is below bf16's normal range
                continue
            assert joint.error_sq[at] <= (1 - joint.alpha) * joint.norm_sq[at] * (1 + 1e-9)
        if not joint.everything_fits and len(joint.payload) >= 4096:
            assert len(joint.payload) >= 0.99 * budget


def test_at_the_bytes_of_index_and_float_pairs_the_error_is_less_than_half() -> None:
    """Layers of a convolutional network's proportions, Student-t(3) times a scale each (codec study: target .47)."""
    rng = np.random.default_rng(0)
    sizes = [1728, *[36_864] * 4, 73_728, *[147_456] * 3, 294_912, *[64] * 8]
    layout = flat_layout(sizes)
    x = [(rng.standard_t(3, d) * np.exp(rng.standard_normal())).astype(np.float32) for d in sizes]
    kept = [max(1, d // 100) for d in sizes]
    pairs = sum(
        float(np.sum(np.sort(np.abs(v))[: v.size - k].astype(np.float64) ** 2)) for v, k in zip(x, kept, strict=True)
    )
    got = compress(layout, header_of(layout), x, None, Scheme(), 8 * sum(kept))
    assert len(got.payload) <= 8 * sum(kept)
    assert sum(got.error_sq) <= 0.40 * pairs


@pytest.mark.parametrize("period", [4, 9, 25])
def test_filters_whose_corners_are_zero_do_not_mislead_samples(period: int) -> None:
    """As in a convolution on small images: one element of each filter carries all. (Strides of the samples: 18, 36.)"""
    rng = np.random.default_rng(period)
    x = []
    for d in (period * 18_000, period * 36_000):
        v = np.zeros(d, np.float32)
        v[period // 2 :: period] = rng.standard_t(3, d // period)
        x.append(v)
    for v in x:
        table = error_table(v)
        assert table.errors[-1] == pytest.approx(float(np.sum(v.astype(np.float64) ** 2)), rel=0.5)
        assert table.magnitudes is not None
        assert np.count_nonzero(table.magnitudes) == pytest.approx(table.magnitudes.size / period, rel=0.2)
    layout = flat_layout([v.size for v in x])
    got = compress(layout, header_of(layout), x, None, Scheme(codec="portable"), 20_000)
    plain = compress(layout, header_of(layout), x, None, Scheme(allocation="uniform", values="bf16"), 20_000)
    assert sum(got.error_sq) < 0.6 * sum(plain.error_sq)


def test_values_whose_squares_sums_overflow() -> None:
    """1e152: their squared norm is a float64, the square of their sum is not. (Warnings are errors.)"""
    x = [np.full(300, 1e152), np.full(20, 1e-200)]
    layout = flat_layout([300, 20], "float64")
    got = compress(layout, header_of(layout), x, None, Scheme(), 150)
    assert len(got.payload) <= 150
    assert got.error_sq[0] <= got.norm_sq[0]


def test_bytes_between_two_precisions_are_spent() -> None:
    """Alike layers of normal values change precision all at once: what lies between is used all the same.

    From 1 bit for all (4.75 kB) to 2 bits (9.5 kB) and beyond. A choice from estimates may lose a
    few per cent more than the budget before it did, never much.
    """
    sizes = [30_000, 8000]
    layout = flat_layout(sizes)
    x = [vector("gauss", d, "float32", 9 + d) for d in sizes]
    lost: list[float] = []
    for budget in range(4300, 12_000, 350):
        got = compress(layout, header_of(layout), x, None, Scheme(), budget)
        lost.append(sum(got.error_sq))
        assert len(got.payload) >= 0.99 * budget or all(r == 1.0 for r in got.ratios)
        assert len(got.payload) >= 0.96 * budget
    assert np.all(lost <= 1.08 * np.minimum.accumulate(lost))
    assert lost[-1] < 0.25 * lost[0]


def test_any_damage_is_a_wire_error_or_another_legal_message() -> None:
    layout = flat_layout([3000, 60])
    x = [vector("heavy", d, "float32", d) for d in (3000, 60)]
    rng = np.random.default_rng(0)
    for values in ("1bit", "3bit", "6bit"):
        payload = compress(layout, header_of(layout), x, None, Scheme(values=values, ratio=0.1), None).payload
        for _ in range(400):
            body = bytearray(payload[:-4])
            for _ in range(int(rng.integers(1, 4))):
                body[int(rng.integers(30, len(body)))] = int(rng.integers(256))
            cut = body[: int(rng.integers(30, len(body) + 1))] if rng.random() < 0.3 else body
            try:
                decode(layout, bytes(cut) + zlib.crc32(cut).to_bytes(4, "little"))
            except WireError:
                continue


def test_codings_have_names_and_numbers_that_stay() -> None:
    assert [(c.name, c.id, c.bits) for c in FITTED] == [
        *(("1bit", 9, 1), ("2bit", 4, 2), ("3bit", 5, 3)),
        *(("4bit", 6, 4), ("5bit", 7, 5), ("6bit", 8, 6)),
    ]
    assert (BF16.itemsize, FP16.stream_bytes(3)) == (2.0, 8)
