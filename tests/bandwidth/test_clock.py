"""The arithmetic of a round, by hand and by property."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bandwidth import Arrival, ClientLinks, ConstantLink, Sample, Upload, arrival, make_links, split_round

times = st.floats(0.0, 1e4)


@dataclass(frozen=True, slots=True)
class StepLink:
    """One rate before `at_s`, another from then on."""

    before_bps: float
    after_bps: float
    at_s: float

    @property
    def mean_bps(self) -> float:
        return self.after_bps

    def rate_bps(self, time_s: float) -> float:
        return self.before_bps if time_s < self.at_s else self.after_bps

    def bits_between(self, start_s: float, end_s: float) -> float:
        before_s = max(min(end_s, self.at_s) - start_s, 0.0)
        return self.before_bps * before_s + self.after_bps * (end_s - start_s - before_s)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        first = min(8.0 * nbytes, self.before_bps * max(self.at_s - start_s, 0.0))
        if first == 8.0 * nbytes:
            return start_s + first / self.before_bps
        return max(start_s, self.at_s) + (8.0 * nbytes - first) / self.after_bps


def at(client: str, finish_s: float) -> Arrival:
    return Arrival(client, 0.0, finish_s, Sample("up", 1, finish_s, 0.0, finish_s, "simulated"))


def test_constant_link_closed_form() -> None:
    links = ClientLinks(ConstantLink(8e6), ConstantLink(1.0), 0.5, 0.25)
    # 10 + 2 s computing; 0.5 s overhead; 3 MB at 1 MB/s.
    got = arrival(links, Upload("c", 10.0, 2.0, 3_000_000), link_busy_until_s=0.0)
    assert got == Arrival("c", 12.0, 15.5, Sample("up", 3_000_000, 3.5, 0.5, 15.5, "simulated"))
    assert got.sample.rate_bps == 8e6
    # The link is busy until 20 with the client's last message.
    assert arrival(links, Upload("c", 10.0, 2.0, 3_000_000), link_busy_until_s=20.0).finish_s == 23.5


def test_step_link_by_hand() -> None:
    # 1 byte/s until 10 s, then 4 bytes/s. From 7 + 1 = 8 s, overhead to 8.5: 1.5 bytes by 10, 6 bytes more in 1.5 s.
    # 7.5 bytes are not whole, so send 8: 6.5 bytes in 1.625 s.
    links = ClientLinks(StepLink(8.0, 32.0, 10.0), ConstantLink(1.0), 0.5, 0.0)
    got = arrival(links, Upload("c", 7.0, 1.0, 8), link_busy_until_s=0.0)
    assert (got.upload_start_s, got.finish_s) == (8.0, 11.625)
    # 64 bits in 3.625 - 0.5 s.
    assert got.sample.rate_bps == 64 / 3.125


def test_an_empty_upload_costs_its_overhead_and_teaches_nothing() -> None:
    links = ClientLinks(ConstantLink(8e6), ConstantLink(1.0), 0.5, 0.25)
    got = arrival(links, Upload("c", 1.0, 2.0, 0), link_busy_until_s=0.0)
    assert got.finish_s == 3.5
    assert not got.sample.valid


@given(st.sampled_from(["constant", "cellular"]), times, times, times, st.integers(0, 10**6), st.integers(0, 10**6))
def test_arrival_properties(kind: str, start: float, compute: float, busy: float, a: int, b: int) -> None:
    links = make_links(
        kind,
        client="c",
        index=0,
        count=1,
        seed=0,
        uplink_bps_min=1e6,
        uplink_bps_max=1e6,
        downlink_factor=1.0,
        overhead_s=0.1,
    )
    few, many = sorted((a, b))
    first = arrival(links, Upload("c", start, compute, few), link_busy_until_s=busy)
    assert first.upload_start_s == max(start + compute, busy)
    assert first.finish_s >= first.upload_start_s + 0.1
    assert first.sample.at_s == first.finish_s
    assert first.sample.seconds == first.finish_s - first.upload_start_s
    assert first.finish_s <= arrival(links, Upload("c", start, compute, many), link_busy_until_s=busy).finish_s
    # A second upload waits for the first: the link carries one at a time.
    second = arrival(links, Upload("c", start, compute, many), link_busy_until_s=first.finish_s)
    assert second.upload_start_s >= first.finish_s


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_bad_times(bad: float) -> None:
    links = ClientLinks(ConstantLink(8e6), ConstantLink(1.0), 0.5, 0.25)
    for upload in (Upload("c", bad, 0.0, 1), Upload("c", 0.0, bad, 1)):
        with pytest.raises(ValueError, match="expected a finite time >= 0"):
            arrival(links, upload, link_busy_until_s=0.0)
    with pytest.raises(ValueError, match="link_busy_until_s"):
        arrival(links, Upload("c", 0.0, 0.0, 1), link_busy_until_s=bad)


def test_split_without_deadline() -> None:
    a, b = at("a", 12.0), at("b", 11.0)
    assert split_round([a, b], 10.0, None) == ((a, b), (), 12.0)


def test_split_with_deadline() -> None:
    a, b, c = at("a", 12.0), at("b", 11.0), at("c", 12.5)
    assert split_round([a, b, c], 10.0, 2.0) == ((a, b), (c,), 12.0)  # exactly at the deadline is on time
    assert split_round([a, b, c], 10.0, 3.0) == ((a, b, c), (), 12.5)  # nobody late: the last finish
    assert split_round([a, b, c], 10.0, 1.5) == ((b,), (a, c), 11.5)  # somebody late: the deadline
    assert split_round([a], 10.0, 0.0) == ((), (a,), 10.0)


def test_split_of_nothing() -> None:
    assert split_round([], 10.0, None) == ((), (), 10.0)
    assert split_round([], 10.0, 5.0) == ((), (), 10.0)


@given(st.lists(times), times, st.none() | times)
def test_split_properties(finishes: list[float], start: float, deadline: float | None) -> None:
    arrivals = [at(str(i), start + f) for i, f in enumerate(finishes)]
    on_time, late, end = split_round(arrivals, start, deadline)
    assert sorted(on_time + late, key=lambda a: int(a.client)) == arrivals
    assert end >= start
    assert all(a.finish_s <= end for a in on_time)
    assert all(a.finish_s > end for a in late)
    assert bool(late) <= (deadline is not None and end == start + deadline)


def test_split_bad_deadline() -> None:
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="deadline_s"):
            split_round([], 0.0, bad)
