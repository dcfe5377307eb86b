"""Trace files: a golden file of every format, plain and gzipped, and what is said of bad ones."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import Columns, TraceLink, read_trace
from bandwidth import trace_files as limits
from bandwidth.trace_files import TraceReader
from compression.errors import ConfigError

TIMES = Columns(time_column="t", rate_column="rate", rate_unit="kbit/s")
LASTS = Columns(duration_column="took", rate_column="rate", rate_unit="kbyte/s", time_unit="ms")

GOLDEN: Mapping[str, tuple[str, Columns, int, list[float], list[float]]] = {
    # Bins of 10 ms over 25 ms; a packet of 12,000 bits at m passes in the ms that ends at m, so 10 is in the first bin:
    # 0, 1, 10 | 11, 11 | 25: 36,000 bits in 10 ms, 24,000 in 10 ms, 12,000 in 5 ms.
    "mahimahi": ("0\n1\n10\n11\n11\n25\n", Columns(), 10, [0.010, 0.010, 0.005], [3.6e6, 2.4e6, 2.4e6]),
    # A rate holds up to its time; the first row says where time starts. Mbit/s.
    "text": ("# cooked\n1.5\t9\n2.0 1.25\n\n5.0 0\n", Columns(), 100, [0.5, 3.0], [1.25e6, 0.0]),
    "json": (
        '[{"duration_ms": 500, "bandwidth_kbps": 80, "latency_ms": 70},\n {"bandwidth_kbps": 0, "duration_ms": 1}]',
        Columns(),
        100,
        [0.5, 0.001],
        [80e3, 0.0],
    ),
    # Times as in "text".
    "csv of times": ('t,what,rate\n10,"a, b",1\n12,,2\n15,,0.5\n', TIMES, 100, [2.0, 3.0], [2e3, 0.5e3]),
    # 1.5 s of 3 kbyte/s = 24,000 bit/s; durations in ms.
    "csv of durations": ("rate;took\n3;1500\n0;250\n", LASTS, 100, [1.5, 0.25], [24e3, 0.0]),
    # Dates: half an hour, and a second that begins on the next day.
    "csv of dates": (
        "t\trate\n2017-10-13 23:29:59\t1\n2017-10-13 23:59:59\t5\n2017-10-14T00:00:00\t7\n",
        TIMES,
        100,
        [1800.0, 1.0],
        [5e3, 7e3],
    ),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("named", [False, True], ids=["auto", "named"])
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_golden(tmp_path: Path, name: str, named: bool, packed: bool) -> None:
    text, columns, bin_ms, durations_s, rates_bps = GOLDEN[name]
    path = tmp_path / ("x.gz" if packed else "x")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = read_trace(path, format=name.split()[0] if named else "auto", bin_ms=bin_ms, columns=columns)
    assert trace.durations_s == pytest.approx(durations_s, rel=1e-12)
    assert trace.rates_bps == pytest.approx(rates_bps, rel=1e-12)
    assert trace.name == path.name


def test_the_shortest_mahimahi_file_is_12_mbit_s(tmp_path: Path) -> None:
    # One packet of 12,000 bits in every millisecond.
    (tmp_path / "x").write_text("1\n")
    assert read_trace(tmp_path / "x").mean_bps == pytest.approx(12e6)


def test_the_packets_of_a_mahimahi_file_are_all_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("".join(f"{m}\n" for m in range(0, 12_345, 7)))
    last, packets = 12_341, 1764  # 0, 7, ..., 12,341
    for bin_ms in (1, 7, 100, 99_999):
        trace = read_trace(tmp_path / "x", bin_ms=bin_ms)
        assert trace.period_s == pytest.approx(last / 1000)
        assert trace.bits == pytest.approx(packets * 12_000)


def test_units(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("0 1\n2 3\n")
    for unit, factor in (("bit/s", 1), ("kbit/s", 1e3), ("Gbit/s", 1e9), ("byte/s", 8), ("Mbyte/s", 8e6)):
        assert read_trace(tmp_path / "x", columns=Columns(rate_unit=unit)).rates_bps == (3 * factor,)
    assert read_trace(tmp_path / "x", columns=Columns(time_unit="ms")).durations_s == (0.002,)


GOOD_JSON = '{"duration_ms": 1, "bandwidth_kbps": 1}'

BAD: Mapping[str, tuple[bytes, str, Columns, str]] = {
    "empty": (b"", "auto", TIMES, "no lines: expected a trace; is the file complete?"),
    "only blanks": (b"\n \n", "mahimahi", TIMES, "no rates: expected a whole number of ms a line"),
    "unknown": (b"\nhello world, no\xc3\xa4\n", "auto", LASTS, "rate_column = 'rate': expected one of the columns"),
    "no format": (b"\nhello\n", "auto", TIMES, "line 2: 'hello' is the start of no known format: expected mahimahi: "),
    "zero bytes": (b"1\n\x00\n", "auto", TIMES, "a zero byte: expected text, plain or gzipped, in one of mahimahi, "),
    "not text": (b"\xff\xfe\x80", "auto", TIMES, "can't decode byte 0xff in position 0: .*expected text"),
    "gz cut": (gzip.compress(b"1\n2\n")[:-9], "auto", TIMES, "the gzip data end early: expected a complete file"),
    "gz broken": (gzip.compress(b"1\n2\n")[:-8] + b"12345678", "auto", TIMES, "expected whole gzip data; copy"),
    "packet negative": (b"1\n-2\n3\n", "auto", TIMES, "line 2: '-2': expected a whole number of ms, >= 0"),
    "packet nan": (b"1\nnan\n", "auto", TIMES, "line 2: 'nan': expected a whole number of ms, >= 0"),
    "packet fraction": (b"1\n2.5\n", "auto", TIMES, "line 2: '2.5': expected a whole number"),
    "packet word": (b"1\n2 3\n", "auto", TIMES, "line 2: '2 3': expected a whole number"),
    "packet order": (b"1\n5\n3\n", "auto", TIMES, "line 3: 3 after 5: expected times in order; sort the file"),
    "packet no time": (b"0\n0\n", "auto", TIMES, "last line: 0 ms: expected a trace that lasts"),
    "packet far": (b"1\n1e12\n", "auto", TIMES, "expected at most 1000000 bins; raise bin_ms"),
    "text one row": (b"1 2\n", "auto", Columns(), "no rates: expected `seconds rate` a line, at least two"),
    "text order": (b"1 2\n3 4\n3 5\n", "auto", Columns(), "line 3: time '3' is not after the one before"),
    "text negative": (b"1 2\n3 -4\n", "auto", Columns(), "line 2: rate '-4': expected a finite number >= 0"),
    "text first bad": (b"1 nan\n3 4\n", "text", Columns(), "line 1: rate 'nan': expected a finite number >= 0"),
    "text inf": (b"1 2\ninf 4\n", "auto", Columns(), "line 2: time 'inf': expected a finite number or an ISO"),
    "text words": (b"1 2\n3 4 5\n", "auto", Columns(), "line 2: '3 4 5': expected two numbers, time and rate"),
    "text underscore": (b"1 2\n3 1_0\n", "auto", Columns(), "line 2: rate '1_0': expected a finite number"),
    "text zero": (b"1 2\n3 0\n4 0\n", "auto", Columns(), "all 2 rates are 0: expected some > 0"),
    "json cut": (f"[{GOOD_JSON},\n{{".encode(), "auto", TIMES, "line 2: .*: expected JSON; is the file complete?"),
    "json other": (b'{"a": 1}', "auto", TIMES, "a JSON dict: expected a list of"),
    "json key": (b'[{"duration_ms": 1}]', "auto", TIMES, "entry 1: .*expected duration_ms and bandwidth_kbps"),
    "json nan": (
        f"[{GOOD_JSON}, {GOOD_JSON.replace('1,', 'NaN,')}]".encode(),
        "auto",
        TIMES,
        "entry 2: duration 'nan'",
    ),
    "json text": (GOOD_JSON.join("[]").replace("1}", '"a"}').encode(), "auto", TIMES, "entry 1: rate 'a'"),
    "json true": (GOOD_JSON.join("[]").replace("1}", "true}").encode(), "auto", TIMES, "entry 1: rate 'True'"),
    "json empty": (b"[]", "auto", TIMES, "no rates: expected a list of"),
    "json deep": (b"[" * 100_000, "auto", TIMES, "line 1: "),
    "csv column": (
        b"t,speed\n1,2\n",
        "auto",
        TIMES,
        "line 1: rate_column = 'rate': expected one of the columns t, speed",
    ),
    "csv none named": (b"t,rate\n1,2\n", "auto", Columns(), "expected one of duration_column and time_column"),
    "csv unit": (b"t,rate\n", "auto", Columns(time_column="t", rate_column="rate"), "line 1: rate_unit not given"),
    "csv number": (b"t,rate\n1,2\n2,fast\n", "auto", TIMES, "line 3: rate 'fast': expected a finite number >= 0"),
    "csv date": (b"t,rate\n1,2\nlater,2\n", "auto", TIMES, "line 3: time 'later': expected a finite number or an ISO"),
    "csv short": (b"t,rate\n1,2\n2\n", "auto", TIMES, "line 3: 1 fields: expected 2, as in the header"),
    "csv duration": (b"took,rate\n0,2\n", "auto", LASTS, "line 2: duration '0': expected a finite number > 0"),
    "csv no rows": (b"t,rate\n", "auto", TIMES, "no rates: expected a header and rows"),
    "csv no header": (b"# only this\n", "csv", TIMES, "no rates: expected a header and rows"),
    "csv endless field": (b't,rate\n1,"' + b"2" * 200_000, "auto", TIMES, "field larger than field limit"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_files(tmp_path: Path, name: str) -> None:
    data, format, columns, said = BAD[name]
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(path, format=format, columns=columns)
    assert all(str(path) in problem for problem in caught.value.problems)


def test_the_first_few_problems_are_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("1\n" + "x\n" * 9)
    with pytest.raises(ConfigError) as caught:
        read_trace(tmp_path / "x")
    assert len(caught.value.problems) == 6
    assert caught.value.problems[0] == f"{tmp_path / 'x'}, line 2: 'x': expected a whole number of ms, >= 0"
    assert caught.value.problems[-1] == f"{tmp_path / 'x'}: 4 more problems like these"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing: No such file or directory: expected a trace file that can be read"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="unknown trace format 'pcap'"):
        read_trace(tmp_path / "x", format="pcap")
    with pytest.raises(ConfigError, match="bin_ms = 0"):
        read_trace(tmp_path / "x", bin_ms=0)
    with pytest.raises(ConfigError) as caught:
        Columns(rate_unit="bps", time_unit="min")
    assert len(caught.value.problems) == 2


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 1000)
    monkeypatch.setattr(limits, "MAX_PIECES", 10)
    path = tmp_path / "x"
    for data in (b"1\n" * 501, gzip.compress(b"1\n" * 10**5), gzip.compress(b"1\n" * 251) * 2):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="above 1000 bytes: expected a shorter trace; cut it"):
            read_trace(path)
    path.write_bytes(b"1\n" * 500)
    assert read_trace(path).bits == 500 * 12_000
    path.write_text("".join(f"{i} 1\n" for i in range(12)))
    with pytest.raises(ConfigError, match="line 12: more than 10 rows: expected a shorter trace"):
        read_trace(path)


@given(
    st.one_of(
        st.binary(max_size=60),
        st.text("0123456789.,;-+eE \t\n\r#\"'[]{}:NaInftrue_", max_size=60).map(str.encode),
        st.lists(st.tuples(st.integers(-5, 10**6), st.floats()), max_size=5).map(
            lambda rows: "".join(f"{a} {b}\n" for a, b in rows).encode()
        ),
    ),
    st.sampled_from(limits.FORMATS),
    st.booleans(),
)
def test_any_bytes_are_a_trace_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, format: str, packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(gzip.compress(data) if packed else data)
    try:
        trace = read_trace(path, format=format, columns=TIMES)
    except ConfigError as error:
        assert all(str(path) in problem for problem in error.problems)  # noqa: PT017
    else:
        assert 0.0 < trace.mean_bps < float("inf")


# Real files, where they are.

TRACES = os.environ.get("KIMAD_TRACES", "")
needs_traces = pytest.mark.skipif(not TRACES, reason="KIMAD_TRACES is not set: no folder of public traces")


@needs_traces
@pytest.mark.parametrize(
    ("folder", "count", "mean_mbps"),
    [("norway3g", 12, 1.11), ("oboe", 60, 2.63), ("fcc", 39, 1.34)],
)
def test_real_traces(folder: str, count: int, mean_mbps: float) -> None:
    """As many as there are, and the mean over their seconds, as the folder's own table has it."""
    pairs = TraceReader().folder(Path(TRACES) / folder)
    # the table leaves out what is shorter than a minute
    traces = [pair.up for pair in pairs if pair.up.period_s >= 60.0]
    assert len(pairs) == count
    assert {pair.down for pair in pairs} == {None}
    mean = sum(t.bits for t in traces) / sum(t.period_s for t in traces)
    assert mean / 1e6 == pytest.approx(mean_mbps, rel=0.02)


