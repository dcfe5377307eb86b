"""Small data that tests make, and plain federated averaging."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from clients.tasks import Arrays, Task, TrainOptions, make_task
from compression.errors import ConfigError

DATA = os.environ.get("KIMAD_DATA", "")  # the fixture below hides it from the tasks


def real(name: str) -> Path:
    """A file or folder of KIMAD_DATA, or this test is skipped."""
    path = Path(DATA) / name
    if not DATA or not path.exists():
        pytest.skip(f"no {name} in KIMAD_DATA" if DATA else "KIMAD_DATA is not set")
    return path


Loose = Mapping[str, NDArray[Any]]


def averaged(task: Task, count: int, rounds: int) -> Loose:
    """Rounds of FedAvg over all clients, weighted by examples."""
    arrays: Loose = task.initial_arrays()
    for round_ in range(rounds):
        replies: list[tuple[Loose, float]] = []
        for i in range(count):
            out, metrics = task.train(arrays, i, count, 1000 * round_ + i)
            replies.append((out, metrics["num-examples"]))
        total = sum(n for _, n in replies)
        arrays = {
            name: np.asarray(sum(out[name] * (n / total) for out, n in replies), array.dtype)
            for name, array in arrays.items()
        }
    return arrays


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def problems(name: str, count: int | None = None, /, **options: Any) -> tuple[str, ...]:
    """What a task's check says."""
    with pytest.raises(ConfigError) as caught:
        make_task(name, TrainOptions(**options)).check(count)
    return caught.value.problems


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    content = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def patterns(n: int, side: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """n grey pictures of ten classes, which differ in where the light is; (n, side, side) and (n,)."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n, dtype=np.uint8) % 10
    centres = np.random.default_rng(99).integers(0, 256, (10, side, side))
    noise = rng.integers(-60, 60, (n, side, side))
    return np.clip(centres[labels] + noise, 0, 255).astype(np.uint8), labels


def write_fashion(folder: Path, suffix: str = "", train: int = 200, test: int = 50, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for which, n in (("train", train), ("t10k", test)):
        if n:
            images, labels = patterns(n, 28, seed + (which == "t10k"))
            write_idx(folder / f"{which}-images-idx3-ubyte{suffix}", images)
            write_idx(folder / f"{which}-labels-idx1-ubyte{suffix}", labels)
    return folder


def write_images(folder: Path, per_class: int, classes: tuple[str, ...], suffix: str = ".png", seed: int = 0) -> Path:
    images, _ = patterns(per_class * 10, 32, seed)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i, grey in enumerate(images[label :: len(classes)][:per_class]):
            Image.fromarray(np.stack([grey, 255 - grey, grey // 2], axis=-1)).save(folder / name / f"{i:04d}{suffix}")
    return folder


def write_svmlight(path: Path, n: int = 60, d: int = 7, seed: int = 0, labels: tuple[str, str] = ("-1", "+1")) -> Path:
    rng = np.random.default_rng(seed)
    truth = np.random.default_rng(5).normal(size=d)
    lines = []
    for row in np.where(rng.random((n, d)) < 0.6, rng.normal(size=(n, d)), 0.0):
        label = labels[int(row @ truth + 0.3 * rng.normal() > 0)]
        lines.append(" ".join([label, *(f"{j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v)]) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path
