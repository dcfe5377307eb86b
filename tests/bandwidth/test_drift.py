"""The drifting link: what it is fitted to, its law, and its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bandwidth import LINK_KINDS, DriftLink, mobile_link, stable_link
from compression.errors import ConfigError
from compression.randomness import uniforms, words

SECONDS = 6000


def series(link: DriftLink) -> NDArray[np.float64]:
    """Rates of each second of the link, over its mean."""
    return np.array([link.rate_bps(t) for t in range(SECONDS)]) / link.mean_bps


def scores(rates: NDArray[np.float64], lag: int) -> tuple[float, float]:
    """The survey's: 5 s windows predicted by the one `lag` earlier, first 5 not scored: median, log error's spread."""
    windows = rates.reshape(-1, 5).mean(axis=1)
    floor = 0.05 * rates.mean()
    predicted, actual = windows[:-lag][5:], windows[lag:][5:]
    error = np.abs(predicted - actual) / np.maximum(actual, floor)
    log_error = np.log(np.maximum(actual, floor) / np.maximum(predicted, floor))
    return float(np.median(error)), float(log_error.std())


@pytest.mark.parametrize(
    ("make", "medians", "spreads"),
    [
        # the survey's figures of public mobile traces; 0.35 + 0.16 * ln(age)
        (mobile_link, (0.179, 0.393, 0.427), [0.35 + 0.16 * math.log(age) for age in (5, 30, 60)]),
        # the middle of the FCC and Oboe groups
        (stable_link, (0.068, 0.141, 0.175), [0.25, 0.37, 0.38]),
    ],
)
def test_fitted_statistics(make: Callable[..., DriftLink], medians: tuple[float, ...], spreads: list[float]) -> None:
    """Means over 8 seeds, within 10 % of what they are fitted to; a seed's deviation is 3 to 7 %."""
    made = [series(make(1e6, seed, "c", "up")) for seed in range(8)]
    for lag, median, spread in zip((1, 6, 12), medians, spreads, strict=True):
        got = np.mean([scores(one, lag) for one in made], axis=0)
        assert got[0] == pytest.approx(median, rel=0.1), f"{5 * lag} s"
        assert got[1] == pytest.approx(spread, rel=0.1), f"{5 * lag} s"


@pytest.mark.parametrize("make", [mobile_link, stable_link])
def test_the_mean_is_exact_at_every_time(make: Callable[..., DriftLink]) -> None:
    """Over 1,500 seeds at the first second and after a while; four standard errors."""
    links = [make(1.0, seed, "c", "up") for seed in range(1500)]
    for time_s in (0.0, 40.0):
        rates = np.array([link.rate_bps(time_s) for link in links])
        assert abs(rates.mean() - 1.0) < 4 * rates.std() / math.sqrt(1500)


def test_the_process_is_the_documented_one() -> None:
    """Golden: one process without dips, drawn again here from the same words."""
    link = DriftLink(1e6, 1, "c", "up", flutter_sd=0.0, swing_sd=0.5, swing_s=20.0, trend_sd=0.0, dip_depth=1.0)

    def second_normal(word: int) -> float:
        u, v = ((word >> 32) + 0.5) / 2**32, (word % 2**32) / 2**32
        return math.sqrt(-2 * math.log(u)) * math.sin(2 * math.pi * v)

    b = second_normal(int(words(1, seed=1, client="c", purpose="link-up-drift-start")[0]))
    keep = math.exp(-1 / 20)
    for block in range(2):
        for i, word in enumerate(words(768, seed=1, client="c", round_=block, purpose="link-up-drift")[::3].tolist()):
            b = keep * b + math.sqrt(1 - keep**2) * second_normal(word)
            want = 1e6 * math.exp(0.5 * b - 0.5**2 / 2)
            assert link.rate_bps(block * 256 + i + 0.5) == pytest.approx(want, rel=1e-12)


def test_dips_are_the_documented_ones() -> None:
    """Golden: dips alone."""
    link = DriftLink(1e6, 1, "c", "up", flutter_sd=0, swing_sd=0, trend_sd=0, dip_every_s=20, dip_s=5, dip_depth=0.1)
    assert link.dip_share == 0.2
    dipped = bool(uniforms(3, seed=1, client="c", purpose="link-up-drift-start")[2] < 0.2)
    for i, u in enumerate(uniforms(768, seed=1, client="c", round_=0, purpose="link-up-drift")[2::3].tolist()):
        dipped = u >= 1 / 5 if dipped else u < 1 / 20
        assert link.rate_bps(i) == pytest.approx(1e6 * (0.1 if dipped else 1.0) / (0.8 + 0.2 * 0.1))


def test_stable_is_not_mobile_and_both_are_kinds() -> None:
    assert stable_link(1e6, 1, "c", "up") != mobile_link(1e6, 1, "c", "up") == DriftLink(1e6, 1, "c", "up")
    assert stable_link(1e6, 1, "c", "up", dip_depth=1.0).swing_sd == stable_link(1e6, 1, "c", "up").swing_sd
    for kind, make in (("mobile", mobile_link), ("stable", stable_link)):
        link = make(1e6, 1, "c", "up")
        assert {name: p.default for name, p in LINK_KINDS[kind].parameters.items()} == {
            name: getattr(link, name) for name in LINK_KINDS[kind].parameters
        }


def test_bad_parameters_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        DriftLink(0.0, 1, "c", "left", flutter_sd=-1, swing_s=0, dip_every_s=0.5, dip_s=math.inf, dip_depth=0)
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == [
        "mean_bps",
        "direction",
        "flutter_sd",
        "swing_s",
        "dip_every_s",
        "dip_s",
        "dip_depth",
    ]
