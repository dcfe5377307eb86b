"""What every built-in task keeps: a new one is tested by being in TASKS."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.tasks import TASKS, Task, TrainOptions, make_task, whole_of
from compression.errors import ConfigError
from tests.clients.tasks.support import averaged, equal, problems, write_fashion, write_images, write_svmlight

CLIENTS = 3
CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar(folder: Path) -> str:
    write_images(folder / "train", 6, CIFAR)
    write_images(folder / "test", 2, CIFAR, seed=1)
    return str(folder)


DATA: dict[str, Callable[[Path], str]] = {
    "digits": lambda folder: "",
    "fashion-mnist": lambda folder: str(write_fashion(folder)),
    "cifar10": cifar,
    "libsvm": lambda folder: str(write_svmlight(folder / "data.svm")),
    "quadratic": lambda folder: "",
}
RATE = {"libsvm": 1.0, "digits": 0.3}


@pytest.fixture(params=sorted(TASKS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(name: str, tmp_path: Path) -> TrainOptions:
    return TrainOptions(data_dir=DATA[name](tmp_path), local_lr=RATE.get(name, 0.1), batch_size=16, local_steps=10)


@pytest.fixture
def task(name: str, options: TrainOptions) -> Task:
    return make_task(name, options)


def test_task_passes_its_check_and_learns(task: Task) -> None:
    task.check(None)
    task.check(CLIENTS)
    before, after = task.test(task.initial_arrays()), task.test(averaged(task, CLIENTS, 4))
    assert after["loss"] < 0.98 * before["loss"]
    assert 0 <= after.get("accuracy", 0.0) <= 1


def test_task_gives_the_same_bytes_for_the_same_seed(name: str, options: TrainOptions, task: Task) -> None:
    again = make_task(name, options)
    assert equal(task.initial_arrays(), again.initial_arrays())
    (one, metrics), (other, metrics_again) = (t.train(t.initial_arrays(), 1, CLIENTS, 7) for t in (task, again))
    assert equal(one, other)
    assert metrics == metrics_again
    assert task.test(one) == again.test(other)


def test_task_keeps_names_shapes_and_types_and_leaves_its_input_alone(task: Task) -> None:
    start = task.initial_arrays()
    copies = {key: array.copy() for key, array in start.items()}
    trained, metrics = task.train(start, 0, CLIENTS, 1)
    assert {k: (a.shape, a.dtype) for k, a in trained.items()} == {k: (a.shape, a.dtype) for k, a in start.items()}
    assert not equal(trained, start)
    assert equal(start, copies)
    assert set(metrics) == {"num-examples", "train_loss"}
    assert isinstance(metrics["num-examples"], int)
    tested = task.test_client(start, 0, CLIENTS)
    assert tested["num-examples"] == metrics["num-examples"]
    assert {"loss"} <= set(task.test(start)) <= {"loss", "accuracy"}
    assert set(task.test(start)) == set(tested) - {"num-examples"}


def test_task_reports_all_problems_together(name: str) -> None:
    found = problems(name, model="modle", task_args="nonsense = 1", partition_args="nonsense = 1", data_dir="/no/where")
    assert any("modle" in one for one in found)
    assert any("nonsense" in one and "task-args" in one for one in found)
    assert any("nonsense" in one and "partition-args" in one for one in found) or name == "quadratic"
    assert any("data-dir" in one for one in found)


def test_task_by_module_and_attribute() -> None:
    made: Any = make_task("clients.tasks.quadratic:Quadratic", TrainOptions(seed=3))
    assert made.options.seed == 3
    assert whole_of(made) == ""
    for wrong, said in (("digit", "did you mean 'digits'?"), ("os:none", "cannot be imported"), (":x", "imported")):
        with pytest.raises(ConfigError) as caught:
            make_task(wrong, TrainOptions())
        assert said in str(caught.value)


def test_tasks_without_images_need_no_torch(tmp_path: Path) -> None:
    """A client of an optimisation task is small: no torch, no torchvision."""
    code = (
        "import sys; from clients.tasks import *\n"
        f"t = make_task('libsvm', TrainOptions(data_dir={str(write_svmlight(tmp_path / 'x.svm'))!r}, "
        "partitioner='contiguous'))\n"
        "t.check(3); t.train(t.initial_arrays(), 0, 3, 1)\n"
        "q = make_task('quadratic', TrainOptions()); q.check(3); q.train(q.initial_arrays(), 0, 3, 1)\n"
        "assert not {'torch', 'torchvision', 'flwr_datasets'} & set(sys.modules), sorted(sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)


def test_batch_size_0_is_one_full_gradient_a_step(name: str, options: TrainOptions, task: Task) -> None:
    """The draw of the batches plays no part: another seed gives the same bytes."""
    from dataclasses import replace

    full = make_task(name, replace(options, batch_size=0, local_steps=1))
    start = full.initial_arrays()
    assert equal(full.train(start, 0, CLIENTS, 1)[0], full.train(start, 0, CLIENTS, 2)[0])


def test_one_client_has_everything(task: Task) -> None:
    alone = task.test_client(task.initial_arrays(), 0, 1)["num-examples"]
    parts = [task.test_client(task.initial_arrays(), i, CLIENTS)["num-examples"] for i in range(CLIENTS)]
    assert alone == sum(parts) or (alone, sum(parts)) == (1, CLIENTS)  # quadratic: one example each
    assert np.all(np.array(parts) > 0)
