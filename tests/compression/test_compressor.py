from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import (
    Compressed,
    Header,
    Layout,
    Scheme,
    compress,
    decode,
    dense_bytes_on_wire,
    guaranteed_alpha,
    smallest_bytes,
)
from compression.errors import ConfigError, LayoutError, UpdateError
from compression.operators import OPERATORS
from tests.compression.support import KINDS, dense_of, flat_layout, header_of, same_update, vector

DTYPES = ["float32", "float64"]
PATHS = ["uniform", "hull", "global"]
NAMES = [*PATHS, "knapsack"]
PAIR = ["uniform", "hull"]


def check(
    layout: Layout,
    header: Header,
    x: list[NDArray[Any]],
    whole: dict[str, NDArray[Any]],
    got: Compressed,
    scheme: Scheme,
) -> None:
    """Everything that holds for every message in bytes."""
    found = decode(layout, got.payload)
    assert found.header == header
    assert all(same_update(a, b) for a, b in zip(got.updates, found.updates, strict=True))
    assert {name: a.tolist() for name, a in found.whole.items()} == {name: a.tolist() for name, a in whole.items()}
    for at, (vec, update) in enumerate(zip(x, got.updates, strict=True)):
        exact = vec.astype(np.float64)
        left = exact - dense_of(update, vec.size)
        assert got.error_sq[at] == pytest.approx(float(left @ left), rel=1e-9, abs=1e-300)
        assert got.norm_sq[at] == pytest.approx(float(exact @ exact), rel=1e-9, abs=1e-300)
        assert got.kept[at] == update.values.size
        assert got.ratios[at] == (got.kept[at] / vec.size if vec.size else 1.0)
        if update.indices is not None and scheme.operator == "topk":
            assert np.count_nonzero(vec[update.indices]) == update.indices.size  # zeros are not sent
            kept = set(update.indices.tolist())
            order = np.argsort(-np.abs(vec), kind="stable")[: len(kept)].tolist()
            assert kept == set(order)
        if vec.size and np.any(vec):
            assert got.kept[at] >= 1
    assert got.miss == (got.budget_bytes is not None and len(got.payload) > got.budget_bytes)
    assert len(got.payload) <= dense_bytes_on_wire(layout, header)
    fills = got.budget_bytes is not None and not got.miss and not got.everything_fits and scheme.allocation in PATHS
    if fills and got.budget_bytes is not None and len(got.payload) >= 4096:
        assert len(got.payload) >= 0.99 * got.budget_bytes
    if got.everything_fits:
        assert all(
            u.indices is None or np.count_nonzero(vec) == u.values.size for vec, u in zip(x, got.updates, strict=True)
        )


@given(
    data=st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 2, 9, 64, 800, 5000, 20_000])), min_size=0, max_size=6
    ),
    dtype=st.sampled_from(DTYPES),
    allocation=st.sampled_from(NAMES),
    values=st.sampled_from(["auto", "native"]),
    share=st.floats(0, 1.1),
    floor=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(max_examples=200)
def test_every_budget_is_kept_and_used(
    data: list[tuple[str, int]], dtype: str, allocation: str, values: str, share: float, floor: int, seed: int
) -> None:
    layout = flat_layout([d for _, d in data], dtype, whole=1)
    header = header_of(layout)
    x = [vector(kind, d, dtype, seed + i) for i, (kind, d) in enumerate(data)]
    whole = {"count0": np.array(seed)}
    budget = int(share**3 * dense_bytes_on_wire(layout, header))
    scheme = Scheme(allocation=allocation, values=values, floor=floor)
    got = compress(layout, header, x, whole, scheme, budget)
    check(layout, header, x, whole, got, scheme)
    if got.miss:
        for vec, update in zip(x, got.updates, strict=True):
            nonzero = int(np.count_nonzero(vec))
            assert update.indices is None or update.values.size == min(floor, nonzero)
        assert len(got.payload) <= smallest_bytes(layout, header, scheme)
    assert got.payload == compress(layout, header, x, whole, scheme, budget).payload


