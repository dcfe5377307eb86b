"""The run directory: what is refused, what survives, and the arithmetic of the summary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from app.rundir import ROW_FIELDS, RunDir, Target, read_rows, summarise
from compression.errors import ConfigError, StateError
from protocol.files import write_atomic


def make_row(number: int, accuracy: float | None = None, **fields: Any) -> dict[str, Any]:
    """Row of a run of 2 s rounds that sends 100 bytes up and 1000 down in each."""
    row: dict[str, Any] = {
        "round": number,
        "virtual_s": 2.0 * number,
        "round_s": 2.0,
        "participants": 2,
        "accepted": ["a", "b"],
        "late": [],
        "absorbed": [],
        "refused": {},
        "uplink_bytes": 100,
        "downlink_bytes": 1000,
        "uplink_bytes_by_client": {"a": 50, "b": 50},
        "budget_bytes_by_client": {"a": 60, "b": 60},
        "ratios_by_layer": {"w": 0.1},
        "compression_error": 0.5,
        "train_loss": 1.0,
        "test_loss": None,
        "test_accuracy": accuracy,
        "predicted_up_bps": {"a": 1e5, "b": 1e5},
        "true_up_bps": {"a": 9e4, "b": 2e5},
        "deadline_misses": 1,
        "budget_misses": 0,
    }
    return row | fields


def test_sample_row_has_every_field_and_no_other() -> None:
    assert set(make_row(1)) == ROW_FIELDS


def test_relative_path_is_refused_and_says_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"run-dir is 'runs/x'; expected an absolute path.*run-dir=\"\$PWD/runs/NAME\""
    ):
        RunDir("runs/x")


def test_directory_with_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunDir(tmp_path / "run").append_row(make_row(1))
    with pytest.raises(ConfigError, match=r"already holds a run \(rows\.jsonl\); set resume = true to go on"):
        RunDir(tmp_path / "run")
    assert len(read_rows(tmp_path / "run")) == 1


def test_directory_that_is_new_or_empty_or_has_other_files_is_taken(tmp_path: Path) -> None:
    RunDir(tmp_path / "new" / "deep")
    RunDir(tmp_path / "new" / "deep")
    (tmp_path / "notes.txt").write_text("mine")
    RunDir(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be made"):
        RunDir(tmp_path / "run" / "below")


def test_rows_read_back_bit_equal_and_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    row = make_row(1, accuracy=0.1 + 0.2, extra=[1e-320, 1 / 3, -0.0])
    one, two = RunDir(tmp_path / "one"), RunDir(tmp_path / "two")
    one.append_row(row)
    two.append_row(dict(reversed(row.items())))
    text = (tmp_path / "one" / "rows.jsonl").read_text()
    assert text == (tmp_path / "two" / "rows.jsonl").read_text()
    assert "0.30000000000000004" in text
    assert text.count("\n") == 1
    assert read_rows(tmp_path / "one") == [row]
    assert list(json.loads(text)) == sorted(row)


def test_numpy_numbers_are_written_as_plain_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.append_row(make_row(1, uplink_bytes=np.int64(7), train_loss=np.float32(0.5), flag=np.bool_(True)))
    row = read_rows(run.path)[0]
    assert (row["uplink_bytes"], row["train_loss"], row["flag"]) == (7, 0.5, True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_row_with_nan_or_infinity_is_refused_and_leaves_no_trace(tmp_path: Path, bad: float) -> None:
    run = RunDir(tmp_path / "run")
    run.append_row(make_row(1))
    with pytest.raises(StateError, match=r"round 2: row\['ratios_by_layer'\]\['w'\] is -?(nan|inf); expected a finite"):
        run.append_row(make_row(2, ratios_by_layer={"w": bad}))
    assert [row["round"] for row in read_rows(run.path)] == [1]


def test_row_with_a_missing_field_names_it(tmp_path: Path) -> None:
    row = make_row(4)
    del row["late"], row["true_up_bps"]
    with pytest.raises(StateError, match="the row of round 4 lacks late, true_up_bps"):
        RunDir(tmp_path / "run").append_row(row)


def test_values_that_json_would_change_are_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(StateError, match="is a set"):
        run.append_wall({"x": {1, 2}})
    with pytest.raises(StateError, match="two keys that read the same"):
        run.append_wall({"x": {1: 1, "1": 2}})


def test_every_row_is_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    synced: list[int] = []

    def fsync(_: int) -> None:
        file = run.path / "rows.jsonl"
        synced.append(file.stat().st_size if file.exists() else 0)

    monkeypatch.setattr("app.rundir.os.fsync", fsync)
    for number in (1, 2):
        run.append_row(make_row(number))
        assert synced[-1] == (run.path / "rows.jsonl").stat().st_size


def test_wall_times_stand_apart(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.append_row(make_row(1))
    run.append_wall({"round": 1, "round_s": 0.25})
    assert read_rows(run.path / "wall.jsonl") == [{"round": 1, "round_s": 0.25}]
    assert read_rows(run.path) == [make_row(1)]


def test_torn_last_line_is_no_row_but_a_torn_middle_is_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.append_row(make_row(1))
    file = run.path / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"round": 2, "virt')
    assert [row["round"] for row in read_rows(file)] == [1]
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(StateError, match=r"rows\.jsonl, line 2: not JSON"):
        read_rows(file)
    file.write_bytes(b"[1]\n")
    with pytest.raises(StateError, match="line 1: a list, expected an object"):
        read_rows(file)
    with pytest.raises(StateError, match="cannot be read"):
        read_rows(tmp_path / "nowhere")


def test_whole_files_are_replaced_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.json"
    write_atomic(file, b"old")

    def fail(self: Path, target: Path) -> Path:
        assert self.read_bytes() == b"new"
        assert target.read_bytes() == b"old"
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StateError, match="disk full"):
        write_atomic(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_model_reads_back_in_shape_dtype_and_values(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "scalar": np.array(3, dtype=np.int64),
        "double": np.array([1 / 3]),
    }
    back = load_file(RunDir(tmp_path / "run").write_model(arrays))
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        np.testing.assert_array_equal(back[name], array)


def test_inner_run_has_rows_but_no_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.write_config({"seed": 1})
    dense = run.sub("dense")
    dense.append_row(make_row(1))
    with pytest.raises(StateError, match="an inner run has no summary"):
        dense.write_summary({})
    run.write_summary({"rounds": 1})
    assert json.loads((run.path / "config.json").read_text()) == {"seed": 1}
    assert [file.relative_to(run.path) for file in run.path.rglob("summary.json")] == [Path("summary.json")]
    assert len(read_rows(run.path / "dense")) == 1
    for name in ("", "..", "a/b", "/tmp"):
        with pytest.raises(ConfigError, match="expected one plain directory name"):
            run.sub(name)


OURS = [make_row(1), make_row(2, 0.4), make_row(3, 0.9, late=["a"], absorbed=["a"]), make_row(4, 0.8)]
DENSE = [make_row(n, acc, virtual_s=20.0 * n, uplink_bytes=800) for n, acc in ((1, 0.2), (2, 0.6), (3, 0.9), (4, 0.9))]


def test_summary_by_hand() -> None:
    summary = summarise(OURS, DENSE, target=Target(0.6), uplink_dense_bytes=3200, dense_stopped="target")
    assert summary == {
        "absorbed": 1,
        "best_accuracy": 0.9,
        "budget_misses": 0,
        "deadline_misses": 4,
        "dense_best_accuracy": 0.9,
        "dense_final_accuracy": 0.9,
        "dense_final_loss": None,
        "dense_rounds": 4,
        "dense_rounds_to_target": 2,  # 0.6 is at least the target
        "dense_run_uplink_bytes": 1600,
        "dense_seconds_to_target": 40.0,
        "dense_stopped": "target",
        "dense_virtual_seconds": 80.0,
        "downlink_bytes": 4000,
        "final_accuracy": 0.8,
        "final_loss": None,
        "late": 1,
        "refused": 0,
        "rounds": 4,
        "rounds_to_target": 3,
        "seconds_to_target": 6.0,
        "speedup": 40.0 / 6.0,
        "speedup_at_least": None,
        "target_accuracy": 0.6,
        "target_loss": 0.0,
        "uplink_bytes": 400,
        "uplink_bytes_to_target": 300,
        "uplink_dense_bytes": 3200,
        "uplink_fraction": 0.125,
        "virtual_seconds": 8.0,
    }


def test_what_cannot_be_told_is_null() -> None:
    alone = summarise(OURS, None, target=Target(0.95), uplink_dense_bytes=0)
    never = ("seconds_to_target", "rounds_to_target", "uplink_bytes_to_target", "speedup", "uplink_fraction")
    assert {alone[name] for name in (*never, "dense_seconds_to_target", "dense_run_uplink_bytes")} == {None}
    nothing = summarise([make_row(1)], [], target=Target(0.5), uplink_dense_bytes=100)
    assert (nothing["final_accuracy"], nothing["best_accuracy"]) == (None, None)
    assert summarise([], None, target=Target(0.5), uplink_dense_bytes=0)["virtual_seconds"] == 0.0
    assert summarise(OURS, None, target=Target(0.0), uplink_dense_bytes=1)["rounds_to_target"] is None


def test_dense_run_that_was_stopped_short_bounds_the_speedup() -> None:
    summary = summarise(OURS, DENSE[:1], target=Target(0.6), uplink_dense_bytes=1, dense_stopped="time limit")
    assert summary["speedup"] is None
    assert summary["speedup_at_least"] == 20.0 / 6.0
    assert summary["dense_run_uplink_bytes"] == 800


def test_all_wrong_arguments_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        summarise(OURS, DENSE, target=Target(0.6), uplink_dense_bytes=-1, dense_stopped="none")
    assert len(caught.value.problems) == 2


def test_a_target_loss_is_reached_from_above() -> None:
    target = Target(0.25, loss=True)
    rows = [make_row(1) | {"test_loss": 0.5}, make_row(2) | {"test_loss": None}, make_row(3) | {"test_loss": 0.25}]
    summary = summarise(rows, None, target=target, uplink_dense_bytes=1)
    assert (summary["rounds_to_target"], summary["target_loss"], summary["final_loss"]) == (3, 0.25, 0.25)
    assert not target.reached(0.26)
    assert not target.reached(None)


@pytest.mark.parametrize("wrong", [lambda: Target(60.0), lambda: Target(-1.0, loss=True), lambda: Target(math.nan)])
def test_a_target_out_of_range_is_refused(wrong: Callable[[], Target]) -> None:
    with pytest.raises(ConfigError, match="target"):
        wrong()
