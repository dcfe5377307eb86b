"""Kinds of links by name, and the links of a client from a kind, its parameters and a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bandwidth._registry import Registry
from bandwidth.drift import STABLE, DriftLink
from bandwidth.links import ClientLinks, ConstantLink, Link, rate_problem
from bandwidth.markov import MarkovLink
from bandwidth.outages import OutageLink
from bandwidth.sinusoid import SinusoidLink
from bandwidth.trace import TraceLink
from bandwidth.trace_files import FORMATS, Columns, TracePair, TraceReader
from compression.arguments import Parameter, checked
from compression.errors import ConfigError, unknown_name
from compression.randomness import permutation, uniforms

NO_ARGS: Mapping[str, object] = MappingProxyType({})
DIRECTIONS = ("up", "down")


@dataclass(frozen=True, slots=True)
class Seat:
    """A client's place among the run's clients, and the rates that its links are to have.

    Args:
        client: the client's stable id; names its random draws.
        index: which of the clients this is, 0 to count - 1.
        count: number of clients.
        seed: the run's seed.
        up_bps: mean uplink, bit/s.
        downlink_factor: mean downlink over mean uplink.
    """

    client: str
    index: int
    count: int
    seed: int
    up_bps: float
    downlink_factor: float

    @property
    def down_bps(self) -> float:
        """Mean downlink, bit/s."""
        return self.up_bps * self.downlink_factor


LinkMaker = Callable[[Seat], tuple[Link, Link]]
"""A client's uplink and downlink."""


@dataclass(frozen=True, slots=True)
class LinkKind:
    """A kind of links.

    Args:
        parameters: its parameters by name.
        prepare: (all parameters, folder that relative paths start from) -> LinkMaker. Reads what files there are, and
            raises ConfigError for all that is wrong with the parameters.
    """

    parameters: Mapping[str, Parameter]
    prepare: Callable[[Mapping[str, Any], Path], LinkMaker]


LINK_KINDS: Registry[LinkKind] = Registry("link kind")
"""Kinds of links that a configuration may name."""


def check_args(kind: str, args: Mapping[str, object]) -> dict[str, object]:
    """All parameters of a kind: those given, checked for name and type, and defaults. Touches no file.

    Raises:
        ConfigError: an unknown kind, unknown names or wrong types; all of them together.
    """
    return checked(args, LINK_KINDS[kind].parameters, f"link kind {kind!r}")


def _each_way(make: Callable[[float, Seat, str], Link]) -> LinkMaker:
    """A maker from one that makes a direction: (mean_bps, seat, direction) -> Link. Tried once, for its errors."""

    def both(seat: Seat) -> tuple[Link, Link]:
        return make(seat.up_bps, seat, "up"), make(seat.down_bps, seat, "down")

    both(Seat("", 0, 1, 0, 1e6, 1.0))
    return both


def _parameters_of(link: type, **changed: object) -> dict[str, Parameter]:
    """The fields of a link's class that have defaults, some changed."""
    return {
        f.name: Parameter(type(f.default), changed.get(f.name, f.default))
        for f in fields(link)
        if f.init and isinstance(f.default, int | float)
    }


