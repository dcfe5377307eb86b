"""The estimators' contract, run over the registry; the clip of a client's report; storage."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import ESTIMATORS, Estimate, Estimator, MarkovLink, Sample, clip_report, make_estimator, safe_rate_bps
from bandwidth.estimators import CLOCK_RESET_S, Ewma, LastValue, State, from_dict, to_dict
from bandwidth.samples import MAX_RATE_BPS, MIN_RATE_BPS
from compression.errors import ConfigError, StateError

every = pytest.mark.parametrize("name", sorted(ESTIMATORS))

any_number = st.floats() | st.sampled_from([0.0, -1.0, 1e18, math.nan, math.inf])
any_sample = st.builds(
    Sample,
    st.sampled_from(["up", "down", "?"]),
    st.integers(-(10**18), 10**18),
    any_number,
    any_number,
    any_number,
    st.sampled_from(["simulated", "kernel", "application", "configured", "?"]),
)


def sample(rate_bps: float, at_s: float, source: str = "simulated") -> Sample:
    """One whose rate is exactly rate_bps: 1,000,000 bytes in 8,000,000 / rate seconds."""
    return Sample("up", 1_000_000, 8e6 / rate_bps, 0.0, at_s, source)


good_sample = st.builds(sample, st.floats(1e3, 1e9), st.floats(0.0, 1e3))


def fed(estimator: Estimator, samples: list[Sample]) -> State:
    state = estimator.init()
    for one in samples:
        state = estimator.update(state, one)
    return state


def predicted(estimator: Estimator, state: State, now_s: float) -> Estimate:
    estimate = estimator.predict(state, now_s)
    assert estimate is not None
    return estimate


@every
def test_no_sample_no_prediction(name: str) -> None:
    estimator = make_estimator(name)
    assert estimator.predict(estimator.init(), 5.0) is None


@every
@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 0},
        {"nbytes": -5},
        {"seconds": 0.0},
        {"seconds": math.nan},
        {"seconds": -1.0},
        {"overhead_s": 9.0},
        {"nbytes": 10**18, "seconds": 8.0},
        {"at_s": math.nan},
        {"at_s": math.inf},
        {"source": "?"},
    ],
)
def test_samples_not_valid_are_ignored_and_counted(name: str, change: dict[str, Any]) -> None:
    estimator = make_estimator(name)
    bad = replace(sample(1e6, 2.0), **change)
    assert estimator.update(estimator.init(), bad) == replace(estimator.init(), ignored=1)
    known = fed(estimator, [sample(1e6, 1.0)])
    assert estimator.update(known, bad) == replace(known, ignored=1)


@every
def test_a_constant_rate_is_found_exactly(name: str) -> None:
    estimator = make_estimator(name)
    state = fed(estimator, [sample(2e6, t) for t in (1.0, 2.0, 2.0, 9.0, 500.0)])
    got = predicted(estimator, state, 510.0)
    assert (got.rate_bps, got.age_s, got.samples, got.source) == (2e6, 10.0, 5, "simulated")


@every
def test_the_spread_shrinks_when_predictions_hold_and_grows_when_they_do_not(name: str) -> None:
    estimator = make_estimator(name)
    first = predicted(estimator, fed(estimator, [sample(1e6, 0.0)]), 5.0).spread
    steady = predicted(estimator, fed(estimator, [sample(1e6, 5.0 * i) for i in range(40)]), 200.0).spread
    wild = predicted(estimator, fed(estimator, [sample(1e6 * 9 ** (i % 2), 5.0 * i) for i in range(40)]), 200.0).spread
    # One sample, 5 s old: the survey's 0.35 + 0.16 ln 5 = 0.6075.
    assert first == pytest.approx(0.35 + 0.16 * math.log(5))
    assert steady < 0.5 * first < first < wild


@every
@given(samples=st.lists(any_sample | good_sample, max_size=20), now=st.floats(-1e9, 1e9))
def test_any_samples_give_a_sane_prediction(name: str, samples: list[Sample], now: float) -> None:
    estimator = make_estimator(name)
    state = fed(estimator, samples)
    assert state.samples + state.ignored + state.stale == len(samples)
    assert from_dict(json.loads(json.dumps(to_dict(state)))) == state
    got = estimator.predict(state, now)
    assert (got is None) == (not any(s.valid for s in samples))
    if got is not None:
        assert MIN_RATE_BPS * 0.999 <= got.rate_bps <= MAX_RATE_BPS * 1.001
        assert 0.0 <= got.spread < math.inf
        assert got.age_s >= 0.0


@every
@given(samples=st.lists(good_sample, min_size=1, max_size=10))
def test_between_the_smallest_and_the_largest_rate(name: str, samples: list[Sample]) -> None:
    estimator = make_estimator(name)
    rates = [s.rate_bps for s in samples]
    got = predicted(estimator, fed(estimator, samples), 1e3)
    assert min(rates) * (1 - 1e-9) <= got.rate_bps <= max(rates) * (1 + 1e-9)


@every
@given(samples=st.lists(good_sample, min_size=1, max_size=10), factor=st.floats(1.0, 10.0))
def test_faster_samples_never_predict_less(name: str, samples: list[Sample], factor: float) -> None:
    estimator = make_estimator(name)
    ordered = sorted(samples, key=lambda s: s.at_s)
    faster = [replace(s, seconds=s.seconds / factor) for s in ordered]
    slow, fast = (predicted(estimator, fed(estimator, these), 1e3).rate_bps for these in (ordered, faster))
    assert fast >= slow * (1 - 1e-9)


@every
@given(samples=st.lists(good_sample, min_size=1, max_size=10), now=st.floats(1e3, 1e6), later=st.floats(0.0, 1e6))
def test_older_is_less_certain(name: str, samples: list[Sample], now: float, later: float) -> None:
    estimator = make_estimator(name)
    state = fed(estimator, samples)
    early, late = predicted(estimator, state, now), predicted(estimator, state, now + later)
    assert early.age_s <= late.age_s
    assert early.spread <= late.spread
    assert early.rate_bps == late.rate_bps


@every
def test_an_older_sample_never_replaces_a_newer_one(name: str) -> None:
    estimator = make_estimator(name)
    known = fed(estimator, [sample(1e6, 100.0)])
    assert estimator.update(known, sample(5e6, 99.0)) == replace(known, stale=1)


@every
def test_a_clock_set_back_does_not_lock_the_estimate(name: str) -> None:
    estimator = make_estimator(name)
    state = fed(estimator, [sample(1e6, 2 * CLOCK_RESET_S), sample(5e6, 10.0)])
    got = predicted(estimator, state, 12.0)
    assert (got.rate_bps, got.age_s) == (5e6, 2.0)


@every
def test_measured_beats_configured(name: str) -> None:
    estimator = make_estimator(name)
    configured = fed(estimator, [sample(1e6, 0.0, "configured")])
    assert predicted(estimator, configured, 0.0).source == "configured"
    measured = estimator.update(configured, sample(5e6, 0.0, "kernel"))
    assert predicted(estimator, measured, 0.0).rate_bps == 5e6
    assert estimator.update(measured, sample(1e6, 9.0, "configured")) == replace(measured, stale=1)


@every
def test_states_are_frozen_and_updates_pure(name: str) -> None:
    estimator = make_estimator(name)
    state = fed(estimator, [sample(1e6, 1.0)])
    before = to_dict(state)
    assert estimator.update(state, sample(3e6, 2.0)) == estimator.update(state, sample(3e6, 2.0))
    assert to_dict(state) == before
    with pytest.raises(FrozenInstanceError):
        state.rate_bps = 1.0  # type: ignore[misc]


@every
def test_nan_now_is_refused(name: str) -> None:
    estimator = make_estimator(name)
    with pytest.raises(ValueError, match="now_s is NaN"):
        estimator.predict(estimator.init(), math.nan)


def test_last_is_the_last() -> None:
    assert fed(LastValue(), [sample(1e6, 1.0), sample(4e6, 2.0)]).rate_bps == 4e6


def test_golden_ewma() -> None:
    # weight .5, interval 5 s: after 10 s the old mass 1 is .25, so the new log rate weighs 1 / 1.25 = .8.
    state = fed(Ewma(weight=0.5, interval_s=5.0), [sample(1e6, 0.0), sample(4e6, 10.0)])
    assert state.mass == 1.25
    assert state.rate_bps == pytest.approx(1e6 * 4**0.8)
    # Two that end together weigh the same: the geometric mean.
    assert fed(Ewma(0.5), [sample(1e6, 3.0), sample(4e6, 3.0)]).rate_bps == pytest.approx(2e6)


@given(st.lists(good_sample, min_size=1, max_size=10, unique_by=lambda s: s.at_s))
def test_weight_one_is_the_last_value(samples: list[Sample]) -> None:
    assert fed(Ewma(1.0), samples) == fed(LastValue(), samples)


def test_ewma_parameters() -> None:
    with pytest.raises(ConfigError) as caught:
        Ewma(weight=0.0, interval_s=math.inf)
    assert len(caught.value.problems) == 2


def test_unknown_estimator() -> None:
    with pytest.raises(ConfigError, match="unknown estimator 'lst': expected one of ewma, last; did you mean 'last'"):
        make_estimator("lst")


@every
def test_quality_on_a_cellular_link(name: str) -> None:
    """One 5 s window ahead: median error near the survey's 0.18, safe rates overshoot about as often as asked."""
    estimator = make_estimator(name)
    errors, over = [], []
    for seed in range(4):
        link = MarkovLink(1e6, seed, "c", "up")
        windows = np.array([link.rate_bps(t) for t in range(3000)]).reshape(-1, 5).mean(axis=1)
        state = estimator.init()
        for i, actual in enumerate(windows.tolist()):
            if i >= 5:
                got = predicted(estimator, state, 5.0 * i)
                errors.append(abs(got.rate_bps - actual) / max(actual, 5e4))
                over.append(safe_rate_bps(got, 0.1) > actual)
            state = estimator.update(state, Sample("up", int(actual * 5 / 8), 5.0, 0.0, 5.0 * (i + 1), "simulated"))
    assert 0.15 < np.median(errors) < 0.21
    assert 0.08 < np.mean(over) < 0.16


