from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import selection, topk_indices
from compression.selection import candidates, sum_squares
from tests.compression.support import KINDS, vector


def by_stable_sort(x: NDArray[Any], k: int) -> NDArray[np.int64]:
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k]).astype(np.int64)


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 5e-324, -5e-324, 1e-45, 3e38]), max_size=40),
    k=st.integers(0, 45),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_ties_zeros_and_denormals(values: list[float], k: int, dtype: str) -> None:
    x = np.array(values, dtype=dtype)
    got = topk_indices(x, k)
    assert got.dtype == np.int64
    assert got.tolist() == by_stable_sort(x, k).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [8193, 70_000, 200_001])
def test_big_vectors_by_sampled_bound(kind: str, d: int, dtype: str) -> None:
    x = vector(kind, d, dtype, seed=d)
    for k in (1, 7, d // 1000, d // 100, d // 3, d - 1, d, d + 5):
        assert np.array_equal(topk_indices(x, k), by_stable_sort(x, k)), k


@pytest.mark.parametrize("period", [17, 32, 64, 72])
def test_a_sample_that_misleads(period: int) -> None:
    # The strided sample meets only the small, or only the large, elements.
    d = 1 << 17
    for offset in (0, 1):
        x = np.ones(d, dtype=np.float32)
        x[offset::period] = np.linspace(2, 3, x[offset::period].size)
        for k in (d // 100, d // period + 10, d // 2):
            assert np.array_equal(topk_indices(x, k), by_stable_sort(x, k))


def test_the_pass_is_repeated_lower_when_short(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    original = selection.collect

    def counted(x: NDArray[Any], bound: float, **options: Any) -> selection.Candidates:
        calls.append(bound)
        return original(x, bound, **options)

    monkeypatch.setattr(selection, "collect", counted)
    x = np.full(1 << 17, 1.0, dtype=np.float32)
    x[:: selection.stride_to(x.size, 1 << 11)] = 9.0  # every sample
    assert np.array_equal(topk_indices(x, 5000), by_stable_sort(x, 5000))
    assert len(calls) >= 2
    assert calls[0] > calls[-1]


def test_no_full_sort_or_copy_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    x = vector("heavy", 1 << 18, "float32", 3)
    original = np.partition
    sizes: list[int] = []

    def counted(a: NDArray[Any], *args: Any, **kwargs: Any) -> NDArray[Any]:
        sizes.append(a.size)
        result: NDArray[Any] = original(a, *args, **kwargs)
        return result

    monkeypatch.setattr(np, "partition", counted)
    topk_indices(x, x.size // 100)
    assert max(sizes) < x.size // 8


@given(st.sampled_from(KINDS), st.integers(1, 30_000), st.integers(0, 3000), st.sampled_from(["float32", "float64"]))
@settings(max_examples=60)
def test_candidates_hold_the_largest_and_the_energy(kind: str, d: int, k: int, dtype: str) -> None:
    x = vector(kind, d, dtype, seed=k)
    found = candidates(x, k)
    chosen = set(found.indices.tolist())
    nonzero = np.flatnonzero(x)
    wanted = [i for i in by_stable_sort(x, k).tolist() if x[i] != 0]
    assert chosen >= set(wanted)
    assert not found.complete or chosen == set(nonzero.tolist())
    rest = np.delete(x, found.indices).astype(np.float64)
    assert found.rest_sq == pytest.approx(float(np.sum(rest * rest)), rel=1e-12, abs=0)


def test_sum_of_squares_keeps_small_terms() -> None:
    # float32 accumulation would return 1e16 exactly; the true value has all the ones.
    x = np.ones(100_000, dtype=np.float32)
    x[0] = 1e4
    assert sum_squares(x) == 1e8 + 99_999


def test_only_flat_vectors() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        topk_indices(np.zeros((2, 2)), 1)
