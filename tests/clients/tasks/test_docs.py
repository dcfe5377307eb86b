"""docs/tasks.md says what the code does."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

from clients.tasks import TASKS, Task, TrainOptions, make_task
from clients.tasks.arguments import Arguments
from clients.tasks.cifar10 import Cifar10
from clients.tasks.digits import Digits
from clients.tasks.fashion_mnist import FashionMnist
from clients.tasks.images import BATCH_NORM_WHOLE
from clients.tasks.libsvm import LibsvmArguments
from clients.tasks.partitions import PARTITIONERS
from clients.tasks.quadratic import QuadraticArguments
from tests.clients.tasks.support import averaged

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "tasks.md").read_text()


def test_docs_name_every_task_model_partitioner_and_argument() -> None:
    names = {*TASKS, *PARTITIONERS, *Digits.models, *FashionMnist.models, *Cifar10.models}
    arguments: list[type[Arguments]] = [LibsvmArguments, QuadraticArguments]
    for kind in arguments:
        names |= {field.alias or name for name, field in kind.model_fields.items()}
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT] == []
    assert [kind.cls for kind in PARTITIONERS.values() if kind.cls not in TEXT] == []
    assert BATCH_NORM_WHOLE in TEXT


def test_docs_show_the_protocol() -> None:
    for name, method in inspect.getmembers(Task, inspect.isfunction):
        if not name.startswith("_"):
            assert f"    def {name}{inspect.signature(method)}: ...".replace("'", "") in TEXT


def test_the_task_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = TEXT.split("runs this block as a module -->\n```python\n")[1].split("```")[0]
    (tmp_path / "halves_of_the_docs.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 100).astype(np.uint8)
    images = rng.integers(0, 80, (100, 8, 8)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 4 * label : 4 * label + 4] += 120
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", labels)
    task = make_task("halves_of_the_docs:Halves", TrainOptions(data_dir=str(tmp_path)))
    task.check(4)
    assert task.test(averaged(task, 4, 5))["accuracy"] > 0.9
