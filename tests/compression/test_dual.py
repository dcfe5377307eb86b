"""How far from the best: allocations against the Lagrangian bound, brute force and one global choice."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import Scheme, compress, idle_floors, parse_floors, smallest_bytes
from compression import knapsack as ks
from compression.allocation import ALLOCATIONS
from compression.errors import ConfigError
from compression.frames import varint_bytes
from compression.indices import rice_bytes
from compression.values import BF16
from compression.wire import dense_record_bytes, header_bytes
from tests.compression.support import flat_layout, header_of, vector

Floats = NDArray[np.float64]

# ResNet-18's layers, an eighteenth of each
RESNET = [
    *(96, 4, 4, *(2048, 4, 4) * 4, 4096, 7, 7, 8192, 7, 7, 455, 7, 7, *(8192, 7, 7) * 2),
    *(16_384, 14, 14, 32_768, 14, 14, 1820, 14, 14, *(32_768, 14, 14) * 2),
    *(65_536, 28, 28, 131_072, 28, 28, 7282, 28, 28, *(131_072, 28, 28) * 2, 284, 10),
]


def points(x: NDArray[Any]) -> Floats:
    """Exact (bytes, squared error with bf16's rounding) of a layer at many K, dense last; shape (n, 2)."""
    d = x.size
    order = np.argsort(-np.abs(x), kind="stable")
    tail = np.concatenate(([0.0], np.cumsum(np.sort(np.abs(x).astype(np.float64)) ** 2)))
    rounding = (x - BF16.round(x)).astype(np.float64)[order] ** 2
    rounded = np.concatenate(([0.0], np.cumsum(rounding)))
    dense = dense_record_bytes(d, BF16)
    found = []
    for k in np.unique(
        np.concatenate((np.arange(1, min(d, 30) + 1), np.geomspace(1, d, 150), np.linspace(1, d, 150))).astype(int)
    ).tolist():
        size = 2 + varint_bytes(k) + rice_bytes(np.sort(order[:k]).astype(np.int64), d) + BF16.stream_bytes(k)
        if size < dense:
            found.append((float(size), float(tail[d - k] + rounded[k])))
    return np.array([*found, (float(dense), float(rounded[d]))])


def lower_bound(layers: list[Floats], budget: float) -> float:
    """max over lambda >= 0 of sum_i min_j (error + lambda bytes) - lambda budget: no choice that fits is better."""
    slopes = np.geomspace(1e-9, 1e5, 4000)
    value = -slopes * budget
    for layer in layers:
        value += (layer[:, 1] + slopes[:, None] * layer[:, 0]).min(axis=1)
    return float(value.max())


@pytest.mark.parametrize("kind", ["t3", "gauss"])
def test_hull_is_within_half_a_per_cent_of_the_dual_bound(kind: str) -> None:
    """Budgets of 5 to 30 % of the dense float32 message."""
    rng = np.random.default_rng(7)
    draw = rng.standard_normal if kind == "gauss" else lambda d: rng.standard_t(3, d)
    x = [np.asarray(draw(d) * np.exp(rng.standard_normal()), np.float32) for d in RESNET]
    layout = flat_layout(RESNET)
    header = header_of(layout)
    layers = [points(v) for v in x]
    dense = 4 * sum(RESNET)
    for share in (0.05, 0.07, 0.1, 0.2, 0.3):
        budget = int(share * dense)
        got = compress(layout, header, x, None, Scheme(values="bf16"), budget)
        bound = lower_bound(layers, budget - header_bytes(header))
        exact = math.fsum(got.error_sq)
        assert exact >= bound * (1 - 1e-3)  # the bound is one, but for K between the points
        assert exact <= 1.005 * bound


# ---- knapsack ------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6), st.floats(0, 1.2), st.sampled_from([7, 30, 1000]))
@settings(max_examples=300)
def test_knapsack_keeps_its_bound_against_brute_force(
    layers: int, positions: int, seed: int, share: float, buckets: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.cumsum(rng.integers(1, 50, (layers, positions)), axis=1).astype(np.float64)
    errors = np.sort(rng.exponential(size=(layers, positions)) ** 3, axis=1)[:, ::-1].copy()
    if rng.random() < 0.2:
        errors[:, -1] = 0.0
    budget = share * float(sizes[:, -1].sum())
    before, ks.BUCKETS = ks.BUCKETS, buckets  # type: ignore[misc]
    try:
        found = ks.choose(errors, sizes, budget)
    finally:
        ks.BUCKETS = before  # type: ignore[misc]
    every = list(itertools.product(range(positions), repeat=layers))
    fitting = [c for c in every if ks.totals(sizes, np.array(c)) <= budget]
    assert found.fits == bool(fitting)
    if not fitting:
        assert ks.totals(sizes, found.choice) == sizes[:, 0].sum()
        return
    assert ks.totals(sizes, found.choice) <= budget
    best = min(ks.totals(errors, np.array(c)) for c in fitting)
    shared = [j for j in range(positions) if sizes[:, j].sum() <= budget]
    most = errors[:, shared[-1]].sum() if shared else ks.totals(errors, np.argmin(sizes, axis=1))
    reached = ks.totals(errors, found.choice)
    assert reached <= (best + layers * most / buckets) * (1 + 1e-9)
    assert reached <= most * (1 + 1e-12)  # never worse than one ratio for all


@pytest.mark.parametrize("measure", ["squared", "plain"])
@pytest.mark.parametrize("floor", [1, 40])
def test_knapsack_over_the_papers_grid_through_compress(measure: str, floor: int) -> None:
    """Two layers and a budget of values, where sizes are exact: all 2,500 choices tried."""
    d = [300, 200]
    layout = flat_layout(d, "float64")
    x = [vector("gauss", 300, "float64", 1), 9 * vector("heavy", 200, "float64", 2)]
    tails = [np.concatenate(([0.0], np.cumsum(np.sort(v**2)))) for v in x]
    grid = [[max(floor, math.floor(r * n)) for r in ks.RATIOS] for n in d]

    def error(pair: tuple[int, ...]) -> float:
        squares = [float(t[n - k]) for t, n, k in zip(tails, d, pair, strict=True)]
        return sum(squares) if measure == "squared" else sum(map(math.sqrt, squares))

    for budget in (90, 150, 260, 420):
        scheme = Scheme(allocation="knapsack", values="fp64", unit="coordinates", errors=measure, floor=floor)
        got = compress(layout, header_of(layout), x, None, scheme, budget)
        assert sum(got.kept) <= budget
        assert all(k >= floor for k in got.kept)
        fitting = [p for p in itertools.product(*grid) if sum(p) <= budget]
        best = min(map(error, fitting))
        shared = max((r for r in range(50) if grid[0][r] + grid[1][r] <= budget), default=0)
        most = error((grid[0][shared], grid[1][shared]))
        even = compress(layout, header_of(layout), x, None, Scheme(**_fields(scheme, "uniform")), budget)
        reached = error((got.kept[0], got.kept[1]))
        assert reached <= max(best + 2 * most / 1000, 0.0) * (1 + 1e-9)
        if measure == "squared":
            assert sum(got.error_sq) <= sum(even.error_sq) * (1 + 1e-12)


def _fields(scheme: Scheme, allocation: str) -> dict[str, Any]:
    return {
        "allocation": allocation,
        "values": scheme.values,
        "unit": scheme.unit,
        "errors": scheme.errors,
        "floor": scheme.floor,
    }


@pytest.mark.parametrize("budget", [60, 300, 2000, 9000])
def test_knapsack_in_bytes_is_within_budget_and_never_worse_than_uniform(budget: int) -> None:
    d = [4000, 900, 50, 3]
    layout = flat_layout(d)
    x = [vector("heavy", n, "float32", n) for n in d]
    for floor in (1, 20):
        got, even = (
            compress(layout, header_of(layout), x, None, Scheme(allocation=name, values="bf16", floor=floor), budget)
            for name in ("knapsack", "uniform")
        )
        assert got.miss == (len(got.payload) > budget) == even.miss
        assert all(k >= min(floor, n) for k, n in zip(got.kept, d, strict=True))
        if not got.miss:
            assert sum(got.error_sq) <= sum(even.error_sq) * (1 + 1e-12)


# ---- global --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(0, 999), st.floats(0.01, 1))
@settings(max_examples=60)
def test_at_equal_total_k_no_allocation_beats_global(d: list[int], seed: int, share: float) -> None:
    layout = flat_layout(d, "float64")
    x = [vector(("gauss", "heavy", "clustered")[i % 3], n, "float64", seed + i) * 4.0**i for i, n in enumerate(d)]
    budget = max(len(d), int(share * sum(d)))
    squares = np.sort(np.concatenate(x) ** 2)
    lost = {}
    for allocation in ALLOCATIONS:
        scheme = Scheme(allocation=allocation.name, values="fp64", unit="coordinates")
        got = compress(layout, header_of(layout), x, None, scheme, budget)
        assert sum(got.kept) <= budget
        lost[allocation.name] = sum(got.error_sq)
        assert lost[allocation.name] >= squares[: squares.size - sum(got.kept)].sum() * (1 - 1e-9) - 1e-300
        if allocation.name == "global":  # a floor of one value may take a place from a larger one
            without = compress(layout, header_of(layout), x, None, scheme, budget)
            larger = sum(1 for k in without.kept if k == 1)
            assert sum(got.kept) == budget
            if larger == 0:
                assert lost["global"] == pytest.approx(squares[: squares.size - budget].sum(), rel=1e-9, abs=1e-300)
    assert lost["global"] <= min(lost.values()) * (1 + 1e-9) + 1e-300


def test_global_keeps_its_floors_and_its_budget_in_bytes() -> None:
    d = [60_000, 30_000, 200, 10]
    layout = flat_layout(d)
    x = [vector("gauss", n, "float32", n) * np.float32(10.0 ** (2 - i)) for i, n in enumerate(d)]
    for budget in (5000, 20_000, 120_000):
        scheme = Scheme(allocation="global", values="bf16", floors=(("layer2", 0.1), ("layer3", 4.0)))
        got = compress(layout, header_of(layout), x, None, scheme, budget)
        assert 0.99 * budget <= len(got.payload) <= budget
        assert got.kept[2] >= 20
        assert got.kept[3] >= 4
        threshold = min(np.abs(x[0][got.updates[0].indices]).min() if got.updates[0].indices is not None else 0.0, 1e9)
        if got.updates[1].indices is not None and got.kept[1] > 1:
            assert np.abs(x[1][got.updates[1].indices]).min() >= threshold * (1 - 1e-6)


# ---- coordinates, floors ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 200),
    st.sampled_from([a.name for a in ALLOCATIONS]),
    st.sampled_from(["topk", "randk"]),
)
@settings(max_examples=150)
def test_a_budget_of_coordinates_counts_values_and_nothing_else(
    d: list[int], budget: int, allocation: str, operator: str
) -> None:
    layout = flat_layout(d, "float64", whole=1)
    x = [vector("gauss", n, "float64", n) for n in d]
    scheme = Scheme(operator, allocation=allocation, values="fp64", unit="coordinates")
    got = compress(layout, header_of(layout), x, {"count0": np.array(1)}, scheme, budget, seed=3)
    total = sum(got.kept) + 1  # the whole scalar counts, too
    assert got.miss == (total > budget)
    assert got.miss == (len(d) + 1 > budget)
    for vec, update, k in zip(x, got.updates, got.kept, strict=True):
        assert int(np.count_nonzero(update.values)) == k <= vec.size  # zeros between where it is dense
    if allocation in ("uniform", "hull", "global") and not got.miss and operator == "topk":
        assert total == min(budget, sum(d) + 1)


def test_uniform_in_coordinates_by_hand() -> None:
    """30 values of which the link carries 10: the largest ratio with floor(20 r) + floor(10 r) <= 10."""
    layout = flat_layout([20, 10], "float64")
    x = [np.arange(1.0, 21.0), np.arange(1.0, 11.0)]
    scheme = Scheme(allocation="uniform", values="fp64", unit="coordinates")
    got = compress(layout, header_of(layout), x, None, scheme, 10)
    assert got.kept in ((7, 3), (6, 3), (7, 2), (6, 4))
    assert sum(got.kept) in (9, 10)
    assert got.kept[0] >= 6


def test_floors_are_read_checked_and_kept() -> None:
    assert parse_floors("") == ()
    assert parse_floors(" a=3 , b*=0.5,") == (("a", 3.0), ("b*", 0.5))
    with pytest.raises(ConfigError) as caught:
        parse_floors("a, b=x, c=0, d=1.5, =2, e=nan, f=5")
    assert len(caught.value.problems) == 6
    with pytest.raises(ConfigError, match="expected a pattern and a count"):
        Scheme(floors=(("a", 1.5),))
    layout = flat_layout([1000, 50, 7])
    scheme = Scheme(floors=(("layer0", 0.1), ("layer[12]", 9.0), ("none*", 2.0)), values="bf16")
    assert [scheme.floor_of(layout.layers[i]) for i in range(3)] == [100, 9, 7]
    assert idle_floors(layout, scheme) == ("none*",)
    x = [vector("gauss", n, "float32", n) for n in (1000, 50, 7)]
    least = smallest_bytes(layout, header_of(layout), scheme)
    for allocation in [a.name for a in ALLOCATIONS]:
        floored = Scheme(allocation=allocation, floors=scheme.floors, values="bf16")
        got = compress(layout, header_of(layout), x, None, floored, least)
        assert not got.miss
        assert [k >= f for k, f in zip(got.kept, (100, 9, 7), strict=True)] == [True] * 3
        assert compress(layout, header_of(layout), x, None, floored, 40).miss
