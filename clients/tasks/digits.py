"""Task `digits`: scikit-learn's 1,797 bundled 8x8 images and a small CNN (38,282 parameters).

A fifth of the images, drawn by the seed, is the server's test set; the rest is cut into
clients by flwr-datasets' Dirichlet partitioner over the labels. Nothing is downloaded.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients.tasks import Arrays, TrainOptions
from compression.randomness import derived_seed, permutation, words

TEST_SHARE = 0.2
MIN_PARTITION = 10


class DigitsNet(nn.Module):
    """Two 3x3 convolutions (16, 32), one 2x2 pooling, two dense layers (64, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images (n, 1, 8, 8)."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.max_pool2d(x, 2).flatten(1)
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


@cache
def _split(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images in [0, 1] and labels: train x, train y, test x, test y."""
    images, labels = load_digits(return_X_y=True)
    order = permutation(len(labels), seed=seed, purpose="digits/test-set")
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order], dtype=torch.int64)
    held = round(TEST_SHARE * len(labels))
    return x[held:], y[held:], x[:held], y[:held]


@cache
def _partitions(seed: int, count: int, alpha: float) -> tuple[NDArray[np.int64], ...]:
    """Positions in the training set of each client's examples."""
    _, labels, _, _ = _split(seed)
    partitioner = DirichletPartitioner(
        num_partitions=count,
        partition_by="label",
        alpha=alpha,
        min_partition_size=min(MIN_PARTITION, len(labels) // (2 * count)),
        self_balancing=False,
        seed=derived_seed(seed=seed, purpose="digits/partition"),
    )
    partitioner.dataset = Dataset.from_dict({"label": labels.tolist(), "position": list(range(len(labels)))})
    return tuple(np.array(partitioner.load_partition(i)["position"], dtype=np.int64) for i in range(count))


class Digits:
    """The task; see clients.tasks.Task. Torch runs on one thread, so that every process
    computes the same bits.
    """

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    def initial_arrays(self) -> Arrays:
        """A freshly initialised network, from the run's seed."""
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed(seed=self.options.seed, purpose="digits/model"))
            model = DigitsNet()
        return _arrays(model)

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """`local_steps` steps of SGD on batches drawn without replacement, epoch after epoch."""
        torch.set_num_threads(1)
        o = self.options
        x, y, _, _ = _split(o.seed)
        mine = torch.from_numpy(_partitions(o.seed, count, o.dirichlet_alpha)[index])
        x, y = x[mine], y[mine]
        model = _model(arrays)
        parameters = list(model.parameters())
        losses: list[float] = []
        for batch in _batches(len(mine), o.batch_size, o.local_steps, seed):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():  # plain SGD: torch.optim would import torch's compiler, 150 MB in every process
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=o.local_lr)
            losses.append(loss.item())
        return _arrays(model), {"num-examples": len(mine), "train_loss": sum(losses) / len(losses)}

    def test(self, arrays: Arrays) -> dict[str, float]:
        """Loss and accuracy on the server's test set."""
        torch.set_num_threads(1)
        _, _, x, y = _split(self.options.seed)
        return _metrics(_model(arrays), x, y)

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """Loss and accuracy on one client's own images."""
        torch.set_num_threads(1)
        x, y, _, _ = _split(self.options.seed)
        mine = torch.from_numpy(_partitions(self.options.seed, count, self.options.dirichlet_alpha)[index])
        return {"num-examples": len(mine), **_metrics(_model(arrays), x[mine], y[mine])}


def _batches(n: int, batch_size: int, steps: int, seed: int) -> list[torch.Tensor]:
    """Positions of each step's examples: epochs of one permutation each, never across two."""
    batches: list[torch.Tensor] = []
    epoch = 0
    while len(batches) < steps:
        order = torch.from_numpy(np.argsort(words(n, seed=seed, round_=epoch, purpose="digits/batches"), kind="stable"))
        batches.extend(torch.split(order, batch_size))
        epoch += 1
    return batches[:steps]


def _model(arrays: Arrays) -> DigitsNet:
    with torch.random.fork_rng(devices=[]):
        model = DigitsNet()
    model.load_state_dict({name: torch.tensor(array) for name, array in arrays.items()})
    return model


def _arrays(model: nn.Module) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def _metrics(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    with torch.no_grad():
        logits = model(x)
        loss = F.cross_entropy(logits, y).item()
        accuracy = (logits.argmax(1) == y).float().mean().item()
    return {"loss": loss, "accuracy": accuracy}
