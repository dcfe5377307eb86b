"""What a person reads while a run goes on and when it ends: one line a round, and a closing table.

Both are plain text without control characters, because Flower carries them through its log stream.
"""

from __future__ import annotations

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from app.rundir import Row, Target, count

__all__ = ["closing_table", "human_bytes", "human_factor", "human_seconds", "live_line"]

BYTE_UNITS = ("kB", "MB", "GB", "TB", "PB")


def human_bytes(size_bytes: float) -> str:
    """Bytes in decimal units, with three figures.

    >>> human_bytes(999), human_bytes(999_999), human_bytes(12_340_000), human_bytes(0)
    ('999 B', '1.00 MB', '12.3 MB', '0 B')
    """
    if size_bytes < 999.5:
        return f"{size_bytes:.0f} B"
    power = 1
    while size_bytes >= 999.5 * 1000.0**power and power < len(BYTE_UNITS):
        power += 1
    return f"{_three_figures(size_bytes / 1000.0**power)} {BYTE_UNITS[power - 1]}"


def human_seconds(time_s: float) -> str:
    """A duration in the unit that a person would use, with three figures.

    >>> human_seconds(0.0321), human_seconds(59.9), human_seconds(119), human_seconds(754), human_seconds(9000)
    ('0.0321 s', '59.9 s', '119 s', '12.6 min', '2.50 h')
    """
    if time_s < 1.0:
        return f"{time_s:.3g} s"
    if time_s < 120.0:
        return f"{_three_figures(time_s)} s"
    if time_s < 7200.0:
        return f"{_three_figures(time_s / 60.0)} min"
    return f"{_three_figures(time_s / 3600.0)} h"


def human_factor(factor: float) -> str:
    """A ratio as people say it.

    >>> human_factor(8.64), human_factor(0.52), human_factor(103.7)
    ('8.6x', '0.52x', '104x')
    """
    return f"{factor:.{2 if factor < 0.995 else 1 if factor < 99.95 else 0}f}x"


def _three_figures(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100.0 * fraction:.1f} %"


def _short(loss: float) -> str:
    """A loss in six characters, where that says anything.

    >>> _short(0.6931), _short(3.2e-7), _short(0.0)
    ('0.6931', '3.2e-07', '0.0000')
    """
    return f"{loss:.2g}" if 0.0 < abs(loss) < 1e-3 else f"{loss:.4f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def live_line(row: Row, *, rounds: int | None = None, dense_bytes: int | None = None) -> str:
    """One line about one round.

    Args:
        row: the round's row.
        rounds: how many rounds the run has at most; None if that is not known.
        dense_bytes: what the round's clients would have sent up uncompressed; None leaves the saving out.

    Returns:
        A line without its end; columns of successive rounds stand below each other. "-" is a figure that the round
        does not have.

    >>> live_line({"round": 7, "virtual_s": 84.25, "test_accuracy": 0.6125, "train_loss": 1.2345, "test_loss": None,
    ...            "uplink_bytes": 1_234_000, "late": ["c3"], "deadline_misses": 1}, rounds=60, dense_bytes=12_340_000)
    'round  7/60    84.2 s  accuracy  61.3 %  loss 1.2345  up  1.23 MB, saved  11.1 MB, 90.0 %  late 1  missed 1'
    """
    width = len(str(rounds)) if rounds is not None else 3
    head = f"round {row['round']:>{width}}" + (f"/{rounds}" if rounds is not None else "")
    loss = row["train_loss"] if row["test_loss"] is None else row["test_loss"]
    up_bytes = int(row["uplink_bytes"])
    saved = ""
    if dense_bytes:
        saved_bytes = dense_bytes - up_bytes
        sign = "-" if saved_bytes < 0 else ""
        saved = f", saved {sign + human_bytes(abs(saved_bytes)):>8}, {_percent(saved_bytes / dense_bytes):>6}"
    return "  ".join(
        (
            head,
            f"{human_seconds(row['virtual_s']):>8}",
            f"accuracy {_percent(row['test_accuracy']):>7}",
            f"loss {'-' if loss is None else _short(loss):>6}",
            f"up {human_bytes(up_bytes):>8}{saved}",
            f"late {count(row['late'])}",
            f"missed {row['deadline_misses']}",
        )
    )


def closing_table(summary: Row, *, width: int = 78) -> str:
    """The figures of a whole run beside the dense run's, as plain text.

    Args:
        summary: what `app.rundir.summarise` returns.
        width: of the text, in columns.

    Returns:
        Lines without trailing blanks or control characters; ends without a line end.
    """

    def seconds(value: float | None) -> str:
        return "never" if value is None else human_seconds(value)

    def size(value: float | None) -> str:
        return "-" if value is None else human_bytes(value)

    dense = summary["dense_stopped"] != "none"
    goal = Target(summary["target_loss"], loss=True) if summary["target_loss"] else Target(summary["target_accuracy"])
    target = goal.text
    table = Table(box=box.ASCII, show_edge=False, title_justify="left", pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("this run", justify="right", no_wrap=True)
    if dense:
        table.add_column("dense run", justify="right", no_wrap=True)

    def add(name: str, ours: str, theirs: str = "") -> None:
        table.add_row(name, ours, *((theirs,) if dense else ()))

    def plain(value: Any) -> str:
        return "-" if value is None else str(value)

    if goal.value > 0.0:
        add(f"time to {target}", seconds(summary["seconds_to_target"]), seconds(summary["dense_seconds_to_target"]))
        add(f"rounds to {target}", plain(summary["rounds_to_target"]), plain(summary["dense_rounds_to_target"]))
        # The dense run's bytes end at its target; where it never got there they compare with nothing.
        dense_bytes = summary["dense_run_uplink_bytes"] if summary["dense_seconds_to_target"] is not None else None
        add(f"uplink to {target}", size(summary["uplink_bytes_to_target"]), size(dense_bytes))
    if summary["final_accuracy"] is None and summary["final_loss"] is not None:
        add("final loss", f"{summary['final_loss']:.4g}", _loss(summary["dense_final_loss"]))
    if summary["final_accuracy"] is not None or summary["final_loss"] is None:
        add("final accuracy", _percent(summary["final_accuracy"]), _percent(summary["dense_final_accuracy"]))
        add("best accuracy", _percent(summary["best_accuracy"]), _percent(summary["dense_best_accuracy"]))
    add("rounds", str(summary["rounds"]), str(summary["dense_rounds"]))
    add("virtual time", human_seconds(summary["virtual_seconds"]), seconds(summary["dense_virtual_seconds"]))
    add("uplink", size(summary["uplink_bytes"]))
    add("uplink, same replies uncompressed", size(summary["uplink_dense_bytes"]))
    add("uplink sent of that", _percent(summary["uplink_fraction"]))
    add("downlink (not compressed)", size(summary["downlink_bytes"]))
    add("deadlines missed", str(summary["deadline_misses"]))
    add("budgets missed", str(summary["budget_misses"]))
    add("replies refused", str(summary["refused"]))

    unit = summary.get("unit", "bytes")
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if unit == "coordinates":
        lines.append("Time counts values sent only (unit = coordinates): no headers, no indices.")
    if summary["speedup"] is not None:
        lines.append(f"{target} took the dense run {human_factor(summary['speedup'])} as long.")
    elif summary["speedup_at_least"] is not None:
        lines.append(
            f"The dense run had not reached {target} when it was stopped ({summary['dense_stopped']}): this run is "
            f"more than {human_factor(summary['speedup_at_least'])} as fast."
        )
    return "\n".join(lines)