@pytest.mark.parametrize("allocation", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_big_layers(kind: str, dtype: str, allocation: str) -> None:
    sizes = [150_000, 70_000, 9000, 128]
    layout = flat_layout(sizes, dtype)
    header = header_of(layout)
    x = [vector(kind, d, dtype, 10 + d) * 2.0 ** (3 * i) for i, d in enumerate(sizes)]
    x = [v.astype(dtype) for v in x]
    for budget in (4200, 9000, 60_000, 300_000):
        # zstd makes nothing of neighbours, so that sizes jump: the budget's last hundredth is promised without it.
        scheme = Scheme(allocation=allocation, codec="portable" if kind in ("equal", "clustered") else "auto")
        got = compress(layout, header, x, None, scheme, budget)
        check(layout, header, x, {}, got, scheme)
        assert not got.miss


def test_many_equal_layers_that_would_step_together() -> None:
    layout = flat_layout([10] * 1000)
    header = header_of(layout)
    x = [vector("gauss", 10, "float32", i) for i in range(1000)]
    for budget in (7000, 12_000, 19_000):
        for allocation in NAMES:
            scheme = Scheme(allocation=allocation)
            check(layout, header, x, {}, compress(layout, header, x, None, scheme, budget), scheme)


@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=5), st.integers(300, 30_000), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_hull_is_never_worse_than_uniform(kinds: list[str], budget: int, dtype: str) -> None:
    sizes = [400 * 3**i for i in range(len(kinds))]
    layout = flat_layout(sizes, dtype)
    x = [vector(kind, d, dtype, d) for kind, d in zip(kinds, sizes, strict=True)]
    even, best = (compress(layout, header_of(layout), x, None, Scheme(allocation=n), budget) for n in PAIR)
    assert sum(best.error_sq) <= sum(even.error_sq) * (1 + 1e-12)


def test_hull_is_much_better_where_layers_differ_and_never_beats_one_global_choice() -> None:
    sizes = [40_000] * 4
    layout = flat_layout(sizes)
    x = [vector("gauss", d, "float32", i) * np.float32(10.0 ** (i - 2)) for i, d in enumerate(sizes)]
    scheme = {name: Scheme(allocation=name, values="native") for name in PAIR}
    even, best = (compress(layout, header_of(layout), x, None, scheme[name], 20_000) for name in PAIR)
    assert sum(best.error_sq) < 0.9 * sum(even.error_sq)
    squares = np.sort(np.concatenate([v.astype(np.float64) for v in x]) ** 2)
    for got in (even, best):
        assert sum(got.error_sq) >= squares[: squares.size - sum(got.kept)].sum() * (1 - 1e-9)


def test_more_bytes_keep_more_and_lose_less() -> None:
    layout = flat_layout([30_000, 2000])
    x = [vector("heavy", 30_000, "float32", 1), vector("gauss", 2000, "float32", 2)]
    for name in PATHS:
        scheme = Scheme(allocation=name, values="bf16")
        rows = [compress(layout, header_of(layout), x, None, scheme, b) for b in range(200, 50_000, 2500)]
        kept, lost = [sum(row.kept) for row in rows], [sum(row.error_sq) for row in rows]
        assert kept == sorted(kept)
        assert lost == sorted(lost, reverse=True)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.integers(1, 9), st.sampled_from(DTYPES))
@settings(max_examples=60)
def test_smallest_bytes_is_never_missed(sizes: list[int], floor: int, dtype: str) -> None:
    layout = flat_layout(sizes, dtype, whole=2)
    header = header_of(layout)
    x = [vector("gauss", d, dtype, d) for d in sizes]
    whole = {"count0": np.array(1), "count1": np.array(2)}
    budget = smallest_bytes(layout, header, Scheme(floor=floor))
    assert not compress(layout, header, x, whole, Scheme(floor=floor), budget).miss
    bare = smallest_bytes(layout, header, Scheme(floor=floor), whole=False)
    assert bare == budget - 16
    assert not compress(layout, header, x, None, Scheme(floor=floor, allocation="uniform"), bare).miss


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_is_dense_and_exact(dtype: str) -> None:
    layout = flat_layout([500, 0, 1], dtype, whole=1)
    header = header_of(layout)
    x = [vector("heavy", d, dtype, 3) for d in (500, 0, 1)]
    got = compress(layout, header, x, {"count0": np.array(4)}, Scheme("identity"), None)
    assert len(got.payload) == dense_bytes_on_wire(layout, header)
    assert [u.values.tobytes() for u in got.updates] == [v.tobytes() for v in x]
    assert got.error_sq == (0.0, 0.0, 0.0)
    assert got.alpha == 1.0
    assert got.everything_fits
    tight = compress(layout, header, x, {"count0": np.array(4)}, Scheme("identity"), 100)
    assert tight.payload == got.payload
    assert tight.miss


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 1.0])
def test_a_fixed_ratio_without_a_budget(ratio: float) -> None:
    sizes = [100_000, 999, 7]
    layout = flat_layout(sizes)
    x = [vector("gauss", d, "float32", d) for d in sizes]
    got = compress(layout, header_of(layout), x, None, Scheme(ratio=ratio), None)
    check(layout, header_of(layout), x, {}, got, Scheme(ratio=ratio))
    for d, kept, update in zip(sizes, got.kept, got.updates, strict=True):
        assert kept == (d if update.indices is None else max(1, int(ratio * d)))


