"""Stochastic quantisers: moments, worst cases, golden draws, awkward numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression.errors import ConfigError, UpdateError
from compression.quantise import (
    CHUNK,
    NATURAL_OMEGA,
    NEAREST_ALPHA,
    ZERO,
    Powers,
    Quantised,
    Quantiser,
    block_norms,
    natural,
    natural_variance,
    nearest_power,
    omega,
    one_bit_qsgd,
    qsgd,
    quant,
    quantise,
    restore,
    restore_nonzero,
    restore_powers,
    terngrad,
    variance,
)
from compression.randomness import uniforms, words
from tests.compression.support import KINDS, vector

QUANTISERS = [
    quant(1, 50),
    quant(2, 64),
    terngrad(100),
    qsgd(4, 64),
    Quantiser(math.inf, 7, 33),
    Quantiser(1, 3, 40),
    qsgd(200, 70),
    quant(2, 64, "fp16"),
    qsgd(4, 50, "fp16"),
]


def draw(x: NDArray[Any], quantiser: Quantiser, seed: int) -> Quantised:
    return quantise(x, quantiser, seed=seed, client="c", round_=3, purpose="layer")


# ---- moments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_it_is_unbiased_and_its_variance_is_the_formula(quantiser: Quantiser, dtype: str) -> None:
    x = vector("heavy", 230, dtype, 5)  # no block divides it
    exact = x.astype(np.float64)
    n = 1200
    got = np.array([restore(draw(x, quantiser, seed), "float64") for seed in range(n)])
    # each mean lies within 6 of its standard errors: fails with probability 230 * 2e-9 for a right quantiser
    spread = got.std(axis=0) / np.sqrt(n)
    assert np.all(np.abs(got.mean(axis=0) - exact) <= 6 * spread + _rare(x, quantiser, n) + 1e-6 * np.abs(exact))
    errors = ((got - exact) ** 2).sum(axis=1)
    assert errors.mean() == pytest.approx(variance(x, quantiser), abs=6 * errors.std() / np.sqrt(n))


def _rare(x: NDArray[Any], quantiser: Quantiser, n: int) -> NDArray[np.float64]:
    """What a mean of n may miss where hardly a draw differs: 25 events of size N/s."""
    norms = np.repeat(block_norms(x, quantiser).astype(np.float64), quantiser.block)[: x.size]
    return 25 * norms / quantiser.levels / n


@pytest.mark.parametrize(
    ("quantiser", "share"), [(terngrad(1 << 17), 2.0**-10), (Quantiser(math.inf, 128, 1 << 17), 2.0**-18)]
)
def test_what_the_first_bits_leave_open_is_drawn_as_well(quantiser: Quantiser, share: float) -> None:
    """t is below one unit of the first 8 or 16 bits: without the others no level would ever differ from 0."""
    x = np.full(1 << 17, share * 2, np.float32)
    x[0] = 1.0
    expected = (x.size - 1) * share * 2 * quantiser.levels
    for sign in (1, -1):
        levels = draw(np.float32(sign) * x, quantiser, 1).levels
        assert levels[0] == sign * quantiser.levels
        hits = int(np.count_nonzero(levels[1:] == sign))
        assert np.count_nonzero(levels[1:]) == hits
        assert abs(hits - expected) <= 6 * math.sqrt(expected)  # binomial, nearly Poisson


@given(st.sampled_from(KINDS), st.integers(1, 300), st.integers(0, 50), st.sampled_from(QUANTISERS))
@settings(max_examples=150)
def test_no_vector_is_beyond_omega(kind: str, d: int, seed: int, quantiser: Quantiser) -> None:
    x = vector(kind, d, "float64", seed)
    assert variance(x, quantiser) <= omega(quantiser, d) * float(x @ x) * (1 + 1e-12) + 1e-12 * float(x @ x)


@pytest.mark.parametrize("n", [2, 3, 16, 100])
@pytest.mark.parametrize("s", [1, 2, 5])
def test_worst_vectors_attain_omega(n: int, s: int) -> None:
    equal = np.ones(n)
    for p, r in ((1, n), (2, math.sqrt(n))):
        quantiser = Quantiser(p, s, n)
        if r >= 2 * s:
            # N = r, t = s/r <= 1/2: n (N/s)^2 t (1 - t) = n (r/s - 1), and ||x||^2 = n
            assert variance(equal, quantiser) / n == pytest.approx(r / s - 1)
            assert omega(quantiser, 10 * n) == pytest.approx(r / s - 1)
    top = Quantiser(math.inf, s, n)
    worst = np.full(n, 1 / (2 * s * (1 + omega(top, n))))
    worst[0] = 1.0
    assert variance(worst, top) / float(worst @ worst) == pytest.approx(omega(top, n))


def test_omega_with_one_level_is_the_table_of_diana() -> None:
    for n in (2, 7, 512):
        alphas = {1: 1 / n, 2: 1 / math.sqrt(n), math.inf: 2 / (1 + math.sqrt(n))}
        for p, alpha in alphas.items():
            assert 1 + omega(quant(p, n), 10 * n) == pytest.approx(1 / alpha)
            assert 1 + omega(quant(p, 10**6), n) == pytest.approx(1 / alpha)
            assert omega(quant(p, n), 10 * n) < omega(quant(p, n, "fp16"), 10 * n) < omega(quant(p, n), 10 * n) + 1e-3
    assert omega(qsgd(4), 16) == pytest.approx(16 / (4 * 16))
    assert omega(quant(2), 1) == omega(quant(2), 0) == 0


def test_one_level_has_the_variance_of_diana() -> None:
    x = np.array([3.0, -4.0, 0.0, 12.0, 5.0])
    # blocks (3, -4, 0), (12, 5): sum ||v||_1 ||v||_p - ||v||_2^2
    assert variance(x, quant(2, 3)) == pytest.approx((7 * 5 - 25) + (17 * 13 - 169))
    assert variance(x, quant(math.inf, 3)) == pytest.approx((7 * 4 - 25) + (17 * 12 - 169))
    assert variance(x, quant(1, 3)) == pytest.approx((49 - 25) + (289 - 169))
    # s = 2, p = 2, block (3, -4, 0): t = 6/5, 8/5; f(1-f) = .16, .24; (N/s)^2 = 6.25
    assert variance(x[:3], qsgd(2, 3)) == pytest.approx(6.25 * 0.4)


# ---- golden -----------------------------------------------------------------------------------


def reference(x: NDArray[Any], quantiser: Quantiser, seed: int) -> list[int]:
    """Levels by Python's integers, as the module describes its draws."""
    bits = 8 if quantiser.levels <= 127 else 16
    key = {"seed": seed, "client": "c", "round_": 3}
    stream = b"".join(
        int(w).to_bytes(8, "little")
        for w in words(x.size, purpose="layer/levels", **key)  # type: ignore[arg-type]
    )
    rest = iter(uniforms(x.size, purpose="layer/rest", **key).tolist())  # type: ignore[arg-type]
    norms = block_norms(x, quantiser)
    levels = []
    for j, value in enumerate(x):
        norm = norms[j // quantiser.block]
        t = float(value / norm * x.dtype.type(quantiser.levels << bits)) if norm else 0.0
        lane = int.from_bytes(stream[j * bits // 8 : (j + 1) * bits // 8], "little")
        unit = math.floor(t) + lane
        level = unit >> bits
        if unit % (1 << bits) == (1 << bits) - 1 and next(rest) < t - math.floor(t):
            level += 1
        levels.append(level)
    return levels


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("quantiser", [terngrad(37), qsgd(5, 64), qsgd(300, 1000), quant(1, 5000)], ids=str)
def test_levels_are_the_ones_described(quantiser: Quantiser, dtype: str) -> None:
    x = vector("heavy", 3000, dtype, 2)
    assert draw(x, quantiser, 11).levels.tolist() == reference(x, quantiser, 11)


def test_golden_levels() -> None:
    """The same bytes on every platform: bytes of the first word of the key, by hand.

    x = (1/2, -1/4, 1, -1, 0), N = 1: floor(256 t) = 128, -64, 256, -256, 0. Plus the bytes 209, 180, 185, 50,
    217: 337, 116, 441, -206, 217, of which the whole 256s are 1, 0, 1, -1, 0.
    """
    first = int(words(1, seed=9, client="c", round_=3, purpose="layer/levels")[0]).to_bytes(8, "little")
    assert list(first[:5]) == [209, 180, 185, 50, 217]
    assert draw(np.array([0.5, -0.25, 1, -1, 0]), terngrad(5), 9).levels.tolist() == [1, 0, 1, -1, 0]


@pytest.mark.parametrize("d", [1, 7, 8, 100, 128, 129, 512, 1000])
def test_sums_of_norms_are_in_the_order_described(d: int) -> None:
    """NumPy's pairwise sum: eight running sums up to 128 numbers, halves (multiples of 8) beyond."""

    def pairwise(a: list[float]) -> float:
        if len(a) < 8:
            total = -0.0 if not a else 0.0
            for v in a:
                total += v
            return total
        if len(a) <= 128:
            r = a[:8]
            whole = len(a) - len(a) % 8
            for i in range(8, whole, 8):
                r = [s + v for s, v in zip(r, a[i : i + 8], strict=True)]
            total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
            for v in a[whole:]:
                total += v
            return total
        half = len(a) // 2
        half -= half % 8
        return pairwise(a[:half]) + pairwise(a[half:])

    x = vector("gauss", 3 * d, "float64", d)
    for at, got in enumerate(block_norms(x, quant(1, d))):
        assert got == pairwise([abs(v) for v in x[at * d : (at + 1) * d].tolist()])
    for at, got in enumerate(block_norms(x, quant(2, d))):
        assert got == math.sqrt(pairwise([v * v for v in x[at * d : (at + 1) * d].tolist()]))


def test_golden_values() -> None:
    levels = np.array([3, -1, 0, 2, -3], np.int8)
    q = Quantised(qsgd(3, 2), np.array([1.5, 0.0, 3.0], np.float32), 0, levels)
    # 1.5 * (1, -1/3), 0 * (0, 2/3), 3 * -1
    assert restore(q, "float64").tolist() == [1.5, -0.5, 0.0, 0.0, -3.0]
    half = Quantised(quant(2, 2, "fp16"), np.array([1.5, 0.0, 3.0], np.float16), -2, np.sign(levels))
    assert restore(half, "float32").tolist() == [0.375, -0.375, 0.0, 0.0, -0.75]
    beyond = Quantised(quant(2, 2, "fp16"), np.array([1.5], np.float16), 2000, np.array([1, -1], np.int8))
    limit = float(np.finfo(np.float32).max)
    assert restore(beyond, "float32").tolist() == [limit, -limit]


# ---- forms ------------------------------------------------------------------------------------


def test_named_cases_are_one_family() -> None:
    assert terngrad(7) == quant(math.inf, 7) == Quantiser(math.inf, 1, 7)
    assert one_bit_qsgd(7) == qsgd(1, 7) == quant(2, 7)
    assert qsgd(127).level_dtype == np.int8
    assert qsgd(128).level_dtype == np.int16


def test_all_problems_of_a_quantiser_are_named_together() -> None:
    with pytest.raises(ConfigError, match="4 settings are wrong") as caught:
        Quantiser(3, 0, 0, "fp8")
    assert [p.split()[0] for p in caught.value.problems] == ["p", "levels", "block", "norms"]
    with pytest.raises(ConfigError, match="levels is in 1"):
        Quantiser(2, (1 << 14) + 1)


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("d", [0, 1, 63, 64, 65, CHUNK + 5])
def test_shapes_ranges_and_both_ways_to_restore(quantiser: Quantiser, dtype: str, d: int) -> None:
    x = vector("heavy", d, dtype, 1)
    q = draw(x, quantiser, 4)
    s = quantiser.levels
    assert q.norms.shape == (quantiser.blocks(d),)
    assert q.norms.dtype == (np.float16 if quantiser.norms == "fp16" else dtype)
    assert q.levels.shape == (d,)
    assert q.levels.dtype == quantiser.level_dtype
    assert np.all(np.abs(q.levels.astype(int)) <= s)
    assert np.all((q.levels == 0) | (np.sign(q.levels) == np.sign(x)))
    dense = restore(q, dtype)
    assert dense.dtype == dtype
    positions, values = restore_nonzero(q, dtype)
    assert values.dtype == dtype
    rebuilt = np.zeros(d, dtype)
    rebuilt[positions] = values
    assert np.array_equal(positions, np.flatnonzero(q.levels))
    assert np.array_equal(rebuilt, dense)
    # level j is the floor or the one above it
    t = np.repeat(block_norms(x, quantiser).astype(np.float64), quantiser.block)[:d]
    t = x.astype(np.float64) * s / np.where(t > 0, t, 1)
    assert np.all(np.abs(q.levels - t) < 1 + 1e-4 * s)


def test_blocks_longer_than_a_chunk_and_chunks_of_many_blocks_agree() -> None:
    x = vector("gauss", 3 * CHUNK + 17, "float32", 0)
    long = draw(x, terngrad(10**9), 1)
    assert long.norms.tolist() == [float(np.abs(x).max())]
    top = float(np.abs(x).max())
    padded = np.concatenate((x, np.zeros(7, np.float32)))  # the same norm in each of its blocks of 1000
    padded[::1000] = top
    x[::1000] = top
    assert np.array_equal(draw(padded, terngrad(1000), 1).levels[: x.size], draw(x, terngrad(10**9), 1).levels)
    two = block_norms(x, quant(2, 2 * CHUNK))
    for at, block in enumerate((x[: 2 * CHUNK], x[2 * CHUNK :])):
        assert two[at] == pytest.approx(np.linalg.norm(block.astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=str)
def test_equal_keys_give_equal_bytes_and_others_do_not(quantiser: Quantiser) -> None:
    x = vector("gauss", 1000, "float32", 0)

    def made(seed: int = 1, client: str = "a", round_: int = 2, purpose: str = "l") -> bytes:
        q = quantise(x, quantiser, seed=seed, client=client, round_=round_, purpose=purpose)
        return q.levels.tobytes() + q.norms.tobytes()

    before = str(np.random.get_state())  # noqa: NPY002
    assert made() == made()
    assert len({made(), made(seed=2), made(client="b"), made(round_=3), made(purpose="m")}) == 5
    assert str(np.random.get_state()) == before  # noqa: NPY002


# ---- awkward numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("quantiser", QUANTISERS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zero_is_zero_and_one_element_is_itself(quantiser: Quantiser, dtype: str) -> None:
    zero = draw(np.zeros(100, dtype), quantiser, 1)
    assert not zero.levels.any()
    assert not restore(zero, dtype).any()
    assert variance(np.zeros(100, dtype), quantiser) == 0
    values = (3.0, -0.1, 3e38, -1e-45) + ((1e308, 5e-324) if dtype == "float64" else ())
    for value in values:
        one = np.array([value], dtype)
        q = draw(one, quantiser, 1)
        assert q.levels.tolist() == [math.copysign(quantiser.levels, value)]
        tolerance = 2.0**-10 if quantiser.norms == "fp16" else 0
        assert restore(q, dtype)[0] == pytest.approx(one[0], rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 1e-44), ("float32", 3e38), ("float64", 5e-324), ("float64", 1.7e308)]
)
@pytest.mark.parametrize("p", [1, 2, math.inf])
def test_numbers_at_both_ends_stay_finite_and_unbiased(dtype: str, size: float, p: float) -> None:
    """N > the largest finite value is cut to it; still N >= max|v|, so C stays unbiased."""
    x = (np.array([1, -1, 1, 1] * 500) * size).astype(dtype)
    q = draw(x, Quantiser(p, 1, 2000), 1)
    assert np.isfinite(q.norms).all()
    assert np.isfinite(restore(q, dtype)).all()
    share = float(np.abs(x[0])) / float(q.norms[0])
    assert share <= 1
    # Bernoulli(share) of 2000: within 6 standard deviations
    assert abs(np.count_nonzero(q.levels) - 2000 * share) <= 6 * math.sqrt(2000 * share * (1 - share)) + 1e-9


def test_equal_magnitudes_are_all_sent_by_terngrad() -> None:
    x = vector("equal", 1000, "float32", 3)
    assert np.array_equal(restore(draw(x, terngrad(64), 1), "float32"), x)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_not_finite_or_flat_is_refused(bad: float, dtype: str) -> None:
    x = np.ones(1000, dtype)
    x[777] = bad
    for quantiser in QUANTISERS:
        with pytest.raises(UpdateError, match="'layer', element 777: is not finite"):
            draw(x, quantiser, 1)
    with pytest.raises(UpdateError, match="element 777"):
        natural(x, seed=1, purpose="layer")
    with pytest.raises(UpdateError, match="element 777"):
        nearest_power(x)
    for wrong in (np.ones((2, 2)), np.ones(3, np.int64), np.ones(3, np.float16)):
        with pytest.raises(UpdateError, match="expected a flat float32 or float64"):
            draw(wrong, terngrad(), 1)


def test_norms_in_fp16_are_neighbours_and_unbiased() -> None:
    x = vector("clustered", 20 * 64, "float32", 1)
    exact = block_norms(x, quant(2, 64)).astype(np.float64)
    n = 1000
    got = np.array([draw(x, quant(2, 64, "fp16"), seed).norm_values() for seed in range(n)])
    unit = 2.0 ** (np.frexp(exact.max())[1] - 15)
    assert 2.0**14 <= exact.max() / unit < 2.0**15
    gap = np.spacing((exact / unit).astype(np.float16)).astype(np.float64) * unit
    assert np.all(np.abs(got - exact) < gap * 1.001)
    different = [len(set(column)) for column in got.T.tolist()]
    assert max(different) == 2
    assert sum(different) >= 35  # a norm that is all but a half is met by one of them
    # a mean of n numbers at most a gap apart: within 6 standard errors
    assert np.all(np.abs(got.mean(axis=0) - exact) <= 6 * gap / 2 / math.sqrt(n))


def test_a_norm_lost_in_fp16_counts_in_the_variance() -> None:
    # units of 2**-14; the second norm is half of the smallest half 2**-24: 0 or twice itself, evenly
    x = np.array([1.0, 2.0**-39])
    lossy = terngrad(1, "fp16")
    assert variance(x, lossy) == 2.0**-78
    assert variance(x, lossy) <= omega(lossy, 2)
    assert {draw(x, lossy, seed).norm_values()[1] for seed in range(40)} == {0.0, 2.0**-38}


# ---- powers of two ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_natural_compression_is_unbiased_with_omega_an_eighth(dtype: str) -> None:
    x = np.concatenate((vector("heavy", 300, dtype, 1), np.zeros(3, dtype))).astype(dtype)
    exact = x.astype(np.float64)
    n = 1200
    got = np.array([restore_powers(natural(x, seed=s, purpose="l"), dtype) for s in range(n)], np.float64)
    # each lies within a factor of 2: |x| / 2 is more than a standard deviation
    assert np.all(np.abs(got.mean(axis=0) - exact) <= 6 * np.abs(exact) / 2 / math.sqrt(n))
    errors = ((got - exact) ** 2).sum(axis=1)
    assert errors.mean() == pytest.approx(natural_variance(x), abs=6 * errors.std() / math.sqrt(n))
    assert natural_variance(x) <= NATURAL_OMEGA * float(exact @ exact)
    worst = np.array([4 / 3], dtype)  # f = 1/3: f (1 - f)/(1 + f)^2 = (2/9)/(16/9)
    assert natural_variance(worst) == pytest.approx(float(worst[0]) ** 2 / 8, rel=1e-6)


def test_natural_compression_draws_the_bits_beyond_the_first_eight() -> None:
    x = np.full(1 << 17, 1 + 2.0**-11, np.float32)
    ups = int(np.count_nonzero(natural(x, seed=1, purpose="l").exponents))
    assert abs(ups - 64) <= 48  # Poisson with mean 64: 6 standard deviations


def test_nearest_power_contracts_by_eight_ninths() -> None:
    x = vector("heavy", 5000, "float32", 1)
    got = restore_powers(nearest_power(x), "float64")
    assert np.all((got - x) ** 2 <= (1 - NEAREST_ALPHA) * x.astype(np.float64) ** 2 * (1 + 1e-12))
    golden = np.array([1.0, 1.49, 1.5, -1.51, 0.75, 0.74, 0.0, -0.0, 3.0])
    assert restore_powers(nearest_power(golden), "float64").tolist() == [1, 1, 2, -2, 1, 0.5, 0, 0, 4]
    worst = np.array([1.5])
    assert (restore_powers(nearest_power(worst), "float64")[0] - 1.5) ** 2 == pytest.approx(1.5**2 / 9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_power_survives_and_nothing_becomes_infinite(dtype: str) -> None:
    least, most = (-149, 127) if dtype == "float32" else (-1074, 1023)
    exponents = np.arange(least, most + 1)
    x = np.concatenate((np.ldexp(1.0, exponents), -np.ldexp(1.0, exponents), [0.0])).astype(dtype)
    for powers in (natural(x, seed=1, purpose="l"), nearest_power(x)):
        assert powers.exponents.tolist() == [*exponents.tolist(), *exponents.tolist(), ZERO]
        assert np.array_equal(restore_powers(powers, dtype), x)
    top = np.full(100, np.finfo(dtype).max)
    for powers in (natural(top, seed=1, purpose="l"), nearest_power(-top)):
        assert np.all(powers.exponents == most)
        assert np.isfinite(restore_powers(powers, dtype)).all()
    three = np.full(2000, 3 * np.ldexp(1.0, least)).astype(dtype)  # subnormal: 3 = 2 or 4, evenly
    drawn = natural(three, seed=1, purpose="l").exponents - least
    assert set(drawn.tolist()) == {1, 2}
    assert abs(int(np.count_nonzero(drawn == 2)) - 1000) <= 6 * math.sqrt(500)
    wide = Powers(np.array([False, True]), np.array([3000, -3000], np.int16))
    assert restore_powers(wide, dtype).tolist() == [2.0**most, -(2.0**least)]


def test_natural_compression_depends_on_its_key_alone() -> None:
    x = vector("gauss", 2 * CHUNK + 3, "float32", 1)
    made = [
        natural(x, seed=s, client=c, round_=r, purpose=p).exponents.tobytes()
        for s, c, r, p in [
            (1, "", 0, "a"),
            (1, "", 0, "a"),
            (2, "", 0, "a"),
            (1, "x", 0, "a"),
            (1, "", 1, "a"),
            (1, "", 0, "b"),
        ]
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 5
