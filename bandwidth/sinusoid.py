"""The Kimad paper's link: the square of a sine over a floor (kind "sinusoid")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

from bandwidth.links import check_span, check_time, check_transfer, parameter_problems, rate_problem
from compression.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SinusoidLink:
    """B(t) = eta * sin(theta * t + phase)^2 + delta.

    Its integral over [s, s + d] is closed, written so that nothing cancels late in a run:

        (delta + eta / 2) * d - eta / (2 * theta) * cos(theta * (2 s + d) + 2 * phase) * sin(theta * d)

    `finish_s` takes whole periods out first and solves the rest by Newton's method kept within a bracket (after 50
    steps by halving it), until the step vanishes or the bracket is two neighbouring floats.

    Args:
        eta_bps: eta, height of the wave, bit/s, >= 0.
        theta: angular speed, rad/s, in [1e-9, 1e6]; B's period is pi / theta.
        delta_bps: delta, the lowest rate, bit/s, >= 0; eta and delta are not both 0.
        phase: at time 0, rad.

    Raises:
        ConfigError: a parameter outside its range; all of them together.

    Source: Kimad, the bandwidth model of its experiments; the phase is this project's, so that clients differ.

    >>> SinusoidLink(2e6, math.pi / 60, 0.0).mean_bps
    1000000.0
    """

    eta_bps: float
    theta: float
    delta_bps: float
    phase: float = 0.0

    def __post_init__(self) -> None:
        problems = parameter_problems(
            (0.0 <= self.eta_bps < math.inf, "eta_bps", self.eta_bps, "a finite rate >= 0 (bit/s)"),
            (1e-9 <= self.theta <= 1e6, "theta", self.theta, "a number in [1e-9, 1e6] (rad/s)"),
            (0.0 <= self.delta_bps < math.inf, "delta_bps", self.delta_bps, "a finite rate >= 0 (bit/s)"),
            (math.isfinite(self.phase), "phase", self.phase, "a finite number (rad)"),
        )
        if not problems:
            problems = rate_problem("mean_bps = delta_bps + eta_bps / 2", self.mean_bps)
        if problems:
            raise ConfigError(problems)

    @property
    def mean_bps(self) -> float:
        """delta + eta / 2, bit/s."""
        return self.delta_bps + self.eta_bps / 2.0

    @property
    def period_s(self) -> float:
        """After how many seconds the rate repeats."""
        return math.pi / self.theta

    def rate_bps(self, time_s: float) -> float:
        """B(time_s), bit/s."""
        check_time(time_s)
        return self.eta_bps * math.sin(self.theta * time_s + self.phase) ** 2 + self.delta_bps

    def bits_between(self, start_s: float, end_s: float) -> float:
        """The closed integral."""
        check_span(start_s, end_s)
        return self._bits(start_s, end_s - start_s)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """The inverse of the integral."""
        check_transfer(start_s, nbytes)
        if nbytes == 0:
            return start_s
        bits = 8.0 * nbytes
        periods = math.floor(bits / (self.mean_bps * self.period_s))
        whole_s = periods * self.period_s
        return start_s + (whole_s + self._seconds(start_s, bits - periods * (self.mean_bps * self.period_s)))

    def _bits(self, start_s: float, seconds: float) -> float:
        wave = math.cos(self.theta * (2.0 * start_s + seconds) + 2.0 * self.phase) * math.sin(self.theta * seconds)
        return max(self.mean_bps * seconds - self.eta_bps / (2.0 * self.theta) * wave, 0.0)

    def _seconds(self, start_s: float, bits: float) -> float:
        """The d with integral over [start_s, start_s + d] = bits, for about a period's bits or fewer."""
        if bits <= 0.0:
            return 0.0
        swing = self.eta_bps / (2.0 * self.theta)
        low = max((bits - swing) / self.mean_bps * (1.0 - 1e-12), 0.0)
        high = (bits + swing) / self.mean_bps * (1.0 + 1e-12)
        guess = bits / self.mean_bps
        for step_number in count():
            excess = self._bits(start_s, guess) - bits
            if excess == 0.0:
                return guess
            if excess > 0.0:
                high = guess
            else:
                low = guess
            rate = self.eta_bps * math.sin(self.theta * (start_s + guess) + self.phase) ** 2 + self.delta_bps
            step = excess / rate if rate > 0.0 else math.inf
            if guess - step == guess:
                return guess
            halfway = low + (high - low) / 2.0
            # a step that leaves the bracket, or that would hardly shrink it, gives way to the middle
            newton = step_number < 50 and low < guess - step < high and abs(step) < (high - low) / 2.0
            guess = guess - step if newton else halfway
            if not low < guess < high:
                break
        return high
