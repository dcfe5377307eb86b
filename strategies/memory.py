"""The server's half of the memories: float64 sums over all clients, and a mirror of each.

For each client the server keeps its weight, the last attempt accepted, the chain digest of its
slot h and its mirror; for the population one float64 array a layer, S = sum_i w_i h_i, and
W = sum_i w_i. EF21 steps along g = S / W (algorithms.md section 3; joining clients enter W
with their first accepted reply, before g is formed). A client that leaves, comes back or
changes its weight moves the sums by its mirror.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import Decoded, LayerUpdate, Layout, accumulate
from protocol import Attempt, chain
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


class ServerMemory:
    """Sums, digests and mirrors of one run.

    Args:
        layout: the agreed layout.
        experiment: id of the run, the start of every client's digest chain.
        mirrors: a copy of every memory; None: no client can leave, change its weight or get a
            lost memory back.
    """

    def __init__(self, layout: Layout, experiment: str, mirrors: Mirrors | None = None) -> None:
        self.layout, self.experiment, self.mirrors = layout, experiment, mirrors
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

    def accept(self, attempt: Attempt, payload: bytes, decoded: Decoded, weight: float) -> None:
        """Move the sums by one accepted reply; callers accept in client-id order.

        Args:
            attempt: the attempt the reply answers.
            payload: its bytes, which extend the digest chain.
            decoded: what they decode to.
            weight: the client's weight; without mirrors the one of its first reply holds for good.
        """
        entry = self.client(attempt.client)
        if entry.weight is None:
            entry.weight = weight
        elif self.mirrors is not None and (entry.left or weight != entry.weight):
            change = weight - (0.0 if entry.left else entry.weight)
            self._add(self.mirrors.read(attempt.client), change)
            entry.weight, entry.left = weight, False
        for total, update in zip(self.sums, decoded.updates, strict=True):
            if update is not None:
                accumulate(total, update, entry.weight)
        if self.mirrors is not None:
            self.mirrors.accept(attempt.client, payload)
        entry.digest = chain.extend(entry.digest, payload)
        entry.accepted = attempt

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
