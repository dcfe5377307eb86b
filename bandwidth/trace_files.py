"""Files of measured rates: four formats, plain or gzipped, read into a Trace.

    mahimahi   a whole number a line: the millisecond at which one packet of 1500 bytes may pass
    text       `seconds rate` a line; a rate holds from the line before up to its own time
    json       [{"duration_ms": ..., "bandwidth_kbps": ...}, ...]
    csv        named columns: a duration or a time, and a rate

Nothing in a file is evaluated, and sizes are bounded before memory is taken.
"""

from __future__ import annotations

import csv
import io
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from bandwidth.trace import Trace
from compression.errors import ConfigError, unknown_name

MAX_BYTES = 32 * 2**20
"""Largest trace file, unpacked."""
MAX_PIECES = 1_000_000
"""Most pieces of a trace."""
PACKET_BITS = 1500 * 8
"""One packet of a mahimahi file."""
RATE_UNITS: Mapping[str, float] = {
    "bit/s": 1.0,
    "kbit/s": 1e3,
    "Mbit/s": 1e6,
    "Gbit/s": 1e9,
    "byte/s": 8.0,
    "kbyte/s": 8e3,
    "Mbyte/s": 8e6,
}
"""Units of a rate, in bit/s."""
TIME_UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3}
"""Units of a time or duration, in s."""
_MOST_PROBLEMS = 5


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a CSV file has what, and the units; the units hold for text files, too.

    Args:
        duration_column: name of the column of durations; "" when there are times.
        time_column: name of the column of times, numbers or ISO 8601 dates; a row's rate holds from the row before up
            to its time. "" when there are durations.
        rate_column: name of the column of rates.
        rate_unit: a name in RATE_UNITS; "" for Mbit/s in a text file; a CSV file needs one.
        time_unit: a name in TIME_UNITS, of times and durations alike.
    """

    duration_column: str = ""
    time_column: str = ""
    rate_column: str = ""
    rate_unit: str = ""
    time_unit: str = "s"

    def __post_init__(self) -> None:
        problems = []
        if self.rate_unit and self.rate_unit not in RATE_UNITS:
            problems.append(unknown_name("rate_unit", self.rate_unit, RATE_UNITS))
        if self.time_unit not in TIME_UNITS:
            problems.append(unknown_name("time_unit", self.time_unit, TIME_UNITS))
        if problems:
            raise ConfigError(problems)


class _Problems:
    """What is wrong with a file, line by line; the first few are told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: list[str] = []
        self._count = 0

    def add(self, where: str, text: str) -> None:
        self._count += 1
        if self._count <= _MOST_PROBLEMS:
            self._told.append(f"{self._path}, {where}: {text}")

    @property
    def found(self) -> bool:
        return self._count > 0

    def raise_if_any(self) -> None:
        if self._count > _MOST_PROBLEMS:
            self._told.append(f"{self._path}: {self._count - _MOST_PROBLEMS} more problems like these")
        if self._told:
            raise ConfigError(self._told)


