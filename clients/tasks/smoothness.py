"""Constants of an objective, for step sizes from theory (docs/tasks.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Smoothness:
    """f = sum_i w_i f_i over the clients, w_i = share of the examples.

    Args:
        L: Lipschitz constant of f's gradient (L-smoothness).
        L_clients: the same of each f_i.
        mu: strong convexity of f and of every f_i; 0 where there is none.
        examples: of each client.

    Source: Richtarik, Sokolov, Fatkhullin, EF21 (2021): gamma <= 1/(L + L_tilde sqrt(beta/theta)).
    """

    L: float
    L_clients: tuple[float, ...]
    mu: float
    examples: tuple[int, ...]

    @property
    def L_tilde(self) -> float:  # noqa: N802
        """The clients' quadratic mean, sqrt(sum_i w_i L_i^2)."""
        total = sum(self.examples)
        return math.sqrt(math.fsum(n / total * one**2 for n, one in zip(self.examples, self.L_clients, strict=True)))

    @property
    def L_max(self) -> float:  # noqa: N802
        """The largest of the clients."""
        return max(self.L_clients)

    @property
    def kappa(self) -> float:
        """Condition number L/mu; infinite where mu is 0."""
        return self.L / self.mu if self.mu else math.inf