def test_a_ratio_caps_a_budget() -> None:
    layout = flat_layout([50_000])
    x = [vector("gauss", 50_000, "float32", 1)]
    roomy = compress(layout, header_of(layout), x, None, Scheme(ratio=0.01), 50_000)
    assert roomy.kept == (500,)
    assert not roomy.everything_fits
    joint = compress(layout, header_of(layout), x, None, Scheme(ratio=0.01), 800)
    assert joint.kept == (500,)  # with fewer bits each they fit
    assert len(joint.payload) <= 800
    tight = compress(layout, header_of(layout), x, None, Scheme(ratio=0.01, values="bf16"), 800)
    assert 150 < tight.kept[0] < 500
    assert len(tight.payload) <= 800


def test_without_ratio_and_budget_every_non_zero_goes() -> None:
    layout = flat_layout([3000])
    x = [vector("sparse", 3000, "float32", 1)]
    got = compress(layout, header_of(layout), x, None, Scheme(values="native"), None)
    assert got.everything_fits
    assert got.error_sq == (0.0,)
    assert got.kept == (int(np.count_nonzero(x[0])),)


@pytest.mark.parametrize("operator", [o.name for o in OPERATORS if not o.seeded and o.name != "quant"])
@pytest.mark.parametrize("values", ["auto", "native", "fp64", "fp32", "bf16", "fp16"])
def test_contraction_with_the_alpha_it_states(operator: str, values: str) -> None:
    sizes = [4000, 50, 3]
    for dtype in DTYPES:
        layout = flat_layout(sizes, dtype)
        for kind in ("gauss", "heavy", "clustered", "equal", "sparse"):
            x = [vector(kind, d, dtype, 5) for d in sizes]
            scheme = Scheme(operator, values=values, floor=2)
            for budget in (120, 1500, None):
                got = compress(layout, header_of(layout), x, None, scheme, budget)
                assert guaranteed_alpha(layout, scheme) <= got.alpha <= 1
                for error_sq, norm_sq in zip(got.error_sq, got.norm_sq, strict=True):
                    assert error_sq <= (1 - got.alpha) * norm_sq * (1 + 1e-12)


def test_guaranteed_alpha_golden() -> None:
    # floor 2 of the largest layer's 4,000, and bf16 loses at most (2**-8)**2 of what is kept
    assert guaranteed_alpha(flat_layout([4000, 9]), Scheme(floor=2, values="bf16")) == 2 / 4000 * (1 - 2.0**-16)
    # one level for K values keeps 1/K of what TopK keeps, at worst
    assert guaranteed_alpha(flat_layout([4000, 9]), Scheme(floor=2)) == 1 / 4000 * (1 - 2.0**-16)
    assert guaranteed_alpha(flat_layout([4000, 9]), Scheme(floor=2, values="native")) == 2 / 4000
    assert guaranteed_alpha(flat_layout([4000]), Scheme("identity")) == 1.0


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(allocation="uniform"), Scheme(ratio=0.01), Scheme("identity")])
@pytest.mark.parametrize("budget", [None, 900, 10_000_000])
@pytest.mark.parametrize(("value", "cause"), [(np.nan, "NaN"), (np.inf, r"\+Inf"), (-np.inf, "-Inf")])
def test_what_is_not_finite_is_refused(scheme: Scheme, budget: int | None, value: float, cause: str) -> None:
    sizes = [100_000, 40]
    layout = flat_layout(sizes)
    for layer, at in ((0, 0), (0, 65_537), (0, 99_999), (1, 39)):
        x = [vector("gauss", d, "float32", 1) for d in sizes]
        x[layer][at] = value
        with pytest.raises(UpdateError, match=cause) as caught:
            compress(layout, header_of(layout), x, None, scheme, budget)
        assert (caught.value.layer, caught.value.index) == (f"layer{layer}", at)
    x = [np.full(d, value, dtype=np.float32) for d in sizes]
    with pytest.raises(UpdateError, match=cause):
        compress(layout, header_of(layout), x, None, scheme, budget)


