"""The first two links: exact integration, purity, the chain's law and its calibration; the registry.

What all kinds promise is in test_links_contract.py.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bandwidth import LINK_KINDS, ClientLinks, ConstantLink, Link, MarkovLink, make_links
from bandwidth.links import HORIZON_S
from compression.errors import ConfigError
from compression.randomness import uniforms, words

times = st.floats(0.0, 5e3)
sizes = st.integers(0, 20_000_000)
links: st.SearchStrategy[Link] = st.one_of(
    st.builds(ConstantLink, st.floats(1e4, 1e9)),
    st.builds(MarkovLink, st.floats(1e5, 1e8), st.integers(0, 5), st.sampled_from("abc"), st.sampled_from(["up"])),
)


def by_hand_finish_s(link: Link, start_s: float, nbytes: int) -> float:
    """Second by second, from the rate alone."""
    left, now = 8.0 * nbytes, start_s
    while left > 0.0:
        edge, rate = math.floor(now) + 1.0, link.rate_bps(now)
        if left <= rate * (edge - now):
            return now + left / rate
        left -= rate * (edge - now)
        now = edge
    return now


def markov(mean_bps: float = 1e6, seed: int = 1, client: str = "c", direction: str = "up", **more: Any) -> MarkovLink:
    return MarkovLink(mean_bps, seed, client, direction, **more)


def test_constant_closed_form() -> None:
    link = ConstantLink(8e6)
    assert (link.mean_bps, link.rate_bps(3.7)) == (8e6, 8e6)
    assert link.finish_s(2.0, 3_000_000) == 5.0


@given(links, times, sizes)
def test_finish_is_the_integral_of_the_rate(link: Link, start: float, nbytes: int) -> None:
    if 8 * nbytes / link.mean_bps < 2e3:
        assert link.finish_s(start, nbytes) == pytest.approx(by_hand_finish_s(link, start, nbytes), rel=1e-9)


@given(links, times)
def test_nothing_takes_no_time(link: Link, start: float) -> None:
    assert link.finish_s(start, 0) == start


@given(links, times, sizes, sizes)
def test_additive(link: Link, start: float, a: int, b: int) -> None:
    assert link.finish_s(link.finish_s(start, a), b) == pytest.approx(link.finish_s(start, a + b), rel=1e-9)


@given(links, times, times, sizes, sizes)
def test_monotone_in_bytes_and_start(link: Link, start: float, other: float, a: int, b: int) -> None:
    few, many = sorted((a, b))
    early, late = sorted((start, other))
    assert start <= link.finish_s(start, few) <= link.finish_s(start, many)
    assert link.finish_s(early, few) <= link.finish_s(late, few) * (1.0 + 1e-12)


@given(links, times)
def test_rate_is_positive(link: Link, time_s: float) -> None:
    assert 0.0 < link.rate_bps(time_s) < math.inf


@pytest.mark.parametrize("link", [ConstantLink(1e6), markov()])
def test_bad_times_and_sizes(link: Link) -> None:
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="expected a finite time >= 0"):
            link.rate_bps(bad)
        with pytest.raises(ValueError, match="expected a finite time >= 0"):
            link.finish_s(bad, 1)
    with pytest.raises(ValueError, match="-1 bytes"):
        link.finish_s(0.0, -1)


def test_a_varying_link_has_a_horizon() -> None:
    with pytest.raises(ValueError, match="expected at most 1e"):
        markov().rate_bps(HORIZON_S * 2)


def test_any_order_of_questions_gives_the_same_answers() -> None:
    asked = [3000.5, 0.0, 255.9, 256.0, 1024.0, 17.2, 3000.5]
    forwards = {t: markov().rate_bps(t) for t in sorted(asked)}
    one = markov()
    assert [one.rate_bps(t) for t in asked] == [forwards[t] for t in asked]
    assert markov().finish_s(2000.0, 10**7) == one.finish_s(2000.0, 10**7)
    assert pickle.loads(pickle.dumps(one)).rate_bps(77.0) == one.rate_bps(77.0)
    assert one == markov()
    assert hash(one) == hash(markov())


def test_streams_differ_by_seed_client_and_direction() -> None:
    def rates(link: MarkovLink) -> list[float]:
        return [link.rate_bps(t) for t in range(200)]

    base = rates(markov())
    for other in (markov(seed=2), markov(client="d"), markov(direction="down")):
        assert rates(other) != base
    assert rates(markov(mean_bps=2e6)) == pytest.approx([2 * r for r in base])


def test_the_chain_is_the_documented_one() -> None:
    """Golden: the documented chain, drawn again here from the same words with exact comparisons."""
    link = markov()
    shape = np.exp(np.linspace(-0.7, 0.7, 8))
    norm = shape.mean() * (1 - 2 / 27 + 2 / 27 * 0.1)  # faded: .02 / (.02 + .25) = 2/27 of the time
    start = uniforms(2, seed=1, client="c", purpose="link-up-start")
    level, faded = int(start[0] * 8), bool(start[1] < 2 / 27)
    for block in range(3):
        for i, word in enumerate(words(256, seed=1, client="c", round_=block, purpose="link-up-slots").tolist()):
            walk, fade = (word >> 32) / 2**32, (word & 0xFFFFFFFF) / 2**32
            level = max(level - 1, 0) if walk < 0.25 else min(level + 1, 7) if walk < 0.5 else level
            faded = fade >= 0.25 if faded else fade < 0.02
            want = 1e6 * shape[level] * (0.1 if faded else 1.0) / norm
            assert link.rate_bps(block * 256 + i + 0.5) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(
    "more",
    [{}, {"levels": 2, "span": 3.0}, {"levels": 64}, {"fade_in": 0.0}, {"fade_in": 0.5, "fade_out": 1.0}, {"span": 0}],
)
def test_stationary_mean_is_exactly_the_mean(more: dict[str, Any]) -> None:
    law = markov(mean_bps=3e6, **more).stationary
    assert math.fsum(p for _, p in law) == pytest.approx(1.0, rel=1e-14)
    assert math.fsum(rate * p for rate, p in law) == pytest.approx(3e6, rel=1e-13)


def test_the_stationary_law_is_stationary() -> None:
    """pi P = pi with the documented transition matrix (levels 4, clear then faded)."""
    n, move, fade_in, fade_out = 4, 0.5, 0.02, 0.25
    step = np.eye(n) * (1 - move)
    for i in range(n):
        step[i, max(i - 1, 0)] += move / 2
        step[i, min(i + 1, n - 1)] += move / 2
    fade = np.array([[1 - fade_in, fade_in], [fade_out, 1 - fade_out]])
    pi = np.array([p for _, p in markov(levels=n).stationary])
    np.testing.assert_allclose(pi @ np.kron(fade, step), pi, rtol=1e-13)


def test_the_first_slots_follow_the_stationary_law() -> None:
    rates = np.array([markov(seed=seed).rate_bps(0.0) for seed in range(2000)])
    # sd of one draw is 0.48 of the mean: 2,000 draws are within 4 * 0.48 / sqrt(2000) = 4.3 %.
    assert abs(rates.mean() / 1e6 - 1.0) < 0.043


def window_errors(rates: NDArray[np.float64], lag: int) -> NDArray[np.float64]:
    """The survey's score: 5 s windows predicted by the one `lag` earlier, first 5 not scored."""
    windows = rates.reshape(-1, 5).mean(axis=1)
    predicted, actual = windows[:-lag][5:], windows[lag:][5:]
    error: NDArray[np.float64] = np.abs(predicted - actual) / np.maximum(actual, 0.05 * rates.mean())
    return error


