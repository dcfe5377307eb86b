"""A file that gives each client its link: a TOML file of entries (docs/links.md).

    [[link]]
    clients = "van-*"            # or a list of patterns, as a shell's; case matters
    kind = "trace"
    up = "traces/a.up.gz"        # relative to this file
    down = "traces/a.down.gz"

    [[link]]
    share = 0.3                  # of the run's clients, drawn by the seed
    kind = "mobile"
    uplink_bps_min = 2e5
    uplink_bps_max = 2e6

    [default]                    # everyone else; without it everyone must fit an entry
    kind = "constant"
    uplink_bps = 1e6

A key is a kind's parameter unless it is one of COMMON_KEYS.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from bandwidth.kinds import LINK_KINDS, LinkPlan, plan_links, rank
from bandwidth.links import ClientLinks
from compression.arguments import Parameter, checked
from compression.errors import ConfigError

MAX_BYTES = 2**20
"""Largest link file."""
COMMON_KEYS = (
    "clients",
    "share",
    "kind",
    "uplink_bps",
    "uplink_bps_min",
    "uplink_bps_max",
    "downlink_factor",
    "overhead_s",
)
"""An entry's keys that are not parameters of its kind."""
_NUMBERS = {name: Parameter(float, None) for name in COMMON_KEYS if name not in ("clients", "kind")}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One [[link]] or [default]: whom it is for, and what they get."""

    patterns: tuple[str, ...]
    share: float
    plan: LinkPlan


@dataclass(frozen=True, slots=True)
class LinkFile:
    """Links by client, from a link file; made by `read_link_file`, which checks everything and reads every trace.

    A client gets the first entry with a pattern that fits its id; else the entry with the share it falls into; else the
    default. Shares are taken in the order of the file from the run's clients in an order that the seed draws, so that
    as many clients as the share says have it, except for those that a pattern takes away.
    """

    path: Path
    seed: int
    entries: tuple[_Entry, ...]
    default: LinkPlan | None

    def links(self, client: str, *, index: int, count: int) -> ClientLinks:
        """The links of client `index` of `count`. Mean uplinks from a range go by the ranks of all the run's clients.

        Raises:
            ConfigError: no entry fits the client and there is no default, or an index not one of count clients.
        """
        return self._plan(client, index, count).links(client, index=index, count=count)

    def _plan(self, client: str, index: int, count: int) -> LinkPlan:
        for entry in self.entries:
            if any(fnmatchcase(client, pattern) for pattern in entry.patterns):
                return entry.plan
        place = (rank(index, count, self.seed, "link-shares") + 0.5) / count
        below = 0.0
        for entry in self.entries:
            below += entry.share
            if place < below + 1e-9:
                return entry.plan
        if self.default is None:
            raise ConfigError(
                f"{self.path}: no entry fits client {client!r}: expected a pattern that matches it, shares that add up "
                "to 1, or a [default]; add one"
            )
        return self.default


def read_link_file(path: str | Path, *, seed: int, downlink_factor: float = 4.0, overhead_s: float = 0.05) -> LinkFile:
    """Read a link file and all the traces it names.

    Args:
        path: the file.
        seed: the run's seed.
        downlink_factor: of entries that do not say; mean downlink over mean uplink.
        overhead_s: of entries that do not say; fixed cost of a transfer in either direction, s.

    Raises:
        ConfigError: a file that cannot be read, or problems of its entries, by number; all of them together.
    """
    path = Path(path)
    read = _toml(path)
    problems = []
    for name in sorted(read.keys() - {"link", "default"}):
        problems.append(f"unknown table or key {name!r}: expected [[link]] entries and at most one [default]")
    listed, default = read.get("link", []), read.get("default")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        problems.append("link: expected entries that begin with [[link]], in two brackets")
        listed = []
    if default is not None and not isinstance(default, dict):
        problems.append("default: expected a table that begins with [default]")
        default = None
    if not listed and default is None and not problems:
        problems.append("no entries: expected [[link]] entries, a [default], or both")
    common = {"downlink_factor": downlink_factor, "overhead_s": overhead_s}
    entries: list[_Entry] = []
    for number, keys in enumerate(listed, start=1):
        try:
            entries.append(_entry(keys, path.parent, seed, common))
        except ConfigError as error:
            problems += [f"entry {number}: {problem}" for problem in error.problems]
    if (total := sum(entry.share for entry in entries)) > 1.0 + 1e-9:
        problems.append(f"shares add up to {total:g}: expected 1 at most")
    plan = None
    if default is not None:
        try:
            if "clients" in default or "share" in default:
                raise ConfigError("clients or share given: expected neither; it is for all the others")
            plan = _plan(default, path.parent, seed, common)
        except ConfigError as error:
            problems += [f"default: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    return LinkFile(path, seed, tuple(entries), plan)


def _toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: expected a link file that can be read") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: above {MAX_BYTES} bytes: expected a link file, not a trace")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}: expected TOML with [[link]] entries") from error


def _entry(keys: Mapping[str, object], folder: Path, seed: int, common: Mapping[str, float]) -> _Entry:
    """An entry, checked; ConfigError with all its problems."""
    problems = []
    patterns = keys.get("clients", [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        problems.append(f"clients = {patterns!r}: expected a pattern in quotes, or a list of them")
        patterns = []
    share = keys.get("share", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or ("share" in keys and not 0.0 < share <= 1.0):
        problems.append(f"share = {share!r}: expected a number above 0, at most 1")
        share = 0.0
    if ("clients" in keys) == ("share" in keys):
        problems.append("expected one of clients (whom it is for, by id) and share (how many)")
    try:
        plan = _plan(keys, folder, seed, common)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from error
    if problems:
        raise ConfigError(problems)
    return _Entry(tuple(patterns), float(share), plan)


def _plan(keys: Mapping[str, object], folder: Path, seed: int, common: Mapping[str, float]) -> LinkPlan:
    """What an entry's clients get; ConfigError with all that is wrong with kind, rates and parameters."""
    kind = keys.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(f"kind {'not given' if kind is None else f'= {kind!r}'}: expected one of {_known()}")
    args = {name: value for name, value in keys.items() if name not in COMMON_KEYS}
    problems: list[str] = []
    numbers: dict[str, object] = {}
    for name in keys.keys() & _NUMBERS.keys() - {"share"}:
        try:
            numbers[name] = checked({name: keys[name]}, {name: _NUMBERS[name]}, "an entry")[name]
        except ConfigError as error:
            problems += error.problems
    low, high = _uplinks(keys, numbers, problems, own=_take_own_rates(kind, args, keys))
    given = {name: value for name, value in numbers.items() if name in common}
    values = {**common, **{name: value for name, value in given.items() if isinstance(value, float)}}
    try:
        plan = plan_links(kind, args=args, seed=seed, uplink_bps_min=low, uplink_bps_max=high, folder=folder, **values)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from error
    if problems:
        raise ConfigError(problems)
    return plan


