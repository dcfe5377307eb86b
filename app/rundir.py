"""The directory of one run: what is written, in which file, and the summary of it.

    run-dir/
    |-- config.json        the effective configuration
    |-- rows.jsonl         one JSON object a round; equal for equal seeds, so two runs can be compared byte for byte
    |-- wall.jsonl         wall-clock times, which differ from run to run and so stand apart
    |-- model.safetensors  the final model
    |-- server/            checkpoints and mirrors, from which a killed run goes on (strategies/checkpoint.py)
    |-- summary.json       written last: a run that has one is whole
    `-- dense/             the same files, without a summary, of the dense run over the same links

Rows are on disk when `append_row` returns. Every other file is written whole, beside its name, and then renamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from compression.errors import ConfigError, StateError
from protocol.files import sync_directory, write_atomic
from protocol.filesystem import LOCAL

__all__ = ["ROW_FIELDS", "DenseStopped", "Row", "RunDir", "Target", "count", "read_rows", "summarise"]

Row = Mapping[str, Any]
DenseStopped = Literal["target", "time limit", "round limit", "none"]

ROW_FIELDS = frozenset(
    {
        "round",  # int
        "virtual_s",  # virtual time at the round's end, s
        "round_s",  # virtual time that the round took, s
        "participants",  # clients asked
        "accepted",  # ids of the clients whose reply entered the model
        "late",  # clients whose reply came after the deadline
        "absorbed",  # of those, the clients whose reply was used all the same
        "refused",  # client id -> reason
        "uplink_bytes",  # payload bytes of all clients
        "downlink_bytes",
        "uplink_bytes_by_client",
        "budget_bytes_by_client",
        "ratios_by_layer",  # layer -> mean K/d over clients
        "compression_error",  # relative squared error
        "train_loss",
        "test_loss",  # null where the round was not evaluated
        "test_accuracy",  # in [0, 1]; null where the round was not evaluated
        "predicted_up_bps",  # client id -> bit/s
        "true_up_bps",  # client id -> bit/s
        "deadline_misses",
        "budget_misses",
    }
)
"""What every row must have; more is allowed."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a run is to reach: a test accuracy or, where `loss` says so, a test loss.

    Args:
        value: the accuracy, in [0, 1], or the loss, at least 0; 0 is no target.
        loss: whether it is a loss, which falls.

    Raises:
        ConfigError: the value is out of range.

    >>> Target(0.95).text, Target(1e-6, loss=True).text
    ('95 %', 'loss 1e-06')
    """

    value: float
    loss: bool = False

    def __post_init__(self) -> None:
        if self.loss and not 0.0 <= self.value < math.inf:
            raise ConfigError(f"target loss is {self.value!r}; expected a finite number, at least 0")
        if not self.loss and not 0.0 <= self.value <= 1.0:
            raise ConfigError(f"target accuracy is {self.value!r}; expected a number in [0, 1]")

    @property
    def field(self) -> str:
        """Field of a row that it is compared with."""
        return "test_loss" if self.loss else "test_accuracy"

    @property
    def label(self) -> str:
        """What the field is called in a picture."""
        return "test loss" if self.loss else "test accuracy"

    @property
    def text(self) -> str:
        """The target as a person says it."""
        return f"loss {self.value:g}" if self.loss else f"{100.0 * self.value:g} %"

    def reached(self, value: float | None) -> bool:
        """Whether a figure is at the target or beyond."""
        if value is None or self.value == 0.0:
            return False
        return value <= self.value if self.loss else value >= self.value


def _plain(value: object, where: str) -> object:
    """Turn a value into what JSON has, NumPy's scalars included; refuse what JSON has no number for."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StateError(f"{where} is {value!r}; expected a finite number, or None where there is none")
        return value
    if isinstance(value, Mapping):
        plain = {str(key): _plain(inner, f"{where}[{str(key)!r}]") for key, inner in value.items()}
        if len(plain) != len(value):
            raise StateError(f"{where} has two keys that read the same as text: {sorted(map(str, value))}")
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{where}[{at}]") for at, inner in enumerate(value)]
    raise StateError(
        f"{where} is a {type(value).__name__}; expected a number, text, None, or a list or mapping of them"
    )