@needs_traces
def test_real_traces_of_both_directions() -> None:
    pairs = TraceReader().folder(Path(TRACES) / "mahimahi")
    assert len(pairs) == 4
    ratios = []
    for pair in pairs:
        assert pair.down is not None
        common_s = float(int(min(pair.down.period_s, pair.up.period_s)))
        down, up = (TraceLink(trace).bits_between(0.0, common_s) for trace in (pair.down, pair.up))
        ratios.append(down / up)
    # down over up in the seconds that both last, as the folder's table has it
    assert sorted(ratios) == pytest.approx([1.26, 2.14, 2.39, 5.61], abs=0.006)


@needs_traces
def test_real_trace_in_seconds_agrees_with_counting_its_packets() -> None:
    path = Path(TRACES) / "mahimahi" / "TMobile-UMTS-driving.up"
    ms = np.loadtxt(path, dtype=np.int64)
    trace = read_trace(path, bin_ms=1000)
    seconds = np.bincount(np.maximum(ms - 1, 0) // 1000, minlength=len(trace.durations_s))
    assert trace.rates_bps[:-1] == pytest.approx(seconds[:-1] * 12_000)
    link = TraceLink(trace)
    assert link.bits_between(10.0, 500.0) == pytest.approx(seconds[10:500].sum() * 12_000)


@needs_traces
def test_real_trace_table_of_two_directions() -> None:
    """A home line's speed tests by date: a column each way, half an hour apart, over 18 months."""
    path = next((Path(TRACES) / "home_cable").glob("*.csv.gz"))
    columns = Columns(time_column="datetimestart", rate_column="upload", rate_unit="Mbit/s")
    pair = TraceReader(columns=columns, down_rate_column="download").pair(path)
    assert pair.down is not None
    assert pair.down.durations_s == pair.up.durations_s
    assert np.median(pair.up.durations_s) == 1800.0
    # the folder's table: means of the tests 3.79 up and 45.6 down; its first test only says where time starts
    assert np.mean(pair.up.rates_bps) == pytest.approx(3.79e6, rel=0.005)
    assert np.mean(pair.down.rates_bps) == pytest.approx(45.6e6, rel=0.005)
