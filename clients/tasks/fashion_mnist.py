"""Task `fashion-mnist`: 70,000 grey 28x28 pictures of ten kinds of clothes (Xiao, Rasul, Vollgraf, 2017).

From the four idx files, plain or gzipped, in a folder that the user names, or from torchvision's download.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients.tasks.data import downloaded
from clients.tasks.images import Examples, ImageTask, Model
from compression.errors import ConfigError

SIDE = 28
CLASSES = 10


class FashionCnn(nn.Module):
    """Two 5x5 convolutions (16, 32), each with 2x2 pooling, two dense layers (64, 10); 46,730 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images (n, 1, 28, 28)."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits


class FashionMlp(nn.Module):
    """Dense layers 784-64-64-10; 55,050 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(SIDE * SIDE, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, 10) of images (n, 1, 28, 28)."""
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        logits: torch.Tensor = self.fc3(x)
        return logits


class FashionMnist(ImageTask):
    """The task; see clients.tasks.Task."""

    name = "fashion-mnist"
    models: ClassVar[Mapping[str, Model]] = {"cnn": Model(FashionCnn), "mlp": Model(FashionMlp)}
    layout = (
        "a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        "t10k-labels-idx1-ubyte, each plain or .gz"
    )
    mean = (0.286,)
    std = (0.353,)

    @classmethod
    def read(cls, folder: Path | None, siblings: Sequence[Path]) -> tuple[Examples, Examples | None]:
        """The idx files of a folder, or of its FashionMNIST/raw; the t10k files may be absent."""
        if folder is None:
            folder = downloaded(cls.name, _fetch, f"{_INSTEAD}: {cls.layout}; {_COMMAND}")
        raw = folder / "FashionMNIST" / "raw"
        folder = raw if raw.is_dir() else folder
        train = _examples(folder, "train")
        if train is None:
            raise ConfigError(f"{folder} has no train-images-idx3-ubyte, plain or .gz; expected {cls.layout}")
        return train, _examples(folder, "t10k")


_INSTEAD = "put the files into a folder and set data-dir to it"
_COMMAND = (
    "where there is a network, this fetches them: "
    "python -c \"from torchvision.datasets import FashionMNIST as F; F('FOLDER', download=True)\""
)


def _fetch(folder: str) -> None:
    from torchvision.datasets import FashionMNIST  # imports torch's compiler: only where something is fetched

    FashionMNIST(folder, download=True)


def _examples(folder: Path, which: str) -> Examples | None:
    """Images and labels of "train" or "t10k"; None where there are no such images."""
    images = _find(folder, f"{which}-images-idx3-ubyte")
    if images is None:
        return None
    labels = _find(folder, f"{which}-labels-idx1-ubyte")
    if labels is None:
        raise ConfigError(f"{folder} has {images.name} but no {which}-labels-idx1-ubyte, plain or .gz")
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or x.shape[1:] != (SIDE, SIDE):
        raise ConfigError(f"{images}: an array of shape {x.shape}; expected (n, {SIDE}, {SIDE})")
    if y.shape != x.shape[:1]:
        raise ConfigError(f"{labels}: an array of shape {y.shape}; expected ({len(x)},), a label for each image")
    if len(y) and y.max() >= CLASSES:
        raise ConfigError(f"{labels}: label {y.max()} of image {int(y.argmax())}; expected 0 to {CLASSES - 1}")
    return Examples(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y.astype(np.int64)))


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of one idx file of bytes, plain or gzipped.

    torchvision's reader takes neither .gz files nor damaged ones kindly.

    Raises:
        ConfigError: the file cannot be read, or is no idx file of bytes of just its stated size.

    Source: "THE IDX FILE FORMAT", MNIST database: two zeros, type (8: bytes), number of dimensions, each dimension as
    a big-endian 32-bit integer, then the bytes.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); fetch it again") from error
    kind, dimensions = content[:3], content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    if kind != b"\0\0\x08" or not 1 <= dimensions <= 3 or len(content) < start:
        raise ConfigError(
            f"{path}: begins with {content[:4].hex(' ') or 'nothing'}; expected 00 00 08 and 1 to 3 dimensions, an idx "
            "file of bytes; fetch it again"
        )
    shape = tuple(int(d) for d in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) - start != math.prod(shape):
        raise ConfigError(
            f"{path}: holds {len(content) - start} bytes after its header; expected {math.prod(shape)}, an array of "
            f"shape {shape}; fetch it again"
        )
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)
