"""Operators: what of a vector is sent.

| id  | name     | what                                   | class                        |
|-----|----------|----------------------------------------|------------------------------|
| 0   |          | absent layer                           |                              |
| 1   | topk     | the K entries of largest magnitude     | contractive, alpha = K/d     |
| 2   | identity | everything                             | contractive and unbiased     |
| 3   | randk    | K entries drawn from a seed, unscaled  | contractive, alpha = K/d     |
| 255 |          | whole layer, raw                       |                              |

Contractive with alpha: E||C(x) - x||^2 <= (1 - alpha) ||x||^2; for randk the expectation is over
its draw. Multiplied by d/K it would be unbiased with omega = d/K - 1, as DIANA needs, and not
contractive; EF21 needs it as it is. Sources: TopK, Stich et al. 2018; RandK, Richtarik et al.,
EF21 (2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compression.registry import Registry

NONE, WHOLE = 0, 255


@dataclass(frozen=True, slots=True)
class Operator:
    """One compression operator.

    Args:
        id: its byte in a record; 0 and 255 are taken by the format.
        name: name in a configuration.
        contractive: has an alpha > 0; may be used with EF21.
        unbiased: E C(x) = x; may be used with DIANA.
        adaptive: has a K that an allocation chooses; else it always sends everything.
        values: value coding that "auto" stands for.
        seeded: positions come from a seed, not from the values; the seed travels instead of them.
        alpha: (K, d) -> contraction factor in (0, 1] before values are rounded.
    """

    id: int
    name: str
    contractive: bool
    unbiased: bool
    adaptive: bool
    values: str
    seeded: bool
    alpha: Callable[[int, int], float]


def _share_alpha(k: int, d: int) -> float:
    return min(k, d) / d if d else 1.0


def _all_alpha(k: int, d: int) -> float:
    return 1.0


OPERATORS: Registry[Operator] = Registry("operator")
TOPK = OPERATORS.register(Operator(1, "topk", True, False, True, "bf16", False, _share_alpha))
IDENTITY = OPERATORS.register(Operator(2, "identity", True, True, False, "native", False, _all_alpha))
RANDK = OPERATORS.register(Operator(3, "randk", True, False, True, "bf16", True, _share_alpha))
