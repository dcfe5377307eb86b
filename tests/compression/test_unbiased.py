"""The unbiased forms that DIANA needs: RandK times d/K, what is refused, and omega for its memory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression import Layout, Scheme, compress, decode, guaranteed_alpha, smallest_bytes, worst_omega
from compression.allocation import ALLOCATIONS
from compression.coded import CODED
from compression.errors import ConfigError, UpdateError
from compression.operators import NAMED, OPERATORS, unbiased_names
from compression.values import FP32
from tests.compression.support import KINDS, dense_of, flat_layout, header_of, same_update, vector

NAMES = [a.name for a in ALLOCATIONS]
DTYPES = ["float32", "float64"]
EPS = {"float32": 2.0**-24, "float64": 2.0**-50}  # float64 rounds d/K, and the mean here, too


def randk(**changes: object) -> Scheme:
    return Scheme("randk", contractive=False, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "k"), [(4, 1), (5, 2), (7, 3), (8, 5)])
def test_randk_over_all_supports_has_mean_x_and_the_stated_variance(d: int, k: int, dtype: str) -> None:
    """One real message for each of the (d choose k) supports; they are equally likely (test_randk)."""
    layout, x = flat_layout([d], dtype), vector("heavy", d, dtype, d)
    scheme = randk(ratio=(k + 0.5) / d)
    found: dict[tuple[int, ...], np.ndarray] = {}
    errors: dict[tuple[int, ...], float] = {}
    for seed in itertools.count():
        got = compress(layout, header_of(layout), [x], None, scheme, None, seed=seed)
        (update,) = decode(layout, got.payload).updates
        assert update is not None
        assert update.indices is not None
        assert same_update(update, got.updates[0])
        found[tuple(update.indices.tolist())] = dense_of(update, d)
        errors[tuple(update.indices.tolist())] = got.error_sq[0]
        assert got.alpha == pytest.approx(k / d)
        if len(found) == math.comb(d, k):
            break
    exact = x.astype(np.float64)
    draws = np.stack([found[support] for support in itertools.combinations(range(d), k)])
    assert np.all(np.abs(draws.mean(axis=0) - exact) <= 2 * EPS[dtype] * np.abs(exact))
    variance = float(np.mean(np.sum((draws - exact) ** 2, axis=1)))
    assert variance == pytest.approx((d / k - 1) * float(exact @ exact), rel=1e-6)
    for support, error_sq in errors.items():
        assert error_sq == pytest.approx(float(np.sum((found[support] - exact) ** 2)), rel=1e-12)


def test_randk_by_hand() -> None:
    """Three of seven: 3 * 7/3 = 7, 6 * 7/3 = 14, whichever are drawn; 1 * 7/3 rounded once to float32."""
    layout = flat_layout([7])
    x = np.array([3, 6, 1, 3, 6, 1, 0], np.float32)
    (update,) = compress(layout, header_of(layout), [x], None, randk(ratio=0.5), None, seed=4).updates
    assert update.indices is not None
    told = {3.0: 7.0, 6.0: 14.0, 1.0: float(np.float32(7 / 3)), 0.0: 0.0}
    assert update.values.tolist() == [told[v] for v in x[update.indices].tolist()]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 2, 9, 64, 800, 5000])), min_size=1, max_size=5),
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.sampled_from(["bytes", "coordinates"]),
    st.integers(1, 3),
    st.floats(0, 1.1),
)
@settings(max_examples=120)
def test_k_depends_on_no_draw_and_every_budget_is_kept(
    data: list[tuple[str, int]], allocation: str, dtype: str, unit: str, floor: int, share: float
) -> None:
    layout = flat_layout([d for _, d in data], dtype)
    header, x = header_of(layout), [vector(kind, d, dtype, i) for i, (kind, d) in enumerate(data)]
    scheme = randk(allocation=allocation, unit=unit, floor=floor)
    least = smallest_bytes(layout, header, scheme)
    total = sum(d for _, d in data) if unit == "coordinates" else layout.dense_bytes + least
    budget = int(share**3 * total)
    drawn = [compress(layout, header, x, None, scheme, budget, seed=seed) for seed in range(4)]
    assert len({(len(got.payload), got.miss, got.alpha, got.everything_fits) for got in drawn}) == 1
    sparse = {tuple(u.values.size for u in got.updates if u.indices is not None) for got in drawn}
    assert len(sparse) == 1
    got = drawn[0]
    assert guaranteed_alpha(layout, scheme) <= got.alpha <= 1
    for vec, update, told, error_sq in zip(
        x, got.updates, decode(layout, got.payload).updates, got.error_sq, strict=True
    ):
        assert same_update(update, told)
        left = vec.astype(np.float64) - dense_of(update, vec.size)
        assert error_sq == pytest.approx(float(left @ left), rel=1e-9, abs=1e-300)
    if unit == "bytes":
        assert got.miss == (len(got.payload) > budget)
        assert not got.miss or budget < least
    else:
        assert sum(got.kept) <= max(budget, sum(min(floor, d) for _, d in data))
    if got.everything_fits:
        assert [u.values.tobytes() for u in got.updates] == [v.tobytes() for v in x]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_of_a_layer_is_the_layer(dtype: str) -> None:
    layout = flat_layout([300, 1], dtype)
    x = [vector("heavy", 300, dtype, 1), vector("gauss", 1, dtype, 2)]
    for scheme, budget in ((randk(), None), (randk(), 10**6), (randk(unit="coordinates"), 301), (randk(floor=300), 9)):
        got = compress(layout, header_of(layout), x, None, scheme, budget)
        assert [u.values.tobytes() for u in got.updates] == [v.tobytes() for v in x]
        assert got.error_sq == (0.0, 0.0)
        assert got.alpha == 1.0


def test_hull_spends_on_unbiased_layers_what_lagrange_says() -> None:
    """min sum (d_i/K_i) n_i with sum K_i = K and n_i = ||x_i||^2: K_i in proportion to sqrt(d_i n_i).

    The least is (sum of these roots)^2/K (Cauchy and Schwarz). Seeds cost nothing worth naming here, and
    the hull is a chord of 1/K over steps of a third.
    """
    sizes = [40_000, 30_000, 20_000, 10_000]
    layout = flat_layout(sizes)
    x = [vector("gauss", d, "float32", i) * np.float32(3.0**i) for i, d in enumerate(sizes)]
    for budget in (4000, 12_000, 40_000):
        spread = {}
        for name in NAMES:
            got = compress(layout, header_of(layout), x, None, randk(allocation=name), budget, seed=1)
            terms = [d * n / k - n for d, n, k in zip(sizes, got.norm_sq, got.kept, strict=True)]
            roots = sum(math.sqrt(d * n) for d, n in zip(sizes, got.norm_sq, strict=True))
            best = roots**2 / sum(got.kept) - sum(got.norm_sq)
            spread[name] = sum(terms) / best
            assert spread[name] >= 1 - 1e-9
        assert spread["hull"] <= 1.03
        assert spread["global"] <= 1.03
        assert spread["uniform"] > 1.3
        assert spread["knapsack"] < spread["uniform"] or budget < 5000  # its grid begins at 1 % of a layer


def test_more_bytes_never_raise_the_variance() -> None:
    sizes = [9000, 700, 40]
    layout = flat_layout(sizes)
    x = [vector(kind, d, "float32", d) for kind, d in zip(("heavy", "gauss", "equal"), sizes, strict=True)]
    for name in NAMES:
        spread = []
        for budget in (150, 300, 700, 1500, 4000, 9000, 20_000, 38_000):
            got = compress(layout, header_of(layout), x, None, randk(allocation=name), budget, seed=1)
            rows = zip(sizes, got.norm_sq, got.kept, strict=True)
            spread.append(sum((d / k - 1) * n for d, n, k in rows))
        assert spread == sorted(spread, reverse=True)


def test_a_value_that_cannot_be_scaled_is_refused_whatever_is_drawn() -> None:
    layout = flat_layout([100])
    x = np.ones(100, np.float32)
    x[37] = -3e37
    for seed in range(20):
        with pytest.raises(UpdateError, match=r"layer0.*37: -3.*e\+37 times d/K = 20 is beyond float32"):
            compress(layout, header_of(layout), [x], None, randk(ratio=0.05), None, seed=seed)
        compress(layout, header_of(layout), [x], None, randk(ratio=0.2), None, seed=seed)


def test_natural_refuses_what_has_no_power_above_it() -> None:
    layout = flat_layout([3])
    scheme = Scheme("natural", contractive=False)
    top = np.array([1, 2.0**127, 3], np.float32)
    assert compress(layout, header_of(layout), [top], None, scheme, None).updates[0].values[1] == 2.0**127
    top[1] = 1.5 * 2.0**127
    with pytest.raises(UpdateError, match=r"element 1: .* has no power of two above it in float32"):
        compress(layout, header_of(layout), [top], None, scheme, None)
    compress(layout, header_of(layout), [top], None, Scheme("natural"), None)


# ---- what is refused --------------------------------------------------------------------------


def test_names_of_unbiased_operators() -> None:
    assert unbiased_names() == ["identity", "natural", "one-bit-qsgd", "qsgd", "quant", "randk", "terngrad"]
    for operator in OPERATORS:
        has_omega = CODED[operator.name].omega is not None if operator.coded else operator.omega is not None
        assert has_omega == operator.unbiased


@pytest.mark.parametrize("name", sorted({*(o.name for o in OPERATORS), *NAMED} - set(unbiased_names())))
def test_biased_operators_are_refused_with_the_unbiased_ones(name: str) -> None:
    text = rf"operator '{name}' is biased, and DIANA diverges with it: expected one of identity, natural, .* terngrad"
    with pytest.raises(ConfigError, match=text):
        Scheme(name, contractive=False)
    with pytest.raises(ConfigError, match=text):
        worst_omega(flat_layout([5]), Scheme(name))


@pytest.mark.parametrize("operator", ["randk", "identity"])
def test_values_that_round_are_refused(operator: str) -> None:
    for values in ("bf16", "fp16", "1bit", "6bit"):
        with pytest.raises(ConfigError, match=rf"values = '{values}' rounds.*: expected auto or native"):
            Scheme(operator, values=values, contractive=False)
    scheme = Scheme(operator, values="fp32", contractive=False)
    assert scheme.coding(flat_layout([3]).layers[0]) is FP32
    wide = flat_layout([3], "float64")
    for call in (lambda: worst_omega(wide, scheme), lambda: smallest_bytes(wide, header_of(wide), scheme)):
        with pytest.raises(ConfigError, match=r"values = 'fp32' rounds.*; layer 'layer0' is float64"):
            call()
    for values in ("auto", "native", "fp64"):
        assert worst_omega(wide, Scheme(operator, values=values, contractive=False)) >= 0


# ---- omega ------------------------------------------------------------------------------------


def test_worst_omega_golden() -> None:
    layout = flat_layout([4000, 90, 1, 0])
    assert worst_omega(layout, randk(floor=8)) == 4000 / 8 - 1
    assert worst_omega(layout, randk(floors=(("layer0", 0.5),))) == 90 - 1
    assert worst_omega(layout, Scheme("randk", floor=8)) == 4000 / 8 - 1
    assert worst_omega(layout, Scheme("identity", contractive=False)) == 0
    assert worst_omega(layout, Scheme("natural", contractive=False)) == 1 / 8
    quant = Scheme("quant", operator_args="p = inf, block = 400, norms = 'native'", contractive=False)
    assert worst_omega(layout, quant) == (math.sqrt(400) - 1) / 2  # 1/alpha_p - 1, alpha_p = 2/(1 + sqrt(B))
    for scheme in (randk(floor=8), quant, Scheme("natural", contractive=False)):
        assert guaranteed_alpha(layout, scheme) == 1 / (1 + worst_omega(layout, scheme))
    # two values dense take 2 + 8 bytes, one and its seed 2 + 1 + 4 + 4: such a layer is never sparse
    assert worst_omega(flat_layout([2]), randk()) == 0
    assert worst_omega(flat_layout([2]), randk(unit="coordinates")) == 1
    assert worst_omega(Layout(()), randk()) == 0


ADVERSE = [
    (randk(floor=2), 60),
    (randk(floor=2, allocation="uniform"), 60),
    (Scheme("quant", operator_args="p = 2, block = 64", contractive=False), None),
    (Scheme("terngrad", operator_args="block = 64", contractive=False), None),
    (Scheme("natural", contractive=False), None),
    (Scheme("quant", operator_args="block = 'auto'", contractive=False), 100),
    (Scheme("quant", operator_args="block = 'auto'", contractive=False), 240),
    (Scheme("qsgd", operator_args="levels = 'auto', block = 64", contractive=False), 250),
]


@pytest.mark.parametrize(("scheme", "budget"), ADVERSE)
def test_no_vector_varies_more_than_worst_omega_says(scheme: Scheme, budget: int | None) -> None:
    """Means over 300 messages; 5 of their estimated standard deviations are allowed, and fp16's 2**-10 of a norm."""
    layout = flat_layout([400, 60], "float64")
    omega, header = worst_omega(layout, scheme), header_of(layout)
    top = np.full(400, 1 / (1 + math.sqrt(64)))
    top[::64] = 1.0
    lone = np.zeros(400)
    lone[5] = -2.0
    reached = 0.0
    for x in (np.ones(400), top, lone, np.full(400, 4 / 3), vector("heavy", 400, "float64", 1)):
        pair = [x, x[:60].copy()]
        ratios = np.array(
            [
                [e / max(n, 1e-300) for e, n in zip(got.error_sq, got.norm_sq, strict=True)]
                for got in (compress(layout, header, pair, None, scheme, budget, seed=s) for s in range(300))
            ]
        )
        allowed = 5 * ratios.std(axis=0, ddof=1) / math.sqrt(300) + 1e-3
        assert np.all(ratios.mean(axis=0) <= omega + allowed)
        reached = max(reached, float(ratios.mean(axis=0).max()))
    if budget is None or budget <= 100:  # the worst there is was tried
        assert reached >= 0.8 * omega
