"""Networks: when a reply arrives, by which clock, and what was measured of its link.

SimulatedNetwork integrates each payload's bytes over its client's link on a virtual clock;
nobody sleeps. Which network is used does not depend on the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from bandwidth import Arrival, ClientLinks, Upload, arrival, make_links, split_round

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Sent(Generic[R]):
    """A reply that a client sent in a round.

    Args:
        client: client id.
        nbytes: len(payload).
        reply: whatever the caller wants back when it arrives.
    """

    client: str
    nbytes: int
    reply: R


@dataclass(frozen=True, slots=True)
class Arrived(Generic[R]):
    """A reply that has arrived, with its transfer."""

    client: str
    reply: R
    transfer: Arrival


@dataclass(frozen=True, slots=True)
class RoundEnd(Generic[R]):
    """How a round ended.

    Args:
        on_time: replies of this round that arrived before its end, in client order.
        late: replies of this round still under way at its end, with their coming transfers.
        from_before: replies of earlier rounds that arrived during this one, in client order.
        end_s: the run's clock at the end.
    """

    on_time: tuple[Arrived[R], ...]
    late: tuple[Arrived[R], ...]
    from_before: tuple[Arrived[R], ...]
    end_s: float


class Network(Protocol[R]):
    """What the strategy asks of a network."""

    def register(self, clients: Sequence[tuple[str, int, int]]) -> None:
        """Make clients known: (id, index, count), index among count clients of the run."""

    def now_s(self) -> float:
        """The run's clock, seconds."""

    def under_way(self) -> Mapping[str, float]:
        """Clients whose reply has not arrived, with the time at which it was asked for."""

    def withdraw(self, client: str) -> None:
        """Forget the reply under way of a client that is asked again; its link stays occupied."""

    def compute_s(self, client: str) -> float | None:
        """Modelled compute seconds of a client; None: the client measures them."""

    def overhead_up_s(self, client: str) -> float:
        """Fixed seconds of an upload."""

    def true_up_bps(self, client: str) -> float | None:
        """The uplink's rate now, bit/s; None where nobody knows it."""

    def mean_up_bps(self, client: str) -> float | None:
        """The uplink's mean rate, bit/s; None where nobody knows it."""

    def finish_round(self, sent: Sequence[Sent[R]], deadline_s: float | None, patience_s: float) -> RoundEnd[R]:
        """End a round in which these replies were sent, and move the clock to its end."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Links of a simulated network.

    Args:
        kind: name of a link model (bandwidth.LINK_KINDS).
        uplink_bps_min, uplink_bps_max: mean uplink rates are spread between these, bit/s.
        downlink_factor: downlink rate over uplink rate.
        overhead_s: fixed seconds of every transfer.
        compute_s: modelled compute seconds of a round.
        seed: seed of the links.
    """

    kind: str = "cellular"
    uplink_bps_min: float = 1e5
    uplink_bps_max: float = 1e6
    downlink_factor: float = 4.0
    overhead_s: float = 0.05
    compute_s: float = 1.0
    seed: int = 1


class SimulatedNetwork(Generic[R]):
    """Links on a virtual clock that starts at 0.

    Until the downlink is compressed, a round's time is compute and uplink, as in the Kimad
    paper's experiments. A reply that nobody waits for any more still occupies its link to
    the end.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._links: dict[str, ClientLinks] = {}
        self._busy_until_s: dict[str, float] = {}
        self._under_way: dict[str, tuple[float, Arrived[R]]] = {}
        self._now_s = 0.0

    def register(self, clients: Sequence[tuple[str, int, int]]) -> None:
        """Make clients known: (id, index, count)."""
        s = self.settings
        for client, index, count in clients:
            if client in self._links:
                continue  # a client that comes back has the link it had
            self._links[client] = make_links(
                s.kind,
                client=client,
                index=index,
                count=count,
                seed=s.seed,
                uplink_bps_min=s.uplink_bps_min,
                uplink_bps_max=s.uplink_bps_max,
                downlink_factor=s.downlink_factor,
                overhead_s=s.overhead_s,
            )

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def under_way(self) -> Mapping[str, float]:
        """Clients whose reply has not arrived, with the start of its round."""
        return {client: started_s for client, (started_s, _) in self._under_way.items()}

    def withdraw(self, client: str) -> None:
        """Forget a client's reply under way; its link stays occupied."""
        self._under_way.pop(client, None)

    def compute_s(self, client: str) -> float | None:
        """Modelled compute seconds, the same for all."""
        return self.settings.compute_s

    def overhead_up_s(self, client: str) -> float:
        """Fixed seconds of an upload."""
        return self._links[client].overhead_up_s

    def true_up_bps(self, client: str) -> float | None:
        """The uplink's rate now, bit/s."""
        return self._links[client].up.rate_bps(self._now_s)

    def mean_up_bps(self, client: str) -> float | None:
        """The uplink's mean rate, bit/s."""
        return self._links[client].up.mean_bps

    def finish_round(self, sent: Sequence[Sent[R]], deadline_s: float | None, patience_s: float) -> RoundEnd[R]:
        """End the round: at its last reply, or at its deadline if a reply is still under way.

        A round in which nothing was sent ends when the next reply under way arrives, or when
        its client may be asked again: patience_s after it was asked.
        """
        start_s = self._now_s
        replies: dict[str, R] = {}
        transfers: list[Arrival] = []
        for item in sorted(sent, key=lambda s: s.client):
            upload = Upload(item.client, start_s, self.settings.compute_s, item.nbytes)
            busy_s = self._busy_until_s.get(item.client, 0.0)
            transfer = arrival(self._links[item.client], upload, link_busy_until_s=busy_s)
            self._busy_until_s[item.client] = transfer.finish_s
            replies[item.client] = item.reply
            transfers.append(transfer)
        on_time, late, end_s = split_round(transfers, start_s, deadline_s)
        if not sent and self._under_way:
            ends = (min(a.transfer.finish_s, since_s + patience_s) for since_s, a in self._under_way.values())
            end_s = max(start_s, min(ends))
        self._now_s = end_s
        from_before = sorted(
            (a for _, a in self._under_way.values() if a.transfer.finish_s <= end_s), key=lambda a: a.client
        )
        for arrived in from_before:
            del self._under_way[arrived.client]

        def with_reply(transfer: Arrival) -> Arrived[R]:
            return Arrived(transfer.client, replies[transfer.client], transfer)

        coming = tuple(with_reply(t) for t in late)
        self._under_way.update({a.client: (start_s, a) for a in coming})
        return RoundEnd(tuple(with_reply(t) for t in on_time), coming, tuple(from_before), end_s)