def read_trace(path: str | Path, *, format: str = "auto", bin_ms: int = 100, columns: Columns | None = None) -> Trace:
    """The rates in a file.

    Args:
        path: the file; gzip is recognised by its first bytes.
        format: "mahimahi", "text", "json", "csv", or "auto": told from the first line that is neither empty nor a
            comment (#).
        bin_ms: packets of a mahimahi file are spread evenly over bins of so many ms, >= 1.
        columns: names and units of columns; None for the defaults.

    Raises:
        ConfigError: a file that cannot be read or whose content is not what it should be, naming file and line.
    """
    path = Path(path)
    columns = columns or Columns()
    if format != "auto" and format not in _READERS:
        raise ConfigError(unknown_name("trace format", format, [*_READERS, "auto"]))
    if bin_ms < 1:
        raise ConfigError(f"bin_ms = {bin_ms!r}: expected a whole number >= 1 (ms)")
    text = _text(path)
    if format == "auto":
        format = _format_of(path, text)
    problems = _Problems(path)
    durations_s, rates_bps = _READERS[format](text, problems, columns, bin_ms)
    problems.raise_if_any()
    if not durations_s:
        raise ConfigError(f"{path}: no rates: expected {_SHAPES[format]}; is the file complete?")
    if not any(rates_bps):
        raise ConfigError(f"{path}: all {len(rates_bps)} rates are 0: expected some > 0; over this link nothing passes")
    try:
        return Trace(tuple(durations_s), tuple(rates_bps), path.name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {problem}" for problem in error.problems) from error


def _text(path: Path) -> str:
    """The file's text, unpacked, at most MAX_BYTES."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: expected a trace file that can be read") from error
    if data[:2] == b"\x1f\x8b":
        data = _unpacked(path, data)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: above {MAX_BYTES} bytes: expected a shorter trace; cut it")
    try:
        if b"\0" in data:
            raise ValueError("a zero byte")
        return data.decode("utf-8-sig")
    except ValueError as error:
        wanted = ", ".join(_READERS)
        raise ConfigError(f"{path}: {error}: expected text, plain or gzipped, in one of {wanted}") from error


def _unpacked(path: Path, data: bytes) -> bytes:
    """Up to MAX_BYTES + 1 bytes of gzip members."""
    out = b""
    try:
        while data and len(out) <= MAX_BYTES:
            member = zlib.decompressobj(wbits=31)
            out += member.decompress(data, MAX_BYTES + 1 - len(out))
            if not member.eof and len(out) <= MAX_BYTES:
                raise ConfigError(f"{path}: the gzip data end early: expected a complete file; copy it again")
            data = member.unused_data
    except zlib.error as error:
        raise ConfigError(f"{path}: {error}: expected whole gzip data; copy the file again") from error
    return out


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are neither empty nor comments, with their numbers from 1."""
    for number, line in enumerate(io.StringIO(text), start=1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield number, line


def _format_of(path: Path, text: str) -> str:
    number, line = next(_lines(text), (0, ""))
    words = line.split()
    if line.startswith(("[", "{")):
        return "json"
    if len(words) == 1 and _number(words[0]) is not None:
        return "mahimahi"
    if len(words) == 2 and all(_number(word) is not None for word in words):
        return "text"
    if any(mark in line for mark in ",;\t"):
        return "csv"
    if not line:
        raise ConfigError(f"{path}: no lines: expected a trace; is the file complete?")
    shapes = "; ".join(f"{name}: {shape}" for name, shape in _SHAPES.items())
    raise ConfigError(f"{path}, line {number}: {line[:60]!r} is the start of no known format: expected {shapes}")


def _number(text: str) -> float | None:
    """A finite number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


_Pieces = tuple[list[float], list[float]]
"""Durations (s) and rates (bit/s)."""


class _CsvRows(Protocol):
    """What csv.reader returns."""

    line_num: int

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


def _read_mahimahi(text: str, problems: _Problems, columns: Columns, bin_ms: int) -> _Pieces:
    """A packet with timestamp m passes in the ms that ends at m; the last timestamp is the period, as in mahimahi."""
    counts: dict[int, int] = {}
    last = 0
    for number, line in _lines(text):
        value = _number(line)
        if value is None or value != int(value) or value < 0:
            problems.add(f"line {number}", f"{line[:60]!r}: expected a whole number of ms, >= 0")
            continue
        ms = int(value)
        if ms < last:
            problems.add(f"line {number}", f"{ms} after {last}: expected times in order; sort the file")
        last = max(last, ms)
        place = max(ms - 1, 0) // bin_ms
        counts[place] = counts.get(place, 0) + 1
    bins = -(-last // bin_ms)
    if bins > MAX_PIECES:
        problems.add("last line", f"{last} ms in bins of {bin_ms} ms: expected at most {MAX_PIECES} bins; raise bin_ms")
        return [], []
    if counts and last == 0:
        problems.add("last line", "0 ms: expected a trace that lasts; its last time is its length")
    durations = [min(bin_ms, last - i * bin_ms) / 1000.0 for i in range(bins)]
    return durations, [counts.get(i, 0) * PACKET_BITS / seconds for i, seconds in enumerate(durations)]


def _read_text(text: str, problems: _Problems, columns: Columns, bin_ms: int) -> _Pieces:
    rows = _Rows(problems, columns, RATE_UNITS[columns.rate_unit or "Mbit/s"])
    for number, line in _lines(text):
        words = line.split()
        if len(words) != 2:
            problems.add(f"line {number}", f"{line[:60]!r}: expected two numbers, time and rate")
        elif not rows.add_time(f"line {number}", words[0], words[1]):
            break
    return rows.pieces


def _read_csv(text: str, problems: _Problems, columns: Columns, bin_ms: int) -> _Pieces:
    head = next(_lines(text), (0, ""))[1]
    table = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=head.count))
    try:
        return _csv_pieces(table, problems, columns)
    except csv.Error as error:
        problems.add(f"line {table.line_num}", f"{error}: expected {_SHAPES['csv']}")
        return [], []


def _csv_pieces(table: _CsvRows, problems: _Problems, columns: Columns) -> _Pieces:
    header = [name.strip() for name in next((row for row in table if row and not row[0].startswith("#")), [])]
    if not header:
        return [], []
    top = f"line {table.line_num}"
    timed = bool(columns.time_column)
    wanted = {"time_column" if timed else "duration_column": columns.time_column or columns.duration_column}
    wanted["rate_column"] = columns.rate_column
    if bool(columns.duration_column) == timed:
        problems.add(top, f"expected one of duration_column and time_column; the columns: {', '.join(header)}")
        wanted = {"rate_column": columns.rate_column}
    for key, name in wanted.items():
        if name not in header:
            got = f"{key} = {name!r}" if name else f"{key} not given"
            problems.add(top, f"{got}: expected one of the columns {', '.join(header)}")
    if not columns.rate_unit:
        problems.add(top, f"rate_unit not given: expected one of {', '.join(RATE_UNITS)}")
    if problems.found:
        return [], []
    first, rate = (header.index(name) for name in wanted.values())
    rows = _Rows(problems, columns, RATE_UNITS[columns.rate_unit])
    add = rows.add_time if timed else rows.add_duration
    for row in table:
        where = f"line {table.line_num}"
        if not row or row[0].startswith("#"):
            continue
        if len(row) <= max(first, rate):
            problems.add(where, f"{len(row)} fields: expected {len(header)}, as in the header")
        elif not add(where, row[first].strip(), row[rate].strip()):
            break
    return rows.pieces


def _read_json(text: str, problems: _Problems, columns: Columns, bin_ms: int) -> _Pieces:
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        problems.add(f"line {error.lineno}", f"{error.msg}: expected JSON; is the file complete?")
        return [], []
    except (RecursionError, ValueError) as error:
        problems.add("line 1", f"{error}: expected {_SHAPES['json']}")
        return [], []
    if not isinstance(read, list):
        problems.add("line 1", f"a JSON {type(read).__name__}: expected {_SHAPES['json']}")
        return [], []
    rows = _Rows(problems, Columns(time_unit="ms"), RATE_UNITS["kbit/s"])
    for i, entry in enumerate(read, start=1):
        if not isinstance(entry, dict) or not {"duration_ms", "bandwidth_kbps"} <= entry.keys():
            problems.add(f"entry {i}", f"{str(entry)[:60]}: expected duration_ms and bandwidth_kbps")
        elif not rows.add_duration(f"entry {i}", str(entry["duration_ms"]), str(entry["bandwidth_kbps"])):
            break
    return rows.pieces


class _Rows:
    """Pieces gathered from rows of (duration or time, rate)."""

    def __init__(self, problems: _Problems, columns: Columns, rate_factor: float) -> None:
        self.pieces: _Pieces = ([], [])
        self._problems = problems
        self._time_factor = TIME_UNITS[columns.time_unit]
        self._rate_factor = rate_factor
        self._before_s: float | None = None

    def add_time(self, where: str, time: str, rate: str) -> bool:
        """A rate that holds up to a time; the first row says only where time starts. False: the file is too long."""
        time_s = self._time_s(time)
        if time_s is None:
            self._problems.add(where, f"time {time[:60]!r}: expected a finite number or an ISO 8601 date")
            return True
        before_s, self._before_s = self._before_s, time_s
        if before_s is None:
            self._rate(where, rate)
            return True
        if time_s <= before_s:
            self._problems.add(where, f"time {time[:60]!r} is not after the one before: expected times in order")
            return True
        return self._add(where, time_s - before_s, rate)

    def add_duration(self, where: str, duration: str, rate: str) -> bool:
        """A rate that holds for a duration. False: the file is too long."""
        value = _number(duration)
        if value is None or value <= 0.0:
            self._problems.add(where, f"duration {duration[:60]!r}: expected a finite number > 0")
            return True
        return self._add(where, value * self._time_factor, rate)

    def _time_s(self, text: str) -> float | None:
        value = _number(text)
        if value is not None:
            return value * self._time_factor
        try:
            date = datetime.fromisoformat(text)
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            return None

    def _rate(self, where: str, text: str) -> float | None:
        value = _number(text)
        if value is None or value < 0.0:
            self._problems.add(where, f"rate {text[:60]!r}: expected a finite number >= 0")
            return None
        return value * self._rate_factor

    def _add(self, where: str, seconds: float, rate: str) -> bool:
        value = self._rate(where, rate)
        if value is None:
            return True
        if len(self.pieces[0]) == MAX_PIECES:
            self._problems.add(where, f"more than {MAX_PIECES} rows: expected a shorter trace; cut it or average it")
            return False
        self.pieces[0].append(seconds)
        self.pieces[1].append(value)
        return True


_READERS = {"mahimahi": _read_mahimahi, "text": _read_text, "json": _read_json, "csv": _read_csv}
FORMATS = ("auto", *_READERS)
"""Formats that `read_trace` knows."""
_SHAPES: Mapping[str, str] = {
    "mahimahi": "a whole number of ms a line",
    "text": "`seconds rate` a line, at least two",
    "json": 'a list of {"duration_ms": ..., "bandwidth_kbps": ...}',
    "csv": "a header and rows, separated by commas, semicolons or tabs",
}


@dataclass(frozen=True, slots=True)
class TracePair:
    """Traces of both directions.

    Args:
        up: client to server.
        down: server to client; None when only one direction was measured.
    """

    up: Trace
    down: Trace | None = None


@dataclass(frozen=True, slots=True)
class TraceReader:
    """How trace files are read: `read_trace`'s options, and the other direction's column.

    Args:
        format: as in read_trace.
        bin_ms: as in read_trace.
        columns: as in read_trace.
        down_rate_column: column of the other direction's rates in the same CSV file; "" for none.
    """

    format: str = "auto"
    bin_ms: int = 100
    columns: Columns = Columns()
    down_rate_column: str = ""

    def file(self, path: Path) -> Trace:
        """One file."""
        return read_trace(path, format=self.format, bin_ms=self.bin_ms, columns=self.columns)

    def pair(self, up: Path, down: Path | None = None) -> TracePair:
        """An uplink's file with a downlink's: the one given, or x.down beside x.up, or another column of it.

        Raises:
            ConfigError: as read_trace, the problems of both files together.
        """
        columns = self.columns
        if down is None and not self.down_rate_column:
            down = other_direction(up)
        elif down is None:
            down = up
        if self.down_rate_column:
            changed = {f.name: getattr(columns, f.name) for f in fields(columns)}
            columns = Columns(**{**changed, "rate_column": self.down_rate_column})
        problems: list[str] = []
        traces: list[Trace | None] = []
        for path, which in ((up, self), (down, TraceReader(self.format, self.bin_ms, columns))):
            try:
                traces.append(None if path is None else which.file(path))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        assert traces[0] is not None
        return TracePair(traces[0], traces[1])

    def folder(self, path: Path) -> tuple[TracePair, ...]:
        """Every trace of a folder, in the order of names; x.up and x.down together.

        Files whose names begin with a dot, README or LICENSE are passed over, and so are folders.

        Raises:
            ConfigError: no traces, or as read_trace; the problems of all files together.
        """
        try:
            names = sorted(p for p in path.iterdir() if p.is_file() and not _passed_over(p.name))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}: expected a folder of traces") from error
        both = {down for up in names if (down := other_direction(up)) is not None}
        pairs: list[TracePair] = []
        problems: list[str] = []
        for name in names:
            if name in both:
                continue
            try:
                pairs.append(self.pair(name))
            except ConfigError as error:
                problems += error.problems
        if not names:
            problems.append(f"{path}: no files: expected a folder of traces")
        if problems:
            raise ConfigError(problems)
        return tuple(pairs)


def other_direction(up: Path) -> Path | None:
    """x.down beside x.up (either may be gzipped), if there is one.

    >>> other_direction(Path("nowhere/x.up")) is None
    True
    """
    plain = up.name.removesuffix(".gz")
    if not plain.endswith(".up"):
        return None
    base = plain.removesuffix(".up")
    beside = (up.with_name(f"{base}.down{end}") for end in ("", ".gz"))
    return next((path for path in beside if path.is_file()), None)


def _passed_over(name: str) -> bool:
    return name.startswith(".") or name.upper().startswith(("README", "LICENSE"))
