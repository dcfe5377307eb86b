"""The arithmetic of one simulated round: when each upload ends, and when the round does.

Pure functions of times and bytes on a virtual clock in seconds; nobody sleeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bandwidth.links import ClientLinks
from bandwidth.samples import Sample


@dataclass(frozen=True, slots=True)
class Upload:
    """One client's upload, as asked for.

    Args:
        client: the client's stable id.
        start_s: when the client began to compute.
        compute_s: how long it computes before it sends.
        nbytes: the message, every byte of it.
    """

    client: str
    start_s: float
    compute_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One client's upload, as it went.

    Args:
        client: the client's stable id.
        upload_start_s: when the link took it up.
        finish_s: when its last byte arrived; the link is busy until then, whether the reply is used or not.
        sample: what an estimator learns from it.
    """

    client: str
    upload_start_s: float
    finish_s: float
    sample: Sample


def arrival(links: ClientLinks, upload: Upload, *, link_busy_until_s: float) -> Arrival:
    """Send one upload over a client's uplink.

    It starts at max(start_s + compute_s, link_busy_until_s), costs links.overhead_up_s, then its bytes pass at the
    uplink's rate. The sample spans overhead and bytes, waiting and computing excluded; for 0 bytes it is not valid.

    Args:
        links: the client's links.
        upload: what is sent, and when it is asked for.
        link_busy_until_s: when the client's previous upload ends (its finish_s), 0 for none.

    Raises:
        ValueError: a negative or non-finite time, or a negative size.
    """
    for name, value in (
        ("start_s", upload.start_s),
        ("compute_s", upload.compute_s),
        ("link_busy_until_s", link_busy_until_s),
    ):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} = {value!r}: expected a finite time >= 0")
    begin_s = max(upload.start_s + upload.compute_s, link_busy_until_s)
    finish_s = links.up.finish_s(begin_s + links.overhead_up_s, upload.nbytes)
    sample = Sample("up", upload.nbytes, finish_s - begin_s, links.overhead_up_s, finish_s, "simulated")
    return Arrival(upload.client, begin_s, finish_s, sample)


def split_round(
    arrivals: Sequence[Arrival], start_s: float, deadline_s: float | None
) -> tuple[tuple[Arrival, ...], tuple[Arrival, ...], float]:
    """Who is on time, who is late, and when the round ends: (on_time, late, end_s).

    Late are those that finish after start_s + deadline_s; one that finishes exactly then is on time. The round ends
    at the last finish when nobody is late, else at the deadline. Without a deadline nobody is late. Without arrivals
    the round ends where it started. The order of arrivals is kept.

    Args:
        arrivals: all uploads of the round.
        start_s: when the round began.
        deadline_s: seconds after start_s, or None.

    Raises:
        ValueError: a negative or NaN deadline.
    """
    if deadline_s is not None and not deadline_s >= 0.0:
        raise ValueError(f"deadline_s = {deadline_s!r}: expected a time >= 0, or None")
    limit_s = math.inf if deadline_s is None else start_s + deadline_s
    on_time = tuple(a for a in arrivals if a.finish_s <= limit_s)
    late = tuple(a for a in arrivals if a.finish_s > limit_s)
    end_s = limit_s if late else max((a.finish_s for a in on_time), default=start_s)
    return on_time, late, max(end_s, start_s)