@pytest.mark.parametrize("scheme", [Scheme(), Scheme(allocation="uniform"), Scheme("identity")])
def test_a_norm_beyond_float64_is_refused(scheme: Scheme) -> None:
    layout = flat_layout([100], "float64")
    x = vector("gauss", 100, "float64", 1)
    x[3] = -1e200
    with pytest.raises(UpdateError, match=r"element 3: -1e.200: the layer's squared norm"):
        compress(layout, header_of(layout), [x], None, scheme, 150)


def test_wrong_shapes_dtypes_and_counts_are_refused() -> None:
    layout = flat_layout([6], whole=1)
    header = header_of(layout)
    whole = {"count0": np.array(1)}
    good = [np.ones(6, np.float32)]
    for bad in (np.ones(5, np.float32), np.ones((2, 3), np.float32), np.ones(6), np.ones(6, ">f4")):
        with pytest.raises(UpdateError, match="layer0"):
            compress(layout, header, [bad], whole, Scheme(), None)
    with pytest.raises(LayoutError, match="2 arrays for 1"):
        compress(layout, header, good * 2, whole, Scheme(), None)
    with pytest.raises(LayoutError, match="'count0'"):
        compress(layout, header, good, {}, Scheme(), None)
    with pytest.raises(UpdateError, match="count0"):
        compress(layout, header, good, {"count0": np.array(1.0)}, Scheme(), None)
    with pytest.raises(LayoutError, match="names layout"):
        compress(flat_layout([6]), header, good, None, Scheme(), None)


def test_a_scheme_reports_all_its_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        Scheme("topkk", "hul", "bf61", 1.5, 0)
    assert len(caught.value.problems) == 5
    for part in ("'topk'?", "'hull'?", "'bf16'?", "ratio 1.5", "floor 0"):
        assert part in str(caught.value)


def test_input_and_global_random_state_are_untouched() -> None:
    layout = flat_layout([20_000])
    x = vector("heavy", 20_000, "float32", 1)
    before = x.copy()
    x.flags.writeable = False
    state = str(np.random.get_state(legacy=True))  # noqa: NPY002
    compress(layout, header_of(layout), [x], None, Scheme(), 3000)
    compress(layout, header_of(layout), [x], None, Scheme("identity"), None)
    assert str(np.random.get_state(legacy=True)) == state  # noqa: NPY002
    assert x.tobytes() == before.tobytes()


def test_updates_do_not_share_memory_with_the_input() -> None:
    layout = flat_layout([50])
    x = vector("gauss", 50, "float32", 1)
    for scheme in (Scheme("identity"), Scheme(values="native")):
        got = compress(layout, header_of(layout), [x], None, scheme, None)
        assert not np.shares_memory(got.updates[0].values, x)


def test_an_empty_layout() -> None:
    layout = Layout(())
    header = header_of(layout)
    for name in ("topk", "identity"):
        got = compress(layout, header, [], None, Scheme(name), 1000)
        assert decode(layout, got.payload).updates == ()
        assert len(got.payload) == dense_bytes_on_wire(layout, header) == smallest_bytes(layout, header, Scheme(name))
        assert (got.alpha, got.miss, got.everything_fits) == (1.0, False, True)


@pytest.mark.slow
def test_a_layer_of_a_hundred_million() -> None:
    """Beside one of a single element; half a gigabyte of float32, a budget of a megabyte."""
    d = 10**8
    rng = np.random.default_rng(1)
    layout = flat_layout([d, 1])
    x = [rng.standard_normal(d, dtype=np.float32), np.array([2.5], np.float32)]
    for scheme in (Scheme(), Scheme(values="bf16"), Scheme(operator="randk"), Scheme(allocation="uniform")):
        got = compress(layout, header_of(layout), x, None, scheme, 1_000_000, seed=3)
        assert 990_000 <= len(got.payload) <= 1_000_000
        found = decode(layout, got.payload)
        assert all(same_update(a, b) for a, b in zip(got.updates, found.updates, strict=True))
        support = found.updates[0].indices if found.updates[0] is not None else None
        assert support is not None
        assert support[-1] > 0.99 * d
