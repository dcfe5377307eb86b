from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression.allocation import (
    ALLOCATIONS,
    UNIFORM,
    Allocation,
    Path,
    Sizes,
    error_table,
    fit,
    hull,
    modelled_bytes,
    refined_table,
    uniform,
)
from compression.errors import ConfigError
from compression.frames import varint_bytes
from compression.indices import rice_bytes
from compression.selection import candidates
from tests.compression.support import KINDS, vector


def sizes_of(d: list[int], itemsize: int = 2, floor: int = 1) -> Sizes:
    wide = np.array(d, dtype=np.int64)
    return Sizes(wide, np.full(len(d), itemsize, dtype=np.int64), np.minimum(wide, floor), wide)


def bytes_of(counts: NDArray[np.int64], sizes: Sizes) -> float:
    return float(modelled_bytes(counts, sizes.d, sizes.itemsize).sum())


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 10_000), st.sampled_from(KINDS))
@settings(max_examples=60)
def test_hull_vertices_are_optimal_by_brute_force(d: list[int], seed: int, kind: str) -> None:
    sizes = sizes_of(d)
    tables = [error_table(vector(kind, n, "float64", seed + i)) for i, n in enumerate(d)]

    def error(counts: NDArray[np.int64]) -> float:
        """Total error; a layer that is no smaller sparse goes dense and has none."""
        dense = modelled_bytes(counts, sizes.d, sizes.itemsize) >= 2.0 + sizes.d * sizes.itemsize
        counts = np.where(dense, sizes.d, counts)
        return sum(float(t.at(counts[i : i + 1], d[i])[0]) for i, t in enumerate(tables))

    path = hull(sizes, tables)
    table = [
        (bytes_of(np.array(counts), sizes), error(np.array(counts)))
        for counts in itertools.product(*(range(1, n + 1) for n in d))
    ]
    ends = path._ends  # type: ignore[attr-defined]
    for spent in (0.0, *ends):
        counts = path.counts(path.least + spent)
        size, reached = bytes_of(counts, sizes), error(counts)
        best = min(e for s, e in table if s <= size + 1e-9)
        assert reached <= best * (1 + 1e-9) + 1e-300


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    st.integers(1, 3),
    st.sampled_from(KINDS),
    st.sampled_from(["uniform", "hull"]),
)
@settings(max_examples=60)
def test_paths_grow_from_the_floor_to_the_cap(d: list[int], floor: int, kind: str, name: str) -> None:
    sizes = sizes_of(d, floor=floor)
    path = {"uniform": uniform, "hull": hull}[name](
        sizes, [error_table(vector(kind, n, "float32", i)) for i, n in enumerate(d)]
    )
    rows = [path.counts(size) for size in np.linspace(path.least - 1, path.most + 1, 60)]
    assert np.array_equal(rows[0], sizes.floor)
    assert np.array_equal(rows[-1], sizes.cap)
    assert all(bool(np.all(a <= b)) for a, b in itertools.pairwise(rows))
    assert all(bool(np.all((sizes.floor <= row) & (row <= sizes.cap))) for row in rows)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.floats(0, 1))
def test_uniform_is_one_ratio(d: list[int], share: float) -> None:
    path = uniform(sizes_of(d), ())
    counts = path.counts(path.least + share * (path.most - path.least))
    grown = [(int(k), n) for k, n in zip(counts, d, strict=True) if k > 1]
    if grown:
        # floor(rho d) = K for one rho: the intervals [K/d, (K+1)/d) meet
        assert max(k / n for k, n in grown) < min((k + 1) / n for k, n in grown)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_error_table_is_exact_for_small_layers(kind: str, dtype: str) -> None:
    x = vector(kind, 500, dtype, 4)
    squares = np.sort(np.abs(x.astype(np.float64))) ** 2
    table = error_table(x)
    for k in (0, 1, 7, 250, 499, 500):
        assert table.at(np.array([k]), 500)[0] == pytest.approx(squares[: 500 - k].sum(), rel=1e-12, abs=0)


