from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import LayerUpdate, accumulate, difference, move

SIZES = (0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 257, 1000, 4099, 70_001)


def round_once(value: Fraction, dtype: str) -> float:
    """The nearest number of the dtype: float(Fraction) rounds once; float32 needs the neighbours of that."""
    if dtype == "float64":
        return float(value)
    near = np.float32(float(value))
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    best = min(around, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(np.uint32)) & 1))
    return float(best)


@given(
    st.lists(st.tuples(*(st.floats(-1e3, 1e3, width=32),) * 2), min_size=1, max_size=5),
    st.floats(0.001, 1.0),
    st.sampled_from(["float32", "float64"]),
)
@settings(max_examples=200)
def test_two_roundings_by_exact_arithmetic(pairs: list[tuple[float, float]], rate: float, dtype: str) -> None:
    h = np.array([a for a, _ in pairs], dtype=dtype)
    v = np.array([b for _, b in pairs], dtype=dtype)
    cast = Fraction(float(np.dtype(dtype).type(rate)))
    wanted = [
        round_once(Fraction(float(a)) + Fraction(round_once(cast * Fraction(float(b)), dtype)), dtype)
        for a, b in zip(h, v, strict=True)
    ]
    move(h, LayerUpdate(None, v), rate)
    assert [float(value) for value in h] == wanted


@pytest.mark.parametrize("rate", [1.0, 0.1, 1 / 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_and_torch_agree_bit_by_bit(dtype: str, rate: float) -> None:
    rng = np.random.default_rng(1)
    for d in SIZES:
        h = rng.standard_normal(d).astype(dtype)
        dense = LayerUpdate(None, rng.standard_normal(d).astype(dtype))
        support = np.flatnonzero(rng.random(d) < 0.3)
        sparse = LayerUpdate(support, rng.standard_normal(support.size).astype(dtype))
        for update in (dense, sparse):
            ours, theirs = h.copy(), torch.from_numpy(h.copy())
            move(ours, update, rate)
            move(theirs, update, rate)
            assert ours.tobytes() == theirs.numpy().tobytes(), d
            cast = np.dtype(dtype).type(rate)
            wanted = h.copy()
            at: Any = slice(None) if update.indices is None else update.indices
            wanted[at] = wanted[at] + cast * update.values
            assert ours.tobytes() == wanted.tobytes(), d


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_difference_agrees_too(dtype: str) -> None:
    rng = np.random.default_rng(2)
    u, h = rng.standard_normal(4099).astype(dtype), rng.standard_normal(4099).astype(dtype)
    ours: NDArray[Any] = difference(u, h)
    theirs = difference(torch.from_numpy(u), torch.from_numpy(h))
    assert ours.dtype.name == dtype
    assert ours.tobytes() == theirs.numpy().tobytes()


def test_the_update_is_not_changed_and_values_may_be_read_only() -> None:
    values = np.ones(3, dtype=np.float32)
    values.flags.writeable = False
    update = LayerUpdate(np.array([0, 2, 4]), values)
    for memory in (np.zeros(5, dtype=np.float32), torch.zeros(5)):
        move(memory, update, 0.5)
        assert memory.tolist() == [0.5, 0.0, 0.5, 0.0, 0.5]
    assert values.tolist() == [1.0, 1.0, 1.0]


def test_mixed_dtypes_and_shapes_are_refused() -> None:
    update = LayerUpdate(None, np.zeros(3, dtype=np.float32))
    with pytest.raises(TypeError, match="float64"):
        move(np.zeros(3), update)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        move(torch.zeros(3, dtype=torch.float64), update)
    with pytest.raises(ValueError, match="shape"):
        move(np.zeros(4, dtype=np.float32), update)


def test_sums_are_float64() -> None:
    total = np.full(3, 1e9)
    accumulate(total, LayerUpdate(np.array([0, 2]), np.array([0.1, 0.2], dtype=np.float32)), 3.0)
    accumulate(total, LayerUpdate(None, np.ones(3, dtype=np.float32)), 0.5)
    tenth, fifth = float(np.float32(0.1)), float(np.float32(0.2))
    assert total.tolist() == [1e9 + 3.0 * tenth + 0.5, 1e9 + 0.5, 1e9 + 3.0 * fifth + 0.5]
