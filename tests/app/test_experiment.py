"""A whole experiment in this process: what lies in the run directory, and what the summary says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from app.cli import main
from app.config import parse
from app.experiment import run_experiment
from app.rundir import RunDir
from clients import kimad_mod
from strategies import InProcessGrid


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment") / "run"
    pairs = ["num-rounds=6", "target-accuracy=0.11", "stop-at-target=false", "local-steps=3"]
    assert main(["run", "--clients", "3", "--run-dir", str(folder), *pairs]) == 0
    return folder


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_directory_holds_everything(run_dir: Path) -> None:
    inside = (p.relative_to(run_dir) for p in run_dir.rglob("*") if p.is_file())
    files = sorted(str(p) for p in inside if p.parts[0] != "server")
    assert files == [
        "accuracy.png",
        "config.json",
        "dense/rows.jsonl",
        "dense/wall.jsonl",
        "model.safetensors",
        "rows.jsonl",
        "summary.json",
        "wall.jsonl",
    ]
    assert sorted(p.name for p in (run_dir / "server").glob("*.json")) == ["kept.json", "start.json"]
    model = load_file(run_dir / "model.safetensors")
    assert sum(array.size for array in model.values()) == 38_282
    assert all(np.isfinite(array).all() for array in model.values())
    assert (run_dir / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_is_what_the_rows_add_up_to(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    ours, dense = rows(run_dir / "rows.jsonl"), rows(run_dir / "dense" / "rows.jsonl")
    assert summary["rounds"] == len(ours) == 6
    assert summary["uplink_bytes"] == sum(sum(r["uplink_bytes_by_client"].values()) for r in ours)
    assert summary["uplink_dense_bytes"] == sum(r["uplink_dense_bytes"] for r in ours)
    assert summary["virtual_seconds"] == ours[-1]["virtual_s"]
    first = next(r for r in ours if r["test_accuracy"] >= 0.11)
    assert summary["seconds_to_target"] == first["virtual_s"]
    if summary["dense_stopped"] == "target":
        assert summary["dense_seconds_to_target"] == dense[-1]["virtual_s"]
        assert summary["dense_run_uplink_bytes"] == sum(r["uplink_bytes"] for r in dense)


def test_dense_replies_cost_what_the_main_run_says_they_would(run_dir: Path) -> None:
    ours, dense = rows(run_dir / "rows.jsonl")[0], rows(run_dir / "dense" / "rows.jsonl")[0]
    assert ours["uplink_dense_bytes"] == dense["uplink_bytes"] == 3 * dense["uplink_bytes_by_client"]["0"]


def test_wall_times_stand_apart_from_compared_rows(run_dir: Path) -> None:
    assert [set(r) for r in rows(run_dir / "wall.jsonl")] == [{"round", "round_s", "train_s"}] * 6
    assert not [key for key in rows(run_dir / "rows.jsonl")[0] if "wall" in key]


def test_a_used_run_directory_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--run-dir", str(run_dir)]) == 2
    assert str(run_dir) in capsys.readouterr().err


def test_a_run_in_which_every_client_fails_still_ends_with_a_summary(tmp_path: Path) -> None:
    app = ClientApp(mods=[kimad_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise RuntimeError("no camera here")

    config = parse({"num-rounds": 2, "run-dir": str(tmp_path / "run")})
    grid = InProcessGrid.of_partitions(app, 2, {}, tmp_path / "state")
    summary = run_experiment(config, grid, "t", RunDir(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert (summary["rounds"], summary["uplink_bytes"], summary["dense_stopped"]) == (2, 0, "none")
    assert summary["faults"] == {"client-error": 4}
