"""Step 3 of a round: the messages that go to nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import DOWN, UP, Header, Layout, Scheme, Slot, compress, tag4
from compression.frames import can_read_frames
from compression.randomness import derived_seed
from protocol import Assignment, Attempt, NodeRequest
from strategies.memory import ServerMemory
from strategies.methods import DEFAULT_ETA, METHODS
from strategies.network import Network
from strategies.predict import Rates
from strategies.settings import Settings


class Sender:
    """Writes requests; everything a client needs to know travels in them.

    Args:
        settings: the run's settings.
        layout: the agreed layout.
        memory: what was accepted from whom.
        incarnation: how often the server has been started on this run.
        horizon: a client's oldest accepted attempt that the server may return to; None: it never returns.
    """

    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        memory: ServerMemory,
        incarnation: int,
        horizon: Callable[[str], Attempt | None] | None = None,
    ) -> None:
        self.settings, self.layout, self.memory, self.incarnation = settings, layout, memory, incarnation
        self._horizon = horizon

    def header(self, client: str, round_: int, kind: int = UP, *, slots: bool = False) -> Header:
        """A header of this run, for sizes and for the downlink; with slots, it names h as an uplink's does."""
        return Header(
            kind=kind,
            layout_digest=self.layout.digest,
            experiment=tag4(self.settings.experiment),
            client=tag4(client),
            incarnation=self.incarnation,
            round=round_,
            slots=((Slot.H, bytes(8)),) if slots else (),
        )

    def model(self, arrays: Mapping[str, NDArray[np.generic]], round_: int) -> bytes:
        """The dense downlink: the whole model in its own precision; encoded once a round, the same for all."""
        flat, whole = self.layout.split(arrays)
        header = self.header("", round_, DOWN)
        return compress(self.layout, header, flat, whole, Scheme(operator="identity"), None).payload

    def mirror(self, client: str, round_: int) -> bytes | None:
        """The server's copy of a lost memory, dense; None where no mirrors are kept."""
        if self.memory.mirrors is None:
            return None
        header = self.header(client, round_, DOWN)
        return compress(
            self.layout, header, list(self.memory.mirrors.read(client)), None, Scheme(operator="identity"), None
        ).payload

    def acknowledgement(self, client: str, round_: int, now_s: float) -> Assignment:
        """What the server accepted from a client so far, and nothing asked."""
        entry = self.memory.client(client)
        horizon = entry.accepted if self._horizon is None else self._horizon(client)
        return Assignment(
            client=client,
            incarnation=self.incarnation,
            round=round_,
            accepted_incarnation=entry.accepted.incarnation if entry.accepted else 0,
            accepted_round=entry.accepted.round if entry.accepted else 0,
            accepted_parts=1 if entry.accepted else 0,
            digest=entry.digest,
            horizon_incarnation=horizon.incarnation if horizon else 0,
            horizon_round=horizon.round if horizon else 0,
            now_s=now_s,
        )

    def assignment(
        self, client: str, round_: int, network: Network[Any], rates: Rates, reported_bps: float | None
    ) -> Assignment:
        """What one client is asked in a round, with the inputs of its own budget."""
        s = self.settings
        now_s = network.now_s()
        sample = rates.last_sample(client)
        adaptive = s.operator != "identity" and s.ratio is None
        return replace(
            self.acknowledgement(client, round_, now_s),
            seed=derived_seed(seed=s.seed, client=client, round_=round_, purpose="train"),
            time_budget_s=s.time_budget_s if adaptive else None,
            rate_bps=self.budget_rate_bps(client, network, rates, reported_bps) if adaptive else None,
            overhead_s=network.overhead_up_s(client),
            cap_bytes=s.cap_bytes if s.operator != "identity" else None,
            compute_s=network.compute_s(client),
            send_whole=(round_ - 1) % s.whole_every == 0,
            sample_bytes=sample.nbytes if sample else None,
            sample_seconds=sample.seconds if sample else None,
            sample_end_s=sample.at_s if sample else None,
        )

    def budget_rate_bps(
        self, client: str, network: Network[Any], rates: Rates, reported_bps: float | None
    ) -> float | None:
        """The rate that a client's budget is made from, bit/s; None: the network does not know it."""
        s = self.settings
        if s.budget_rate == "oracle":
            return network.coming_up_bps(client, s.time_budget_s)
        if s.budget_rate == "mean":
            return network.mean_up_bps(client)
        return rates.predict(client, reported_bps, network.now_s())

    def request(
        self,
        kind: str,
        assignments: tuple[Assignment, ...],
        *,
        model: bytes | None = None,
        config: Mapping[str, Any] | None = None,
        memories: Mapping[str, bytes] | None = None,
        forget: bool = False,
    ) -> NodeRequest:
        """One message to a node."""
        s = self.settings
        return NodeRequest(
            kind=kind,
            experiment=s.experiment,
            assignments=assignments,
            model=model,
            layout_json=self.layout.to_json() if kind == "hello" else None,
            operator=s.operator,
            operator_args=s.operator_args,
            codec=s.codec if can_read_frames() else "portable",
            allocation=s.allocation,
            values=s.values,
            ratio=s.ratio,
            floor=s.floor,
            floors=s.floors,
            errors=s.errors,
            unit=s.unit,
            method=s.method if METHODS[s.method].slot else "ef21",
            eta=(DEFAULT_ETA if s.eta is None else s.eta) if METHODS[s.method].slot else 1.0,
            unbiased=s.unbiased,
            memory_rate=self.memory.engine.rate,
            full_start=self.memory.engine.full_start,
            estimator=s.estimator,
            durability=s.durability,
            isolate_rng=s.isolate_rng,
            forget=forget,
            config=dict(config or {}),
            memories=dict(memories or {}),
        )
