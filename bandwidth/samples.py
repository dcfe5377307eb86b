"""One finished transfer: what every estimator learns from, in simulation and on real networks."""

from __future__ import annotations

import math
from dataclasses import dataclass

DIRECTIONS = ("up", "down")
SOURCES = ("simulated", "kernel", "application", "configured")

MIN_RATE_BPS = 1.0
"""No link this project can serve is slower (bit/s)."""
MAX_RATE_BPS = 1e12
"""No link this project will meet is faster (bit/s); a rate above it is a broken clock."""
TINY_S = 1e-9
"""Floor of a transfer's net time (s), so that its rate is always defined."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished transfer. Any values may be held; `valid` says whether to believe them.

    Args:
        direction: "up" (client to server) or "down".
        nbytes: payload bytes carried.
        seconds: the whole transfer, its fixed overhead included.
        overhead_s: the part of `seconds` that does not grow with the bytes (the a of T = a + n/B).
        at_s: when it ended. The clock must outlive a restart of the process (Unix time, or the virtual clock).
        source: who measured: "simulated", "kernel", "application", or "configured" for a rate the user stated.

    >>> Sample("up", 125_000, 1.5, 0.5, 10.0, "simulated").rate_bps
    1000000.0
    """

    direction: str
    nbytes: int
    seconds: float
    overhead_s: float
    at_s: float
    source: str

    @property
    def rate_bps(self) -> float:
        """Rate net of the overhead, bit/s: 8 * nbytes / max(seconds - overhead_s, TINY_S). NaN when a time is NaN."""
        net_s = self.seconds - self.overhead_s
        return math.nan if math.isnan(net_s) else 8.0 * self.nbytes / max(net_s, TINY_S)

    @property
    def valid(self) -> bool:
        """Whether an estimator may learn from it.

        True when direction and source are known, all numbers finite, nbytes > 0, 0 <= overhead_s < seconds, and
        the rate lies in [MIN_RATE_BPS, MAX_RATE_BPS]. A transfer no longer than its overhead says only that the
        overhead is overestimated.
        """
        return (
            self.direction in DIRECTIONS
            and self.source in SOURCES
            and 0 < self.nbytes < 2**63
            and all(map(math.isfinite, (self.seconds, self.overhead_s, self.at_s)))
            and 0.0 <= self.overhead_s < self.seconds
            and MIN_RATE_BPS <= self.rate_bps <= MAX_RATE_BPS
        )
