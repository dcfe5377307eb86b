"""Task quadratic: exact values, exact steps, exact constants."""

from __future__ import annotations

import numpy as np
import pytest

from clients.tasks import TrainOptions
from clients.tasks.quadratic import Quadratic
from tests.clients.tasks.support import Loose, averaged, problems


def made(task_args: str = "", **options: float) -> Quadratic:
    return Quadratic(TrainOptions(task_args=task_args, **{"local_steps": 1, **options}))  # type: ignore[arg-type]


def test_task_quadratic_is_kimads_toy() -> None:
    task = made()
    assert (len(task.a), task.a[0], task.a[-1]) == (30, pytest.approx(0.1), pytest.approx(10.0))
    assert np.ptp(np.diff(np.log(task.a))) < 1e-12
    assert task.test(task.initial_arrays()) == {"loss": pytest.approx(task.a.sum() / 2)}
    assert task.initial_arrays()["x"].dtype == np.float64
    s = task.smoothness(4)
    assert (s.L, s.mu, s.L_clients, s.kappa) == (task.a[-1], task.a[0], (task.a[-1],) * 4, task.a[-1] / task.a[0])
    assert s.L_tilde == pytest.approx(s.L)
    assert task.test({"x": task.optimum()}) == {"loss": 0.0}


def test_task_quadratic_step_is_exact() -> None:
    task = made("x0 = 3.0", local_lr=0.1)
    start: Loose = task.initial_arrays()
    trained, metrics = task.train(start, 0, 2, 5)
    assert np.array_equal(trained["x"], start["x"] - 0.1 * (task.a * start["x"]))
    assert metrics == {"num-examples": 1, "train_loss": task.test(start)["loss"]}


def test_task_quadratic_layers_are_the_same_problem_in_several_arrays() -> None:
    one, several = made(), made("layers = 11")
    assert list(several.initial_arrays()) == [f"x{i:02d}" for i in range(11)]
    assert sorted(several.initial_arrays()) == list(several.initial_arrays())
    a, b = averaged(one, 2, 20), averaged(several, 2, 20)
    assert np.array_equal(a["x"], several.join(b))


def test_task_quadratic_clients_differ_around_a_common_mean() -> None:
    task, count = made("spread = 2.0"), 7
    where = np.array([task.minimiser(i, count) for i in range(count)])
    np.testing.assert_allclose(where.mean(0), 0, atol=1e-15)
    assert np.linalg.norm(where, axis=1).max() == pytest.approx(2.0)
    x = np.linspace(-1, 1, 30)
    np.testing.assert_allclose(np.mean([task.gradient(x, i, count) for i in range(count)], axis=0), task.gradient(x))
    assert task.test_client({"x": where[3]}, 3, count) == {"num-examples": 1, "loss": 0.0}
    assert not made("spread = 2.0").minimiser(0, 1).any()  # a single client is the mean


def test_task_quadratic_noise_is_unbiased_and_of_the_stated_size() -> None:
    task = made("noise = 0.5, d = 1000", local_lr=1.0)
    start: Loose = task.initial_arrays()
    trained: Loose = task.train(start, 0, 1, 3)[0]
    noise = start["x"] - task.a * start["x"] - trained["x"]
    assert abs(noise.mean()) < 0.06
    assert noise.std() == pytest.approx(0.5, rel=0.06)
    again, other = (task.train(start, 0, 1, seed)[0]["x"] for seed in (3, 4))
    assert np.array_equal(again, task.train(start, 0, 1, 3)[0]["x"])
    assert not np.array_equal(again, other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task_args": "dd = 3"}, "unknown argument in task-args 'dd': expected one of a_max, a_min, d, layers, noise"),
        ({"task_args": "d = 0"}, "d in task-args is 0: Input should be greater than or equal to 1"),
        ({"task_args": 'd = "many"'}, "d in task-args is 'many': Input should be a valid integer"),
        ({"task_args": "a_min = 20.0"}, "a_min is 20, above a_max = 10: swap them"),
        ({"task_args": "layers = 31"}, "layers is 31, above d = 30"),
        ({"model": "cnn"}, "unknown model of task quadratic 'cnn': expected one of quadratic"),
        ({"data_dir": "/data"}, "task quadratic has no data: leave data-dir and partition-args empty"),
        ({"partitioner": "idd"}, "did you mean 'iid'?"),
    ],
)
def test_task_quadratic_names_a_mistake(options: dict[str, str], said: str) -> None:
    (found,) = problems("quadratic", **options)
    assert said in found
