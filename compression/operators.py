"""Operators: what of a vector is sent.

| id  | name     | what                                   | class                           |
|-----|----------|----------------------------------------|---------------------------------|
| 0   |          | absent layer                           |                                 |
| 1   | topk     | the K entries of largest magnitude     | contractive, alpha = K/d        |
| 2   | identity | everything                             | contractive and unbiased        |
| 3   | randk    | K entries drawn from a seed            | contractive; times d/K unbiased |
| 4   | quant    | levels of a block's norm, at random    | unbiased; scaled contractive    |
| 5   | round    | the nearest level of a block's largest | contractive                     |
| 6   | sign     | a block's mean magnitude, and signs    | contractive                     |
| 7   | natural  | powers of two                          | unbiased, or contractive        |
| 8   | lowrank  | factors of a matrix                    | contractive in expectation      |
| 255 |          | whole layer, raw                       |                                 |

Contractive with alpha: E||C(x) - x||^2 <= (1 - alpha) ||x||^2; for randk the expectation is over
its draw. Unbiased with omega: E C(x) = x and E||C(x) - x||^2 <= omega ||x||^2. EF21 needs the first, and randk as
it is; DIANA the second, and randk times d/K: omega = d/K - 1. Topk, round, sign and lowrank are biased
at any scale. 4 to 8 have a record of their own and no K: coded.py has their
formulas and sources. Named cases are configurations of these (NAMED). Sources: TopK, Stich et al.
2018; RandK, Richtarik et al., EF21 (2021).
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
        unbiased: has a form with E C(x) = x; may be used with DIANA.
        adaptive: has a K that an allocation chooses; else it always sends everything.
        values: value coding that "auto" stands for.
        seeded: positions come from a seed, not from the values; the seed travels instead of them.
        alpha: (K, d) -> contraction factor in (0, 1] before values are rounded; of coded operators, coded.py.
        coded: has a record of its own.
        omega: (K, d) -> variance factor of the unbiased form; None: it has none, or coded.py has it.
    """

    id: int
    name: str
    contractive: bool
    unbiased: bool
    adaptive: bool
    values: str
    seeded: bool
    alpha: Callable[[int, int], float]
    coded: bool = False
    omega: Callable[[int, int], float] | None = None


def _share_alpha(k: int, d: int) -> float:
    return min(k, d) / d if d else 1.0


def _share_omega(k: int, d: int) -> float:
    return d / k - 1.0 if k < d else 0.0


def _all_alpha(k: int, d: int) -> float:
    return 1.0


def _all_omega(k: int, d: int) -> float:
    return 0.0


OPERATORS: Registry[Operator] = Registry("operator")
TOPK = OPERATORS.register(Operator(1, "topk", True, False, True, "bf16", False, _share_alpha))
IDENTITY = OPERATORS.register(Operator(2, "identity", True, True, False, "native", False, _all_alpha, omega=_all_omega))
RANDK = OPERATORS.register(Operator(3, "randk", True, True, True, "bf16", True, _share_alpha, omega=_share_omega))
QUANT = OPERATORS.register(Operator(4, "quant", True, True, False, "native", False, _all_alpha, coded=True))
ROUND = OPERATORS.register(Operator(5, "round", True, False, False, "native", False, _all_alpha, coded=True))
SIGN = OPERATORS.register(Operator(6, "sign", True, False, False, "native", False, _all_alpha, coded=True))
NATURAL = OPERATORS.register(Operator(7, "natural", True, True, False, "native", False, _all_alpha, coded=True))
LOWRANK = OPERATORS.register(Operator(8, "lowrank", True, False, False, "native", False, _all_alpha, coded=True))

NAMED = {
    "terngrad": ("quant", "p = inf, levels = 1"),
    "qsgd": ("quant", "p = 2, levels = 4"),
    "one-bit-qsgd": ("quant", "p = 2, levels = 1"),
}
"""Configurations of operators that have a name of their own; further arguments may follow these."""


def unbiased_names() -> list[str]:
    """Names of the operators, named cases included, that have an unbiased form."""
    named = [name for name, (of, _) in NAMED.items() if OPERATORS[of].unbiased]
    return sorted([*(operator.name for operator in OPERATORS if operator.unbiased), *named])


def biased(name: str) -> str:
    """Sentence for an operator without an unbiased form."""
    valid = ", ".join(unbiased_names())
    return f"operator {name!r} is biased, and DIANA diverges with it: expected one of {valid}"
