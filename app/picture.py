"""The picture of a run: test accuracy against virtual time and against uplink bytes, beside the dense run.

Where the target is a loss, or there is no accuracy, the loss stands in its place, on a logarithmic axis.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from app.rundir import Row, Target
from app.table import human_bytes, human_factor, human_seconds
from protocol.files import write_atomic

__all__ = ["COORDINATES", "FOOTNOTE", "Curve", "curve", "draw"]

FOOTNOTE = "time = compute + uplink; the downlink is not compressed yet and not counted"
COORDINATES = "time counts values sent only (unit = coordinates): no headers, no indices, no downlink"

# Okabe and Ito's colours, told apart by every common kind of colour vision; the line styles and markers differ too.
OURS, DENSE, SOFT, INK = "#0072B2", "#D55E00", "#5f5f5f", "#222222"
STYLES = ((OURS, "o", "-", "this run"), (DENSE, "s", "--", "dense run, same links"))
LOG_FROM = 5.0  # runs whose lengths differ by more than this factor need a logarithmic axis
UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's evaluated rounds.

    Args:
        time_s: virtual time at the end of each evaluated round, s.
        up_bytes: uplink bytes of all rounds up to and with each evaluated one.
        values: test accuracy there, in [0, 1], or test loss.
        reached: index of the first that reaches the target; None if none does.
    """

    time_s: tuple[float, ...]
    up_bytes: tuple[float, ...]
    values: tuple[float, ...]
    reached: int | None


