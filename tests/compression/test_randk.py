"""RandK: a support that travels as its seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import Record, Scheme, compress, decode, encode, guaranteed_alpha, predicted_bytes
from compression.allocation import ALLOCATIONS
from compression.errors import UpdateError, WireError
from compression.indices import SEED_BYTES, seeded_support
from compression.operators import RANDK, TOPK
from compression.values import BF16, FP16, FP32
from compression.wire import LayerUpdate, header_bytes
from tests.compression.support import dense_of, flat_layout, header_of, same_update, vector

SEEDS = [int(s) for s in np.random.default_rng(3).integers(0, 2**32, size=6000)]


@given(st.integers(0, 2**32 - 1), st.integers(1, 9000), st.floats(0, 1))
@settings(max_examples=200)
def test_a_support_is_distinct_ascending_and_within_the_layer(seed: int, d: int, share: float) -> None:
    k = round(share * d)
    support = seeded_support(seed, k, d)
    assert support.shape == (k,)
    assert support.dtype == np.int64
    assert np.all(np.diff(support) > 0)
    assert k == 0 or (support[0] >= 0 and support[-1] < d)
    assert np.array_equal(seeded_support(seed, d, d), np.arange(d))


def test_supports_are_the_ones_in_the_specification() -> None:
    """Worked by Python's own integers, as compression/indices.py describes it."""
    mask = 2**64 - 1
    golden = 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    def small(seed: int, k: int, d: int) -> list[int]:
        order = sorted(range(d), key=lambda x: (mix((mix(seed) + (x + 1) * golden) & mask), x))
        return sorted(order[:k])

    def large(seed: int, k: int, d: int) -> list[int]:
        b = (d - 1).bit_length()
        keys = [mix((seed + (i + 1) * golden) & mask) for i in range(8)]

        def network(x: int) -> int:
            wide, narrow = b // 2, b - b // 2
            u, low = x >> narrow, x & ((1 << narrow) - 1)
            for key in keys:
                u ^= (mix((low + key) & mask) >> 32) & ((1 << wide) - 1)
                u, low, wide, narrow = low, u, narrow, wide
            return (u << narrow) | low

        found = []
        for x in range(k):
            y = network(x)
            while y >= d:
                y = network(y)
            found.append(y)
        return sorted(found)

    for seed, k, d in ((0, 2, 5), (1, 3, 10), (2**32 - 1, 100, 4096)):
        assert seeded_support(seed, k, d).tolist() == small(seed, k, d)
    for seed, k, d in ((0, 5, 4097), (7, 40, 9999), (2**32 - 1, 33, 65_537), (123, 20, 11_173_962)):
        assert seeded_support(seed, k, d).tolist() == large(seed, k, d)


@pytest.mark.parametrize(("d", "k"), [(2, 1), (3, 1), (5, 2), (7, 3), (64, 5), (5000, 50)])
def test_every_position_and_every_pair_is_drawn_as_often_as_any_other(d: int, k: int) -> None:
    single = np.zeros(d)
    pairs: dict[tuple[int, int], int] = dict.fromkeys(itertools.combinations(range(min(d, 8)), 2), 0)
    for seed in SEEDS:
        support = seeded_support(seed, k, d)
        single[support] += 1
        for pair in itertools.combinations([p for p in support.tolist() if p < 8], 2):
            pairs[pair] += 1
    n = len(SEEDS)
    # positions: counts are binomial(n, k/d); their chi-square has mean d - 1 and variance 2 (d - 1)
    chi = float(np.sum((single - n * k / d) ** 2) / (n * k / d * (1 - k / d)) * (d - 1) / d)
    assert abs(chi - (d - 1)) < 5 * np.sqrt(2 * (d - 1)) + 5
    share = k * (k - 1) / (d * (d - 1))
    for count in pairs.values():
        assert abs(count - n * share) <= 5 * np.sqrt(n * share * (1 - share)) + 1


def test_the_message_costs_a_seed_and_no_index() -> None:
    layout = flat_layout([10_000, 300])
    header = header_of(layout)
    x = [vector("gauss", d, "float32", d) for d in (10_000, 300)]
    got = compress(layout, header, x, None, Scheme("randk", ratio=0.1), None, seed=5)
    assert got.kept == (1000, 30)
    per_layer = 2 + SEED_BYTES
    assert len(got.payload) == header_bytes(header) + (per_layer + 2 + 2000) + (per_layer + 1 + 60)


