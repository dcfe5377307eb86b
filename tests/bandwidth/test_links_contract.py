"""What every link kind promises, run over the registry: a new kind is tested by existing."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bandwidth import LINK_KINDS, ClientLinks, Link, make_links

# Parameters with which each kind is tested, besides its defaults; None where it cannot do without any.
MORE_ARGS: Mapping[str, Mapping[str, object]] = {
    "constant": {},
    "cellular": {"levels": 3, "fade_in": 0.3},
    "mobile": {"swing_sd": 1.0, "dip_s": 30},
    "stable": {"dip_depth": 1.0},
    "sinusoid": {"amplitude": 1.0, "period_s": 7.0},
    "outages": {"outage_every_s": 10.0, "outage_s": 5.0, "base": "sinusoid", "base_args": {"amplitude": 1.0}},
    "trace": {"path": "steps.json"},
}
NEEDS_ARGS = {"trace"}

every = pytest.mark.parametrize(
    ("kind", "args"),
    [(kind, MORE_ARGS[kind]) for kind in sorted(LINK_KINDS)] + [(k, {}) for k in sorted({*LINK_KINDS} - NEEDS_ARGS)],
    ids=lambda value: value if isinstance(value, str) else "more" if value else "defaults",
)
times = st.floats(0.0, 5e3)
sizes = st.integers(0, 20_000_000)
Make = Callable[..., ClientLinks]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make_links; a trace of 2 s at 1, 3 s at nothing, 1 s at 4 Mbit/s lies in its folder."""
    folder: Path = tmp_path_factory.mktemp("traces")
    steps = '[{"duration_ms": 2000, "bandwidth_kbps": 1000}, {"duration_ms": 3000, "bandwidth_kbps": 0},'
    (folder / "steps.json").write_text(steps + ' {"duration_ms": 1000, "bandwidth_kbps": 4000}]')
    known: dict[str, ClientLinks] = {}

    def one(
        kind: str, args: Mapping[str, object], client: str = "c", seed: int = 1, fresh: bool = False
    ) -> ClientLinks:
        key = repr((kind, args, client, seed))
        if fresh or key not in known:
            known[key] = make_links(
                kind,
                args=args,
                client=client,
                index=0,
                count=1,
                seed=seed,
                uplink_bps_min=1e6,
                uplink_bps_max=1e6,
                downlink_factor=4.0,
                overhead_s=0.0,
                folder=folder,
            )
        return known[key]

    return one


def test_every_kind_is_tested() -> None:
    assert {*MORE_ARGS} == {*LINK_KINDS}


def slack(link: Link, *times_s: float) -> float:
    """Bits that rounding may move: those of a few units in the last place of the times."""
    return 1e-9 + link.mean_bps * 1e-11 * (1.0 + sum(times_s))


@every
@given(start=times, nbytes=sizes)
def test_finish_inverts_the_integral(
    make: Make, kind: str, args: Mapping[str, object], start: float, nbytes: int
) -> None:
    link = make(kind, args).up
    finish = link.finish_s(start, nbytes)
    assert finish >= start
    assert link.bits_between(start, finish) == pytest.approx(8.0 * nbytes, rel=1e-11, abs=slack(link, finish))
    if nbytes == 0:
        assert finish == start


@every
@given(start=times, length=st.floats(0.0, 500.0))
def test_the_integral_inverts_finish(
    make: Make, kind: str, args: Mapping[str, object], start: float, length: float
) -> None:
    """The first time by which the bits have passed: no later than the time at which they were counted."""
    link = make(kind, args).up
    bits = link.bits_between(start, start + length)
    assert bits >= 0.0
    finish = link.finish_s(start, bits / 8.0)
    fewer = link.bits_between(start, start + length * 0.999) if length > 0.0 else 0.0
    assert finish <= start + length + 1e-5
    assert link.bits_between(start, finish) == pytest.approx(bits, rel=1e-11, abs=slack(link, start, length))
    if fewer < bits * (1 - 1e-6):
        assert finish > start + length * 0.998


@every
@given(start=times, lengths=st.tuples(st.floats(0.0, 700.0), st.floats(0.0, 700.0)))
def test_the_integral_is_additive(
    make: Make, kind: str, args: Mapping[str, object], start: float, lengths: tuple[float, float]
) -> None:
    link = make(kind, args).up
    middle = start + lengths[0]
    end = middle + lengths[1]
    parts = link.bits_between(start, middle) + link.bits_between(middle, end)
    assert parts == pytest.approx(link.bits_between(start, end), rel=1e-11, abs=slack(link, end))
    assert link.bits_between(start, start) == 0.0


