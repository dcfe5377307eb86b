"""Links: a rate over time, and when a message begun at some time has passed.

A link is a pure function of its parameters and the time. Nobody sleeps and nothing is drawn while time passes, so
any time may be asked in any order, in any process, with the same answer.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from bandwidth._registry import Registry
from compression.errors import ConfigError
from compression.randomness import permutation, uniforms, words

HORIZON_S = 1e7
"""Latest time a varying link can be asked about (116 days of virtual time)."""

_BLOCK_SLOTS = 256


class Link(Protocol):
    """One direction of one client's connection."""

    @property
    def mean_bps(self) -> float:
        """Long-run mean rate, bit/s."""
        ...

    def rate_bps(self, time_s: float) -> float:
        """Rate at a time >= 0, bit/s; always > 0."""
        ...

    def finish_s(self, start_s: float, nbytes: int) -> float:
        """When nbytes begun at start_s have passed: the f with integral of rate over [start_s, f] = 8 * nbytes.

        Exactly start_s for 0 bytes. Raises ValueError for a negative or non-finite time or a negative size.
        """
        ...


def _check_time(time_s: float) -> None:
    if not 0.0 <= time_s < math.inf:
        raise ValueError(f"time {time_s!r} s: expected a finite time >= 0")


def _check_transfer(start_s: float, nbytes: int) -> None:
    _check_time(start_s)
    if nbytes < 0:
        raise ValueError(f"{nbytes} bytes: expected a size >= 0")


def _rate_problem(name: str, value: float) -> list[str]:
    return [] if 0.0 < value < math.inf else [f"{name} = {value!r}: expected a finite rate > 0 (bit/s)"]


@dataclass(frozen=True, slots=True)
class ConstantLink:
    """A link whose rate never changes.

    Args:
        mean_bps: the rate, bit/s.

    Raises:
        ConfigError: the rate is not finite and > 0.

    >>> ConstantLink(8e6).finish_s(1.0, 500_000)
    1.5
    """

    mean_bps: float

    def __post_init__(self) -> None:
        if problems := _rate_problem("rate_bps", self.mean_bps):
            raise ConfigError(problems)

    def rate_bps(self, time_s: float) -> float:
        """The rate, bit/s."""
        _check_time(time_s)
        return self.mean_bps

    def finish_s(self, start_s: float, nbytes: int) -> float:
        """start_s + 8 * nbytes / rate."""
        _check_transfer(start_s, nbytes)
        return start_s + 8.0 * nbytes / self.mean_bps


@dataclass(frozen=True, slots=True)
class _Block:
    """256 slots: each slot's state, and bits_before[i] = bits passed from the block's start to slot i's."""

    states: bytes
    bits_before: array[float]


