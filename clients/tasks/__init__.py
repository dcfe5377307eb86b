"""Built-in tasks: a model, its data cut into clients, and how to train and test it.

docs/tasks.md lists them with their data, models and arguments, and shows a task of one's own.
"""

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
        batch_size: examples a step; 0: all of the client's, one full-batch gradient a step.
        local_lr: learning rate of the local optimiser.
        model: name of one of the task's models; "": its default.
        data_dir: folder or file of the data, absolute, or relative to the folder that the environment variable
            KIMAD_DATA names; "": the task's own embedded data or download.
        partitioner: how the examples are cut into clients, a name of clients.tasks.partitions.PARTITIONERS.
        partition_args: its arguments, the inside of a TOML inline table, such as `alpha = 0.5`.
        task_args: arguments of the task itself, in the same form.
    """

    seed: int = 1
    local_steps: int = 5
    batch_size: int = 32
    local_lr: float = 0.1
    model: str = ""
    data_dir: str = ""
    partitioner: str = "dirichlet"
    partition_args: str = ""
    task_args: str = ""


class Task(Protocol):
    """A model with data. Implementations are cheap to make; data is loaded when used.

    A task may also have an attribute `whole: str`, see `whole_of`.
    """

    def check(self, count: int | None) -> None:
        """Find what is wrong before any work: names, arguments, missing or unreadable data.

        Args:
            count: number of clients, or None where it is not known; then the partitions are not tried.

        Raises:
            ConfigError: with every problem found.
        """

    def initial_arrays(self) -> Arrays:
        """The model at the start, by name."""

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """Train client `index` of `count` from `arrays`, with every draw from `seed`.

        Returns:
            The trained arrays, and metrics: "num-examples", "train_loss". A client without examples returns the
            arrays unchanged, 0 and 0.0.
        """

    def test(self, arrays: Arrays) -> dict[str, float]:
        """Metrics on the server's test set: "loss", and "accuracy" where there is one."""

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """Metrics on client `index`'s own data: "num-examples", "loss", and "accuracy" where there is one."""


TASKS: Final[Mapping[str, str]] = {
    "digits": "clients.tasks.digits:Digits",
    "fashion-mnist": "clients.tasks.fashion_mnist:FashionMnist",
    "cifar10": "clients.tasks.cifar10:Cifar10",
    "libsvm": "clients.tasks.libsvm:Libsvm",
    "quadratic": "clients.tasks.quadratic:Quadratic",
}
"""Built-in tasks: where each is, as module:attr; imported when made."""


def make_task(name: str, options: TrainOptions) -> Task:
    """The task of a name, or of module:attr (called with the options).

    Raises:
        ConfigError: unknown name, or nothing to import there.
    """
    where = TASKS.get(name, name)
    module, colon, attr = where.partition(":")
    if not colon:
        raise ConfigError(unknown_name("task", name, TASKS) + " (or module:attr of your own)")
    try:
        factory: Callable[[TrainOptions], Task] = getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"task {name!r} cannot be imported ({error}): expected module:attr, importable from the app's folder"
        ) from error
    return factory(options)


def whole_of(task: Task) -> str:
    """Comma-separated patterns of the arrays that must travel whole with this task's model; "" where none must.

    These are a model's running statistics (batch normalisation): no trained parameters, so no memory may hold them.
    """
    return str(getattr(task, "whole", ""))
