"""Small ClientApps and grids for tests: least squares in NumPy, in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from clients import kimad_mod
from protocol import Store
from strategies import InProcessGrid, Kimad

Floats = NDArray[np.float64]
SHAPES = {"w": (8, 3), "b": (6,)}
SIZE = 30


@dataclass(frozen=True)
class LeastSquares:
    """f_i(x) = 1/2 ||A_i x - b_i||^2 / rows over the layers w and b joined; all float64."""

    a: tuple[Floats, ...]
    b: tuple[Floats, ...]

    @classmethod
    def make(cls, clients: int, seed: int = 0, rows: int = 40, spread: float = 1.0) -> LeastSquares:
        rng = np.random.default_rng(seed)
        scale = np.exp(spread * rng.normal(size=(clients, 1, SIZE)))  # heterogeneous clients
        a = rng.normal(size=(clients, rows, SIZE)) * scale
        b = rng.normal(size=(clients, rows)) * 3
        return cls(tuple(a), tuple(b))

    def gradient(self, index: int, x: Floats) -> Floats:
        a, b = self.a[index], self.b[index]
        return np.asarray(a.T @ (a @ x - b) / len(b))

    def value(self, index: int, x: Floats) -> float:
        residual = self.a[index] @ x - self.b[index]
        return float(residual @ residual / (2 * len(residual)))

    def smoothness(self, index: int, columns: slice = slice(None)) -> float:
        """Lipschitz constant of the gradient's part in these columns."""
        a = self.a[index]
        return float(np.linalg.norm(a[:, columns].T @ a, 2) / len(a))


def join(arrays: Mapping[str, NDArray[Any]]) -> Floats:
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name in SHAPES])


def cut(x: Floats, dtype: str) -> dict[str, NDArray[Any]]:
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])[:-1]
    return {n: p.reshape(s).astype(dtype) for (n, s), p in zip(SHAPES.items(), np.split(x, ends), strict=True)}


def record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def read(arrays: ArrayRecord) -> dict[str, NDArray[Any]]:
    return {name: array.numpy() for name, array in arrays.items()}


Spoil = Callable[[int, int, dict[str, NDArray[Any]]], dict[str, NDArray[Any]]]


def least_squares_app(
    problem: LeastSquares, step: float, spoil: Spoil | None = None, examples: dict[int, float | None] | None = None
) -> ClientApp:
    """One gradient step of size `step` on the node's own f_i; `spoil(index, round, arrays)` may change the answer.

    Client i reports 10 (i + 1) examples, or what `examples` says of it; None reports none.
    """
    app = ClientApp(mods=[kimad_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        arrays = read(message.content.array_records["arrays"])
        dtype = arrays["w"].dtype.name
        x = join(arrays)
        trained = cut(x - step * problem.gradient(index, x), dtype) | {
            n: a for n, a in arrays.items() if n not in SHAPES
        }
        if spoil is not None:
            number = message.content.config_records["config"]["server-round"]
            assert isinstance(number, int)
            trained = spoil(index, number, trained)
        metrics = MetricRecord({"num-examples": 10 * (index + 1), "train_loss": problem.value(index, x)})
        if examples is not None and index in examples:
            del metrics["num-examples"]
            if (said := examples[index]) is not None:
                metrics["num-examples"] = said
        return Message(RecordDict({"arrays": record(trained), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        index = int(context.node_config["partition-id"])
        loss = problem.value(index, join(read(message.content.array_records["arrays"])))
        metrics = MetricRecord({"num-examples": 10 * (index + 1), "loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def grid_of(app: ClientApp, count: int, state_dir: Path) -> InProcessGrid:
    return InProcessGrid.of_partitions(app, count, {}, state_dir)


@dataclass(frozen=True)
class Settled:
    """A client's memory: slot h and its digest."""

    h: tuple[NDArray[Any], ...]
    digest: bytes


def settled_memories(strategy: Kimad, state_dir: Path) -> dict[str, Settled]:
    """What each client's memory will be once it hears what the server accepted; nothing on disk changes for good."""
    memories = {}
    for client in strategy.memory:
        known = strategy.memory.client(client)
        with Store(state_dir, strategy.settings.experiment, client) as store:
            store.use(strategy.layout)
            entry = store.entry(client)
            assert store.settle(entry, known.accepted, known.digest) != "lost", client
            memories[client] = Settled(tuple(part.copy() for part in store.h(entry)), entry.digest)
    return memories
