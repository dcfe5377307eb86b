"""Operators: what of a vector is sent.

| id  | name     | what                                   | class                        |
|-----|----------|----------------------------------------|------------------------------|
| 0   |          | absent layer                           |                              |
| 1   | topk     | the K entries of largest magnitude     | contractive, alpha = K/d     |
| 2   | identity | everything                             | contractive and unbiased     |
| 255 |          | whole layer, raw                       |                              |

Contractive with alpha: E||C(x) - x||^2 <= (1 - alpha) ||x||^2 (algorithms.md, section 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.registry import Registry
from compression.selection import topk_indices

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
        alpha: (K, d) -> contraction factor in (0, 1] before values are rounded.
        select: (x of shape (d,), K) -> ascending int64 positions, or None for all of them.
    """

    id: int
    name: str
    contractive: bool
    unbiased: bool
    adaptive: bool
    values: str
    alpha: Callable[[int, int], float]
    select: Callable[[NDArray[Any], int], NDArray[np.int64] | None]


def _topk_alpha(k: int, d: int) -> float:
    return min(k, d) / d if d else 1.0


def _all_alpha(k: int, d: int) -> float:
    return 1.0


def _all(x: NDArray[Any], k: int) -> None:
    return None


OPERATORS: Registry[Operator] = Registry("operator")
TOPK = OPERATORS.register(Operator(1, "topk", True, False, True, "bf16", _topk_alpha, topk_indices))
IDENTITY = OPERATORS.register(Operator(2, "identity", True, True, False, "native", _all_alpha, _all))
