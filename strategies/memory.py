"""The server's half of the memories: float64 sums over all clients, and a mirror of each.

For each client the server keeps its weight, the last attempt accepted, the chain digest of its
slot h and its mirror; for the population one float64 array a layer, S = sum_i w_i h_i, and
W = sum_i w_i. Clients enter W with their first accepted reply, before g is formed. A client that
leaves, comes back or changes its weight moves the sums by its mirror.

What the server steps along (methods.py): EF21's g = S / W after the replies of a round. With an
unbiased operator, of the replies d_i that were in time,

    g = (S + (n/|A|) sum_A w_i d_i + sum_B w_i d_i) / (W and B's weights), S and W before the round,

A those of the n clients that were in the sums before, B those that join with it: then E g is the
weighted mean of all u_i (our statement; without the split of A and B, joining clients bias it). A late
reply moves S, and is no part of g.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import Decoded, LayerUpdate, Layout, accumulate
from protocol import Attempt, chain
from strategies.methods import Engine
from strategies.mirrors import FloatArray, Mirrors


@dataclass(slots=True)
class ClientEntry:
    """What the server knows of one client's memory.

    Args:
        digest: chain digest of its slot h.
        weight: w_i, from its first accepted reply on; None before it.
        accepted: its last accepted attempt; None before the first.
        left: whether it has left, so that its memory is not in the sums.
    """

    digest: bytes
    weight: float | None = None
    accepted: Attempt | None = None
    left: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A reply that is accepted.

    Args:
        attempt: the attempt it answers.
        payload: its bytes, which extend the digest chain.
        decoded: what they decode to.
        weight: the client's weight; without mirrors the one of its first reply holds for good.
        in_time: whether it was there before its round's deadline.
    """

    attempt: Attempt
    payload: bytes
    decoded: Decoded
    weight: float
    in_time: bool = True