def _uplinks(
    keys: Mapping[str, object], numbers: Mapping[str, object], problems: list[str], *, own: bool
) -> tuple[float, float]:
    """Slowest and fastest mean uplink, bit/s; 1 and 1 where they are not used or not right."""
    names = sorted(keys.keys() & {"uplink_bps", "uplink_bps_min", "uplink_bps_max"})
    if names == ["uplink_bps"]:
        names = ["uplink_bps"] * 2
    elif names == ["uplink_bps_max", "uplink_bps_min"]:
        names.reverse()
    elif not (names == [] and own):
        got = " and ".join(names) or "no mean uplink"
        problems.append(f"{got}: expected uplink_bps, or uplink_bps_min and uplink_bps_max (bit/s)")
        return 1.0, 1.0
    low, high = (numbers.get(name) for name in names) if names else (1.0, 1.0)
    return (low, high) if isinstance(low, float) and isinstance(high, float) else (1.0, 1.0)


def _take_own_rates(kind: str, args: dict[str, object], keys: Mapping[str, object]) -> bool:
    """Whether traces keep the rates they have. In an entry without a mean uplink they do unless it says otherwise."""
    named = bool(keys.keys() & {"uplink_bps", "uplink_bps_min", "uplink_bps_max"})
    if kind == "outages" and args.get("base") == "trace" and isinstance(args.get("base_args", {}), dict):
        inner = dict(args.get("base_args", {}))  # type: ignore[call-overload]
        args["base_args"] = inner
        return _take_own_rates("trace", inner, keys)
    if kind == "trace" and not named:
        args.setdefault("scaled", False)
    return kind == "trace" and args.get("scaled") is False


def _known() -> str:
    return ", ".join(sorted(LINK_KINDS))
