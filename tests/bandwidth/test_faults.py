"""Fault plans: shares that add up, draws that repeat, and what a mistake is told."""

from __future__ import annotations

from collections import Counter

import pytest

from bandwidth.faults import FATES, FaultPlan
from compression.errors import ConfigError


def test_shares_are_met_and_every_draw_repeats() -> None:
    plan = FaultPlan.parse("lose_request = 0.1, lose_reply = 0.2, corrupt = 0.05, duplicate = 0.15")
    keys = [(client, round_) for client in "abcdefghij" for round_ in range(1000)]
    drawn = [plan.fate(seed=3, client=c, round_=r, times=0) for c, r in keys]
    assert drawn == [plan.fate(seed=3, client=c, round_=r, times=0) for c, r in keys]
    counts = Counter(drawn)
    for name in FATES:  # five standard deviations of a binomial count
        share = getattr(plan, name)
        assert abs(counts[name] - share * len(keys)) < 5 * (share * (1 - share) * len(keys)) ** 0.5
    again = [plan.fate(seed=3, client=c, round_=r, times=1) for c, r in keys]
    both = sum(a == b == "lose_reply" for a, b in zip(drawn, again, strict=True))
    assert abs(both - 0.04 * len(keys)) < 5 * (0.04 * 0.96 * len(keys)) ** 0.5  # asked again is drawn again


def test_nothing_goes_wrong_without_a_plan_and_everything_at_one() -> None:
    assert {FaultPlan().fate(seed=s, client="a", round_=1, times=0) for s in range(200)} == {None}
    whole = FaultPlan(corrupt=1.0)
    assert {whole.fate(seed=s, client="a", round_=1, times=0) for s in range(200)} == {"corrupt"}
    assert {whole.bit(2, seed=s, client="a", round_=1) for s in range(200)} == set(range(16))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lose_reply = 1.5", "lose_reply is 1.5: expected a share from 0 to 1"),
        ("lose_reply = nan", "expected a share from 0 to 1"),
        ("lose_reply = 0.6, corrupt = 0.6", "add up to 1.2"),
        ("lose_replies = 0.1", "did you mean 'lose_reply'"),
        ("lose_reply", "expected `name = value"),
    ],
)
def test_mistakes_are_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("`", "`")):
        FaultPlan.parse(text)
