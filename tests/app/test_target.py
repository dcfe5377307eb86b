"""The main job's promise, on more than one seed: minutes long, so marked slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_digits_reaches_95_percent_sooner_and_with_a_twentieth_of_the_bytes(seed: int, tmp_path: Path) -> None:
    assert main(["run", f"seed={seed}", "--run-dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_accuracy"] >= 0.95
    assert summary["uplink_bytes"] <= 0.05 * summary["uplink_dense_bytes"]
    dense_s = summary["dense_seconds_to_target"] or summary["dense_virtual_seconds"]  # stopped when 20 times as long
    assert dense_s >= 5 * summary["seconds_to_target"]
    assert summary["budget_misses"] == 0
    assert summary["faults"] == {}
