"""The simulated network: deadlines, late replies, busy links, and the clock."""

from __future__ import annotations

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
    end = net.finish_round([Sent("b", 2000, "B"), Sent("a", 1000, "A")], None)
    assert [(a.client, a.reply, a.transfer.finish_s) for a in end.on_time] == [("a", "A", 2.5), ("b", "B", 3.5)]
    assert (end.late, end.from_before, end.end_s, net.now_s()) == ((), (), 3.5, 3.5)


def test_a_late_reply_arrives_in_the_round_that_is_under_way_then() -> None:
    net = network("a", "b")
    first = net.finish_round([Sent("a", 1000, "A"), Sent("b", 4000, "B")], 3.0)
    assert [a.client for a in first.on_time] == ["a"]
    assert [a.client for a in first.late] == ["b"]
    assert first.end_s == 3.0
    assert dict(net.under_way()) == {"b": 0.0}
    second = net.finish_round([Sent("a", 1000, "A2")], 3.0)  # from 3.0 to 5.5; b's arrives at 5.5
    assert (second.end_s, [a.reply for a in second.from_before]) == (5.5, ["B"])
    assert dict(net.under_way()) == {}


def test_a_round_without_replies_waits_for_the_next_arrival() -> None:
    net = network("a")
    net.finish_round([Sent("a", 4000, "A")], 3.0)
    end = net.finish_round([], 3.0)
    assert (end.end_s, [a.reply for a in end.from_before]) == (5.5, ["A"])
    nothing = net.finish_round([], 3.0)
    assert (nothing.end_s, nothing.from_before) == (5.5, ())


def test_a_withdrawn_reply_never_arrives_but_occupies_its_link() -> None:
    net = network("a")
    net.finish_round([Sent("a", 9000, "old")], 3.0)  # on the link until 1 + 0.5 + 9 = 10.5
    net.withdraw("a")
    end = net.finish_round([Sent("a", 1000, "new")], None)  # ready at 4.0, uploads from 10.5
    assert [(a.reply, a.transfer.finish_s) for a in end.on_time] == [("new", 12.0)]
    assert end.from_before == ()


def test_samples_say_what_a_transfer_took() -> None:
    end = network("a").finish_round([Sent("a", 1000, "A")], None)
    sample = end.on_time[0].transfer.sample
    assert (sample.nbytes, sample.seconds, sample.at_s) == (1000, 1.5, 2.5)
    assert sample.rate_bps == pytest.approx(8000)
