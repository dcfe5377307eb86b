"""isolate-rng: global generators are seeded around the user's code, and are afterwards what they were before."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from clients.isolation import seeded
from strategies import InProcessGrid, Kimad, SimulatedNetwork
from tests.apps import SIZE, LeastSquares, cut, join, least_squares_app, read, record
from tests.strategies.test_faults import BASE, LINKS


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def test_the_same_seed_gives_the_same_draws_and_what_was_before_goes_on() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = [draws(), draws()]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    first = draws()
    with seeded(2**63 + 5):
        inside = draws()
    with seeded(2**63 + 5):
        assert draws() == inside
    with seeded(2**63 + 6):
        assert all(a != b for a, b in zip(draws(), inside, strict=True))
    assert [first, draws()] == before


@pytest.mark.parametrize("isolate", [True, False])
def test_an_app_that_draws_from_global_generators_repeats_itself(tmp_path: Path, isolate: bool) -> None:
    def noisy(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {name: a + sum(draws()) for name, a in arrays.items()}

    def run(folder: Path) -> NDArray[np.float64]:
        app = least_squares_app(LeastSquares.make(3), 1e-3, noisy)
        grid = InProcessGrid.of_partitions(app, 3, {}, folder)
        strategy = Kimad(replace(BASE, isolate_rng=isolate), SimulatedNetwork(LINKS), on_round=lambda row, wall: None)
        start = record(cut(np.ones(SIZE), "float64"))
        return join(read(strategy.start(grid=grid, initial_arrays=start, num_rounds=2).arrays))

    assert np.array_equal(run(tmp_path / "a"), run(tmp_path / "b")) == isolate
