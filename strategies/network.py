"""Networks: when a reply arrives, by which clock, and what was measured of its link.

SimulatedNetwork integrates each payload's bytes over its client's link on a virtual clock;
nobody sleeps. Which network is used does not depend on the grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bandwidth import (
    Arrival,
    ClientLinks,
    LinkFile,
    LinkPlan,
    Upload,
    arguments,
    arrival,
    link_problems,
    plan_links,
    read_link_file,
    split_round,
)
from compression.errors import ConfigError

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

    def coming_up_bps(self, client: str, time_budget_s: float) -> float | None:
        """Rate at which a budget made from it is used up exactly at the time budget's end, bit/s.

        None where nobody knows the future.
        """

    def idle_until(self, time_s: float) -> None:
        """Let the clock move on to a time, when nobody can be asked before."""

    def finish_round(self, sent: Sequence[Sent[R]], deadline_s: float | None, patience_s: float) -> RoundEnd[R]:
        """End a round in which these replies were sent, and move the clock to its end."""

    def state(self) -> dict[str, Any]:
        """The clock and the links' occupation as plain values, and under "coming" (client, started_s, Arrived)."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Links of a simulated network.

    What can be checked without a file is checked here; `plan` checks the rest.

    Args:
        kind: name of a link model (bandwidth.LINK_KINDS).
        uplink_bps_min, uplink_bps_max: mean uplink rates are spread between these, bit/s.
        downlink_factor: downlink rate over uplink rate.
        overhead_s: fixed seconds of every transfer.
        compute_s: modelled compute seconds of a round.
        seed: seed of the links.
        args: parameters of the kind, such as `amplitude = 0.95, period_s = 60` (docs/links.md).
        file: path of a link file that says who gets which links; then kind, uplinks and args are
            not used, and the file may leave downlink factor and overhead to these settings.
        folder: where relative paths of trace files in args start; "": the working directory.

    Raises:
        ConfigError: all that is wrong, together.
    """

    kind: str = "cellular"
    uplink_bps_min: float = 1e5
    uplink_bps_max: float = 1e6
    downlink_factor: float = 4.0
    overhead_s: float = 0.05
    compute_s: float = 1.0
    seed: int = 1
    args: str = ""
    file: str = ""
    folder: str = ""

    def __post_init__(self) -> None:
        problems: list[str] = []
        args: dict[str, object] = {}
        if self.file and self.args:
            problems.append(f"args = {self.args!r} with a link file: expected parameters in the file's entries")
        elif self.args:
            try:
                args = arguments(self.args, "args of the links")
            except ConfigError as error:
                problems += error.problems
        problems += link_problems(
            "constant" if self.file else self.kind,
            args=args,
            uplink_bps_min=1.0 if self.file else self.uplink_bps_min,
            uplink_bps_max=1.0 if self.file else self.uplink_bps_max,
            downlink_factor=self.downlink_factor,
            overhead_s=self.overhead_s,
        )
        if not 0.0 <= self.compute_s < math.inf:
            problems.append(f"compute_s = {self.compute_s!r}: expected a finite time >= 0 (s)")
        if problems:
            raise ConfigError(problems)

    def plan(self) -> LinkPlan | LinkFile:
        """The links to be given out: everything checked, every file read.

        Raises:
            ConfigError: all that is wrong, together.
        """
        if self.file:
            return read_link_file(
                self.file, seed=self.seed, downlink_factor=self.downlink_factor, overhead_s=self.overhead_s
            )
        return plan_links(
            self.kind,
            args=arguments(self.args, "args of the links"),
            seed=self.seed,
            uplink_bps_min=self.uplink_bps_min,
            uplink_bps_max=self.uplink_bps_max,
            downlink_factor=self.downlink_factor,
            overhead_s=self.overhead_s,
            folder=self.folder,
        )


class SimulatedNetwork(Generic[R]):
    """Links on a virtual clock that starts at 0.

    Until the downlink is compressed, a round's time is compute and uplink, as in the Kimad
    paper's experiments. A reply that nobody waits for any more still occupies its link to
    the end.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self._plan = settings.plan()
        self._links: dict[str, ClientLinks] = {}
        self._busy_until_s: dict[str, float] = {}
        self._under_way: dict[str, tuple[float, Arrived[R]]] = {}
        self._now_s = 0.0

    def register(self, clients: Sequence[tuple[str, int, int]]) -> None:
        """Make clients known: (id, index, count)."""
        for client, index, count in clients:
            if client in self._links:
                continue  # a client that comes back has the link it had
            self._links[client] = self._plan.links(client, index=index, count=count)

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

    def mean_up_bps(self, client: str) -> float:
        """The uplink's mean rate, bit/s."""
        return self._links[client].up.mean_bps

    def coming_up_bps(self, client: str, time_budget_s: float) -> float:
        """What the uplink will carry from the end of computing to the end of the time budget, bit/s.

        The mean over the time that a budget counts on; a link still busy with an earlier reply
        carries less of it. 0 when no time is left.
        """
        links = self._links[client]
        end_s = self._now_s + time_budget_s
        ready_s = self._now_s + self.settings.compute_s
        counted_s = end_s - ready_s - links.overhead_up_s
        begin_s = max(ready_s, self._busy_until_s.get(client, 0.0)) + links.overhead_up_s
        if counted_s <= 0.0 or begin_s >= end_s:
            return 0.0
        return links.up.bits_between(begin_s, end_s) / counted_s

    def state(self) -> dict[str, Any]:
        """The clock, until when links are busy, and the replies under way."""
        return {
            "now_s": self._now_s,
            "busy_until_s": dict(self._busy_until_s),
            "coming": [(client, since_s, arrived) for client, (since_s, arrived) in self._under_way.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was."""
        self._now_s = state["now_s"]
        self._busy_until_s = dict(state["busy_until_s"])
        self._under_way = {client: (since_s, arrived) for client, since_s, arrived in state["coming"]}

    def idle_until(self, time_s: float) -> None:
        """Let the clock move on to a time, or to the next arrival if that is earlier."""
        coming = (a.transfer.finish_s for _, a in self._under_way.values())
        self._now_s = max(self._now_s, min((time_s, *coming)))

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
