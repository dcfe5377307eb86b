"""A cellular-like link: a sticky chain over levels, with fades (kind "cellular")."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bandwidth._slots import BLOCK_SLOTS, SlottedLink
from bandwidth.links import parameter_problems, rate_problem
from compression.errors import ConfigError
from compression.randomness import uniforms, words


@dataclass(frozen=True, slots=True)
class MarkovLink(SlottedLink[int]):
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
    trend over minutes is missing: levels are forgotten after about a minute. `mobile_link` has both.

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

    levels: int = 8
    span: float = 1.4
    move: float = 0.5
    fade_in: float = 0.02
    fade_out: float = 0.25
    fade_depth: float = 0.1
    _rates: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = rate_problem("mean_bps", self.mean_bps) + parameter_problems(
            (self.direction in ("up", "down"), "direction", self.direction, "'up' or 'down'"),
            (2 <= self.levels <= 64, "levels", self.levels, "2 to 64"),
            (0.0 <= self.span <= 20.0, "span", self.span, "a number in [0, 20]"),
            (0.0 <= self.move <= 1.0, "move", self.move, "a probability"),
            (0.0 <= self.fade_in < 1.0, "fade_in", self.fade_in, "a probability below 1"),
            (0.0 < self.fade_out <= 1.0, "fade_out", self.fade_out, "a probability above 0"),
            (1e-6 <= self.fade_depth <= 1.0, "fade_depth", self.fade_depth, "a number in [1e-6, 1]"),
        )
        if problems:
            raise ConfigError(problems)
        shape = [math.exp(self.span * (i / (self.levels - 1) - 0.5)) for i in range(self.levels)]
        faded = self.fade_in / (self.fade_in + self.fade_out)
        unit = self.mean_bps / (math.fsum(shape) / self.levels * (1.0 - faded + faded * self.fade_depth))
        clear = tuple(unit * level for level in shape)
        object.__setattr__(self, "_rates", clear + tuple(rate * self.fade_depth for rate in clear))

    @property
    def stationary(self) -> tuple[tuple[float, float], ...]:
        """The chain's stationary law: (rate in bit/s, probability) for each state."""
        faded = self.fade_in / (self.fade_in + self.fade_out)
        weights = [(1.0 - faded) / self.levels] * self.levels + [faded / self.levels] * self.levels
        return tuple(zip(self._rates, weights, strict=True))

    def _first_state(self) -> int:
        level, fade = uniforms(2, seed=self.seed, client=self.client, purpose=f"link-{self.direction}-start")
        faded = fade < self.fade_in / (self.fade_in + self.fade_out)
        return int(level * self.levels) + (self.levels if faded else 0)

    def _draw(self, index: int, state: int) -> tuple[Iterable[float], int]:
        raw = words(
            BLOCK_SLOTS, seed=self.seed, client=self.client, round_=index, purpose=f"link-{self.direction}-slots"
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
        return [self._rates[s] for s in states], states[-1]
