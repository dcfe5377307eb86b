"""The sinusoid against its closed form, an independent quadrature, and hard cases of its inversion."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import SinusoidLink, make_links
from compression.errors import ConfigError

waves = st.builds(
    SinusoidLink,
    st.floats(1e3, 1e9),
    st.floats(1e-3, 1e2),
    st.one_of(st.just(0.0), st.floats(0.0, 1e9)),
    st.floats(-10.0, 10.0),
)


def test_by_hand() -> None:
    # eta 2, theta pi/2, delta 1: from 0 to 1 s a quarter of the sine's circle, where sin^2 has the mean 1/2; so has
    # every further one. 2 * 1/2 + 1 = 2 bits a second.
    link = SinusoidLink(2.0, math.pi / 2, 1.0)
    assert (link.mean_bps, link.period_s) == (2.0, 2.0)
    assert link.rate_bps(0.0) == 1.0
    assert link.rate_bps(1.0) == pytest.approx(3.0)
    assert link.bits_between(0.0, 1.0) == pytest.approx(2.0)
    assert link.bits_between(0.0, 2.0) == pytest.approx(4.0)
    # Up to 1/2 s: x/2 - sin(2 theta x)/(4 theta) = 1/4 - 1/(2 pi), twice, and 1/2 from delta.
    assert link.bits_between(0.0, 0.5) == pytest.approx(1.0 - 1.0 / math.pi)
    assert link.finish_s(0.0, 1) == pytest.approx(4.0)
    # A phase of pi/2 starts at the crest.
    assert SinusoidLink(2.0, math.pi / 2, 1.0, math.pi / 2).rate_bps(0.0) == pytest.approx(3.0)


@given(waves, st.floats(0.0, 1e4), st.floats(0.0, 2.0))
def test_the_integral_agrees_with_a_quadrature(link: SinusoidLink, start: float, periods: float) -> None:
    """Gauss and Legendre with 40 points: exact to rounding for two periods of a sine."""
    length = periods * link.period_s
    nodes, weights = np.polynomial.legendre.leggauss(40)
    at = start + length * (nodes + 1.0) / 2.0
    rates = link.eta_bps * np.sin(link.theta * at + link.phase) ** 2 + link.delta_bps
    want = float(weights @ rates) * length / 2.0
    # the phase at a time is known to the rounding of theta * time
    slack = link.mean_bps * length * 4e-16 * (10.0 + link.theta * (start + length)) + 1e-9
    got = link.bits_between(start, start + length)
    lost = link.mean_bps * 2.0 * math.ulp(start + length) * 2.0  # start + length is a rounded time
    assert got == pytest.approx(want, rel=1e-11, abs=slack + lost)


@given(waves, st.floats(0.0, 1e4), st.integers(1, 10**12))
def test_inversion_to_float_precision(link: SinusoidLink, start: float, nbytes: int) -> None:
    finish = link.finish_s(start, nbytes)
    got = link.bits_between(start, finish)
    # one unit in the last place of the time, at the highest rate, and the rounding of the phase
    unit = (link.eta_bps + link.delta_bps) * math.ulp(finish) * 2.0
    wave = link.eta_bps / link.theta * 1e-15 * (10.0 + link.theta * finish)
    assert got == pytest.approx(8.0 * nbytes, rel=1e-13, abs=unit + wave)


def test_from_a_standstill() -> None:
    """delta = 0 and the wave at its foot: the bits passed grow with the cube of the time."""
    link = SinusoidLink(3e6, 1e-3, 0.0)
    # eta * theta^2 * d^3 / 3 = 8 bits: d = 2.
    assert link.finish_s(0.0, 1) == pytest.approx(2.0, rel=1e-6)
    at_rest = link.period_s  # a foot, up to rounding
    assert link.rate_bps(at_rest) == pytest.approx(0.0, abs=1e-12)
    finishes = [link.finish_s(at_rest, n) for n in range(200)]
    assert finishes == sorted(finishes)
    assert len(set(finishes)) == 200


def test_many_periods() -> None:
    link = SinusoidLink(2e6, math.pi / 60.0, 0.0, 0.7)
    # 60 s carry 60e6 bits.
    assert link.finish_s(5.0, 60_000_000 // 8 * 1_000_000) == pytest.approx(5.0 + 60e6, rel=1e-14)


def test_a_flat_wave_is_a_constant_link() -> None:
    assert SinusoidLink(0.0, 1.0, 8e6).finish_s(2.0, 3_000_000) == pytest.approx(5.0, rel=1e-15)


def test_bad_parameters_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        SinusoidLink(-1.0, 0.0, math.nan, math.inf)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == ["eta_bps", "theta", "delta_bps", "phase"]
    with pytest.raises(ConfigError, match=r"mean_bps = delta_bps \+ eta_bps / 2 = 0.0: expected a finite rate > 0"):
        SinusoidLink(0.0, 1.0, 0.0)


def of_kind(**args: object) -> SinusoidLink:
    links = make_links(
        "sinusoid",
        args=args,
        client="c",
        index=0,
        count=1,
        seed=1,
        uplink_bps_min=1e6,
        uplink_bps_max=1e6,
        downlink_factor=4.0,
        overhead_s=0.0,
    )
    assert isinstance(links.up, SinusoidLink)
    return links.up


def test_the_kind() -> None:
    # amplitude 0.75 of the mean 1e6: from 0.25e6 to 1.75e6.
    link = of_kind(amplitude=0.75, period_s=10, phase=0.25)
    assert (link.delta_bps, link.eta_bps, link.phase) == (0.25e6, 1.5e6, 0.25)
    assert link.period_s == pytest.approx(10.0)
    assert of_kind(theta=0.5).theta == 0.5
    assert of_kind().period_s == pytest.approx(60.0)
    assert 0.0 <= of_kind().phase < math.pi
    assert of_kind(amplitude=0).eta_bps == 0.0


def test_refusals_of_the_kind() -> None:
    with pytest.raises(ConfigError) as caught:
        of_kind(amplitude=1.5, period_s=1.0, theta=2.0)
    assert caught.value.problems == (
        "amplitude = 1.5: expected a number in [0, 1], 1 for a rate that falls to 0",
        "period_s = 1.0 and theta = 2.0: expected one of them",
    )
    with pytest.raises(ConfigError, match=r"period_s = 0\.0: expected a time in"):
        of_kind(period_s=0)
    with pytest.raises(ConfigError, match=r"unknown parameter 'amplitud' of link kind 'sinusoid': expected one of "):
        of_kind(amplitud=1)
    with pytest.raises(ConfigError, match="amplitude = 'high' of link kind 'sinusoid': expected a number"):
        of_kind(amplitude="high")
