"""A run that goes on from a checkpoint gives the rows that it would have given."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compression.errors import ConfigError, StateError
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork
from tests.apps import LeastSquares, cut, grid_of, least_squares_app, record, settled_memories

LINKS = LinkSettings("cellular", 600.0, 2400.0, overhead_s=0.01, compute_s=0.2, seed=3)
BASE = Settings(
    experiment="t", time_budget_s=1.0, deadline_s=1.2, fraction=0.75, checkpoint_every=2, evaluate="none", forget=False
)
ROUNDS = 9


class KilledError(Exception):
    """The server dies."""


def run(
    folder: Path, settings: Settings = BASE, *, die_after: int | None = None, resume: bool = False
) -> tuple[Kimad, list[dict[str, Any]]]:
    """Run, or go on; killed after the row of a round, before its checkpoint. Rows are those of this start."""
    rows: list[dict[str, Any]] = []

    def on_round(row: dict[str, Any], wall: dict[str, Any]) -> None:
        rows.append(json.loads(json.dumps(row)))
        if row["round"] == die_after:
            raise KilledError

    app = least_squares_app(LeastSquares.make(4), 1e-3)
    strategy = Kimad(settings, SimulatedNetwork(LINKS), on_round=on_round, state_dir=folder / "server", resume=resume)
    try:
        strategy.start(
            grid=grid_of(app, 4, folder / "clients"),
            initial_arrays=record(cut(np.zeros(30), "float32")),
            num_rounds=ROUNDS,
        )
    except KilledError:
        assert die_after is not None
    return strategy, rows


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("die_after", [1, 2, 5, 6, 8])
def test_the_rows_after_a_kill_are_the_undisturbed_ones(tmp_path: Path, die_after: int, optimizer: str) -> None:
    settings = replace(BASE, server_optimizer=optimizer, server_lr=0.1)
    whole, rows = run(tmp_path / "whole", settings)
    run(tmp_path / "cut", settings, die_after=die_after)
    again, rest = run(tmp_path / "cut", settings, resume=True)
    assert again.incarnation == 2
    done = ROUNDS - len(rest)
    assert done == max(0, die_after - 1) // 2 * 2
    assert rest == rows[done:]
    assert all(np.array_equal(again.arrays[name], whole.arrays[name]) for name in whole.arrays)
    for total, other in zip(again.memory.sums, whole.memory.sums, strict=True):
        assert np.array_equal(total, other)
    settled_memories(again, tmp_path / "cut" / "clients")
    assert again.counts == whole.counts


def test_a_damaged_newest_checkpoint_falls_back_to_the_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, rows = run(tmp_path / "whole")
    run(tmp_path / "cut", die_after=7)
    newest = tmp_path / "cut" / "server" / "round-00000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    _, rest = run(tmp_path / "cut", resume=True)
    assert rest == rows[4:]
    assert "damaged" in caplog.text


def test_two_kills_never_use_an_incarnation_twice(tmp_path: Path) -> None:
    _, rows = run(tmp_path / "whole")
    run(tmp_path / "cut", die_after=3)
    run(tmp_path / "cut", die_after=5, resume=True)
    strategy, rest = run(tmp_path / "cut", resume=True)
    assert strategy.incarnation == 3
    assert rest == rows[ROUNDS - len(rest) :]


def test_mirrors_are_the_clients_memories(tmp_path: Path) -> None:
    strategy, _ = run(tmp_path)
    assert strategy.memory.mirrors is not None
    for client, memory in settled_memories(strategy, tmp_path / "clients").items():
        for mirror, h in zip(strategy.memory.mirrors.read(client), memory.h, strict=True):
            assert np.array_equal(mirror, h)


def test_a_client_that_lost_its_disk_while_the_server_was_dead_goes_on(tmp_path: Path) -> None:
    _, rows = run(tmp_path / "whole")
    run(tmp_path / "cut", die_after=6)
    shutil.rmtree(tmp_path / "cut" / "clients" / "run-t" / "node-2")
    again, rest = run(tmp_path / "cut", resume=True)
    assert [row["accepted"] for row in rest] == [row["accepted"] for row in rows[ROUNDS - len(rest) :]]
    settled_memories(again, tmp_path / "cut" / "clients")


def test_a_run_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    run(tmp_path, die_after=3)
    with pytest.raises(StateError, match="resume = true"):
        run(tmp_path)


def test_checkpoints_of_another_model_are_refused(tmp_path: Path) -> None:
    run(tmp_path, die_after=3)
    app = least_squares_app(LeastSquares.make(4), 1e-3)
    strategy = Kimad(BASE, SimulatedNetwork(LINKS), state_dir=tmp_path / "server", resume=True)
    with pytest.raises(ConfigError, match="another model"):
        strategy.start(grid_of(app, 4, tmp_path / "clients"), record({"x": np.zeros(3, np.float32)}))
