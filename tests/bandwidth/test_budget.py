"""Budgets: exact against a constant link, monotone, whole bytes, never negative."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import (
    ConstantLink,
    asymmetric_budget_bytes,
    one_rate_budget_bytes,
    smallest_time_budget_s,
    uplink_budget_bytes,
)
from bandwidth.budget import MAX_BUDGET_BYTES

rates = st.floats(1e3, 1e10)
seconds = st.floats(0.0, 1e4)


def slack_s(*times: float) -> float:
    """Rounding of a handful of sums of these times."""
    return 1e-12 * (1.0 + sum(times))


def test_golden_uplink() -> None:
    # 8 Mbit/s is 1,000,000 bytes/s; 2 - 0.5 - 0.1 = 1.4 s are left.
    assert uplink_budget_bytes(8e6, 2.0, 0.5, 0.1) == 1_400_000
    # 10 bit/s for 1 s is 1.25 bytes: rounded down.
    assert uplink_budget_bytes(10.0, 1.0, 0.0, 0.0) == 1
    assert uplink_budget_bytes(8e6, 2.0, 0.5, 0.1, cap_bytes=1000) == 1000
    assert uplink_budget_bytes(8e6, 2.0, 0.5, 0.1, cap_bytes=2_000_000) == 1_400_000
    assert uplink_budget_bytes(8e6, 2.0, 1.5, 0.6) == 0
    assert uplink_budget_bytes(0.0, 2.0, 0.0, 0.0) == 0


def test_golden_one_rate() -> None:
    # 1,000,000 bytes/s for 3 - 0.5 - 0.25 - 0.25 = 2 s, shared by two messages, or by one and three (alpha = 3).
    assert one_rate_budget_bytes(8e6, 3.0, 0.5, 0.25, 0.25) == 1_000_000
    assert one_rate_budget_bytes(8e6, 3.0, 0.5, 0.25, 0.25, alpha=3.0) == 500_000


def test_golden_asymmetric() -> None:
    # tau = 3 - 0.5 - 0.25 - 0.25 = 2 s; up 0.5 s at 1,000,000 bytes/s, down 1.5 s at 4,000,000 bytes/s over alpha 2.
    assert asymmetric_budget_bytes(8e6, 32e6, 3.0, 0.5, 0.25, 0.25, 0.25, 2.0) == (500_000, 3_000_000)
    assert asymmetric_budget_bytes(8e6, 32e6, 1.0, 1.0, 0.0, 0.0, 0.5) == (0, 0)


@given(rates, seconds, seconds, seconds)
def test_a_budgeted_message_is_on_time_and_one_more_byte_is_not(rate: float, t: float, used: float, a: float) -> None:
    budget = uplink_budget_bytes(rate, t, used, a)
    link = ConstantLink(rate)
    if budget > 0:
        assert link.finish_s(used + a, budget) <= t + slack_s(t, used, a)
    assert link.finish_s(used + a, budget + 1) >= t - slack_s(t, used, a)


@given(rates, seconds, seconds, seconds, seconds, st.floats(0.0, 10.0))
def test_one_rate_round_is_on_time(
    rate: float, t: float, compute: float, a_up: float, a_down: float, alpha: float
) -> None:
    c = one_rate_budget_bytes(rate, t, compute, a_up, a_down, alpha)
    if c > 0:
        total = compute + a_up + a_down + 8 * c / rate + alpha * 8 * c / rate
        assert total <= t + slack_s(t, compute, a_up, a_down)


@given(rates, rates, seconds, seconds, seconds, seconds, st.floats(0.0, 1.0), st.floats(0.1, 10.0))
def test_asymmetric_round_is_on_time(
    up: float, down: float, t: float, compute: float, a_up: float, a_down: float, share: float, alpha: float
) -> None:
    c_up, c_down = asymmetric_budget_bytes(up, down, t, compute, a_up, a_down, share, alpha)
    assert min(c_up, c_down) >= 0
    if c_up + c_down > 0:
        total = compute + a_up + a_down + 8 * c_up / up + alpha * 8 * c_down / down
        assert total <= t + slack_s(t, compute, a_up, a_down)


@given(rates, seconds, seconds, seconds)
def test_all_of_the_time_to_the_upload_is_the_uplink_rule(rate: float, t: float, compute: float, a: float) -> None:
    assert asymmetric_budget_bytes(rate, 1.0, t, compute, a, 0.0, 1.0)[0] == uplink_budget_bytes(rate, t, compute, a)
    assert one_rate_budget_bytes(rate, t, compute, a, 0.0, 0.0) == uplink_budget_bytes(rate, t, compute, a)


@given(rates, rates, seconds, seconds, seconds)
def test_monotone(rate: float, other: float, t: float, used: float, a: float) -> None:
    low, high = sorted((rate, other))
    assert uplink_budget_bytes(low, t, used, a) <= uplink_budget_bytes(high, t, used, a)
    assert uplink_budget_bytes(low, t, used, a) <= uplink_budget_bytes(low, t + 1.0, used, a)
    assert uplink_budget_bytes(low, t, used, a) >= uplink_budget_bytes(low, t, used + 1.0, a)
    assert uplink_budget_bytes(low, t, used, a) >= uplink_budget_bytes(low, t, used, a + 1.0)


@given(rates, st.integers(0, 2**40), seconds, seconds)
def test_smallest_time_budget_is_enough_and_hardly_more(rate: float, nbytes: int, compute: float, a: float) -> None:
    t = smallest_time_budget_s(rate, nbytes, compute, a)
    assert uplink_budget_bytes(rate, t, compute, a) >= nbytes
    assert t == pytest.approx(compute + a + 8 * nbytes / rate, rel=1e-14)
    if nbytes > 0:
        # A byte's time less than that, beyond rounding, and the message no longer fits.
        less = t - 8.0 / rate - 1e-14 * t
        assert less <= 0.0 or uplink_budget_bytes(rate, less, compute, a) < nbytes


def test_budgets_saturate() -> None:
    assert uplink_budget_bytes(1e300, 1e300, 0.0, 0.0) == MAX_BUDGET_BYTES
    assert uplink_budget_bytes(1e300, 1e300, 0.0, 0.0, cap_bytes=7) == 7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: uplink_budget_bytes(x, 1.0, 0.0, 0.0),
        lambda x: uplink_budget_bytes(1.0, x, 0.0, 0.0),
        lambda x: uplink_budget_bytes(1.0, 1.0, x, 0.0),
        lambda x: uplink_budget_bytes(1.0, 1.0, 0.0, x),
        lambda x: uplink_budget_bytes(1.0, 1.0, 0.0, 0.0, cap_bytes=x),
        lambda x: one_rate_budget_bytes(1.0, 1.0, 0.0, 0.0, 0.0, x),
        lambda x: asymmetric_budget_bytes(1.0, x, 1.0, 0.0, 0.0, 0.0, 0.5),
        lambda x: asymmetric_budget_bytes(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, x),
        lambda x: smallest_time_budget_s(x, 1, 0.0, 0.0),
        lambda x: smallest_time_budget_s(1.0, 1, x, 0.0),
    ],
)
def test_bad_arguments_are_named(call: Callable[[float], object], bad: float) -> None:
    with pytest.raises(ValueError, match=r"= (nan|inf|-1\.0): expected a finite number >= 0"):
        call(bad)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"uplink_share = 1\.5"):
        asymmetric_budget_bytes(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.5)
    with pytest.raises(ValueError, match="congestion = 0"):
        asymmetric_budget_bytes(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5, 0.0)
    with pytest.raises(ValueError, match="no message ever arrives"):
        smallest_time_budget_s(0.0, 1, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"at most 2\*\*53"):
        smallest_time_budget_s(1.0, 2**53 + 1, 0.0, 0.0)
    with pytest.raises(ValueError, match="too slow"):
        smallest_time_budget_s(1e-300, 2**53, 0.0, 0.0)
