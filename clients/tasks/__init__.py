"""Built-in tasks: a model, its data cut into clients, and how to train and test it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from compression.errors import ConfigError, unknown_name

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What a task needs to know of a run.

    Args:
        seed: seed of the run: decides model, test set and partitions.
        local_steps: optimiser steps a round.
        batch_size: examples a step.
        local_lr: learning rate of the local optimiser.
        dirichlet_alpha: concentration of the partition by label.
    """

    seed: int = 1
    local_steps: int = 5
    batch_size: int = 32
    local_lr: float = 0.1
    dirichlet_alpha: float = 0.5


class Task(Protocol):
    """A model with data. Implementations are cheap to make; data is loaded when used."""

    def initial_arrays(self) -> Arrays:
        """The model at the start, by name."""

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """Train client `index` of `count` from `arrays`, with every draw from `seed`.

        Returns:
            The trained arrays, and metrics: "num-examples", "train_loss".
        """

    def test(self, arrays: Arrays) -> dict[str, float]:
        """Metrics on the server's test set: "loss", "accuracy"."""

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """Metrics on client `index`'s own data: "num-examples", "loss", "accuracy"."""


def _digits(options: TrainOptions) -> Task:
    from clients.tasks.digits import Digits

    return Digits(options)


TASKS: Final[Mapping[str, Callable[[TrainOptions], Task]]] = {"digits": _digits}


def make_task(name: str, options: TrainOptions) -> Task:
    """The task of a name, or of module:attr (called with the options).

    Raises:
        ConfigError: unknown name, or nothing to import there.
    """
    if ":" not in name:
        if name not in TASKS:
            raise ConfigError(unknown_name("task", name, TASKS) + " (or module:attr of your own)")
        return TASKS[name](options)
    module, _, attr = name.partition(":")
    try:
        factory: Callable[[TrainOptions], Task] = getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"task {name!r} cannot be imported ({error}): expected module:attr, importable from the app's folder"
        ) from error
    return factory(options)
