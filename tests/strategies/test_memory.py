"""Server memory, optimiser and whole arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from strategies.step import ServerOptimizer, combine_whole


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sgd_at_one_is_fedavgs_step(dtype: type) -> None:
    x: NDArray[Any] = np.array([1.0, 2.0, 3.0], dtype)
    update = np.array([0.5, -0.25, 0.0])
    optimizer = ServerOptimizer("SGD", 1.0, [x])
    (new,) = optimizer.step([update])
    assert new.dtype == dtype
    assert new.tolist() == [0.5, 2.25, 3.0]
    assert x.tolist() == [1.0, 2.0, 3.0]  # the caller's array is its own


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_a_named_optimiser_is_torchs(name: str) -> None:
    optimizer = ServerOptimizer(name, 0.1, [np.zeros(3, np.float32)])
    parameter = torch.nn.Parameter(torch.zeros(3))
    reference = getattr(torch.optim, name)([parameter], lr=0.1)
    for g in ([1.0, 2.0, -3.0], [0.5, 0.0, 1.0]):
        (ours,) = optimizer.step([np.array(g)])
        parameter.grad = torch.tensor(g)
        reference.step()
    assert np.array_equal(ours, parameter.detach().numpy())


def test_whole_arrays_mean_and_maximum() -> None:
    mean = combine_whole([(1.0, np.array([0.0, 4.0], np.float32)), (3.0, np.array([4.0, 0.0], np.float32))])
    assert (mean.dtype.name, mean.tolist()) == ("float32", [3.0, 1.0])
    assert combine_whole([(0.0, np.array(2.0)), (0.0, np.array(4.0))]) == 3.0
    counter = combine_whole([(1.0, np.array(5, np.int64)), (9.0, np.array(3, np.int64))])
    assert (counter.dtype.name, counter.item()) == ("int64", 5)
    flags = combine_whole([(1.0, np.array([True, False])), (1.0, np.array([False, False]))])
    assert flags.tolist() == [True, False]
    half = combine_whole([(1.0, np.array([1.0], np.float16)), (1.0, np.array([2.0], np.float16))])
    assert (half.dtype.name, half.tolist()) == ("float16", [1.5])
