"""What every task of small labelled images shares: data, cuts, plain SGD and tests, in torch.

A new one names its models and reads a folder; see clients.tasks.digits for the least of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients.tasks import Arrays, TrainOptions, arguments, partitions
from clients.tasks.batches import batches
from clients.tasks.data import data_path
from compression.errors import ConfigError, unknown_name
from compression.randomness import derived_seed, permutation

TEST_SHARE: Final = 0.2
BATCH_NORM_WHOLE: Final = "*running_*, *num_batches_tracked*"


@dataclass(frozen=True, slots=True)
class Model:
    """One of a task's models.

    Args:
        make: a freshly initialised network; draws from torch's generator.
        whole: patterns of its arrays that are no trained parameters and must travel whole.
        chunk: most images in the network at once, which bounds the memory. A longer batch's gradient is summed over
            chunks; batch normalisation then sees one chunk at a time.
    """

    make: Callable[[], nn.Module]
    whole: str = ""
    chunk: int = 500


@dataclass(frozen=True, slots=True)
class Examples:
    """Images, uint8 (n, channels, height, width), and labels, int64 (n,)."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)

    def at(self, positions: NDArray[np.int64]) -> Examples:
        """Those at these positions, in that order."""
        where = torch.from_numpy(positions)
        return Examples(self.x[where], self.y[where])