def test_small_errors_are_not_lost_in_the_total() -> None:
    # One element of 1e6 and 16,000 of sqrt(1e-5): the error of Top-1 is .16, under half an ulp of 1e12 in float32.
    x = np.full(16_001, np.sqrt(1e-5), dtype=np.float32)
    x[77] = 1e6
    assert error_table(x).at(np.array([1]), x.size)[0] == pytest.approx(0.16, rel=1e-4)


def test_sampled_tables_are_close_and_refined_ones_exact() -> None:
    d = 300_000
    x = vector("gauss", d, "float32", 2)
    squares = np.sort(np.abs(x.astype(np.float64))) ** 2
    true = np.concatenate(([0.0], np.cumsum(squares)))
    table = error_table(x)
    k = np.array([300, 3000, 30_000, 150_000])
    assert table.at(k, d) == pytest.approx(true[d - k], rel=0.03)
    found = candidates(x, 4000)
    refined = refined_table(table, d, np.sort(found.magnitudes), found.rest_sq)
    assert refined.at(k[:2], d) == pytest.approx(true[d - k[:2]], rel=1e-9)
    assert refined.at(k[2:], d) == pytest.approx(true[d - k[2:]], rel=0.03)
    assert bool(np.all(np.diff(refined.counts) >= 0))
    assert bool(np.all(np.diff(refined.errors) >= 0))


@pytest.mark.parametrize("density", [0.3, 0.05, 0.004])
def test_modelled_bytes_are_those_of_random_supports(density: float) -> None:
    d = 1 << 19
    indices = np.flatnonzero(np.random.default_rng(3).random(d) < density).astype(np.int64)
    k = indices.size
    exact = 2 + varint_bytes(k) + rice_bytes(indices, d) + 2 * k
    assert modelled_bytes(np.array([k]), np.array([d]), np.array([2]))[0] == pytest.approx(exact, rel=0.005)


def test_sizes_beyond_two_to_the_31() -> None:
    d = 3 << 40
    sizes = sizes_of([d, 10])
    path = uniform(sizes, ())
    counts = path.counts(1e12)
    assert 1 << 31 < counts[0] < d
    assert bytes_of(counts, sizes) == pytest.approx(1e12, rel=0.05)


class _Line:
    """K grows along a straight line in all layers at once: equal layers jump together."""

    def __init__(self, layers: int, most: int) -> None:
        self.layers, self.least, self.most = layers, 0.0, float(most)

    def counts(self, size: float) -> NDArray[np.int64]:
        return np.full(self.layers, 1 + int(min(max(size, self.least), self.most)), dtype=np.int64)


@given(st.integers(1, 400), st.integers(1, 3000), st.integers(1, 900), st.integers(0, 2_000_000))
@settings(max_examples=150)
def test_fit_is_within_the_budget_and_close(layers: int, most: int, weight: int, budget: int) -> None:
    path: Path = _Line(layers, most)
    seen = 0

    def total(counts: NDArray[np.int64]) -> int:
        nonlocal seen
        seen += 1
        return 50 + weight * int(counts.sum())

    counts, fits = fit(path, total, budget)
    size = total(counts)
    if not fits:
        assert budget < 50 + weight * layers
        assert counts.tolist() == [1] * layers
        return
    assert size <= budget
    assert size >= 0.996 * budget - 1 or size + weight > budget or counts.min() == most + 1
    assert seen < 100


def test_registries_refuse_duplicates_and_name_the_nearest() -> None:
    path: Callable[..., Path] = uniform
    for taken in (Allocation(9, "hull", True, path), Allocation(UNIFORM.id, "other", True, path)):
        with pytest.raises(ConfigError, match="registered already"):
            ALLOCATIONS.register(taken)
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        ALLOCATIONS["unifrom"]
    assert [entry.name for entry in ALLOCATIONS] == ["uniform", "hull", "global", "knapsack"]
    assert "hull" in ALLOCATIONS
    assert ALLOCATIONS.by_id(77) is None
