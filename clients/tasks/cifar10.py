"""Task `cifar10`: 60,000 colour 32x32 pictures of ten classes (Krizhevsky, 2009).

From images in one folder a class, from torchvision's own files, or from torchvision's download.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients.tasks.data import downloaded
from clients.tasks.images import BATCH_NORM_WHOLE, Examples, ImageTask, Model
from compression.errors import ConfigError

SIDE = 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUFFIXES = (".png", ".jpg", ".jpeg")
BATCHES = "cifar-10-batches-py"


class LeNet(nn.Module):
    """LeNet-5 for three channels: two 5x5 convolutions (6, 16), dense layers (120, 84, 10); 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, len(CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images (n, 3, 32, 32)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        logits: torch.Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


def resnet18() -> nn.Module:
    """torchvision's ResNet-18 with the stem for small images (3x3, stride 1, no pooling); 11,173,962 parameters."""
    from torchvision.models import resnet18 as make  # imports torch's compiler: only where this model is used

    model: nn.Module = make(num_classes=len(CLASSES))
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


class Cifar10(ImageTask):
    """The task; see clients.tasks.Task."""

    name = "cifar10"
    models: ClassVar[Mapping[str, Model]] = {
        "lenet": Model(LeNet),
        "resnet18": Model(resnet18, BATCH_NORM_WHOLE, chunk=128),
    }
    layout = (
        "a folder with one folder of .png or .jpg images for each class, or with train/CLASS and test/CLASS, or with "
        f"{BATCHES}"
    )
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.247, 0.2435, 0.2616)

    @classmethod
    def read(cls, folder: Path | None, siblings: Sequence[Path]) -> tuple[Examples, Examples | None]:
        """Images by class, or torchvision's files."""
        if folder is None:
            folder = downloaded(cls.name, _fetch, f"{_INSTEAD}: {cls.layout}; {_COMMAND}")
        if (folder / BATCHES).is_dir():
            return _batches(folder, train=True), _batches(folder, train=False)
        labels = _labels(siblings)
        train, *test = (_images(part, labels) for part in _parts(folder))
        if len(train) == 0:
            raise ConfigError(f"{folder} holds no images; expected {cls.layout}")
        return train, test[0] if test else None


_INSTEAD = "put the images into a folder and set data-dir to it"
_COMMAND = (
    f"where there is a network, this fetches {BATCHES}: "
    "python -c \"from torchvision.datasets import CIFAR10 as C; C('FOLDER', download=True)\""
)


def _fetch(folder: str) -> None:
    from torchvision.datasets import CIFAR10

    CIFAR10(folder, download=True)


def _batches(folder: Path, *, train: bool) -> Examples:
    """torchvision's files; it checks their MD5 sums before it unpickles."""
    from torchvision.datasets import CIFAR10

    try:
        read = CIFAR10(str(folder), train=train)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{folder / BATCHES}: {error}; {_COMMAND}") from error
    x = torch.from_numpy(read.data).permute(0, 3, 1, 2).contiguous()
    return Examples(x, torch.tensor(read.targets, dtype=torch.int64))


def _labels(siblings: Sequence[Path]) -> dict[str, int]:
    """Label of each class: CIFAR-10's own, or the sorted names' where others are found.

    Raises:
        ConfigError: more classes than the models have outputs.
    """
    names: set[str] = set()
    for folder in siblings:
        names.update(one.name for part in _parts(folder) for one in _folders(part))
    if names <= set(CLASSES):
        return {name: label for label, name in enumerate(CLASSES)}
    if len(names) > len(CLASSES):
        raise ConfigError(
            f"{', '.join(map(str, siblings[:3]))}: images of {len(names)} classes; expected at most {len(CLASSES)}, "
            "the outputs of the models; for others write a task of your own (docs/tasks.md)"
        )
    return {name: label for label, name in enumerate(sorted(names))}


def _parts(folder: Path) -> list[Path]:
    """The training folder, and the test folder where there is one."""
    if not (folder / "train").is_dir():
        return [folder]
    return [part for part in (folder / "train", folder / "test") if part.is_dir()]


def _folders(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))


def _images(folder: Path, labels: Mapping[str, int]) -> Examples:
    """The images of a folder with one folder for each class, in order of class and name."""
    found = [
        (path, labels[one.name])
        for one in _folders(folder)
        for path in sorted(one.iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    x = np.empty((len(found), 3, SIDE, SIDE), np.uint8)
    for row, (path, _) in enumerate(found):
        x[row] = _decode(path)
    return Examples(torch.from_numpy(x), torch.tensor([label for _, label in found], dtype=torch.int64))


def _decode(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One image as (3, 32, 32)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            size, pixels = image.size, np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # Pillow raises any of these
        raise ConfigError(f"{path}: no readable image ({error}); replace or remove it") from error
    if size != (SIDE, SIDE):
        raise ConfigError(f"{path}: {size[0]} x {size[1]} pixels; expected {SIDE} x {SIDE}: scale the images before")
    return pixels.transpose(2, 0, 1)
