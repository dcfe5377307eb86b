"""A link whose log rate drifts on three time scales, with dips (kinds "mobile" and "stable")."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bandwidth._slots import BLOCK_SLOTS, SlottedLink
from bandwidth.links import parameter_problems, rate_problem
from compression.errors import ConfigError
from compression.randomness import uniforms, words

State = tuple[float, float, float, bool]
"""The three processes, each over its own deviation, and whether the link is in a dip."""


@dataclass(frozen=True, slots=True)
class DriftLink(SlottedLink[State]):
    """A link with one-second slots: exp of a sum of three Gaussian AR(1) processes, times a dip's depth in a dip.

    rate = mean_bps * exp(flutter + swing + trend) * (dip_depth if dipped else 1) / norm. Each process is stationary
    with the deviation `*_sd` and forgets by 1/e in `*_s` seconds. A dip begins in a slot with probability
    1 / dip_every_s and ends with probability 1 / dip_s. norm makes the mean exactly mean_bps. The first slot is drawn
    from the stationary law.

    The defaults are fitted to the survey's figures for public mobile traces, all ages at once, by random search. Scored
    as MarkovLink is (5 s windows predicted by an earlier one, first 5 not scored, median of
    |p - a| / max(a, 5 % of the mean)), and by the deviation of ln(a / p), both held at 5 % of the mean or more, which
    the survey gives as 0.35 + 0.16 * ln(age in s); 24 seeds of 6,000 s, mean and standard deviation over the seeds:

        age of the prediction      5 s              30 s             60 s
        public traces, median      0.179            0.393            0.427
        mobile, median             0.180 +- 0.006   0.375 +- 0.022   0.417 +- 0.024
        public traces, spread      0.61             0.89             1.01
        mobile, spread             0.62  +- 0.03    0.94  +- 0.07    0.96  +- 0.06

    STABLE is fitted in the same way to the middle of two public groups of fixed lines, FCC home lines (39 traces) and
    Oboe video sessions (60), means over their traces. A home cable line that was tested every half hour agrees that
    nothing more is lost later: from one test to the next it is off by 0.03 (down) and 0.06 (up) at the median.

        age of the prediction      5 s              30 s             60 s
        FCC / Oboe, median         0.060 / 0.075    0.115 / 0.168    0.125 / 0.224
        stable, median             0.068 +- 0.002   0.143 +- 0.008   0.165 +- 0.011
        FCC / Oboe, spread         0.36 / 0.15      0.46 / 0.28      0.50 / 0.27
        stable, spread             0.26  +- 0.01    0.38  +- 0.03    0.39  +- 0.03

    Args:
        mean_bps: stationary mean rate, bit/s.
        seed: the run's seed.
        client: the client's stable id.
        direction: "up" or "down"; each direction has processes of its own, independent of the other.
        flutter_sd: deviation of the fast process, natural log, in [0, 3]; the other two likewise.
        flutter_s: its time constant, s, in [0.1, 1e6]; the other two likewise.
        swing_sd: deviation of the middle process.
        swing_s: its time constant, s.
        trend_sd: deviation of the slow process.
        trend_s: its time constant, s.
        dip_every_s: mean time from the end of a dip to the next one, s, >= 1.
        dip_s: mean length of a dip, s, >= 1.
        dip_depth: rate within a dip over the rate without, in [1e-6, 1]; 1 for no dips.

    Raises:
        ConfigError: a parameter outside its range; all of them together.
        ValueError: (methods) a time beyond HORIZON_S.
    """

    flutter_sd: float = 0.19
    flutter_s: float = 6.0
    swing_sd: float = 0.38
    swing_s: float = 31.0
    trend_sd: float = 0.3
    trend_s: float = 360.0
    dip_every_s: float = 77.0
    dip_s: float = 6.0
    dip_depth: float = 0.035

    def __post_init__(self) -> None:
        sds = {"flutter_sd": self.flutter_sd, "swing_sd": self.swing_sd, "trend_sd": self.trend_sd}
        taus = {"flutter_s": self.flutter_s, "swing_s": self.swing_s, "trend_s": self.trend_s}
        problems = rate_problem("mean_bps", self.mean_bps) + parameter_problems(
            (self.direction in ("up", "down"), "direction", self.direction, "'up' or 'down'"),
            *((0.0 <= value <= 3.0, name, value, "a number in [0, 3]") for name, value in sds.items()),
            *((0.1 <= value <= 1e6, name, value, "a time in [0.1, 1e6] (s)") for name, value in taus.items()),
            (1.0 <= self.dip_every_s < math.inf, "dip_every_s", self.dip_every_s, "a finite time >= 1 (s)"),
            (1.0 <= self.dip_s < math.inf, "dip_s", self.dip_s, "a finite time >= 1 (s)"),
            (1e-6 <= self.dip_depth <= 1.0, "dip_depth", self.dip_depth, "a number in [1e-6, 1]"),
        )
        if problems:
            raise ConfigError(problems)

    @property
    def dip_share(self) -> float:
        """Share of the time spent in dips."""
        return self.dip_s / (self.dip_every_s + self.dip_s)

    def _first_state(self) -> State:
        purpose = f"link-{self.direction}-drift-start"
        start = words(2, seed=self.seed, client=self.client, purpose=purpose).tolist()
        dipped = float(uniforms(3, seed=self.seed, client=self.client, purpose=purpose)[2]) < self.dip_share
        a, b = _normals(start[0])
        c, _ = _normals(start[1])
        return a, b, c, dipped

    def _draw(self, index: int, state: State) -> tuple[Iterable[float], State]:
        purpose = f"link-{self.direction}-drift"
        raw = words(3 * BLOCK_SLOTS, seed=self.seed, client=self.client, round_=index, purpose=purpose).tolist()
        keep = [math.exp(-1.0 / tau) for tau in (self.flutter_s, self.swing_s, self.trend_s)]
        fresh = [math.sqrt(1.0 - k * k) for k in keep]
        (ka, kb, kc), (fa, fb, fc) = keep, fresh
        variance = self.flutter_sd**2 + self.swing_sd**2 + self.trend_sd**2
        share = self.dip_share
        unit = self.mean_bps / (math.exp(variance / 2.0) * (1.0 - share + share * self.dip_depth))
        begin, end = 1.0 / self.dip_every_s, 1.0 / self.dip_s
        a, b, c, dipped = state
        rates = []
        for i in range(0, 3 * BLOCK_SLOTS, 3):
            na, nb = _normals(raw[i])
            nc, _ = _normals(raw[i + 1])
            a, b, c = ka * a + fa * na, kb * b + fb * nb, kc * c + fc * nc
            u = (raw[i + 2] >> 11) * 2.0**-53
            dipped = u >= end if dipped else u < begin
            log_rate = self.flutter_sd * a + self.swing_sd * b + self.trend_sd * c
            rates.append(unit * math.exp(log_rate) * (self.dip_depth if dipped else 1.0))
        return rates, (a, b, c, dipped)


def _normals(word: int) -> tuple[float, float]:
    """Two independent standard normals from the halves of a 64-bit word (Box and Muller)."""
    radius = math.sqrt(-2.0 * math.log(((word >> 32) + 0.5) * 2.0**-32))
    angle = 2.0 * math.pi * ((word & 0xFFFFFFFF) * 2.0**-32)
    return radius * math.cos(angle), radius * math.sin(angle)


STABLE: Mapping[str, float] = {
    "flutter_sd": 0.063,
    "flutter_s": 2.0,
    "swing_sd": 0.155,
    "swing_s": 40.0,
    "trend_sd": 0.08,
    "trend_s": 250.0,
    "dip_every_s": 77.0,
    "dip_s": 5.5,
    "dip_depth": 0.3,
}
"""Parameters of a fixed line."""


def mobile_link(mean_bps: float, seed: int, client: str, direction: str, **parameters: float) -> DriftLink:
    """A moving device on a cellular network: a DriftLink with its defaults, or with other parameters by name."""
    return DriftLink(mean_bps, seed, client, direction, **parameters)


def stable_link(mean_bps: float, seed: int, client: str, direction: str, **parameters: float) -> DriftLink:
    """A fixed line: a DriftLink with STABLE, or with other parameters by name."""
    return DriftLink(mean_bps, seed, client, direction, **{**STABLE, **parameters})