class ImageTask(ABC):
    """A task of images; see clients.tasks.Task.

    A subclass says, besides how it reads:
        name: of the task; also names every draw.
        models: by name; the first is the default.
        layout: what data-dir must hold, in one sentence; "": nothing, the data is embedded.
        scale, mean, std: a pixel p of a channel enters the network as (p / scale - mean) / std.

    Torch runs on one thread, so that every process computes the same bits.
    """

    name: ClassVar[str]
    models: ClassVar[Mapping[str, Model]]
    layout: ClassVar[str] = ""
    scale: ClassVar[float] = 255.0
    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    @classmethod
    @abstractmethod
    def read(cls, folder: Path | None, siblings: Sequence[Path]) -> tuple[Examples, Examples | None]:
        """The training and the test images of a folder; without test images, a share of the others is held out.

        Args:
            folder: to read, or None: the task's own embedded data or download.
            siblings: all folders of the data, `folder` among them, so that labels mean the same in each.

        Raises:
            ConfigError: a file is missing, cannot be read or is damaged; it is named.
        """

    @property
    def whole(self) -> str:
        """Patterns of this model's arrays that travel whole; see clients.tasks.whole_of."""
        return self._kind().whole

    def check(self, count: int | None) -> None:
        """See clients.tasks.Task."""
        o = self.options
        arguments.require(
            self._kind,
            lambda: arguments.read("task-args", o.task_args, arguments.NoArguments),
            lambda: partitions.check(o.partitioner, o.partition_args),
            lambda: self._folders(count),
        )
        self._test_set()
        if count is not None:
            self._client(0, count)

    def initial_arrays(self) -> Arrays:
        """A freshly initialised network, from the run's seed."""
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed=self.options.seed, purpose=f"{self.name}/model"))
            model = self._kind().make()
        return _arrays(model)

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """`local_steps` steps of SGD on batches drawn without replacement, epoch after epoch.

        A batch of one image is normalised by the running statistics of batch normalisation, not by its own.
        """
        torch.set_num_threads(1)
        o = self.options
        data, mine = self._client(index, count)
        if len(mine) == 0:
            return dict(arrays), {"num-examples": 0, "train_loss": 0.0}
        model = self._model(arrays)
        parameters = list(model.parameters())
        losses: list[float] = []
        for step in batches(len(mine), o.batch_size, o.local_steps, seed=seed, purpose=f"{self.name}/batches"):
            model.train(len(step) > 1)
            loss, gradients = self._gradient(model, parameters, data, mine[step])
            with torch.no_grad():  # plain SGD: torch.optim would import torch's compiler, 150 MB in every process
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=o.local_lr)
            losses.append(loss)
        return _arrays(model), {"num-examples": len(mine), "train_loss": sum(losses) / len(losses)}

    def test(self, arrays: Arrays) -> dict[str, float]:
        """Loss and accuracy on the server's test set."""
        torch.set_num_threads(1)
        data = self._test_set()
        return self._metrics(self._model(arrays), data, np.arange(len(data)))

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """Loss and accuracy on one client's own images; 0 and 0 where it has none."""
        torch.set_num_threads(1)
        data, mine = self._client(index, count)
        if len(mine) == 0:
            return {"num-examples": 0, "loss": 0.0, "accuracy": 0.0}
        return {"num-examples": len(mine), **self._metrics(self._model(arrays), data, mine)}

    def _kind(self) -> Model:
        name = self.options.model or next(iter(self.models))
        if name not in self.models:
            raise ConfigError(unknown_name(f"model of task {self.name}", name, self.models))
        return self.models[name]

    def _model(self, arrays: Arrays) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            model = self._kind().make()
        model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
        return model

    def _folders(self, count: int | None = None) -> tuple[str, ...]:
        """The folders of the data: one, a client's each, or none where the data is the task's own."""
        o = self.options
        if not self.layout:
            if o.data_dir or o.partitioner == "folders":
                raise ConfigError(f"task {self.name} reads no files: leave data-dir empty, without partitioner folders")
            return ()
        path = data_path(self.name, o.data_dir)
        if path is not None and not path.is_dir():
            raise ConfigError(f"data-dir is {o.data_dir!r}, a file; expected a folder: {self.layout}")
        if o.partitioner == "folders":
            return tuple(str(one) for one in partitions.client_folders(path, count))
        return () if path is None else (str(path),)

    def _client(self, index: int, count: int) -> tuple[Examples, NDArray[np.int64]]:
        """The images of one client: positions in a set of images."""
        o, folders = self.options, self._folders(count)
        if o.partitioner == "folders":
            data, _ = _load(type(self), o.seed, folders, index)
            return data, np.arange(len(data))
        data, _ = _load(type(self), o.seed, folders, 0)
        return data, _cut(type(self), o.seed, folders, o.partitioner, o.partition_args, count)[index]

    def _test_set(self) -> Examples:
        folders = self._folders()
        parts = [_load(type(self), self.options.seed, folders, at)[1] for at in range(max(1, len(folders)))]
        if sum(map(len, parts)) == 0:
            raise ConfigError(f"task {self.name}: no test images; give some, or more images to take a fifth from")
        if len(parts) == 1:
            return parts[0]
        return Examples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def _inputs(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(one).reshape(-1, 1, 1) for one in (self.mean, self.std))
        return images.float().div_(self.scale).sub_(mean).div_(std)

    def _chunks(self, data: Examples, where: NDArray[np.int64]) -> Iterator[Examples]:
        """The images in parts of nearly equal size."""
        return map(data.at, np.array_split(where, math.ceil(len(where) / self._kind().chunk)))

    def _gradient(
        self, model: nn.Module, parameters: list[nn.Parameter], data: Examples, where: NDArray[np.int64]
    ) -> tuple[float, list[torch.Tensor]]:
        """Mean loss over these images and its gradient."""
        losses: list[float] = []
        total: list[torch.Tensor] = []
        for part in self._chunks(data, where):
            loss = F.cross_entropy(model(self._inputs(part.x)), part.y) * (len(part) / len(where))
            gradients = torch.autograd.grad(loss, parameters)
            total = [t.add_(g) for t, g in zip(total, gradients, strict=True)] if total else list(gradients)
            losses.append(loss.item())
        return math.fsum(losses), total

    def _metrics(self, model: nn.Module, data: Examples, where: NDArray[np.int64]) -> dict[str, float]:
        model.eval()
        losses: list[float] = []
        hits = 0
        with torch.no_grad():
            for part in self._chunks(data, where):
                logits, share = model(self._inputs(part.x)), len(part) / len(where)
                losses.append(share * F.cross_entropy(logits, part.y).item())
                hits += int((logits.argmax(1) == part.y).sum().item())
        return {"loss": math.fsum(losses), "accuracy": float(np.float32(hits / len(where)))}


@cache
def _load(task: type[ImageTask], seed: int, folders: tuple[str, ...], at: int) -> tuple[Examples, Examples]:
    """Training and test images of one folder, or of the task's own data; read once a process."""
    siblings = [Path(one) for one in folders]
    folder = siblings[at] if folders else None
    try:
        train, test = task.read(folder, siblings)
    except OSError as error:  # a file or folder that may not be read; the error names it
        raise ConfigError(f"task {task.name}: its data cannot be read: {error}") from error
    if test is not None:
        return train, test
    client = siblings[at].name if len(folders) > 1 else ""
    order = permutation(len(train), seed=seed, client=client, purpose=f"{task.name}/test-set")
    held = round(TEST_SHARE * len(train))
    return train.at(order[held:]), train.at(order[:held])


@cache
def _cut(
    task: type[ImageTask], seed: int, folders: tuple[str, ...], partitioner: str, text: str, count: int
) -> partitions.Positions:
    labels = _load(task, seed, folders, 0)[0].y.numpy()
    return partitions.cut(partitioner, text, labels=labels, count=count, seed=seed, task=task.name)


def _arrays(model: nn.Module) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