@pytest.mark.parametrize("allocation", [a.name for a in ALLOCATIONS])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_budget_is_kept(allocation: str, dtype: str) -> None:
    sizes = [30_000, 2000, 100, 1, 0]
    layout = flat_layout(sizes, dtype)
    header = header_of(layout)
    x = [vector("heavy", d, dtype, d) for d in sizes]
    scheme = Scheme("randk", allocation=allocation)
    for budget in (60, 100, 500, 5000, 60_000, 10**7):
        got = compress(layout, header, x, None, scheme, budget, seed=1)
        assert got.miss == (len(got.payload) > budget)
        found = decode(layout, got.payload)
        assert all(same_update(a, b) for a, b in zip(got.updates, found.updates, strict=True))
        for at, (vec, update) in enumerate(zip(x, got.updates, strict=True)):
            left = vec.astype(np.float64) - dense_of(update, vec.size)
            assert got.error_sq[at] == pytest.approx(float(left @ left), rel=1e-9, abs=1e-300)
        if not got.miss and not got.everything_fits and budget >= 5000 and allocation != "knapsack":
            assert len(got.payload) >= 0.99 * budget
    assert got.everything_fits


def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    layout = flat_layout([5000, 5000])
    x = [np.ones(5000, np.float32)] * 2
    header = header_of(layout)
    scheme = Scheme("randk", ratio=0.1)
    once, again, other = (compress(layout, header, x, None, scheme, None, seed=s) for s in (1, 1, 2))
    assert once.payload == again.payload
    first, second = (u.indices for u in once.updates)
    assert first is not None
    assert second is not None
    assert not np.array_equal(first, second)  # each layer draws for itself
    third = other.updates[0].indices
    assert third is not None
    assert not np.array_equal(first, third)


def test_it_contracts_in_expectation_by_the_alpha_it_states() -> None:
    layout = flat_layout([200, 40], "float64")
    x = [vector("heavy", 200, "float64", 1), vector("gauss", 40, "float64", 2)]
    scheme = Scheme("randk", ratio=0.25, values="fp64")
    got = [compress(layout, header_of(layout), x, None, scheme, None, seed=s) for s in range(2000)]
    assert {g.alpha for g in got} == {0.25}
    assert guaranteed_alpha(layout, Scheme("randk", floor=2)) == pytest.approx((1 - 2.0**-16) * 0.01)
    for at in range(2):
        lost = np.array([g.error_sq[at] / g.norm_sq[at] for g in got])
        assert lost.mean() == pytest.approx(0.75, abs=5 * lost.std() / np.sqrt(len(got)))


def test_a_record_that_is_not_its_seeds_is_refused() -> None:
    layout = flat_layout([100])
    header = header_of(layout)
    support = seeded_support(9, 5, 100)
    values = np.ones(5, np.float32)
    good = Record(RANDK, FP32, LayerUpdate(support, values), 9)
    assert len(encode(layout, header, [good])) == predicted_bytes(layout, header, [good])
    wrong = (
        Record(RANDK, FP32, LayerUpdate(support, values), 8),
        Record(RANDK, FP32, LayerUpdate(support, values)),
        Record(TOPK, FP32, LayerUpdate(support, values), 9),
    )
    for record in wrong:
        with pytest.raises(UpdateError, match="seed"):
            encode(layout, header, [record])


@pytest.mark.parametrize("coding", [BF16, FP16, FP32])
def test_any_damage_is_a_wire_error_or_another_legal_message(coding: object) -> None:
    layout = flat_layout([5000, 60])
    header = header_of(layout)
    x = [vector("gauss", d, "float32", d) for d in (5000, 60)]
    values = getattr(coding, "name", "")
    payload = compress(layout, header, x, None, Scheme("randk", values=values, ratio=0.02), None, seed=3).payload
    rng = np.random.default_rng(0)
    import zlib

    for _ in range(1500):
        body = bytearray(payload[:-4])
        for _ in range(int(rng.integers(1, 4))):
            body[int(rng.integers(30, len(body)))] = int(rng.integers(256))
        cut = body[: int(rng.integers(30, len(body) + 1))] if rng.random() < 0.3 else body
        try:
            decode(layout, bytes(cut) + zlib.crc32(cut).to_bytes(4, "little"))
        except WireError:
            continue
