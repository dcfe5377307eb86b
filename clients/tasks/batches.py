"""Which examples each local step uses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from compression.randomness import permutation


def batches(n: int, batch_size: int, steps: int, *, seed: int, purpose: str) -> list[NDArray[np.int64]]:
    """Positions of each step's examples: epochs of one permutation each, never across two.

    Args:
        n: examples, at least 1.
        batch_size: examples a step; the last step of an epoch may have fewer. 0: all, in order, without a draw.
        steps: number of steps.
        seed: of this client in this round.
        purpose: names the draws.

    >>> [batch.tolist() for batch in batches(3, 0, 2, seed=1, purpose="doc")]
    [[0, 1, 2], [0, 1, 2]]
    >>> [len(batch) for batch in batches(5, 2, 4, seed=1, purpose="doc")]
    [2, 2, 1, 2]
    """
    if batch_size == 0:
        return [np.arange(n)] * steps
    drawn: list[NDArray[np.int64]] = []
    epoch = 0
    while len(drawn) < steps:
        order = permutation(n, seed=seed, round_=epoch, purpose=purpose)
        drawn.extend(order[at : at + batch_size] for at in range(0, n, batch_size))
        epoch += 1
    return drawn[:steps]