def test_safe_rate() -> None:
    estimate = Estimate(1e6, 0.5, 1.0, 3, "kernel")
    assert safe_rate_bps(estimate, 0.5) == pytest.approx(1e6)
    # z(0.1) = -1.2816.
    assert safe_rate_bps(estimate, 0.1) == pytest.approx(1e6 * math.exp(-1.2815515655446 * 0.5))
    assert safe_rate_bps(replace(estimate, spread=0.0), 0.1) == 1e6
    for bad in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="risk"):
            safe_rate_bps(estimate, bad)


SEEN = Estimate(1e6, 0.3, 1.0, 3, "kernel")


@pytest.mark.parametrize(
    ("reported", "seen", "want"),
    [
        (2e6, SEEN, (2e6, False)),
        (4e6, SEEN, (4e6, False)),
        (5e6, SEEN, (4e6, True)),
        (1e5, SEEN, (2.5e5, True)),
        (5e6, None, (5e6, False)),
        (1e18, None, (MAX_RATE_BPS, True)),
        (1e-9, None, (MIN_RATE_BPS, True)),
        (math.nan, SEEN, (None, False)),
        (math.inf, SEEN, (None, False)),
        (-math.inf, None, (None, False)),
        (0.0, SEEN, (None, False)),
        (-1.0, None, (None, False)),
    ],
)
def test_clip_report(reported: float, seen: Estimate | None, want: tuple[float | None, bool]) -> None:
    assert clip_report(reported, seen) == want


