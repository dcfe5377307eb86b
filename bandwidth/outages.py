"""Another link with pauses in which nothing passes (kind "outages")."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from bandwidth.links import HORIZON_S, Link, check_span, check_time, check_transfer, parameter_problems
from compression.errors import ConfigError
from compression.randomness import uniforms

_FIRST_BATCH = 64


@dataclass(frozen=True, slots=True)
class OutageLink:
    """A base link, except that its rate is 0 during outages.

    Times without and with an outage alternate, each drawn from an exponential law, the first one as if the link had
    been running for ever. The base link's clock goes on during an outage. Both directions of a client with the same
    seed are out at the same times: the draws do not depend on the direction.

    Args:
        base: what the link is between outages.
        seed: the run's seed.
        client: the client's stable id.
        outage_every_s: mean time from the end of an outage to the next one, s, >= 1.
        outage_s: mean length of an outage, s, > 0.

    Raises:
        ConfigError: a parameter outside its range; all of them together.
        ValueError: (methods) a time beyond HORIZON_S.
    """

    base: Link
    seed: int
    client: str
    outage_every_s: float = 300.0
    outage_s: float = 20.0
    _starts_up: bool = field(init=False, repr=False, compare=False)
    _edges: list[tuple[float, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        problems = parameter_problems(
            (1.0 <= self.outage_every_s < math.inf, "outage_every_s", self.outage_every_s, "a finite time >= 1 (s)"),
            (0.0 < self.outage_s < math.inf, "outage_s", self.outage_s, "a finite time > 0 (s)"),
        )
        if problems:
            raise ConfigError(problems)
        start = uniforms(1, seed=self.seed, client=self.client, purpose="link-outages-start")[0]
        object.__setattr__(self, "_starts_up", float(start) < self.up_share)
        object.__setattr__(self, "_edges", [()])

    @property
    def up_share(self) -> float:
        """Share of the time without an outage."""
        return self.outage_every_s / (self.outage_every_s + self.outage_s)

    @property
    def mean_bps(self) -> float:
        """The base link's mean, times the share of the time without an outage, bit/s."""
        return self.base.mean_bps * self.up_share

    def rate_bps(self, time_s: float) -> float:
        """The base link's rate, or 0 in an outage, bit/s."""
        check_time(time_s)
        edges = self._until(time_s)
        return self.base.rate_bps(time_s) if self._up(bisect_right(edges, time_s)) else 0.0

    def bits_between(self, start_s: float, end_s: float) -> float:
        """The base link's bits, summed over the times without an outage."""
        check_span(start_s, end_s)
        edges = self._until(end_s)
        piece = bisect_right(edges, start_s)
        parts = []
        while start_s < end_s:
            until_s = min(edges[piece], end_s)
            if self._up(piece):
                parts.append(self.base.bits_between(start_s, until_s))
            start_s, piece = until_s, piece + 1
        return math.fsum(parts)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """When the base link, paused during outages, has passed nbytes."""
        check_transfer(start_s, nbytes)
        if nbytes == 0:
            return start_s
        left = 8.0 * nbytes
        rounding = left * 1e-13  # so much left over is rounding: no outage is waited through for it
        piece = bisect_right(self._until(start_s), start_s)
        while True:
            until_s = self._until(start_s)[piece]
            if self._up(piece):
                passed = self.base.bits_between(start_s, until_s)
                if left <= passed + rounding:
                    return min(self.base.finish_s(start_s, left / 8.0), until_s)
                left -= passed
            start_s, piece = until_s, piece + 1

    def _up(self, piece: int) -> bool:
        """Whether the piece before edge `piece` is without an outage."""
        return (piece % 2 == 0) == self._starts_up

    def _until(self, time_s: float) -> tuple[float, ...]:
        """Ends of the alternating pieces from time 0 on, past time_s.

        Each batch has twice the draws of the one before and a key of its own. Two threads may draw the same batch:
        both get the same one.
        """
        edges = self._edges[0]
        if time_s > HORIZON_S:
            raise ValueError(f"time {time_s!r} s: expected at most {HORIZON_S:g} s on a varying link")
        while not edges or edges[-1] <= time_s:
            batch = (len(edges) // _FIRST_BATCH + 1).bit_length() - 1  # 64, then 128, 256 draws, ...
            count = _FIRST_BATCH << batch
            drawn = uniforms(count, seed=self.seed, client=self.client, round_=batch, purpose="link-outages")
            now, fresh = (edges[-1] if edges else 0.0), []
            for i, u in enumerate(drawn.tolist()):
                now -= (self.outage_every_s if self._up(i) else self.outage_s) * math.log1p(-u)
                fresh.append(now)
            edges += tuple(fresh)
        self._edges[0] = edges
        return edges
