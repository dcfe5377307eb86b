"""Step 1 of a round: which clients are asked."""

from __future__ import annotations

from collections.abc import Collection

from compression.randomness import permutation, uniforms


def choose(
    known: Collection[str],
    may_not: Collection[str],
    *,
    fraction: float,
    seed: int,
    round_: int,
    sampling: str = "fraction",
) -> tuple[str, ...]:
    """A seeded draw of the known clients, leaving out those that may not be asked.

    Args:
        known: ids of all known clients.
        may_not: those with a reply under way, and those that take no further part.
        fraction: share of the known clients wanted, in (0, 1].
        seed: the run's seed.
        round_: the round's number; each round draws anew.
        sampling: "fraction": that share of them, at least one; "poisson": each by itself with
            that probability, whoever else is known, so that there may be none.

    Returns:
        Ids in ascending order; fewer than wanted when too few may be asked.
    """
    ordered = sorted(known)
    if sampling == "poisson":
        drawn = (uniforms(1, seed=seed, client=client, round_=round_, purpose="sample")[0] for client in ordered)
        return tuple(c for c, u in zip(ordered, drawn, strict=True) if u < fraction and c not in may_not)
    order = permutation(len(ordered), seed=seed, round_=round_, purpose="sample")
    free = [ordered[i] for i in order if ordered[i] not in may_not]
    return tuple(sorted(free[: max(1, round(fraction * len(ordered)))]))