@given(any_number, st.none() | st.builds(Estimate, st.floats(1.0, 1e12), *map(st.just, (0.3, 1.0, 3, "kernel"))))
def test_a_clipped_report_is_near_what_was_seen(reported: float, seen: Estimate | None) -> None:
    rate, _ = clip_report(reported, seen)
    if rate is None:
        assert not 0.0 < reported < math.inf
    else:
        assert MIN_RATE_BPS <= rate <= MAX_RATE_BPS
        assert seen is None or seen.rate_bps / 4 <= rate <= seen.rate_bps * 4
        assert clip_report(rate, seen) == (rate, False)


def test_clip_report_factor() -> None:
    for bad in (0.5, math.nan, math.inf):
        with pytest.raises(ValueError, match="factor"):
            clip_report(1e6, SEEN, bad)


GOOD = to_dict(State(1e6, 1.5, 10.0, 1.0, 5.0, 2, 0, 1, "kernel"))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({}, "missing fields"),
        (GOOD | {"extra": 1}, "unknown fields"),
        (GOOD | {"rate_bps": "fast"}, "expected float, got str"),
        (GOOD | {"samples": 2.5}, "expected int, got float"),
        (GOOD | {"samples": True}, "expected int, got bool"),
        (GOOD | {"rate_bps": math.nan}, "not a state"),
        (GOOD | {"rate_bps": 0.0}, "not a state"),
        (GOOD | {"rate_bps": 1e18}, "not a state"),
        (GOOD | {"mass": 0.0}, "not a state"),
        (GOOD | {"surprise": -1.0}, "not a state"),
        (GOOD | {"surprise_mass": 0.0}, "not a state"),
        (GOOD | {"samples": -1}, "not a state"),
        (GOOD | {"samples": 0}, "not a state"),
        (GOOD | {"source": "guess"}, "not a state"),
    ],
)
def test_stored_states_are_checked(stored: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        from_dict(stored)


def test_stored_state_round_trip() -> None:
    assert to_dict(from_dict(GOOD)) == GOOD
    assert from_dict(GOOD | {"at_s": 10}) == from_dict(GOOD)
    assert from_dict(to_dict(State())) == State()
