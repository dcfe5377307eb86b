"""The server's half of the memories: float64 sums over all clients.

For each client the server keeps its weight, the last attempt accepted and the chain digest
of its slot h; for the population one float64 array a layer, S = sum_i w_i h_i, and
W = sum_i w_i. EF21 steps along g = S / W (algorithms.md section 3; joining clients enter W
with their first accepted reply, before g is formed).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compression import Decoded, Layout, accumulate
from protocol import Attempt, chain


@dataclass(slots=True)
class ClientEntry:
    """What the server knows of one client's memory.

    Args:
        digest: chain digest of its slot h.
        weight: w_i, frozen at its first accepted reply; None before it.
        accepted: its last accepted attempt; None before the first.
    """

    digest: bytes
    weight: float | None = None
    accepted: Attempt | None = None


class ServerMemory:
    """Sums and digests of one run.

    Args:
        layout: the agreed layout.
        experiment: id of the run, the start of every client's digest chain.
    """

    def __init__(self, layout: Layout, experiment: str) -> None:
        self.layout, self.experiment = layout, experiment
        self.total_weight = 0.0
        self.sums: tuple[NDArray[np.float64], ...] = tuple(np.zeros(layout.layers[i].size) for i in layout.compressed)
        self._clients: dict[str, ClientEntry] = {}

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
            weight: the client's weight, used if this is its first accepted reply.
        """
        entry = self.client(attempt.client)
        if entry.weight is None:
            entry.weight = weight
            self.total_weight += weight
        for total, update in zip(self.sums, decoded.updates, strict=True):
            if update is not None:
                accumulate(total, update, entry.weight)
        entry.digest = chain.extend(entry.digest, payload)
        entry.accepted = attempt

    def mean(self) -> tuple[NDArray[np.float64], ...]:
        """g = S / W, one flat float64 array a compressed layer."""
        return tuple(total / self.total_weight for total in self.sums)
