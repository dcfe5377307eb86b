"""Traces as links: steps by hand, across the seam, over many periods; and the kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import ClientLinks, Trace, TraceLink, make_links
from compression.errors import ConfigError

# 2 s at 8 bit/s, 3 s at nothing, 1 s at 32 bit/s: 48 bits in 6 s.
STEPS = Trace((2.0, 3.0, 1.0), (8.0, 0.0, 32.0))


def test_the_trace_itself() -> None:
    assert (STEPS.period_s, STEPS.bits, STEPS.mean_bps) == (6.0, 48.0, 8.0)


def test_rates_repeat() -> None:
    link = TraceLink(STEPS)
    for start in (0.0, 6.0, 600.0):
        assert [link.rate_bps(start + t) for t in (0.0, 1.9, 2.0, 4.9, 5.0, 5.9)] == [8, 8, 0, 0, 32, 32]
    assert TraceLink(STEPS, offset_s=5.5).rate_bps(0.0) == 32.0
    assert TraceLink(STEPS, offset_s=5.5).rate_bps(0.5) == 8.0
    assert TraceLink(STEPS, offset_s=5.5 + 6e3).rate_bps(0.5) == 8.0
    assert TraceLink(STEPS, scale=0.5).rate_bps(5.0) == 16.0


def test_bits_by_hand() -> None:
    link = TraceLink(STEPS)
    assert link.bits_between(1.0, 1.5) == 4.0
    assert link.bits_between(1.0, 4.0) == 8.0
    assert link.bits_between(2.5, 4.0) == 0.0
    assert link.bits_between(1.0, 5.5) == 8.0 + 16.0
    assert link.bits_between(5.5, 7.0) == 16.0 + 8.0  # over the seam
    assert link.bits_between(5.5, 5.5 + 60.0) == 480.0
    assert link.bits_between(4.0, 13.0) == 32.0 + 48.0 + 8.0


def test_finish_by_hand() -> None:
    link = TraceLink(STEPS)
    assert link.finish_s(0.0, 1) == 1.0
    assert link.finish_s(0.0, 2) == 2.0  # just done: the pause is not waited through
    assert link.finish_s(0.0, 3) == 5.25
    assert link.finish_s(3.0, 1) == 5.25
    assert link.finish_s(0.0, 6) == 6.0  # a whole period
    assert link.finish_s(0.0, 7) == 7.0
    assert link.finish_s(5.75, 2) == 7.0  # 8 bits by the seam, 8 more in 1 s
    assert link.finish_s(0.0, 600_000_000) == 6e8  # a hundred million periods
    assert link.finish_s(1.0, 600_000_003) == 6e8 + 5.5
    assert TraceLink(STEPS, offset_s=5.75).finish_s(0.0, 2) == 1.25
    assert TraceLink(STEPS, scale=2.0).finish_s(0.0, 2) == 1.0


def test_a_trace_that_begins_and_ends_with_nothing() -> None:
    link = TraceLink(Trace((1.0, 1.0, 1.0), (0.0, 8.0, 0.0)))
    assert [link.finish_s(0.0, n) for n in (1, 2, 10**6)] == [2.0, 5.0, 3e6 - 1.0]
    assert link.finish_s(2.5, 1) == 5.0
    assert TraceLink(Trace((2.0,), (4.0,))).finish_s(1.0, 8) == 17.0


pieces = st.lists(st.tuples(st.floats(0.01, 100.0), st.one_of(st.just(0.0), st.floats(1.0, 1e7))), min_size=1)


@given(
    pieces.filter(lambda p: any(rate for _, rate in p)), st.floats(0.0, 1e4), st.floats(0.0, 1e4), st.integers(0, 10**7)
)
def test_against_a_walk(trace: list[tuple[float, float]], offset_s: float, start_s: float, nbytes: int) -> None:
    """Piece by piece, with nothing summed beforehand, for up to 50 periods."""
    link = TraceLink(Trace(tuple(d for d, _ in trace), tuple(r for _, r in trace)), offset_s)
    period_s = math.fsum(d for d, _ in trace)
    if 8 * nbytes > 50 * math.fsum(d * r for d, r in trace):
        return
    within_s, i = math.fmod(start_s + offset_s, period_s), 0
    while within_s >= trace[i][0]:
        within_s -= trace[i][0]
        i = (i + 1) % len(trace)
    now_s, left = start_s, 8.0 * nbytes
    while left > 1e-9 * nbytes:
        length_s, rate = trace[i][0] - within_s, trace[i][1]
        if rate > 0.0 and left <= rate * length_s:
            now_s += left / rate
            break
        now_s, left, within_s, i = now_s + length_s, left - rate * length_s, 0.0, (i + 1) % len(trace)
    finish_s = link.finish_s(start_s, nbytes)
    low, high = sorted((now_s, finish_s))
    assert link.bits_between(low, high) <= 1e-8 * nbytes + link.mean_bps * 1e-9 + max(r for _, r in trace) * 1e-9


def test_bad_traces() -> None:
    for durations, rates, said in (
        ((), (), "0 durations, 0 rates"),
        ((1.0,), (1.0, 2.0), "1 durations, 2 rates"),
        ((1.0, 0.0), (1.0, 1.0), "duration 1 is 0.0: expected a finite number > 0"),
        ((1.0, math.nan), (1.0, 1.0), "duration 1 is nan"),
        ((1.0,), (-1.0,), "rate 0 is -1.0: expected a finite number >= 0"),
        ((1.0,), (math.inf,), "rate 0 is inf"),
        ((1.0, 1.0), (0.0, 0.0), "0 bits in 2 s"),
        ((1e300, 1e300), (1e300, 1.0), "inf bits"),
    ):
        with pytest.raises(ConfigError, match=said):
            Trace(durations, rates, "x")
    with pytest.raises(ConfigError) as caught:
        TraceLink(STEPS, -1.0, 0.0)
    assert len(caught.value.problems) == 2


def write(folder: Path, name: str, *kbps: float) -> None:
    """A JSON trace, a second for each rate."""
    rows = ", ".join(f'{{"duration_ms": 1000, "bandwidth_kbps": {rate}}}' for rate in kbps)
    (folder / name).write_text(f"[{rows}]")


def of_kind(folder: Path, client: str = "c", index: int = 0, count: int = 1, **args: Any) -> ClientLinks:
    return make_links(
        "trace",
        args=args,
        client=client,
        index=index,
        count=count,
        seed=1,
        uplink_bps_min=1e6,
        uplink_bps_max=1e6,
        downlink_factor=4.0,
        overhead_s=0.0,
        folder=folder,
    )


def test_the_kind_scales_a_file(tmp_path: Path) -> None:
    write(tmp_path, "x.json", 1000, 3000)
    links = of_kind(tmp_path, path="x.json", offset_s=0)
    assert [links.up.rate_bps(t) for t in (0, 1)] == [0.5e6, 1.5e6]
    assert [links.down.rate_bps(t) for t in (0, 1)] == [2e6, 6e6]
    links = of_kind(tmp_path, path="x.json", offset_s=0, scaled=False)
    assert [links.up.rate_bps(t) for t in (0, 1)] == [1e6, 3e6]
    assert [links.down.rate_bps(t) for t in (0, 1)] == [4e6, 12e6]
    offsets = {of_kind(tmp_path, client=f"c{i}", path="x.json").up.bits_between(0.0, 0.5) for i in range(9)}
    assert len(offsets) > 3
    up, down = (of_kind(tmp_path, path="x.json").up, of_kind(tmp_path, path="x.json").down)
    assert isinstance(up, TraceLink)
    assert isinstance(down, TraceLink)
    assert up.offset_s == down.offset_s


def test_the_kind_finds_the_other_direction(tmp_path: Path) -> None:
    write(tmp_path, "x.up", 1000)
    write(tmp_path, "x.down", 3000)
    write(tmp_path, "y.down", 7000)
    ways: tuple[dict[str, Any], ...] = (
        {"path": "x.up"},
        {"up": "x.up"},
        {"up": "x.up", "down": "x.down"},
        {"path": str(tmp_path / "x.up")},
    )
    for args in ways:
        links = of_kind(tmp_path, scaled=False, **args)
        assert (links.up.mean_bps, links.down.mean_bps) == (1e6, 3e6)
        assert of_kind(tmp_path, **args).down.mean_bps == pytest.approx(4e6)
    assert of_kind(tmp_path, scaled=False, up="x.up", down="y.down").down.mean_bps == 7e6


def test_the_kind_gives_out_a_folder(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path, f"{i}.json", 1000 * (i + 1))
    write(tmp_path, "3.up", 4000)
    write(tmp_path, "3.down", 9000)
    (tmp_path / "README.md").write_text("not a trace")
    (tmp_path / ".hidden").write_text("nor this")
    (tmp_path / "inner").mkdir()
    fleet = [of_kind(tmp_path, f"c{i}", i, 8, path=".", scaled=False) for i in range(8)]
    assert sorted(links.up.mean_bps for links in fleet) == [1e6, 1e6, 2e6, 2e6, 3e6, 3e6, 4e6, 4e6]
    assert {links.down.mean_bps for links in fleet if links.up.mean_bps == 4e6} == {9e6}
    (tmp_path / "notes.txt").write_text("no trace at all")
    write(tmp_path, "zero.json", 0)
    with pytest.raises(ConfigError) as caught:
        of_kind(tmp_path, path=".")
    assert len(caught.value.problems) == 2
    assert "notes.txt, line 1: 'no trace at all' is the start of no known format" in caught.value.problems[0]
    with pytest.raises(ConfigError, match="no files: expected a folder of traces"):
        of_kind(tmp_path, path="inner")


def test_two_columns_are_two_directions(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("took;down;up\n1;8;2\n1;24;6\n")
    columns: dict[str, Any] = {"duration_column": "took", "rate_column": "up", "rate_unit": "Mbit/s"}
    links = of_kind(tmp_path, path="x.csv", scaled=False, down_rate_column="down", **columns)
    assert (links.up.mean_bps, links.down.mean_bps) == (4e6, 16e6)


def test_refusals_of_the_kind(tmp_path: Path) -> None:
    def problems(**args: Any) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            of_kind(tmp_path, **args)
        return caught.value.problems

    assert problems(down="x", offset_s=-1, format="jsno", bin_ms=0, rate_unit="Mb", time_unit="h") == (
        "neither path nor up is given: expected path (a file, or a folder of them) or up (a file, with down if there "
        "is one)",
        "down = 'x' without up: expected both files, or path",
        "offset_s = -1.0: expected a finite time >= 0 (s)",
        "unknown trace format 'jsno': expected one of auto, csv, json, mahimahi, text; did you mean 'json'?",
        "bin_ms = 0: expected a whole number >= 1 (ms)",
        "unknown rate_unit 'Mb': expected one of Gbit/s, Mbit/s, Mbyte/s, bit/s, byte/s, kbit/s, kbyte/s; did you mean "
        "'Mbit/s'?",
        "unknown time_unit 'h': expected one of ms, s",
    )
    assert problems(path="x", up="y")[0].startswith("path and up are both given")
    assert problems(up="no.up", down="no.down") == tuple(
        f"{tmp_path / name}: No such file or directory: expected a trace file that can be read"
        for name in ("no.up", "no.down")
    )
    assert problems(path="x", scaled=1) == ("scaled = 1 of link kind 'trace': expected true or false",)
    assert problems(path="x", bin_ms=True) == ("bin_ms = True of link kind 'trace': expected a whole number",)
