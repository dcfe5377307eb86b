"""Measured rates as a link: piecewise constant, repeated for ever (kind "trace")."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

from bandwidth.links import check_span, check_time, check_transfer, parameter_problems
from compression.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Trace:
    """Rates over consecutive pieces of time.

    Args:
        durations_s: length of each piece, s, > 0.
        rates_bps: rate within each, bit/s, >= 0, not all 0.
        name: where they come from; not compared.

    Raises:
        ConfigError: no pieces, not as many rates as durations, a number outside its range, or all rates 0.
    """

    durations_s: tuple[float, ...]
    rates_bps: tuple[float, ...]
    name: str = field(default="", compare=False)
    _until_s: array[float] = field(init=False, repr=False, compare=False)
    _until_bits: array[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n, m = len(self.durations_s), len(self.rates_bps)
        if n != m or n == 0:
            raise ConfigError(f"trace {self.name!r}: {n} durations, {m} rates: expected one each, and at least one")
        for what, values, least in (("duration", self.durations_s, "> 0"), ("rate", self.rates_bps, ">= 0")):
            for i, value in enumerate(values):
                if not (0.0 < value < math.inf or (value == 0.0 and what == "rate")):
                    raise ConfigError(f"trace {self.name!r}: {what} {i} is {value!r}: expected a finite number {least}")
        bits = (d * r for d, r in zip(self.durations_s, self.rates_bps, strict=True))
        object.__setattr__(self, "_until_s", array("d", accumulate(self.durations_s)))
        object.__setattr__(self, "_until_bits", array("d", accumulate(bits)))
        if not (0.0 < self.bits < math.inf and self.period_s < math.inf):
            raise ConfigError(f"trace {self.name!r}: {self.bits:g} bits in {self.period_s:g} s: expected some, finite")

    @property
    def period_s(self) -> float:
        """Length of the trace, s."""
        return self._until_s[-1]

    @property
    def bits(self) -> float:
        """Bits that pass in one period."""
        return self._until_bits[-1]

    @property
    def mean_bps(self) -> float:
        """Mean rate, bit/s."""
        return self.bits / self.period_s

    def piece_at(self, time_s: float) -> int:
        """Index of the piece that holds a time in [0, period_s)."""
        return min(bisect_right(self._until_s, time_s), len(self._until_s) - 1)

    def end_s(self, piece: int) -> float:
        """Where a piece ends, s from the trace's start."""
        return self._until_s[piece]

    def bits_until(self, time_s: float) -> float:
        """Bits that pass from the trace's start to a time >= 0, over as many periods as it takes."""
        periods, rest_s = divmod(time_s, self.period_s)
        piece = self.piece_at(rest_s)
        left = self.rates_bps[piece] * (self._until_s[piece] - rest_s)
        return periods * self.bits + (self._until_bits[piece] - left)

    def time_of(self, bits: float) -> float:
        """The first time, from the trace's start, by which so many bits > 0 have passed."""
        rounding = bits * 1e-15  # so much beyond a piece's end is rounding: no piece at rate 0 is waited through for it
        periods, rest = divmod(bits, self.bits)
        if rest <= rounding and periods > 0.0:
            periods, rest = periods - 1.0, self.bits
        piece = bisect_left(self._until_bits, max(rest - rounding, math.ulp(0.0)))  # never a piece at rate 0
        back_s = max(self._until_bits[piece] - rest, 0.0) / self.rates_bps[piece]
        return periods * self.period_s + max(self._until_s[piece] - back_s, 0.0)


@dataclass(frozen=True, slots=True)
class TraceLink:
    """A trace, repeated for ever: rate(t) = scale * trace((t + offset_s) mod period).

    Args:
        trace: the rates.
        offset_s: where in the trace time 0 falls, s, >= 0.
        scale: factor on every rate, > 0; 1 for the trace's own.

    Raises:
        ConfigError: a parameter outside its range; all of them together.

    >>> TraceLink(Trace((1.0, 2.0), (8.0, 0.0))).finish_s(0.5, 1)
    3.5
    """

    trace: Trace
    offset_s: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        mean_bps = self.scale * self.trace.mean_bps
        problems = parameter_problems(
            (0.0 <= self.offset_s < math.inf, "offset_s", self.offset_s, "a finite time >= 0 (s)"),
            (0.0 < mean_bps < math.inf, "scale", self.scale, "a number > 0 that leaves the rates finite"),
        )
        if problems:
            raise ConfigError(problems)

    @property
    def mean_bps(self) -> float:
        """The trace's mean rate times scale, bit/s."""
        return self.scale * self.trace.mean_bps

    def rate_bps(self, time_s: float) -> float:
        """Rate of the piece that holds time_s, bit/s."""
        check_time(time_s)
        return self.scale * self.trace.rates_bps[self.trace.piece_at(self._within(time_s))]

    def bits_between(self, start_s: float, end_s: float) -> float:
        """Sums over whole pieces and periods, linear within the first and the last piece."""
        check_span(start_s, end_s)
        trace, within_s, seconds = self.trace, self._within(start_s), end_s - start_s
        piece = trace.piece_at(within_s)
        if within_s + seconds <= trace.end_s(piece):
            return self.scale * trace.rates_bps[piece] * seconds
        return self.scale * max(trace.bits_until(within_s + seconds) - trace.bits_until(within_s), 0.0)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """The inverse of the integral, found by bisection over the pieces' sums."""
        check_transfer(start_s, nbytes)
        if nbytes == 0:
            return start_s
        trace, within_s, bits = self.trace, self._within(start_s), 8.0 * nbytes / self.scale
        piece = trace.piece_at(within_s)
        rate_bps = trace.rates_bps[piece]
        if bits <= rate_bps * (trace.end_s(piece) - within_s):
            return start_s + bits / rate_bps
        return start_s + max(trace.time_of(trace.bits_until(within_s) + bits) - within_s, 0.0)

    def _within(self, time_s: float) -> float:
        """Where in the trace a time falls, s in [0, period_s)."""
        return math.fmod(math.fmod(time_s, self.trace.period_s) + self.offset_s, self.trace.period_s)
