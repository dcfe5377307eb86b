"""The simulated network: deadlines, late replies, busy links, and the clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.network import LinkSettings, Sent, SimulatedNetwork

# One client's link: 8,000 bit/s, so 1,000 bytes a second; compute 1 s, overhead 0.5 s.
LINKS = LinkSettings("constant", 8000.0, 8000.0, 4.0, overhead_s=0.5, compute_s=1.0)


def network(*clients: str) -> SimulatedNetwork[str]:
    net: SimulatedNetwork[str] = SimulatedNetwork(LINKS)
    net.register([(client, i, len(clients)) for i, client in enumerate(clients)])
    return net


def test_a_round_lasts_until_its_last_reply() -> None:
    net = network("a", "b")
    end = net.finish_round([Sent("b", 2000, "B"), Sent("a", 1000, "A")], None, 99.0)
    assert [(a.client, a.reply, a.transfer.finish_s) for a in end.on_time] == [("a", "A", 2.5), ("b", "B", 3.5)]
    assert (end.late, end.from_before, end.end_s, net.now_s()) == ((), (), 3.5, 3.5)


def test_a_late_reply_arrives_in_the_round_that_is_under_way_then() -> None:
    net = network("a", "b")
    first = net.finish_round([Sent("a", 1000, "A"), Sent("b", 4000, "B")], 3.0, 99.0)
    assert [a.client for a in first.on_time] == ["a"]
    assert [a.client for a in first.late] == ["b"]
    assert first.end_s == 3.0
    assert dict(net.under_way()) == {"b": 0.0}
    second = net.finish_round([Sent("a", 1000, "A2")], 3.0, 99.0)  # from 3.0 to 5.5; b's arrives at 5.5
    assert (second.end_s, [a.reply for a in second.from_before]) == (5.5, ["B"])
    assert dict(net.under_way()) == {}


def test_a_round_without_replies_waits_for_the_next_arrival() -> None:
    net = network("a")
    net.finish_round([Sent("a", 4000, "A")], 3.0, 99.0)
    end = net.finish_round([], 3.0, 99.0)
    assert (end.end_s, [a.reply for a in end.from_before]) == (5.5, ["A"])
    nothing = net.finish_round([], 3.0, 99.0)
    assert (nothing.end_s, nothing.from_before) == (5.5, ())


def test_a_round_without_replies_ends_when_a_client_may_be_asked_again() -> None:
    net = network("a")
    net.finish_round([Sent("a", 9000, "A")], 3.0, 99.0)  # arrives at 10.5
    end = net.finish_round([], 3.0, 4.5)
    assert (end.end_s, end.from_before) == (4.5, ())
    assert dict(net.under_way()) == {"a": 0.0}


def test_a_client_that_comes_back_has_the_link_it_had() -> None:
    net: SimulatedNetwork[str] = SimulatedNetwork(replace(LINKS, uplink_bps_max=80_000.0))
    net.register([("a", 0, 2), ("b", 1, 2)])
    before = net.mean_up_bps("a")
    net.register([("a", 1, 2)])
    assert net.mean_up_bps("a") == before


def test_a_withdrawn_reply_never_arrives_but_occupies_its_link() -> None:
    net = network("a")
    net.finish_round([Sent("a", 9000, "old")], 3.0, 99.0)  # on the link until 1 + 0.5 + 9 = 10.5
    net.withdraw("a")
    end = net.finish_round([Sent("a", 1000, "new")], None, 99.0)  # ready at 4.0, uploads from 10.5
    assert [(a.reply, a.transfer.finish_s) for a in end.on_time] == [("new", 12.0)]
    assert end.from_before == ()


def test_samples_say_what_a_transfer_took() -> None:
    end = network("a").finish_round([Sent("a", 1000, "A")], None, 99.0)
    sample = end.on_time[0].transfer.sample
    assert (sample.nbytes, sample.seconds, sample.at_s) == (1000, 1.5, 2.5)
    assert sample.rate_bps == pytest.approx(8000)