def _constant(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    return _each_way(lambda mean_bps, seat, direction: ConstantLink(mean_bps))


def _cellular(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    return _each_way(lambda mean_bps, seat, direction: MarkovLink(mean_bps, seat.seed, seat.client, direction, **args))


def _drift(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    return _each_way(lambda mean_bps, seat, direction: DriftLink(mean_bps, seat.seed, seat.client, direction, **args))


def _sinusoid(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    amplitude, period_s, theta, phase = (args[name] for name in ("amplitude", "period_s", "theta", "phase"))
    problems = []
    if not 0.0 <= amplitude <= 1.0:
        problems.append(f"amplitude = {amplitude!r}: expected a number in [0, 1], 1 for a rate that falls to 0")
    if period_s is not None and theta is not None:
        problems.append(f"period_s = {period_s!r} and theta = {theta!r}: expected one of them")
    if period_s is not None and not math.pi / 1e6 <= period_s <= math.pi * 1e9:
        problems.append(f"period_s = {period_s!r}: expected a time in [4e-6, 3e9] (s)")
    elif theta is None:
        theta = math.pi / (60.0 if period_s is None else period_s)
    if problems:
        raise ConfigError(problems)

    def make(mean_bps: float, seat: Seat, direction: str) -> Link:
        at = phase
        if at is None:
            purpose = f"link-{direction}-phase"
            at = math.pi * float(uniforms(1, seed=seat.seed, client=seat.client, purpose=purpose)[0])
        return SinusoidLink(2.0 * amplitude * mean_bps, theta, mean_bps * (1.0 - amplitude), at)

    return _each_way(make)


def _outages(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    every_s, outage_s, base = args["outage_every_s"], args["outage_s"], args["base"]
    problems: list[str] = []
    share = 1.0
    try:
        share = OutageLink(ConstantLink(1.0), 0, "", every_s, outage_s).up_share
    except ConfigError as error:
        problems += error.problems
    make = _each_way(lambda mean_bps, seat, direction: ConstantLink(mean_bps))
    try:
        if base == "outages":
            raise ConfigError("base = 'outages': expected another kind; give outage_every_s and outage_s for both")
        make = LINK_KINDS[base].prepare(check_args(base, args["base_args"]), folder)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)

    def both(seat: Seat) -> tuple[Link, Link]:
        between = Seat(seat.client, seat.index, seat.count, seat.seed, seat.up_bps / share, seat.downlink_factor)
        up, down = (OutageLink(link, seat.seed, seat.client, every_s, outage_s) for link in make(between))
        return up, down

    return both


def _trace(args: Mapping[str, Any], folder: Path) -> LinkMaker:
    pairs = _traces(args, folder)
    scaled, offset_s = args["scaled"], args["offset_s"]

    def both(seat: Seat) -> tuple[Link, Link]:
        pair = pairs[_shuffled(seat.count, seat.seed, "link-traces")[seat.index] % len(pairs)]
        at = offset_s
        if at is None:
            share = float(uniforms(1, seed=seat.seed, client=seat.client, purpose="link-offset")[0])
            at = share * pair.up.period_s
        up = TraceLink(pair.up, at, seat.up_bps / pair.up.mean_bps if scaled else 1.0)
        if pair.down is None:
            return up, TraceLink(pair.up, at, up.scale * seat.downlink_factor)
        return up, TraceLink(pair.down, at, seat.down_bps / pair.down.mean_bps if scaled else 1.0)

    return both


def _traces(args: Mapping[str, Any], folder: Path) -> tuple[TracePair, ...]:
    """The traces that the parameters name, read."""
    path, up, down = args["path"], args["up"], args["down"]
    problems = []
    if bool(path) == bool(up):
        got = "path and up are both given" if path else "neither path nor up is given"
        problems.append(f"{got}: expected path (a file, or a folder of them) or up (a file, with down if there is one)")
    if down and not up:
        problems.append(f"down = {down!r} without up: expected both files, or path")
    if args["offset_s"] is not None and not 0.0 <= args["offset_s"] < math.inf:
        problems.append(f"offset_s = {args['offset_s']!r}: expected a finite time >= 0 (s)")
    if args["format"] not in FORMATS:
        problems.append(unknown_name("trace format", args["format"], FORMATS))
    if args["bin_ms"] < 1:
        problems.append(f"bin_ms = {args['bin_ms']!r}: expected a whole number >= 1 (ms)")
    columns = Columns()
    try:
        columns = Columns(**{f.name: args[f.name] for f in fields(Columns)})
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    reader = TraceReader(args["format"], args["bin_ms"], columns, args["down_rate_column"])
    if up:
        return (reader.pair(folder / up, folder / down if down else None),)
    whole = folder / path
    return reader.folder(whole) if whole.is_dir() else (reader.pair(whole),)


LINK_KINDS.add("constant", LinkKind({}, _constant))
LINK_KINDS.add("cellular", LinkKind(_parameters_of(MarkovLink), _cellular))
LINK_KINDS.add("mobile", LinkKind(_parameters_of(DriftLink), _drift))
LINK_KINDS.add("stable", LinkKind(_parameters_of(DriftLink, **STABLE), _drift))
LINK_KINDS.add(
    "sinusoid",
    LinkKind(
        {
            "amplitude": Parameter(float, 0.9),
            "period_s": Parameter(float, None),
            "theta": Parameter(float, None),
            "phase": Parameter(float, None),
        },
        _sinusoid,
    ),
)
LINK_KINDS.add(
    "outages",
    LinkKind(
        {**_parameters_of(OutageLink), "base": Parameter(str, "constant"), "base_args": Parameter(dict, NO_ARGS)},
        _outages,
    ),
)
LINK_KINDS.add(
    "trace",
    LinkKind(
        {
            "path": Parameter(str, ""),
            "up": Parameter(str, ""),
            "down": Parameter(str, ""),
            "scaled": Parameter(bool, True),
            "offset_s": Parameter(float, None),
            "format": Parameter(str, "auto"),
            "bin_ms": Parameter(int, 100),
            "duration_column": Parameter(str, ""),
            "time_column": Parameter(str, ""),
            "rate_column": Parameter(str, ""),
            "down_rate_column": Parameter(str, ""),
            "rate_unit": Parameter(str, ""),
            "time_unit": Parameter(str, "s"),
        },
        _trace,
    ),
)


@lru_cache(maxsize=64)
def _shuffled(count: int, seed: int, purpose: str) -> tuple[int, ...]:
    return tuple(permutation(count, seed=seed, purpose=purpose).tolist())


def rank(index: int, count: int, seed: int, purpose: str) -> int:
    """Client `index`'s place in an order of the clients that the seed draws, 0 to count - 1.

    Raises:
        ConfigError: an index that is not one of count clients.
    """
    if not 0 <= index < count:
        raise ConfigError(f"client index {index} of {count}: expected 0 to count - 1")
    return _shuffled(count, seed, purpose)[index]


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """How clients get links of one kind; made by `plan_links`, which checks everything and reads every file."""

    make: LinkMaker
    seed: int
    uplink_bps_min: float
    uplink_bps_max: float
    downlink_factor: float
    overhead_s: float

    def links(self, client: str, *, index: int, count: int) -> ClientLinks:
        """The links of client `index` of `count`.

        Raises:
            ConfigError: an index that is not one of count clients.
        """
        place = rank(index, count, self.seed, "link-ranks")
        share = place / (count - 1) if count > 1 else 0.5
        low, high = self.uplink_bps_min, self.uplink_bps_max
        up_bps = high if share == 1.0 else low * (high / low) ** share
        up, down = self.make(Seat(client, index, count, self.seed, up_bps, self.downlink_factor))
        return ClientLinks(up=up, down=down, overhead_up_s=self.overhead_s, overhead_down_s=self.overhead_s)


def link_problems(
    kind: str,
    *,
    args: Mapping[str, object] = NO_ARGS,
    uplink_bps_min: float,
    uplink_bps_max: float,
    downlink_factor: float,
    overhead_s: float,
) -> list[str]:
    """What can be seen to be wrong without reading a file: arguments as of `plan_links`.

    Names and types of the parameters, and the numbers that all kinds share; `plan_links` finds these and the rest.
    """
    problems: list[str] = []
    try:
        check_args(kind, args)
    except ConfigError as error:
        problems += error.problems
    numbers = rate_problem("uplink_bps_min", uplink_bps_min) + rate_problem("uplink_bps_max", uplink_bps_max)
    if not numbers and uplink_bps_min > uplink_bps_max:
        numbers.append(f"uplink_bps_min = {uplink_bps_min!r} is above uplink_bps_max = {uplink_bps_max!r}")
    if not 0.0 < downlink_factor < math.inf:
        numbers.append(f"downlink_factor = {downlink_factor!r}: expected a finite number > 0")
    if not 0.0 <= overhead_s < math.inf:
        numbers.append(f"overhead_s = {overhead_s!r}: expected a finite time >= 0 (s)")
    return problems + numbers


def plan_links(
    kind: str,
    *,
    args: Mapping[str, object] = NO_ARGS,
    seed: int,
    uplink_bps_min: float,
    uplink_bps_max: float,
    downlink_factor: float,
    overhead_s: float,
    folder: str | Path = "",
) -> LinkPlan:
    """Check a kind and its parameters, and read its files, once for all clients.

    Args:
        kind: a name in LINK_KINDS.
        args: the kind's parameters by name; those not given have their defaults.
        seed: the run's seed.
        uplink_bps_min: slowest mean uplink, bit/s.
        uplink_bps_max: fastest mean uplink, bit/s.
        downlink_factor: mean downlink over mean uplink, > 0.
        overhead_s: fixed cost of a transfer in either direction, s.
        folder: where relative paths of trace files start; "" for the working directory.

    Raises:
        ConfigError: an unknown kind, unknown parameters, values outside their range, or files that cannot be read; all
            of them together.
    """
    problems = link_problems(
        kind,
        args=args,
        uplink_bps_min=uplink_bps_min,
        uplink_bps_max=uplink_bps_max,
        downlink_factor=downlink_factor,
        overhead_s=overhead_s,
    )
    try:
        make = LINK_KINDS[kind].prepare(check_args(kind, args), Path(folder))
    except ConfigError as error:
        raise ConfigError(dict.fromkeys((*error.problems, *problems))) from error
    if problems:
        raise ConfigError(problems)
    return LinkPlan(make, seed, uplink_bps_min, uplink_bps_max, downlink_factor, overhead_s)


def make_links(
    kind: str,
    *,
    args: Mapping[str, object] = NO_ARGS,
    client: str,
    index: int,
    count: int,
    seed: int,
    uplink_bps_min: float,
    uplink_bps_max: float,
    downlink_factor: float,
    overhead_s: float,
    folder: str | Path = "",
) -> ClientLinks:
    """The links of client `index` of `count`: `plan_links` for one client.

    The clients' mean uplinks are spaced geometrically from min to max, both ends taken, in an order permuted by the
    seed; a single client gets the geometric mean. The mean downlink is downlink_factor times the mean uplink. Only
    traces with rates of their own (scaled = false) take neither.

    Args:
        kind: a name in LINK_KINDS.
        args: the kind's parameters by name; those not given have their defaults.
        client: the client's stable id; names its random draws.
        index: which of the clients this is, 0 to count - 1.
        count: number of clients.
        seed: the run's seed.
        uplink_bps_min: slowest mean uplink, bit/s.
        uplink_bps_max: fastest mean uplink, bit/s.
        downlink_factor: mean downlink over mean uplink, > 0.
        overhead_s: fixed cost of a transfer in either direction, s.
        folder: where relative paths of trace files start; "" for the working directory.

    Raises:
        ConfigError: as plan_links, or an index that is not one of count clients; all of them together.
    """
    problems = [] if 0 <= index < count else [f"client index {index} of {count}: expected 0 to count - 1"]
    try:
        plan = plan_links(
            kind,
            args=args,
            seed=seed,
            uplink_bps_min=uplink_bps_min,
            uplink_bps_max=uplink_bps_max,
            downlink_factor=downlink_factor,
            overhead_s=overhead_s,
            folder=folder,
        )
    except ConfigError as error:
        raise ConfigError((*error.problems, *problems)) from error
    if problems:
        raise ConfigError(problems)
    return plan.links(client, index=index, count=count)