def _to_line(row: Row, where: str) -> bytes:
    return json.dumps(_plain(row, where), sort_keys=True, allow_nan=False).encode() + b"\n"


def _to_document(value: Row, where: str) -> bytes:
    return json.dumps(_plain(value, where), sort_keys=True, allow_nan=False, indent=2).encode() + b"\n"


@dataclass(frozen=True, slots=True, init=False)
class RunDir:
    """The directory of one run; made when this is, and refused when it already holds a run.

    Args:
        path: absolute path of the directory. Flower runs an unpacked copy of the project, so a relative path would end
            up in that copy.
        inner: whether this is a run inside another run's directory, which has no summary of its own; see `sub`.
        resume: whether a run that is there goes on; its summary, and a dense run beside it, are made anew.

    Raises:
        ConfigError: the path is relative, is no directory, cannot be made, or holds a run.
    """

    path: Path
    inner: bool

    def __init__(self, path: str | Path, *, inner: bool = False, resume: bool = False) -> None:
        given, path = str(path), Path(path)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "inner", inner)
        if not path.is_absolute():
            raise ConfigError(
                f"run-dir is {given!r}; expected an absolute path, because Flower runs a copy of the project "
                'somewhere else: write run-dir="$PWD/runs/NAME"'
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run-dir {path} is a file; expected a directory or a path that does not exist yet")
        held = [name for name in ("rows.jsonl", "summary.json") if (path / name).exists()]
        if held and not resume:
            raise ConfigError(
                f"run-dir {path} already holds a run ({' and '.join(held)}); set resume = true to go on, choose "
                "another run-dir, or move or delete this one"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run-dir {path} cannot be made ({error}); choose another run-dir") from error
        if resume:
            (path / "summary.json").unlink(missing_ok=True)

    def sub(self, name: str) -> RunDir:
        """Directory of a run inside this one, such as the dense run; it has rows but no summary.

        Args:
            name: one plain path component.

        Raises:
            ConfigError: the name is none, or the directory holds a run.
        """
        if name in ("", ".", "..") or Path(name).name != name:
            raise ConfigError(f"sub-run {name!r}: expected one plain directory name")
        return RunDir(self.path / name, inner=True)

    def clear(self, name: str) -> None:
        """Remove the directory of a run inside this one, which is to be made anew."""
        LOCAL.remove(self.path / name)

    def keep_rounds(self, rounds: int) -> list[dict[str, Any]]:
        """Keep the rows of the first rounds only: what came after them was not in the checkpoint and comes again.

        Returns:
            The rows kept.

        Raises:
            StateError: fewer rows are there than that.
        """
        path = self.path / "rows.jsonl"
        rows = [row for row in read_rows(path) if row["round"] <= rounds] if path.exists() else []
        if len(rows) < rounds:
            raise StateError(f"{path} has {len(rows)} rows of the {rounds} rounds in the checkpoint; was it changed?")
        for name in ("rows.jsonl", "wall.jsonl"):
            path = self.path / name
            if path.exists():
                lines = path.read_bytes().split(b"\n")[:-1]
                kept = [line for line in lines if json.loads(line)["round"] <= rounds]
                write_atomic(path, b"".join(line + b"\n" for line in kept))
        return rows

    def config_before(self) -> dict[str, Any] | None:
        """The configuration that a run in this directory had; None if there was none."""
        try:
            found = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write_config(self, config: Row) -> Path:
        """Write the effective configuration to config.json and return its path."""
        return self._write_document("config.json", config)

    def append_row(self, row: Row) -> None:
        """Append one round's row to rows.jsonl; it is on disk when this returns.

        Keys are sorted and floats are written so that they read back bit-equal: equal rows are equal bytes.

        Args:
            row: at least `ROW_FIELDS`.

        Raises:
            StateError: a field is missing, a float is NaN or infinite, or the disk refuses.
        """
        missing = sorted(ROW_FIELDS - row.keys())
        if missing:
            raise StateError(f"rows.jsonl: the row of round {row.get('round')} lacks {', '.join(missing)}")
        self._append("rows.jsonl", row, f"rows.jsonl: round {row['round']}: row")

    def append_wall(self, row: Row) -> None:
        """Append wall-clock times of one round to wall.jsonl, which is never compared between runs."""
        self._append("wall.jsonl", row, "wall.jsonl: row")

    def write_model(self, arrays: Mapping[str, NDArray[Any]]) -> Path:
        """Write the model to model.safetensors and return its path.

        Args:
            arrays: name -> array of any shape; strided arrays are written in C order.
        """
        path = self.path / "model.safetensors"
        write_atomic(path, save({name: np.asarray(array, order="C") for name, array in arrays.items()}))
        return path

    def write_summary(self, summary: Row) -> Path:
        """Write summary.json, the last file of a run, and return its path.

        Raises:
            StateError: this is an inner run, whose figures belong into the outer run's summary.
        """
        if self.inner:
            raise StateError(f"{self.path}: an inner run has no summary.json; its figures go into the outer run's")
        return self._write_document("summary.json", summary)

    def _write_document(self, name: str, value: Row) -> Path:
        path = self.path / name
        write_atomic(path, _to_document(value, name))
        return path

    def _append(self, name: str, row: Row, where: str) -> None:
        line = _to_line(row, where)
        path = self.path / name
        try:
            new = not path.exists()
            with path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_directory(self.path)
        except OSError as error:
            raise StateError(f"{path}: cannot append a row ({error}); the rows before it are intact") from error


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a run.

    Args:
        path: a run directory, or the file itself. A last line without its line end, left by a crash in mid-write, is
            not a row and is left out.

    Raises:
        StateError: there is no such file, or a line is no JSON object.
    """
    file = Path(path)
    file = file / "rows.jsonl" if file.is_dir() else file
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise StateError(f"{file}: cannot be read ({error})") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise StateError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise StateError(f"{file}, line {number}: a {type(row).__name__}, expected an object")
        rows.append(row)
    return rows


def count(value: object) -> int:
    """How many clients a row's field names: a number, or the length of a list or mapping of them.

    >>> count(3), count(["a", "b"]), count({"a": "stale"}), count(None)
    (3, 2, 1, 0)
    """
    if value is None:
        return 0
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    raise StateError(f"{value!r} counts no clients; expected a number, a list or a mapping")


def _rounds_to(rows: Sequence[Row], target: Target) -> int | None:
    """Rounds up to and with the first that reaches the target; None if none does, or there is no target."""
    return next((at for at, row in enumerate(rows, start=1) if target.reached(row[target.field])), None)


def _total(rows: Sequence[Row], field: str) -> int:
    return sum(count(row[field]) for row in rows)


def summarise(
    rows: Sequence[Row],
    dense_rows: Sequence[Row] | None,
    *,
    target: Target,
    uplink_dense_bytes: int,
    dense_stopped: DenseStopped = "none",
) -> dict[str, Any]:
    """Figures of a whole run, beside the dense run over the same links.

    A target counts as reached at the end of the first round whose test accuracy, or loss, reaches it: that instant is
    `virtual_s` of the row. What cannot be told is None, never 0.

    Args:
        rows: the run's rows, in order.
        dense_rows: the dense run's, in order; None or empty where there was none.
        target: what counts as reached.
        uplink_dense_bytes: what the clients of `rows` would have sent up uncompressed.
        dense_stopped: why the dense run ended; "none" where there was none.

    Returns:
        A dict for summary.json. `uplink_fraction` = uplink_bytes / uplink_dense_bytes. `dense_run_uplink_bytes` is
        what the dense run sent up to its target, or to its end where it never got there. `speedup` =
        dense_seconds_to_target / seconds_to_target. `speedup_at_least` = the dense run's last instant /
        seconds_to_target, where only the dense run missed the target: it needs at least that much longer.

    Raises:
        ConfigError: an argument is out of range, or `dense_stopped` does not fit `dense_rows`.
    """
    dense = dense_rows or ()
    problems = []
    if uplink_dense_bytes < 0:
        problems.append(f"uplink_dense_bytes is {uplink_dense_bytes!r}; expected bytes, at least 0")
    if dense_stopped not in get_args(DenseStopped):
        problems.append(f"dense_stopped is {dense_stopped!r}; expected one of {', '.join(get_args(DenseStopped))}")
    elif (dense_stopped == "none") != (not dense):
        problems.append(f"dense_stopped is {dense_stopped!r} with {len(dense)} dense rows; 'none' means no dense run")
    if problems:
        raise ConfigError(problems)

    reached = _rounds_to(rows, target)
    dense_reached = _rounds_to(dense, target)
    seconds = None if reached is None else float(rows[reached - 1]["virtual_s"])
    dense_seconds = None if dense_reached is None else float(dense[dense_reached - 1]["virtual_s"])
    at_least = float(dense[-1]["virtual_s"]) if dense and dense_seconds is None else None
    accuracies = [float(row["test_accuracy"]) for row in rows if row["test_accuracy"] is not None]
    losses = [float(row["test_loss"]) for row in rows if row["test_loss"] is not None]
    dense_losses = [float(row["test_loss"]) for row in dense if row["test_loss"] is not None]
    dense_accuracies = [float(row["test_accuracy"]) for row in dense if row["test_accuracy"] is not None]
    uplink_bytes = _total(rows, "uplink_bytes")
    return {
        "absorbed": _total(rows, "absorbed"),
        "best_accuracy": max(accuracies, default=None),
        "budget_misses": _total(rows, "budget_misses"),
        "deadline_misses": _total(rows, "deadline_misses"),
        "dense_best_accuracy": max(dense_accuracies, default=None),
        "dense_final_accuracy": dense_accuracies[-1] if dense_accuracies else None,
        "dense_final_loss": dense_losses[-1] if dense_losses else None,
        "dense_rounds": len(dense),
        "dense_rounds_to_target": dense_reached,
        "dense_run_uplink_bytes": _total(dense[:dense_reached], "uplink_bytes") if dense else None,
        "dense_seconds_to_target": dense_seconds,
        "dense_stopped": dense_stopped,
        "dense_virtual_seconds": float(dense[-1]["virtual_s"]) if dense else None,
        "downlink_bytes": _total(rows, "downlink_bytes"),
        "final_accuracy": accuracies[-1] if accuracies else None,
        "final_loss": losses[-1] if losses else None,
        "late": _total(rows, "late"),
        "refused": _total(rows, "refused"),
        "rounds": len(rows),
        "rounds_to_target": reached,
        "seconds_to_target": seconds,
        "speedup": _ratio(dense_seconds, seconds),
        "speedup_at_least": _ratio(at_least, seconds),
        "target_accuracy": 0.0 if target.loss else target.value,
        "target_loss": target.value if target.loss else 0.0,
        "uplink_bytes": uplink_bytes,
        "uplink_bytes_to_target": None if reached is None else _total(rows[:reached], "uplink_bytes"),
        "uplink_dense_bytes": uplink_dense_bytes,
        "uplink_fraction": _ratio(uplink_bytes, uplink_dense_bytes),
        "virtual_seconds": float(rows[-1]["virtual_s"]) if rows else 0.0,
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
