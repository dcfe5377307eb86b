"""The picture of a run: what it says, and that every kind of run can be drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from app import picture
from app.picture import FOOTNOTE, curve, draw
from app.rundir import Target

Rows = list[dict[str, Any]]


def make_rows(accuracies: Sequence[float | None], round_s: float, up_bytes: int) -> Rows:
    return [
        {"virtual_s": round_s * number, "uplink_bytes": up_bytes, "test_accuracy": accuracy}
        for number, accuracy in enumerate(accuracies, start=1)
    ]


OURS = make_rows([0.2, None, 0.55, 0.7, 0.75], round_s=3.0, up_bytes=1000)
DENSE = make_rows([0.2, 0.5, 0.7, 0.75], round_s=60.0, up_bytes=40_000)


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that the next `draw` fills, kept for a look at its parts."""
    kept = Figure(figsize=(12.0, 5.6), dpi=130)
    monkeypatch.setattr(picture, "Figure", lambda **_: kept)
    return kept


def texts(part: Figure | Axes) -> list[str]:
    return [text.get_text() for text in part.texts]


def test_curve_counts_the_bytes_of_rounds_without_an_accuracy() -> None:
    ours = curve(OURS, Target(0.6))
    assert ours.time_s == (3.0, 9.0, 12.0, 15.0)
    assert ours.up_bytes == (1000.0, 3000.0, 4000.0, 5000.0)
    assert ours.reached == 2
    assert curve(OURS, Target(0.7)).reached == 2
    assert curve(OURS, Target(0.76)).reached is None
    assert curve(OURS, Target(0.0)).reached is None


def test_picture_says_when_each_run_reaches_the_target_and_the_factor(tmp_path: Path, figure: Figure) -> None:
    draw(tmp_path / "p.png", OURS, DENSE, target=Target(0.6), title="Title", subtitle="what ran")
    left, right = figure.axes
    assert left.get_title(loc="left") == "60 % after 12.0 s, dense after 3.00 min: 15.0x faster"
    assert right.get_title(loc="left") == "60 % after 4.00 kB, dense after 120 kB: 30.0x fewer bytes"
    assert {"12.0 s", "3.00 min", "15.0x"} <= set(texts(left))
    assert {"4.00 kB", "120 kB", "30.0x"} <= set(texts(right))
    assert texts(figure) == ["Title", "what ran", FOOTNOTE]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "target 60 %",
        "this run",
        "dense run, same links",
    ]
    assert (left.get_xscale(), right.get_xscale()) == ("log", "log")
    assert left.get_xlabel() == "virtual time (min)"
    assert np.asarray(left.lines[1].get_xdata()).tolist() == [3.0 / 60.0, 9.0 / 60.0, 12.0 / 60.0, 15.0 / 60.0]


def test_time_is_linear_where_the_runs_are_of_like_length(tmp_path: Path, figure: Figure) -> None:
    draw(tmp_path / "p.png", OURS, make_rows([0.1, 0.7], 30.0, 10), target=Target(0.6), title="", subtitle="")
    assert figure.axes[0].get_xscale() == "linear"
    assert figure.axes[1].get_title(loc="left").endswith("200x more bytes")


@pytest.mark.parametrize(
    ("rows", "dense", "said"),
    [
        (OURS, None, "60 % after 12.0 s"),
        (OURS, DENSE[:1], "60 % after 12.0 s, dense not within 60.0 s: over 5.0x faster"),
        (OURS[:3], DENSE, "60 % not within 9.00 s, dense after 3.00 min"),
        (OURS, make_rows([0.1, 0.7], 6.0, 10), "60 % after 12.0 s, dense after 12.0 s: about the same"),
        (OURS[:3], make_rows([0.7], 1.0, 10), "60 % not within 9.00 s, dense after 1.00 s: over 9.0x slower"),
    ],
)
def test_a_factor_is_claimed_only_where_it_is_known(
    tmp_path: Path, figure: Figure, rows: Rows, dense: Rows | None, said: str
) -> None:
    draw(tmp_path / "p.png", rows, dense, target=Target(0.6), title="", subtitle="")
    assert figure.axes[0].get_title(loc="left") == said


@pytest.mark.parametrize(
    ("rows", "dense", "target"),
    [
        (OURS[:1], None, 0.6),
        (OURS[:1], DENSE[:1], 0.2),
        (make_rows([None, None], 1.0, 5), None, 0.6),
        ([], None, 0.6),
        (make_rows([0.3, 0.9], 0.0, 0), make_rows([0.3, 0.9], 0.0, 0), 0.6),
        (OURS, DENSE, 0.0),
        (make_rows([0.0, 1.0], 1e-3, 1), make_rows([0.5, 1.0], 1e6, 10**15), 1.0),
    ],
    ids=["one row", "one row each", "not evaluated", "no rows", "no time, no bytes", "no target", "far apart"],
)
def test_every_run_can_be_drawn(tmp_path: Path, rows: Rows, dense: Rows | None, target: float) -> None:
    path = draw(tmp_path / "p.png", rows, dense, target=Target(target), title="t", subtitle="s")
    pixels = imread(io.BytesIO(path.read_bytes()), format="png")
    assert pixels.shape[:2] == (728, 1560)
    assert pixels.std() > 0.05  # not an empty sheet


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    one, two = (
        draw(tmp_path / name, OURS, DENSE, target=Target(0.6), title="t", subtitle="s").read_bytes()
        for name in ("one.png", "two.png")
    )
    assert one == two
