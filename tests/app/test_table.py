"""The lines that a person reads: exact texts, columns that stand below each other, no control characters."""

from __future__ import annotations

from typing import Any

import pytest

from app.rundir import Target, summarise
from app.table import closing_table, human_bytes, human_factor, human_seconds, live_line


def make_row(number: int, accuracy: float | None = None, **fields: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "round": number,
        "virtual_s": 50.0 * number,
        "test_accuracy": accuracy,
        "test_loss": None,
        "train_loss": 0.75,
        "uplink_bytes": 250_000,
        "downlink_bytes": 2_000_000,
        "late": [],
        "absorbed": [],
        "refused": {},
        "deadline_misses": 0,
        "budget_misses": 0,
    }
    return row | fields


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9994, "9.99 kB"),
        (9996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_501, "1.00 MB"),
        (5e18, "5000 PB"),
    ],
)
def test_bytes(size_bytes: float, text: str) -> None:
    assert human_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0 s"), (0.5, "0.5 s"), (9.996, "10.0 s"), (119.9, "120 s"), (120.0, "2.00 min"), (7200.0, "2.00 h")],
)
def test_seconds(time_s: float, text: str) -> None:
    assert human_seconds(time_s) == text


@pytest.mark.parametrize(("factor", "text"), [(0.994, "0.99x"), (0.996, "1.0x"), (99.94, "99.9x"), (99.96, "100x")])
def test_factor(factor: float, text: str) -> None:
    assert human_factor(factor) == text


def test_live_line_says_what_a_round_did() -> None:
    row = make_row(7, 0.6125, test_loss=1.25, late=["c1", "c2"], deadline_misses=3)
    assert live_line(row, rounds=60, dense_bytes=2_500_000) == (
        "round  7/60  5.83 min  accuracy  61.3 %  loss 1.2500  up   250 kB, saved  2.25 MB, 90.0 %  late 2  missed 3"
    )


def test_live_line_without_evaluation_or_limits() -> None:
    assert live_line(make_row(7, train_loss=None)) == (
        "round   7  5.83 min  accuracy       -  loss      -  up   250 kB  late 0  missed 0"
    )
    assert "loss 0.7500" in live_line(make_row(7))


def test_live_line_owns_up_when_compression_costs_bytes() -> None:
    assert "saved -50.0 kB, -25.0 %" in live_line(make_row(1), dense_bytes=200_000)


def test_live_lines_stand_in_columns() -> None:
    rows = [make_row(1), make_row(9, 0.05, test_loss=9.5), make_row(200, 1.0, uplink_bytes=1_999_999)]
    lines = [live_line(row, rounds=200, dense_bytes=2_000_000) for row in rows]
    for word in ("accuracy", "loss", "up", "saved", "late"):
        assert len({line.index(word) for line in lines}) == 1
    assert all(line.isprintable() for line in lines)


def test_closing_table_with_a_dense_run() -> None:
    ours = [make_row(1, 0.4), make_row(2, 0.8)]
    dense = [make_row(1, 0.5, virtual_s=600.0, uplink_bytes=5_000_000), make_row(2, 0.7, virtual_s=1200.0)]
    text = closing_table(
        summarise(ours, dense, target=Target(0.6), uplink_dense_bytes=10_000_000, dense_stopped="target")
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    assert ["", "this run", "dense run"] in cells
    assert ["time to 60 %", "100 s", "20.0 min"] in cells
    assert ["rounds to 60 %", "2", "2"] in cells
    assert ["uplink to 60 %", "500 kB", "5.25 MB"] in cells
    assert ["final accuracy", "80.0 %", "70.0 %"] in cells
    assert ["uplink sent of that", "5.0 %", ""] in cells
    assert ["downlink (not compressed)", "4.00 MB", ""] in cells
    assert text.splitlines()[-1] == "60 % took the dense run 12.0x as long."


def test_closing_table_claims_no_more_than_is_known() -> None:
    short = [make_row(1, 0.5, virtual_s=600.0)]
    bound = closing_table(
        summarise([make_row(1, 0.6)], short, target=Target(0.6), uplink_dense_bytes=1, dense_stopped="time limit")
    )
    assert "never" in bound
    assert bound.splitlines()[-1] == (
        "The dense run had not reached 60 % when it was stopped (time limit): this run is more than 12.0x as fast."
    )
    alone = closing_table(summarise([make_row(1)], None, target=Target(0.6), uplink_dense_bytes=1))
    assert "dense run" not in alone
    assert "as long" not in alone
    free = closing_table(summarise([make_row(1)], None, target=Target(0.0), uplink_dense_bytes=1))
    assert "time to" not in free


def test_closing_table_is_plain_text() -> None:
    summary = summarise([make_row(1, 0.6)], None, target=Target(0.6), uplink_dense_bytes=10**13)
    lines = closing_table(summary).splitlines()
    assert all(line.isascii() and line.isprintable() and line == line.rstrip() for line in lines)
    assert max(map(len, lines)) <= 78
