"""Proximal steps: x <- argmin_z R(z) + ||z - x||^2/(2 gamma), after the optimiser's step.

| name        | arguments | R(x)                                        | step                                   |
|-------------|-----------|---------------------------------------------|----------------------------------------|
| none        |           | 0                                           | x                                      |
| l2          | l2        | l2/2 ||x||^2                                | x/(1 + gamma l2)                       |
| l1          | l1        | l1 ||x||_1                                  | sign(x) max(abs(x) - gamma l1, 0)      |
| elastic-net | l1, l2    | l1 ||x||_1 + l2/2 ||x||^2                   | l1's, then l2's                        |
| box         | low, high | 0 inside low <= x_j <= high, infinite beyond | min(max(x, low), high)                |

or module:attr, a function (x, gamma) -> x of a flat float64 array. Source: DIANA (Mishchenko et al., 2019),
Algorithm 1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compression.arguments import Parameter, arguments, checked
from compression.errors import ConfigError, unknown_name

Floats = NDArray[np.float64]
Prox = Callable[[Floats, float], Floats]


def _shrunk(x: Floats, by: float) -> Floats:
    return np.sign(x) * np.maximum(np.abs(x) - by, 0.0)


def _l2(x: Floats, gamma: float, l2: float) -> Floats:
    return x / (1.0 + gamma * l2)


def _l1(x: Floats, gamma: float, l1: float) -> Floats:
    return _shrunk(x, gamma * l1)


def _elastic_net(x: Floats, gamma: float, l1: float, l2: float) -> Floats:
    return _shrunk(x, gamma * l1) / (1.0 + gamma * l2)


def _box(x: Floats, _: float, low: float, high: float) -> Floats:
    return np.clip(x, low, high)


_NUMBER: Final = Parameter(float, None)
_BUILT_IN: Final[Mapping[str, tuple[Callable[..., Floats], tuple[str, ...]]]] = {
    "l2": (_l2, ("l2",)),
    "l1": (_l1, ("l1",)),
    "elastic-net": (_elastic_net, ("l1", "l2")),
    "box": (_box, ("low", "high")),
}
NAMES: Final = ("none", *_BUILT_IN)


def make_prox(name: str, args: str) -> Prox | None:
    """The proximal step of a configuration; None for "none".

    Args:
        name: in `NAMES`, or module:attr.
        args: its arguments, such as `l1 = 0.01`.

    Raises:
        ConfigError: all that is wrong with them.
    """
    given = arguments(args, "prox-args")
    if ":" in name or name == "none":
        if given:
            raise ConfigError(f"prox-args is {args!r}: prox {name!r} takes none")
        return _imported(name) if ":" in name else None
    if name not in _BUILT_IN:
        raise ConfigError(unknown_name("prox", name, NAMES) + " (or module:attr of your own)")
    step, wanted = _BUILT_IN[name]
    values = checked(given, dict.fromkeys(wanted, _NUMBER), f"prox {name!r}")
    problems = [f'prox {name!r} needs {key}: give prox-args = "{key} = ..."' for key, v in values.items() if v is None]
    numbers: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    problems += [
        f"{k} of prox {name!r} is {v:g}: expected at least 0"
        for k, v in numbers.items()
        if k[0] == "l" and v < 0 and name != "box"
    ]
    if name == "box" and not problems and not numbers["low"] <= numbers["high"]:
        problems.append(f"low of prox 'box' is {numbers['low']:g}, above high = {numbers['high']:g}: swap them")
    if problems:
        raise ConfigError(problems)
    return lambda x, gamma: step(x, gamma, **numbers)


def _imported(name: str) -> Prox:
    module, _, attr = name.partition(":")
    try:
        found: Prox = getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"prox {name!r} cannot be imported ({error}): expected module:attr, importable from the app's folder"
        ) from error
    return found
