"""The benchmark of the memories, on a small model: what it plays is a run, and what it says adds up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import memories
from benchmarks.memories import FIXED, RATIO, Play, Row
from benchmarks.vectors import prepared
from compression import Scheme
from protocol import Store


def test_all_sections_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"w": np.random.default_rng(1).standard_normal((60, 50)).astype(np.float32)}
    assert memories.run(20, tmp_path, tmp_path / "out.json", model) == 0
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]
    assert list(report["sections"]) == list(memories.sections(model, 20))
    for title, rows in report["sections"].items():
        assert title in printed
        assert all(row["met"] == (None if row["target"] is None else row["value"] <= row["target"]) for row in rows)
        if title != "RAM of one message":  # Linux only
            assert any(row["target"] for row in rows)


def test_a_play_moves_the_memory_to_the_update(tmp_path: Path) -> None:
    layout, _, u = prepared({"w": np.arange(1.0, 401.0, dtype=np.float32)})
    play = Play(tmp_path, layout, u, {FIXED: Scheme(ratio=RATIO, values="fp32")})
    watch = play.run(101)
    assert set(map(len, watch.times.values())) == {101}
    with Store(tmp_path, memories.EXPERIMENT, memories.CLIENT) as store:
        entry = store.entry(memories.CLIENT)
        assert store.settle(entry, play.accepted, None) == "accepted"
        assert np.array_equal(store.h(entry)[0], u[0])
        assert 10 <= len(entry.kept) <= 21


def test_a_target_says_met_or_not() -> None:
    text = memories.table("a title", [Row("a", 1.0, "ms"), Row("b", 2.0, "x", 3.0), Row("c", 4.0, "x", 3.0, "why")])
    assert [line.split()[3:] for line in text.splitlines()[2:]] == [[], ["3", "met"], ["3", "NOT", "MET", "why"]]
