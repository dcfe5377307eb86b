"""Task `digits`: scikit-learn's 1,797 bundled 8x8 images and a small CNN (38,282 parameters).

A fifth of the images, drawn by the seed, is the server's test set. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812

from clients.tasks.images import Examples, ImageTask, Model


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


class Digits(ImageTask):
    """The task; see clients.tasks.Task."""

    name = "digits"
    models: ClassVar[Mapping[str, Model]] = {"cnn": Model(DigitsNet, chunk=2000)}
    scale = 16.0

    @classmethod
    def read(cls, folder: Path | None, siblings: Sequence[Path]) -> tuple[Examples, Examples | None]:
        """The bundled images, grey levels 0 to 16."""
        images, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(images.astype(np.uint8).reshape(-1, 1, 8, 8))
        return Examples(x, torch.tensor(labels, dtype=torch.int64)), None
