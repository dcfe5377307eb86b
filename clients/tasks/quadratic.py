"""Task `quadratic`: Kimad's toy, f(x) = 1/2 sum_j a_j x_j^2 with d = 30 and a from 0.1 to 10; no data, float64.

With `spread`, client i has f_i(x) = 1/2 sum_j a_j (x_j - s_ij)^2, whose minimisers s_i have mean zero, so that the
clients' mean is f plus a constant, which is left out.

Source: Xin et al., Kimad (2023), section 4.1; its a_j are not printed: a geometric sequence is our choice.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from clients.tasks import Arrays, TrainOptions, partitions
from clients.tasks.arguments import Arguments, read, require
from clients.tasks.smoothness import Smoothness
from compression.errors import ConfigError, unknown_name
from compression.randomness import uniforms

Floats = NDArray[np.float64]


class QuadraticArguments(Arguments):
    """task-args of `quadratic`."""

    d: int = Field(30, ge=1, description="dimensions")
    a_min: float = Field(0.1, gt=0, description="smallest eigenvalue: mu")
    a_max: float = Field(10.0, gt=0, description="largest eigenvalue: L")
    x0: float = Field(1.0, description="every coordinate at the start")
    layers: int = Field(1, ge=1, description="arrays that x is split into")
    spread: float = Field(0.0, ge=0, description="the clients' minimisers lie within this distance of their mean")
    noise: float = Field(0.0, ge=0, description="standard deviation of the noise on each coordinate of a gradient")

    @model_validator(mode="after")
    def _fits(self) -> QuadraticArguments:
        if self.a_min > self.a_max:
            raise ValueError(f"a_min is {self.a_min:g}, above a_max = {self.a_max:g}: swap them")
        if self.layers > self.d:
            raise ValueError(f"layers is {self.layers}, above d = {self.d}: a layer needs a coordinate")
        return self


class Quadratic:
    """The task; see clients.tasks.Task. Every client weighs one example; batch-size and partitioner play no part."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    @cached_property
    def arguments(self) -> QuadraticArguments:
        """The checked task-args."""
        return read("task-args", self.options.task_args, QuadraticArguments)

    @cached_property
    def a(self) -> Floats:
        """The eigenvalues, ascending; shape (d,)."""
        return np.geomspace(self.arguments.a_min, self.arguments.a_max, self.arguments.d)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in the order of the coordinates."""
        layers = self.arguments.layers
        return ("x",) if layers == 1 else tuple(f"x{i:0{len(str(layers - 1))}d}" for i in range(layers))

    def check(self, count: int | None) -> None:
        """See clients.tasks.Task."""
        require(
            self._check_model,
            self._check_data,
            lambda: self.arguments,
            lambda: partitions.check(self.options.partitioner, self.options.partition_args),
        )

    def initial_arrays(self) -> Arrays:
        """x0 in every coordinate."""
        return self.cut(np.full(self.arguments.d, self.arguments.x0))

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """`local_steps` gradient steps; without noise they are exact."""
        x, losses = self.join(arrays), list[float]()
        for step in range(self.options.local_steps):
            losses.append(self._value(x - self.minimiser(index, count)))
            gradient = self.gradient(x, index, count)
            if self.arguments.noise:
                drawn = uniforms(len(x), seed=seed, round_=step, purpose="quadratic/noise")
                gradient = gradient + self.arguments.noise * np.sqrt(12.0) * (drawn - 0.5)
            x = x - self.options.local_lr * gradient
        return self.cut(x), {"num-examples": 1, "train_loss": sum(losses) / len(losses)}

    def test(self, arrays: Arrays) -> dict[str, float]:
        """The loss f(x), 0 at the minimum; there is no accuracy."""
        return {"loss": self.objective(self.join(arrays))}

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """The loss f_i(x)."""
        return {"num-examples": 1, "loss": self._value(self.join(arrays) - self.minimiser(index, count))}

    def join(self, arrays: Arrays) -> Floats:
        """x, shape (d,), of the arrays."""
        return np.concatenate([np.asarray(arrays[name], np.float64) for name in self.names])

    def cut(self, x: Floats) -> Arrays:
        """The arrays of x, shape (d,)."""
        parts = np.array_split(x, len(self.names))
        return {name: part.copy() for name, part in zip(self.names, parts, strict=True)}

    def objective(self, x: Floats) -> float:
        """f(x) of x, shape (d,)."""
        return self._value(x)

    def gradient(self, x: Floats, index: int | None = None, count: int = 1) -> Floats:
        """Gradient of f, or of client `index`'s f_i, at x; shape (d,)."""
        return self.a * (x if index is None else x - self.minimiser(index, count))

    def minimiser(self, index: int, count: int) -> Floats:
        """s_i: where client `index` of `count` has its minimum; shape (d,)."""
        spread, d = self.arguments.spread, self.arguments.d
        if not spread:
            return np.zeros(d)
        shape = (count, d)
        drawn = uniforms(count * d, seed=self.options.seed, purpose="quadratic/spread").reshape(shape) * 2 - 1
        farthest = np.sqrt(np.max(np.sum((drawn - drawn.mean(axis=0)) ** 2, axis=1))) or 1.0
        return np.asarray(spread * (drawn[index] - drawn.mean(axis=0)) / farthest)

    def optimum(self) -> Floats:
        """The minimiser of f: zero."""
        return np.zeros(self.arguments.d)

    def smoothness(self, count: int) -> Smoothness:
        """Exact constants of f and of `count` clients' f_i."""
        largest, smallest = float(self.a.max()), float(self.a.min())
        return Smoothness(L=largest, L_clients=(largest,) * count, mu=smallest, examples=(1,) * count)

    def _check_model(self) -> None:
        if self.options.model not in ("", "quadratic"):
            raise ConfigError(unknown_name("model of task quadratic", self.options.model, ["quadratic"]))

    def _check_data(self) -> None:
        o = self.options
        if o.data_dir or o.partition_args or o.partitioner == "folders":
            raise ConfigError("task quadratic has no data: leave data-dir and partition-args empty")

    def _value(self, x: Floats) -> float:
        return float(np.sum(self.a * x * x) / 2)