@dataclass(frozen=True, slots=True)
class MarkovLink:
    """A cellular-like link: one-second slots, a sticky Markov chain over log-spaced levels, and deep fades.

    A slot's rate is mean_bps * level[s] * (fade_depth if faded else 1) / norm. In every slot the level moves one
    step down or up with probability move / 2 each (at an end it stays instead), so that all levels are equally
    likely; independently, a fade begins with probability fade_in and ends with probability fade_out. levels lie
    evenly in log rate over a range of `span`; norm makes the stationary mean exactly mean_bps. The first slot is
    drawn from the stationary law.

    Calibrated against the survey's figures for public mobile traces (5 s windows predicted by an earlier window, first
    5 not scored, median of |p - a| / max(a, 5 % of the mean)), with these defaults, 24 seeds of 6,000 s:

        age of the prediction      5 s     30 s    60 s
        public traces (survey)     0.179   0.393   0.427
        this link                  0.176   0.373   0.437
        standard deviation over seeds
                                   0.005   0.015   0.026
        its log error's deviation  0.50    0.74    0.80

    The tails are lighter than the traces' (log error's deviation 0.6 to 0.9 at 5 s, 1.2 to 1.5 at 60 s), and one slow
    trend over minutes is missing: levels are forgotten after about a minute.

    Args:
        mean_bps: stationary mean rate, bit/s.
        seed: the run's seed.
        client: the client's stable id.
        direction: "up" or "down"; each direction has a chain of its own, independent of the other.
        levels: number of levels, 2 to 64.
        span: natural logarithm of highest over lowest level, >= 0.
        move: probability that a slot tries to change level, in [0, 1].
        fade_in: probability that a fade begins in a slot, in [0, 1).
        fade_out: probability that a fade ends in a slot, in (0, 1].
        fade_depth: rate within a fade over the rate without, in (0, 1].

    Raises:
        ConfigError: a parameter outside its range; all of them together.
        ValueError: (methods) a time beyond HORIZON_S.
    """

    mean_bps: float
    seed: int
    client: str
    direction: str
    levels: int = 8
    span: float = 1.4
    move: float = 0.5
    fade_in: float = 0.02
    fade_out: float = 0.25
    fade_depth: float = 0.1
    _rates: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _blocks: dict[int, _Block] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = _rate_problem("mean_bps", self.mean_bps)
        checks = (
            (self.direction in ("up", "down"), "direction", self.direction, "'up' or 'down'"),
            (2 <= self.levels <= 64, "levels", self.levels, "2 to 64"),
            (0.0 <= self.span <= 20.0, "span", self.span, "a number in [0, 20]"),
            (0.0 <= self.move <= 1.0, "move", self.move, "a probability"),
            (0.0 <= self.fade_in < 1.0, "fade_in", self.fade_in, "a probability below 1"),
            (0.0 < self.fade_out <= 1.0, "fade_out", self.fade_out, "a probability above 0"),
            (1e-6 <= self.fade_depth <= 1.0, "fade_depth", self.fade_depth, "a number in [1e-6, 1]"),
        )
        problems += [f"{name} = {got!r}: expected {want}" for ok, name, got, want in checks if not ok]
        if problems:
            raise ConfigError(problems)
        shape = [math.exp(self.span * (i / (self.levels - 1) - 0.5)) for i in range(self.levels)]
        faded = self.fade_in / (self.fade_in + self.fade_out)
        unit = self.mean_bps / (math.fsum(shape) / self.levels * (1.0 - faded + faded * self.fade_depth))
        clear = tuple(unit * level for level in shape)
        object.__setattr__(self, "_rates", clear + tuple(rate * self.fade_depth for rate in clear))
        object.__setattr__(self, "_blocks", {})

    @property
    def stationary(self) -> tuple[tuple[float, float], ...]:
        """The chain's stationary law: (rate in bit/s, probability) for each state."""
        faded = self.fade_in / (self.fade_in + self.fade_out)
        weights = [(1.0 - faded) / self.levels] * self.levels + [faded / self.levels] * self.levels
        return tuple(zip(self._rates, weights, strict=True))

    def rate_bps(self, time_s: float) -> float:
        """Rate of the slot that holds time_s, bit/s."""
        _check_time(time_s)
        index, slot = divmod(int(time_s), _BLOCK_SLOTS)
        return self._rates[self._block(index).states[slot]]

    def finish_s(self, start_s: float, nbytes: int) -> float:
        """When nbytes begun at start_s have passed: sums of whole slots, linear within the first and the last."""
        _check_transfer(start_s, nbytes)
        if nbytes == 0:
            return start_s
        whole = int(start_s)
        index, slot = divmod(whole, _BLOCK_SLOTS)
        block = self._block(index)
        target = block.bits_before[slot] + self._rates[block.states[slot]] * (start_s - whole) + 8.0 * nbytes
        while target > block.bits_before[-1]:
            target -= block.bits_before[-1]
            index += 1
            block = self._block(index)
        slot = max(bisect_left(block.bits_before, target) - 1, 0)
        within_s = (target - block.bits_before[slot]) / self._rates[block.states[slot]]
        return max(start_s, index * _BLOCK_SLOTS + slot + within_s)

    def _block(self, index: int) -> _Block:
        """Block `index`, drawn from its own words and the last state of the one before; kept once drawn.

        Two threads may draw the same block: both get the same one.
        """
        found = self._blocks.get(index)
        if found is not None:
            return found
        if index * _BLOCK_SLOTS > HORIZON_S:
            raise ValueError(f"time {index * _BLOCK_SLOTS} s: expected at most {HORIZON_S:g} s on a varying link")
        known = index
        while known > 0 and known - 1 not in self._blocks:
            known -= 1
        for i in range(known, index + 1):
            state = self._first_state() if i == 0 else self._blocks[i - 1].states[-1]
            self._blocks[i] = self._draw(i, state)
        return self._blocks[index]

    def _first_state(self) -> int:
        """State before slot 0, from the stationary law."""
        level, fade = uniforms(2, seed=self.seed, client=self.client, purpose=f"link-{self.direction}-start")
        faded = fade < self.fade_in / (self.fade_in + self.fade_out)
        return int(level * self.levels) + (self.levels if faded else 0)

    def _draw(self, index: int, state: int) -> _Block:
        raw = words(
            _BLOCK_SLOTS, seed=self.seed, client=self.client, round_=index, purpose=f"link-{self.direction}-slots"
        )
        walk = (raw >> np.uint64(32)).astype(np.float64) * 2.0**-32
        fade = (raw & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
        steps = np.where(walk < self.move / 2, -1, np.where(walk < self.move, 1, 0)).tolist()
        faded, level = divmod(state, self.levels)
        top = self.levels - 1
        states = bytearray()
        for step, u in zip(steps, fade.tolist(), strict=True):
            level = min(max(level + step, 0), top)
            faded = (u >= self.fade_out) if faded else (u < self.fade_in)
            states.append(level + self.levels * faded)
        bits = accumulate((self._rates[s] for s in states), initial=0.0)
        return _Block(bytes(states), array("d", bits))


@dataclass(frozen=True, slots=True)
class ClientLinks:
    """Both directions of one client's connection.

    Args:
        up: client to server.
        down: server to client.
        overhead_up_s: fixed cost of an upload (handshake, slow start, polling), s.
        overhead_down_s: fixed cost of a download, s.
    """

    up: Link
    down: Link
    overhead_up_s: float
    overhead_down_s: float

    def __post_init__(self) -> None:
        values = {"overhead_up_s": self.overhead_up_s, "overhead_down_s": self.overhead_down_s}
        problems = [
            f"{name} = {value!r}: expected a finite time >= 0 (s)"
            for name, value in values.items()
            if not 0.0 <= value < math.inf
        ]
        if problems:
            raise ConfigError(problems)


LinkMaker = Callable[[float, int, str, str], Link]
"""(mean_bps, seed, client, direction) -> Link."""


def _constant(mean_bps: float, seed: int, client: str, direction: str) -> Link:
    return ConstantLink(mean_bps)


def _cellular(mean_bps: float, seed: int, client: str, direction: str) -> Link:
    return MarkovLink(mean_bps, seed, client, direction)


LINK_KINDS: Registry[LinkMaker] = Registry("link kind")
"""Kinds of links that a configuration may name."""
LINK_KINDS.add("constant", _constant)
LINK_KINDS.add("cellular", _cellular)


@lru_cache(maxsize=64)
def _ranks(count: int, seed: int) -> tuple[int, ...]:
    return tuple(permutation(count, seed=seed, purpose="link-ranks").tolist())


def make_links(
    kind: str,
    *,
    client: str,
    index: int,
    count: int,
    seed: int,
    uplink_bps_min: float,
    uplink_bps_max: float,
    downlink_factor: float,
    overhead_s: float,
) -> ClientLinks:
    """The links of client `index` of `count`.

    The clients' mean uplinks are spaced geometrically from min to max, both ends taken, in an order permuted by the
    seed; a single client gets the geometric mean. The mean downlink is downlink_factor times the mean uplink.

    Args:
        kind: a name in LINK_KINDS: "constant" or "cellular".
        client: the client's stable id; names its random draws.
        index: which of the clients this is, 0 to count - 1.
        count: number of clients.
        seed: the run's seed.
        uplink_bps_min: slowest mean uplink, bit/s.
        uplink_bps_max: fastest mean uplink, bit/s.
        downlink_factor: mean downlink over mean uplink, > 0.
        overhead_s: fixed cost of a transfer in either direction, s.

    Raises:
        ConfigError: unknown kind, or values outside their range; all of them together.
    """
    make = LINK_KINDS[kind]
    problems = _rate_problem("uplink_bps_min", uplink_bps_min) + _rate_problem("uplink_bps_max", uplink_bps_max)
    if not problems and uplink_bps_min > uplink_bps_max:
        problems.append(f"uplink_bps_min = {uplink_bps_min!r} is above uplink_bps_max = {uplink_bps_max!r}")
    if not 0.0 < downlink_factor < math.inf:
        problems.append(f"downlink_factor = {downlink_factor!r}: expected a finite number > 0")
    if not 0.0 <= overhead_s < math.inf:
        problems.append(f"overhead_s = {overhead_s!r}: expected a finite time >= 0 (s)")
    if not 0 <= index < count:
        problems.append(f"client index {index} of {count}: expected 0 to count - 1")
    if problems:
        raise ConfigError(problems)
    rank = _ranks(count, seed)[index]
    share = rank / (count - 1) if count > 1 else 0.5
    up_bps = uplink_bps_max if share == 1.0 else uplink_bps_min * (uplink_bps_max / uplink_bps_min) ** share
    return ClientLinks(
        up=make(up_bps, seed, client, "up"),
        down=make(up_bps * downlink_factor, seed, client, "down"),
        overhead_up_s=overhead_s,
        overhead_down_s=overhead_s,
    )