@every
@given(start=times, a=sizes, b=sizes)
def test_two_messages_take_as_long_as_one(
    make: Make, kind: str, args: Mapping[str, object], start: float, a: int, b: int
) -> None:
    link = make(kind, args).up
    twice, once = link.finish_s(link.finish_s(start, a), b), link.finish_s(start, a + b)
    # in bits: where the rate is 0, rounding may put the two ends on two sides of an outage
    low, high = sorted((twice, once))
    assert link.bits_between(low, high) <= slack(link, high)


@every
@given(start=times, other=times, a=sizes, b=sizes)
def test_monotone_in_bytes_and_start(
    make: Make, kind: str, args: Mapping[str, object], start: float, other: float, a: int, b: int
) -> None:
    link = make(kind, args).up
    few, many = sorted((a, b))
    early, late = sorted((start, other))
    assert start <= link.finish_s(start, few) <= link.finish_s(start, many) * (1.0 + 1e-12)
    sooner, later = link.finish_s(early, few), link.finish_s(late, few)
    assert sooner <= later or link.bits_between(later, sooner) <= slack(link, sooner)


@every
@given(time_s=times)
def test_rates_are_never_negative_and_agree_with_the_integral(
    make: Make, kind: str, args: Mapping[str, object], time_s: float
) -> None:
    link = make(kind, args).up
    rate = link.rate_bps(time_s)
    assert 0.0 <= rate < math.inf
    step = 1e-6
    if link.rate_bps(time_s + step) == pytest.approx(rate, rel=1e-3, abs=10.0):
        assume(kind != "outages" or rate > 0.0)
        assert link.bits_between(time_s, time_s + step) / step == pytest.approx(rate, rel=2e-3, abs=20.0)


@every
def test_the_integral_is_that_of_the_rate(make: Make, kind: str, args: Mapping[str, object]) -> None:
    """Over a minute, by 60,000 midpoints: jumps, at most one a second and a few more, are met to a millisecond."""
    link = make(kind, args).up
    grid = (np.arange(60_000) + 0.5) / 1000.0
    rates = np.array([link.rate_bps(t) for t in grid.tolist()])
    assert link.bits_between(0.0, 60.0) == pytest.approx(rates.sum() / 1000.0, rel=1e-3)


@every
def test_the_mean_is_the_long_run_mean(make: Make, kind: str, args: Mapping[str, object]) -> None:
    """Ten clients, 4,000 s each: within what slow drifts and outages leave of it."""
    for direction, mean_bps in (("up", 1e6), ("down", 4e6)):
        links = [getattr(make(kind, args, client=f"c{i}"), direction) for i in range(10)]
        assert [link.mean_bps for link in links] == pytest.approx([mean_bps] * 10)
        total = math.fsum(link.bits_between(0.0, 4000.0) for link in links) / 4e4
        assert total == pytest.approx(mean_bps, rel=0.1)


@every
def test_any_order_of_questions_gives_the_same_bits(make: Make, kind: str, args: Mapping[str, object]) -> None:
    asked = [3000.5, 0.0, 255.9, 256.0, 1024.0, 17.2, 2000.0, 3000.5, 4.0]

    def answers(link: Link, order: list[float]) -> dict[float, tuple[float, float, float]]:
        return {t: (link.rate_bps(t), link.finish_s(t, 10**7), link.bits_between(t, t + 1500.0)) for t in order}

    one, two = make(kind, args, fresh=True), make(kind, args, fresh=True)
    for link, again in ((one.up, two.up), (one.down, two.down)):
        got = answers(link, asked)
        assert got == answers(again, sorted(asked)) == answers(link, asked[::-1])
        assert answers(pickle.loads(pickle.dumps(link)), asked) == got
        assert link == again
        assert hash(link) == hash(again)


@every
def test_bad_times_and_sizes(make: Make, kind: str, args: Mapping[str, object]) -> None:
    link = make(kind, args).up
    for bad in (math.nan, math.inf, -1.0):
        for call in (link.rate_bps, lambda t: link.finish_s(t, 1), lambda t: link.bits_between(t, 2.0)):
            with pytest.raises(ValueError, match="expected a finite time >= 0"):
                call(bad)
    with pytest.raises(ValueError, match="-1 bytes"):
        link.finish_s(0.0, -1)
    with pytest.raises(ValueError, match="expected an end at or after the start"):
        link.bits_between(2.0, 1.0)


@pytest.mark.parametrize("kind", sorted({*LINK_KINDS} - {"constant"}))
def test_clients_and_seeds_differ(make: Make, kind: str) -> None:
    args = MORE_ARGS[kind]
    base = make(kind, args).up.bits_between(0.0, 20.0)
    assert make(kind, args, client="d").up.bits_between(0.0, 20.0) != base
    assert make(kind, args, seed=2).up.bits_between(0.0, 20.0) != base