def curve(rows: Sequence[Row], target: Target) -> Curve:
    """The evaluated rounds of a run; the bytes of the others count all the same.

    Args:
        rows: the run's rows, in order.
        target: what is drawn, and what counts as reached.
    """
    sent_bytes = accumulate(int(row["uplink_bytes"]) for row in rows)
    points = [
        (float(row["virtual_s"]), float(sent), float(row[target.field]))
        for row, sent in zip(rows, sent_bytes, strict=True)
        if row[target.field] is not None
    ]
    reached = next((at for at, point in enumerate(points) if target.reached(point[2])), None)
    return Curve(
        time_s=tuple(point[0] for point in points),
        up_bytes=tuple(point[1] for point in points),
        values=tuple(point[2] for point in points),
        reached=reached,
    )


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Where a run reaches the target, or where it ends without; in the unit of an axis."""

    at: float
    reached: bool


def draw(
    path: str | Path,
    rows: Sequence[Row],
    dense_rows: Sequence[Row] | None,
    *,
    target: Target,
    title: str,
    subtitle: str,
    footnote: str = FOOTNOTE,
) -> Path:
    """Draw a run as one PNG of two panels.

    Left: test accuracy, or loss, against virtual time, on a logarithmic axis when one run took more than five times as
    long as the other. Right: against the uplink bytes of all clients together. Where a run reaches the target, the
    picture says when and after how many bytes, and by which factor the two runs differ.

    Args:
        path: the PNG.
        rows: the run's rows, in order; rounds without an accuracy are left out.
        dense_rows: the dense run's over the same links; None or empty where there was none.
        target: what is drawn, and what counts as reached.
        title: first line.
        subtitle: second line.
        footnote: what the time counts.

    Returns:
        The path.

    Raises:
        StateError: the file cannot be written.
    """
    path = Path(path)
    ours, dense = curve(rows, target), curve(dense_rows or (), target)
    figure = Figure(figsize=(12.0, 5.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.subplots_adjust(left=0.065, right=0.98, top=0.79, bottom=0.2, wspace=0.07)
    figure.text(0.065, 0.95, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.065, 0.895, subtitle, fontsize=10.5, color=SOFT, va="center")
    figure.text(0.065, 0.04, footnote, fontsize=9.5, color=SOFT, va="center")

    _value_axis(left, (*ours.values, *dense.values), target)
    pair = (ours, dense)
    unit_s = _time_axis(left, ours.time_s, dense.time_s)
    times = tuple([value / unit_s for value in one.time_s] for one in pair)
    _panel(left, times, pair, target, lambda x: human_seconds(x * unit_s), ("faster", "slower"))
    _bytes_axis(right, (*ours.up_bytes, *dense.up_bytes))
    _panel(right, (ours.up_bytes, dense.up_bytes), pair, target, human_bytes, ("fewer bytes", "more bytes"))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", bbox_to_anchor=(0.985, 0.04), ncols=3, frameon=False)

    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    write_atomic(path, out.getvalue())
    return path


def _value_axis(axes: Axes, values: Sequence[float], target: Target) -> None:
    """Prepare the y axis: per cent of accuracy, or the loss on a logarithmic scale where every loss is above 0."""
    axes.set_ylabel(target.label, color=INK)
    if not target.loss:
        axes.set_ylim(max(0.0, min(values, default=0.0) - 0.05), max(*values, target.value, 0.1) + 0.05)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        return
    seen = [value for value in (*values, target.value) if value != 0.0]
    if seen and min(seen) > 0.0 and min(values, default=1.0) > 0.0:
        axes.set_yscale("log")
        axes.set_ylim(min(seen) / 1.5, max(seen) * 1.5)


def _logarithmic(axes: Axes, values: Iterable[float]) -> None:
    """Give the x axis a logarithmic scale around the positive values; no ticks where there are none."""
    positive = [value for value in values if value > 0.0]
    if not positive:
        axes.set_xticks([])
        return
    low, high = min(positive), max(positive)
    axes.set_xscale("log")
    axes.set_xlim(low / 1.3, high * 1.3)
    subs = (1.0,) if high > 300.0 * low else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(base=10.0, subs=subs, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())


def _time_axis(axes: Axes, ours_s: Sequence[float], dense_s: Sequence[float]) -> float:
    """Prepare the axis of virtual time, and return its unit in seconds."""
    ends = [values[-1] for values in (ours_s, dense_s) if values]
    unit, unit_s = next((one for one in UNITS if max(ends, default=0.0) >= 2.0 * one[1]), UNITS[-1])
    if len(ends) == 2 and max(ends) > LOG_FROM * min(ends):
        _logarithmic(axes, (value / unit_s for value in (*ours_s, *dense_s)))
    else:
        axes.set_xlim(0.0, 1.05 * max(ends, default=0.0) / unit_s or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.set_xlabel(f"virtual time ({unit})", color=INK)
    return unit_s


def _bytes_axis(axes: Axes, values: Iterable[float]) -> None:
    """Prepare the logarithmic axis of cumulative bytes, in decimal units."""
    _logarithmic(axes, values)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"\.0+ ", " ", human_bytes(value))))
    axes.set_xlabel("uplink bytes of all clients together", color=INK)


def _panel(
    axes: Axes,
    positions: Sequence[Sequence[float]],
    curves: Sequence[Curve],
    target: Target,
    human: Callable[[float], str],
    words: tuple[str, str],
) -> None:
    """Draw both curves, the target, where each reaches it, and the factor between.

    Args:
        axes: with its limits and scale already set.
        positions: x of our curve and of the dense one, in the unit of the axis.
        curves: ours and the dense one.
        target: what counts as reached.
        human: names a position to a person.
        words: what a factor above 1 is in our favour, and against us.
    """
    axes.grid(True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if target.value > 0.0:
        axes.axhline(target.value, color=SOFT, linewidth=1.3, linestyle=":", label=f"target {target.text}")

    bottom = axes.get_ylim()[0]
    arrivals: list[_Arrival | None] = []
    for order, (x, one, (colour, marker, line, label)) in enumerate(zip(positions, curves, STYLES, strict=True)):
        arrivals.append(_Arrival(x[-1 if one.reached is None else one.reached], one.reached is not None) if x else None)
        if not x:
            continue
        axes.plot(x, one.values, color=colour, linestyle=line, linewidth=2.0, label=label, zorder=3)
        axes.plot(
            x,
            one.values,
            color=colour,
            linestyle="",
            marker=marker,
            markersize=4.5 if len(x) > 1 else 9.0,
            markeredgecolor="white",
            markeredgewidth=0.7,
            markevery=max(1, len(x) // 20),
            zorder=4,
        )
        if one.reached is None:
            continue
        at, height = x[one.reached], one.values[one.reached]
        axes.plot([at, at], [bottom, height], color=colour, linestyle=line, linewidth=1.0, alpha=0.8)
        axes.plot([at], [height], color=colour, marker="*", markersize=17, markeredgecolor="white", zorder=5)
        room = _across(axes, at)
        beside = -1 if (room > 0.82 if order else room > 0.18) else 1
        axes.annotate(
            human(at),
            (at, bottom),
            xytext=(6 * beside, 8 + 18 * order),
            textcoords="offset points",
            ha="left" if beside > 0 else "right",
            color=colour,
            fontsize=11,
            fontweight="bold",
            zorder=6,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )

    ours, dense = arrivals
    verdict = _verdict(ours, dense, words)
    axes.set_title(_sentence(ours, dense, verdict, target, human), loc="left", fontsize=10.5, color=INK)
    if not any(positions):
        axes.text(0.5, 0.4, "no round was evaluated", transform=axes.transAxes, ha="center", color=SOFT, fontsize=12)
    if ours and dense and verdict and abs(_across(axes, ours.at) - _across(axes, dense.at)) > 0.2:
        middle = axes.transData.inverted().transform(
            (axes.transData.transform((ours.at, 0.0)) + axes.transData.transform((dense.at, 0.0))) / 2.0
        )[0]
        axes.annotate(
            "",
            (ours.at, target.value),
            xytext=(dense.at, target.value),
            zorder=5,
            arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 1.4, "shrinkA": 9, "shrinkB": 9},
        )
        axes.annotate(
            verdict[0],
            (middle, target.value),
            ha="center",
            va="center",
            color=INK,
            fontsize=11,
            fontweight="bold",
            zorder=6,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none"},
        )


def _across(axes: Axes, x: float) -> float:
    """Where a position lies across the panel: 0 at its left edge, 1 at its right."""
    low, high = (float(axes.transData.transform((edge, 0.0))[0]) for edge in axes.get_xlim())
    return (float(axes.transData.transform((x, 0.0))[0]) - low) / (high - low)


def _verdict(ours: _Arrival | None, dense: _Arrival | None, words: tuple[str, str]) -> tuple[str, str] | None:
    """The factor between the runs and what it is a factor of; None where nothing can be told.

    A run that was stopped short of the target would have needed more than it had used by then, which bounds the factor
    where that is already more than the other run needed.
    """
    if not ours or not dense or not (ours.reached or dense.reached) or not ours.at or not dense.at:
        return None
    better = dense.at >= ours.at
    if not (ours.reached if better else dense.reached):
        return None
    factor = human_factor(dense.at / ours.at if better else ours.at / dense.at)
    bound = "" if ours.reached and dense.reached else "over "
    return bound + factor, words[0 if better else 1]


def _sentence(
    ours: _Arrival | None,
    dense: _Arrival | None,
    verdict: tuple[str, str] | None,
    target: Target,
    human: Callable[[float], str],
) -> str:
    """Say when each run reaches the target and by which factor they differ; nothing where there is no target."""
    if target.value == 0.0:
        return ""

    def when(one: _Arrival) -> str:
        return f"after {human(one.at)}" if one.reached else f"not within {human(one.at)}"

    said = f"{target.text} {when(ours)}" if ours else f"{target.text} not reached"
    if dense:
        said += f", dense {when(dense)}"
    if verdict:
        said += ": about the same" if verdict[0] == "1.0x" else f": {' '.join(verdict)}"
    return said
