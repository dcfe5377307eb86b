"""Links: a rate over time, and when a message begun at some time has passed.

A link is a pure function of its parameters and the time. Nobody sleeps and nothing is drawn while time passes, so
any time may be asked in any order, in any process, with the same answer.

    links.py     the protocol, the constant link, both directions of a client
    markov.py    a sticky chain over levels with fades (kind "cellular")
    drift.py     a slowly drifting log rate with dips (kinds "mobile" and "stable")
    sinusoid.py  the Kimad paper's square of a sine
    outages.py   another link with pauses
    trace.py     measured rates, repeated; trace_files.py reads them
    kinds.py     the kinds by name, and a client's links from a kind
    link_file.py a file that gives each client its link
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from compression.errors import ConfigError

HORIZON_S = 1e7
"""Latest time a link with random draws can be asked about (116 days of virtual time)."""


class Link(Protocol):
    """One direction of one client's connection."""

    @property
    def mean_bps(self) -> float:
        """Long-run mean rate, bit/s; always > 0."""
        ...

    def rate_bps(self, time_s: float) -> float:
        """Rate at a time >= 0, bit/s; 0 during an outage, never negative."""
        ...

    def bits_between(self, start_s: float, end_s: float) -> float:
        """The integral of the rate over [start_s, end_s], bits.

        Raises ValueError for a negative or non-finite time, or an end before the start.
        """
        ...

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """When nbytes begun at start_s have passed: the first f with bits_between(start_s, f) = 8 * nbytes.

        Exactly start_s for 0 bytes; a fraction of a byte is allowed. Raises ValueError for a negative or non-finite
        time or a negative size.
        """
        ...


def check_time(time_s: float) -> None:
    """ValueError unless the time is finite and >= 0."""
    if not 0.0 <= time_s < math.inf:
        raise ValueError(f"time {time_s!r} s: expected a finite time >= 0")


def check_span(start_s: float, end_s: float) -> None:
    """ValueError unless both times are finite and 0 <= start <= end."""
    check_time(start_s)
    check_time(end_s)
    if end_s < start_s:
        raise ValueError(f"from {start_s!r} s to {end_s!r} s: expected an end at or after the start")


def check_transfer(start_s: float, nbytes: float) -> None:
    """ValueError unless the time is finite and >= 0 and the size is >= 0."""
    check_time(start_s)
    if not nbytes >= 0:
        raise ValueError(f"{nbytes} bytes: expected a size >= 0")


def rate_problem(name: str, value: float) -> list[str]:
    """The sentence about a rate that is not finite and > 0, if it is not."""
    return [] if 0.0 < value < math.inf else [f"{name} = {value!r}: expected a finite rate > 0 (bit/s)"]


def parameter_problems(*checks: tuple[bool, str, object, str]) -> list[str]:
    """Sentences about parameters: one for each (holds, name, got, expected) that does not hold."""
    return [f"{name} = {got!r}: expected {want}" for holds, name, got, want in checks if not holds]


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
        if problems := rate_problem("rate_bps", self.mean_bps):
            raise ConfigError(problems)

    def rate_bps(self, time_s: float) -> float:
        """The rate, bit/s."""
        check_time(time_s)
        return self.mean_bps

    def bits_between(self, start_s: float, end_s: float) -> float:
        """rate * (end_s - start_s)."""
        check_span(start_s, end_s)
        return self.mean_bps * (end_s - start_s)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """start_s + 8 * nbytes / rate."""
        check_transfer(start_s, nbytes)
        return start_s + 8.0 * nbytes / self.mean_bps


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
