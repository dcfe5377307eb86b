"""How many bytes a message may take so that its round ends in time (docs: the Kimad budget rule).

With B in bit/s, times in s and a fixed overhead a, a transfer of n bytes costs a + 8 n / B; solved for n:

    c = B / 8 * (t - T_comp - a)

Bytes are whole and rounded down; a budget is never negative. Zero says that the time budget is too small for any
message: the caller sends the smallest legal one and logs a miss. Every byte of the message counts.
Source: Kimad, "compression budget"; overheads and the asymmetric split are this project's.
"""

from __future__ import annotations

import math

MAX_BUDGET_BYTES = 2**63 - 1
"""Budgets saturate here."""


def _check(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < 0.0:
            raise ValueError(f"{name} = {value!r}: expected a finite number >= 0")


def _bytes_in(rate_bps: float, seconds: float) -> int:
    return min(int(min(rate_bps / 8.0 * max(seconds, 0.0), 2.0**63)), MAX_BUDGET_BYTES)


def uplink_budget_bytes(
    rate_bps: float, time_budget_s: float, elapsed_s: float, overhead_s: float, cap_bytes: int | None = None
) -> int:
    """Bytes that fit the rest of the round over one link: floor(B/8 * (t - elapsed - a)), at least 0.

    Args:
        rate_bps: predicted rate B, bit/s.
        time_budget_s: t, the whole round's time budget.
        elapsed_s: time of it already spent (compute time; on a device, measured).
        overhead_s: a, the transfer's fixed cost.
        cap_bytes: the server's upper limit, None for none.

    Raises:
        ValueError: a negative, NaN or infinite argument.

    >>> uplink_budget_bytes(8e6, 2.0, 0.5, 0.1)
    1400000
    """
    _check(rate_bps=rate_bps, time_budget_s=time_budget_s, elapsed_s=elapsed_s, overhead_s=overhead_s)
    if cap_bytes is not None:
        _check(cap_bytes=cap_bytes)
    budget = _bytes_in(rate_bps, time_budget_s - elapsed_s - overhead_s)
    return budget if cap_bytes is None else min(budget, cap_bytes)


def one_rate_budget_bytes(
    rate_bps: float,
    time_budget_s: float,
    compute_s: float,
    overhead_up_s: float,
    overhead_down_s: float,
    alpha: float = 1.0,
) -> int:
    """Bytes of each of two equal messages, one down and one up, over links of one rate.

    floor(B/8 * (t - T_comp - a_up - a_down) / (1 + alpha)), at least 0.

    Args:
        rate_bps: predicted rate B of both directions, bit/s.
        time_budget_s: t, the whole round's time budget.
        compute_s: T_comp.
        overhead_up_s: a_up, fixed cost of the upload.
        overhead_down_s: a_down, fixed cost of the download.
        alpha: broadcast congestion: a download takes alpha times its bytes / B; 1 for none.

    Raises:
        ValueError: a negative, NaN or infinite argument.
    """
    _check(rate_bps=rate_bps, time_budget_s=time_budget_s, compute_s=compute_s, alpha=alpha)
    _check(overhead_up_s=overhead_up_s, overhead_down_s=overhead_down_s)
    return _bytes_in(rate_bps, (time_budget_s - compute_s - overhead_up_s - overhead_down_s) / (1.0 + alpha))


def asymmetric_budget_bytes(
    up_bps: float,
    down_bps: float,
    time_budget_s: float,
    compute_s: float,
    overhead_up_s: float,
    overhead_down_s: float,
    uplink_share: float,
    congestion: float = 1.0,
) -> tuple[int, int]:
    """Budgets (up, down) when the directions differ: the free time is shared, each share filled.

    tau = t - T_comp - a_up - a_down; c_up = B_up/8 * share * tau; c_down = B_down/8 * (1 - share) * tau / alpha.

    Args:
        up_bps: predicted uplink rate, bit/s.
        down_bps: predicted downlink rate, bit/s.
        time_budget_s: t, the whole round's time budget.
        compute_s: T_comp.
        overhead_up_s: a_up, fixed cost of the upload.
        overhead_down_s: a_down, fixed cost of the download.
        uplink_share: part of the free time given to the upload, in [0, 1].
        congestion: alpha > 0, broadcast congestion of the downlink; 1 for none.

    Raises:
        ValueError: a negative, NaN or infinite argument, a share above 1, or congestion 0.
    """
    _check(up_bps=up_bps, down_bps=down_bps, time_budget_s=time_budget_s, compute_s=compute_s)
    _check(overhead_up_s=overhead_up_s, overhead_down_s=overhead_down_s)
    _check(uplink_share=uplink_share, congestion=congestion)
    if uplink_share > 1.0:
        raise ValueError(f"uplink_share = {uplink_share!r}: expected a number in [0, 1]")
    if congestion == 0.0:
        raise ValueError("congestion = 0: expected a number > 0 (1 for none)")
    free_s = time_budget_s - compute_s - overhead_up_s - overhead_down_s
    return (
        _bytes_in(up_bps, free_s * uplink_share),
        _bytes_in(down_bps, free_s * (1.0 - uplink_share) / congestion),
    )


def smallest_time_budget_s(rate_bps: float, nbytes: int, compute_s: float, overhead_s: float) -> float:
    """The smallest workable time budget for a message: T_comp + a + 8 n / B.

    Rounded up by as few units in the last place as needed so that `uplink_budget_bytes` at this t is >= nbytes.

    Args:
        rate_bps: predicted rate B > 0, bit/s.
        nbytes: the message, in bytes, at most 2**53.
        compute_s: T_comp.
        overhead_s: a, the transfer's fixed cost.

    Raises:
        ValueError: a negative, NaN or infinite argument, rate 0, or a message above 2**53 bytes.

    >>> smallest_time_budget_s(8e6, 1_000_000, 0.5, 0.25)
    1.75
    """
    _check(rate_bps=rate_bps, nbytes=nbytes, compute_s=compute_s, overhead_s=overhead_s)
    if rate_bps == 0.0:
        raise ValueError("rate_bps = 0: expected a rate > 0; over this link no message ever arrives")
    if nbytes > 2**53:
        raise ValueError(f"nbytes = {nbytes}: expected at most 2**53")
    time_budget_s = compute_s + overhead_s + 8.0 * nbytes / rate_bps
    if not math.isfinite(time_budget_s):
        raise ValueError(f"rate_bps = {rate_bps!r}: too slow for {nbytes} bytes in any time")
    step = 1
    while uplink_budget_bytes(rate_bps, time_budget_s, compute_s, overhead_s) < nbytes:
        time_budget_s = _up(time_budget_s, step)
        step *= 2
    return time_budget_s


def _up(value: float, units: int) -> float:
    return value + units * math.ulp(value)