def test_calibration() -> None:
    """Medians near the survey's 0.179 (5 s), 0.393 (30 s), 0.427 (60 s); fades well below the mean."""
    made = [markov(seed=seed) for seed in range(8)]
    series = [np.array([link.rate_bps(t) for t in range(6000)]) for link in made]
    median = {lag: np.mean([np.median(window_errors(x, lag)) for x in series]) for lag in (1, 6, 12)}
    assert 0.165 < median[1] < 0.195
    assert 0.35 < median[6] < 0.42
    assert 0.39 < median[12] < 0.47
    every = np.concatenate(series)
    assert abs(every.mean() / 1e6 - 1.0) < 0.05
    assert 0.05 < np.mean(every < 0.25e6) < 0.10  # faded: 2/27 = 7.4 %


def test_wrong_parameters_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        MarkovLink(-1.0, 0, "c", "left", levels=1, span=-1, move=2, fade_in=1.0, fade_out=0.0, fade_depth=0.0)
    assert len(caught.value.problems) == 8
    with pytest.raises(ConfigError, match="rate_bps = nan"):
        ConstantLink(math.nan)
    with pytest.raises(ConfigError, match="overhead_down_s = -1"):
        ClientLinks(ConstantLink(1.0), ConstantLink(1.0), 0.0, -1.0)


def made(kind: str = "constant", **more: Any) -> ClientLinks:
    settings: dict[str, Any] = {
        "client": "c",
        "index": 0,
        "count": 1,
        "seed": 3,
        "uplink_bps_min": 1e6,
        "uplink_bps_max": 16e6,
        "downlink_factor": 4.0,
        "overhead_s": 0.1,
    }
    return make_links(kind, **(settings | more))


@pytest.mark.parametrize("kind", sorted({*LINK_KINDS} - {"trace"}))  # traces: test_trace.py
def test_make_links_spaces_the_means(kind: str) -> None:
    fleet = [made(kind, client=f"c{i}", index=i, count=5) for i in range(5)]
    # Five from 1 to 16 Mbit/s: a factor 2 each.
    assert sorted(links.up.mean_bps for links in fleet) == pytest.approx([1e6, 2e6, 4e6, 8e6, 16e6])
    for links in fleet:
        assert links.down.mean_bps == pytest.approx(4.0 * links.up.mean_bps, rel=1e-14)
        assert (links.overhead_up_s, links.overhead_down_s) == (0.1, 0.1)
    assert made(kind).up.mean_bps == pytest.approx(4e6)
    assert made(kind, uplink_bps_max=1e6, index=1, count=3).up.mean_bps == pytest.approx(1e6, rel=1e-14)


def test_both_ends_of_the_range_are_taken_exactly() -> None:
    means = {made(client=f"c{i}", index=i, count=5).up.mean_bps for i in range(5)}
    assert (min(means), max(means)) == (1e6, 16e6)


def test_the_order_of_means_is_permuted_by_the_seed() -> None:
    orders = {tuple(made(index=i, count=6, seed=seed).up.mean_bps for i in range(6)) for seed in range(10)}
    assert len(orders) > 5


def test_make_links_refusals() -> None:
    with pytest.raises(ConfigError, match=r"unknown link kind 'celular': expected one of .*; did you mean 'cellular'"):
        made("celular")
    with pytest.raises(ConfigError) as caught:
        made(uplink_bps_min=2.0, uplink_bps_max=1.0, downlink_factor=0.0, overhead_s=-1.0, index=1)
    assert len(caught.value.problems) == 4


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'constant' is registered already"):
        LINK_KINDS.add("constant", LINK_KINDS["constant"])
    assert len(LINK_KINDS) == len(list(LINK_KINDS))
    assert "constant" in LINK_KINDS
    assert "nothing" not in LINK_KINDS