class ServerMemory:
    """Sums, digests and mirrors of one run.

    Args:
        layout: the agreed layout.
        experiment: id of the run, the start of every client's digest chain.
        mirrors: a copy of every memory; None: no client can leave, change its weight or get a
            lost memory back.
        engine: the method's numbers.
    """

    def __init__(
        self, layout: Layout, experiment: str, mirrors: Mirrors | None = None, engine: Engine | None = None
    ) -> None:
        self.layout, self.experiment, self.mirrors, self.engine = layout, experiment, mirrors, engine or Engine()
        self.sums: tuple[NDArray[np.float64], ...] = tuple(np.zeros(layout.layers[i].size) for i in layout.compressed)
        self._clients: dict[str, ClientEntry] = {}

    @property
    def total_weight(self) -> float:
        """W, over the clients that are in the sums."""
        return math.fsum(e.weight for e in self._clients.values() if e.weight is not None and not e.left)

    def client(self, client: str) -> ClientEntry:
        """The entry of a client; a client never seen before starts at h = 0."""
        if client not in self._clients:
            self._clients[client] = ClientEntry(chain.start(self.experiment, self.layout.digest, client))
        return self._clients[client]

    def __iter__(self) -> Iterator[str]:
        """Ids of the clients seen so far."""
        return iter(sorted(self._clients))

    def take(self, replies: Sequence[Taken]) -> tuple[NDArray[np.float64], ...] | None:
        """Move the memories by a round's accepted replies, given in client-id order.

        Returns:
            g, one flat float64 array a compressed layer; None: nothing says where to go.
        """
        if self.engine.is_mean:
            for reply in replies:
                self.accept(reply.attempt, reply.payload, reply.decoded, reply.weight)
            return self.mean() if replies and self.total_weight > 0 else None
        estimate = self._estimate([reply for reply in replies if reply.in_time])
        for reply in replies:
            self.accept(reply.attempt, reply.payload, reply.decoded, reply.weight)
        return estimate

    def _estimate(self, replies: Sequence[Taken]) -> tuple[NDArray[np.float64], ...] | None:
        """g of replies whose clients' memories have not moved yet; None: nobody has a weight."""
        before = {c for c, e in self._clients.items() if e.weight is not None and not e.left}
        old = sum(reply.attempt.client in before for reply in replies)
        for reply in replies:
            self._weigh(reply)
        total_weight = self.total_weight
        if not replies or total_weight <= 0:
            return None
        scale = len(before) / old if self.engine.scaled and old else 1.0
        g = tuple(total.copy() for total in self.sums)
        for reply in replies:
            weight = self.client(reply.attempt.client).weight or 0.0
            share = self.engine.gain * weight * (scale if reply.attempt.client in before else 1.0)
            for total, update in zip(g, reply.decoded.updates, strict=True):
                if update is not None:
                    accumulate(total, update, share)
        for total in g:
            total /= total_weight
        return g

    def accept(self, attempt: Attempt, payload: bytes, decoded: Decoded, weight: float) -> None:
        """Move the sums and the mirror by one accepted reply; callers accept in client-id order. As in `Taken`."""
        entry = self._weigh(Taken(attempt, payload, decoded, weight))
        rate = self.engine.rate_of(entry.accepted is None)
        if rate:
            for total, update in zip(self.sums, decoded.updates, strict=True):
                if update is not None:
                    accumulate(total, update, entry.weight or 0.0, rate)
            if self.mirrors is not None:
                self.mirrors.accept(attempt.client, payload, rate)
        entry.digest = chain.extend(entry.digest, payload)
        entry.accepted = attempt

    def _weigh(self, reply: Taken) -> ClientEntry:
        """The client of a reply in the sums with its weight."""
        entry = self.client(reply.attempt.client)
        if entry.weight is None:
            entry.weight = reply.weight
        elif self.mirrors is not None and (entry.left or reply.weight != entry.weight):
            change = reply.weight - (0.0 if entry.left else entry.weight)
            self._add(self.mirrors.read(reply.attempt.client), change)
            entry.weight, entry.left = reply.weight, False
        return entry

    def leave(self, client: str) -> bool:
        """Take a client's memory out of the sums; it comes back with its next accepted reply.

        Returns:
            Whether it was in them, and there is a mirror to do it with.
        """
        entry = self.client(client)
        if self.mirrors is None or entry.weight is None or entry.left:
            return False
        self._add(self.mirrors.read(client), -entry.weight)
        entry.left = True
        if all(e.left or e.weight is None for e in self._clients.values()):
            for total in self.sums:
                total[:] = 0.0  # nobody is left: what rounding left goes too
        return True

    def _add(self, memory: tuple[FloatArray, ...], weight: float) -> None:
        for total, h in zip(self.sums, memory, strict=True):
            accumulate(total, LayerUpdate(None, h), weight)

    def mean(self) -> tuple[NDArray[np.float64], ...]:
        """g = S / W, one flat float64 array a compressed layer."""
        total_weight = self.total_weight
        return tuple(total / total_weight for total in self.sums)

    def horizon(self) -> dict[str, tuple[int, int]]:
        """(incarnation, round) of every client's last accepted attempt: what a checkpoint made now can return to."""
        accepted = {client: entry.accepted for client, entry in self._clients.items()}
        return {client: (a.incarnation, a.round) for client, a in accepted.items() if a is not None}

    def state(self) -> dict[str, Any]:
        """Everything but the sums and the mirrors, as plain values."""
        return {
            client: [e.digest.hex(), e.weight, plain_attempt(e.accepted), e.left] for client, e in self._clients.items()
        }

    def restore(self, state: Mapping[str, Any], sums: tuple[NDArray[np.float64], ...]) -> None:
        """Go back to what `state` and the sums were."""
        self._clients = {
            client: ClientEntry(bytes.fromhex(digest), weight, read_attempt(client, accepted), left)
            for client, (digest, weight, accepted, left) in state.items()
        }
        for total, saved in zip(self.sums, sums, strict=True):
            total[:] = saved


def plain_attempt(attempt: Attempt | None) -> list[int] | None:
    """An attempt as plain values; its client is known beside it."""
    return None if attempt is None else [attempt.incarnation, attempt.round, attempt.part]


def read_attempt(client: str, plain: list[int] | None) -> Attempt | None:
    """The attempt that `plain_attempt` wrote."""
    return None if plain is None else Attempt(plain[0], plain[1], client, plain[2])
