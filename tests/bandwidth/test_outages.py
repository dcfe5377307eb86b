"""Outages: by hand from the drawn edges, their law, and what the kind keeps of its base."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bandwidth import ConstantLink, MarkovLink, OutageLink, make_links
from bandwidth.links import HORIZON_S
from compression.errors import ConfigError
from compression.randomness import uniforms


def edges(link: OutageLink, first: int) -> list[float]:
    """Golden: ends of the first alternating pieces (64 at most), drawn again from the documented words."""
    up = uniforms(1, seed=link.seed, client=link.client, purpose="link-outages-start")[0] < link.up_share
    ends, now = [], 0.0
    for u in uniforms(64, seed=link.seed, client=link.client, round_=0, purpose="link-outages")[:first].tolist():
        now += -math.log(1.0 - u) * (link.outage_every_s if up else link.outage_s)
        ends.append(now)
        up = not up
    return ends


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_are_the_documented_ones(seed: int) -> None:
    link = OutageLink(ConstantLink(1e6), seed, "c", 30.0, 10.0)
    up = link.rate_bps(0.0) > 0.0
    before = 0.0
    for end in edges(link, 20):
        assert link.rate_bps((before + end) / 2.0) == (1e6 if up else 0.0)
        passed = link.bits_between(before, end)
        assert passed == pytest.approx(1e6 * (end - before) if up else 0.0, rel=1e-9, abs=1e-3)
        before, up = end, not up


def test_a_message_waits_for_the_end_of_an_outage() -> None:
    link = next(
        link
        for link in (OutageLink(ConstantLink(8e6), seed, "c", 30.0, 10.0) for seed in range(100))
        if link.rate_bps(0.0) > 0.0 and edges(link, 2)[0] > 2.0 and edges(link, 3)[2] - edges(link, 3)[1] > 3.0
    )
    out, back = edges(link, 2)
    # From 2 s before the outage 5 MB at 1 MB/s: 2 MB before it, 3 MB after it.
    assert link.finish_s(out - 2.0, 5_000_000) == pytest.approx(back + 3.0)
    # Begun within the outage; and just as much as passes before it, which does not wait for its end.
    assert link.finish_s((out + back) / 2.0, 1_000_000) == pytest.approx(back + 1.0)
    assert link.finish_s(out - 2.0, 2_000_000) == pytest.approx(out)


def test_law_of_the_outages() -> None:
    """Over 400 links of 2,000 s, 30 s on and 10 s off: shares and lengths within four standard errors."""
    grid = np.arange(0.0, 2000.0, 1.0).tolist()
    links = [OutageLink(ConstantLink(1.0), 5, f"c{i}", 30.0, 10.0) for i in range(400)]
    first = np.mean([link.rate_bps(0.0) for link in links])
    assert abs(first - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 400)  # the first moment is as good as any other
    share = np.array([np.mean([link.rate_bps(t) for t in grid]) for link in links])
    assert abs(share.mean() - 0.75) < 4 * share.std() / 20.0
    lengths = np.diff([edges(link, 60) for link in links], axis=1)
    for start, mean_s in ((0, 30.0), (1, 10.0)):
        drawn = np.concatenate(
            [row[(start + (link.rate_bps(0.0) > 0.0)) % 2 :: 2] for link, row in zip(links, lengths, strict=True)]
        )
        assert drawn.mean() == pytest.approx(mean_s, rel=0.05)
        assert drawn.std() == pytest.approx(mean_s, rel=0.05)  # exponential: as large as the mean


def test_both_directions_are_out_together_and_the_mean_holds() -> None:
    links = make_links(
        "outages",
        args={"outage_every_s": 30, "outage_s": 10, "base": "cellular", "base_args": {"levels": 4}},
        client="c",
        index=0,
        count=1,
        seed=1,
        uplink_bps_min=3e6,
        uplink_bps_max=3e6,
        downlink_factor=2.0,
        overhead_s=0.0,
    )
    up, down = links.up, links.down
    assert isinstance(up, OutageLink)
    assert isinstance(down, OutageLink)
    assert up.base == MarkovLink(4e6, 1, "c", "up", levels=4)  # 3e6 / (30 / 40)
    assert (up.mean_bps, down.mean_bps) == (3e6, 6e6)
    out = [up.rate_bps(t) == 0.0 for t in range(400)]
    assert any(out)
    assert not all(out)
    assert out == [down.rate_bps(t) == 0.0 for t in range(400)]


def test_refusals() -> None:
    with pytest.raises(ConfigError) as caught:
        OutageLink(ConstantLink(1.0), 0, "c", 0.5, 0.0)
    assert caught.value.problems == (
        "outage_every_s = 0.5: expected a finite time >= 1 (s)",
        "outage_s = 0.0: expected a finite time > 0 (s)",
    )
    with pytest.raises(ValueError, match="expected at most 1e"):
        OutageLink(ConstantLink(1.0), 0, "c").rate_bps(HORIZON_S * 2)

    def kind(**args: object) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            make_links(
                "outages",
                args=args,
                client="c",
                index=0,
                count=1,
                seed=1,
                uplink_bps_min=1.0,
                uplink_bps_max=1.0,
                downlink_factor=1.0,
                overhead_s=0.0,
            )
        return caught.value.problems

    assert kind(outage_s=-1, base="outages") == (
        "outage_s = -1.0: expected a finite time > 0 (s)",
        "base = 'outages': expected another kind; give outage_every_s and outage_s for both",
    )
    assert kind(base="constant", base_args={"x": 1}) == (
        "unknown parameter 'x' of link kind 'constant': expected none: it has no parameters",
    )
    assert kind(base_args=3) == ("base_args = 3 of link kind 'outages': expected a table",)
