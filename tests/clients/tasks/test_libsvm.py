"""Task libsvm: the objective, its gradient and constants against numerical ones; files good and bad."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clients.tasks import TrainOptions
from clients.tasks.libsvm import Floats, Libsvm
from compression.errors import ConfigError
from tests.clients.tasks.support import averaged, problems, real, write_svmlight

RNG = np.random.default_rng(3)


def made(data: Path, **options: str | int | float) -> Libsvm:
    settings = {"partitioner": "contiguous", "batch_size": 0, "local_steps": 1, "data_dir": str(data), **options}
    return Libsvm(TrainOptions(**settings))  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_svmlight(tmp_path / "data.svm")


def numerical(f: Callable[[Floats], float], x: Floats, h: float = 1e-5) -> Floats:
    return np.array([(f(x + h * e) - f(x - h * e)) / (2 * h) for e in np.eye(len(x))])


def hessian(g: Callable[[Floats], Floats], x: Floats, h: float = 1e-5) -> Floats:
    rows = np.array([(g(x + h * e) - g(x - h * e)) / (2 * h) for e in np.eye(len(x))])
    return np.asarray((rows + rows.T) / 2)


@pytest.mark.parametrize("task_args", ["", "lambda = 0.3, bias = true"])
@pytest.mark.parametrize("model", ["logistic", "nonconvex"])
def test_task_libsvm_gradient_is_the_objectives(file: Path, model: str, task_args: str) -> None:
    task = made(file, model=model, task_args=task_args)
    d = len(task.initial_arrays()["x"])
    assert d == 7 + ("bias" in task_args)
    for scale in (0.1, 3.0, 40.0):
        x = scale * RNG.normal(size=d)
        for client in (None, 0, 2):

            def f(x: Floats, client: int | None = client) -> float:
                return task.objective(x, client, 3)

            np.testing.assert_allclose(task.gradient(x, client, 3), numerical(f, x), atol=1e-7)


def test_task_libsvm_objective_is_the_formula(tmp_path: Path) -> None:
    file = tmp_path / "two.svm"
    file.write_text("2 1:1.5 3:-2\n1 2:4 # a comment\n\n")
    x = np.array([0.2, -0.3, 0.7])
    losses = np.log(1 + np.exp(-(0.2 * 1.5 - 2 * 0.7))) + np.log(1 + np.exp(4 * -0.3))
    assert made(file, task_args="lambda = 0.1").objective(x) == pytest.approx(losses / 2 + 0.05 * (x @ x), rel=1e-15)
    penalty = 0.1 * np.sum(x**2 / (1 + x**2))
    assert made(file, model="nonconvex").objective(x) == pytest.approx(losses / 2 + penalty, rel=1e-15)
    assert made(file).test({"x": x})["accuracy"] == 0.5


def test_task_libsvm_f_is_the_clients_mean_weighted_by_examples(file: Path) -> None:
    task, x = made(file), RNG.normal(size=7)
    s = task.smoothness(7)
    assert s.examples == (9, 9, 9, 9, 8, 8, 8)
    weights = np.array(s.examples) / 60
    assert sum(w * task.objective(x, i, 7) for i, w in enumerate(weights)) == pytest.approx(task.objective(x))
    assert s.L <= s.L_tilde <= s.L_max


def test_task_libsvm_one_full_batch_step_is_exact(file: Path) -> None:
    task, x = made(file, local_lr=0.7), RNG.normal(size=7)
    trained, metrics = task.train({"x": x}, 1, 4, 9)
    assert np.array_equal(trained["x"], x - 0.7 * task.gradient(x, 1, 4))
    assert trained["x"].dtype == np.float64
    assert metrics == {"num-examples": 15, "train_loss": task.objective(x, 1, 4)}


@pytest.mark.parametrize("count", [1, 3, 20])  # 20: three examples a client, fewer than columns
@pytest.mark.parametrize("model", ["logistic", "nonconvex"])
def test_task_libsvm_constants_are_the_hessians_eigenvalues(file: Path, model: str, count: int) -> None:
    task = made(file, model=model, task_args="lambda = 0.2")
    s, zero = task.smoothness(count), np.zeros(7)

    def largest(client: int | None, x: Floats) -> float:
        return float(np.linalg.eigvalsh(hessian(lambda x: task.gradient(x, client, count), x))[-1])

    assert pytest.approx(largest(None, zero), rel=1e-8) == s.L
    for i in range(count):
        assert s.L_clients[i] == pytest.approx(largest(i, zero), rel=1e-8)
    far = 300 * RNG.normal(size=7)
    for x in (RNG.normal(size=7), far):
        curvature = np.linalg.eigvalsh(hessian(task.gradient, x))
        assert np.all(np.abs(curvature) <= s.L + 1e-7)
        assert model == "nonconvex" or curvature[0] >= s.mu - 1e-7
    if model == "logistic":
        assert s.mu == 0.2 == pytest.approx(np.linalg.eigvalsh(hessian(task.gradient, far))[0], rel=0.1)
    else:
        assert (s.mu, s.kappa) == (0.0, np.inf)


def test_task_libsvm_kappa_sets_lambda(file: Path) -> None:
    s = made(file, task_args="kappa = 100").smoothness(3)
    assert s.kappa == pytest.approx(100, rel=1e-10)
    assert float(f"{s.mu:.11e}") == s.mu  # rounded, so that all processes agree on it


@pytest.mark.parametrize("task_args", ["", "kappa = 1e4", "lambda = 1e-6", "lambda = 5.0"])
def test_task_libsvm_optimum_has_no_gradient(file: Path, task_args: str) -> None:
    task = made(file, task_args=task_args)
    x = task.optimum()
    assert np.linalg.norm(task.gradient(x)) < 1e-15
    best = task.objective(x)
    assert all(task.objective(x + 1e-3 * RNG.normal(size=7)) > best for _ in range(20))


def test_task_libsvm_gradient_descent_reaches_the_optimum_at_its_rate(file: Path) -> None:
    task = made(file, task_args="kappa = 10")
    s, x_star = task.smoothness(4), task.optimum()
    descent = made(file, task_args="kappa = 10", local_lr=1 / s.L)
    x = averaged(descent, 4, 150)["x"]
    assert np.sum((x - x_star) ** 2) <= (1 - 1 / s.kappa) ** 150 * np.sum(x_star**2) + 1e-25


def test_task_libsvm_optimum_only_where_there_is_one(file: Path) -> None:
    for task in (made(file, model="nonconvex"), made(file, task_args="lambda = 0")):
        with pytest.raises(ConfigError, match="only model logistic with lambda above 0"):
            task.optimum()


# ---- files


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_task_libsvm_reads_plain_and_compressed_files(file: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    packed = file.with_name(f"packed{suffix}")
    packed.write_bytes(pack(file.read_bytes()))
    x = RNG.normal(size=7)
    assert made(packed).objective(x) == made(file).objective(x)


def test_task_libsvm_test_file_beside_the_data(file: Path) -> None:
    write_svmlight(file.with_name("test.svm"), n=30, d=9, seed=1)
    task = made(file, task_args='test = "test.svm"')
    task.check(3)
    x = RNG.normal(size=9)  # as many columns as the wider file
    other = made(file.with_name("test.svm"))
    assert task.test({"x": x})["loss"] == pytest.approx(other.objective(x))
    assert task.test({"x": x}) != task.test_client({"x": x}, 0, 1)
    assert (
        f"there is no file {file.parent / 'tset.svm'}"
        in problems("libsvm", data_dir=str(file), task_args='test = "tset.svm"')[0]
    )


def test_task_libsvm_with_a_folder_for_each_client(tmp_path: Path) -> None:
    for i, name in enumerate(["a/1.svm", "a/2.svm", "b/1.svm"]):
        write_svmlight(tmp_path / name, n=10 + i, d=4 + i, seed=i)
    task = made(tmp_path, partitioner="folders")
    task.check(2)
    x = RNG.normal(size=6)
    assert [task.train({"x": x}, i, 2, 1)[1]["num-examples"] for i in range(2)] == [21, 12]
    assert task.objective(x, 1, 2) == pytest.approx(made(tmp_path / "b/1.svm").objective(x))
    (tmp_path / "c").mkdir()
    assert "no file in c of" in problems("libsvm", 3, data_dir=str(tmp_path), partitioner="folders")[0]


def test_task_libsvm_cuts_by_query_id(tmp_path: Path) -> None:
    file = tmp_path / "rank.svm"
    file.write_text("".join(f"{i % 2} qid:{i % 3} 1:{i}\n" for i in range(10)))
    task = made(file, partitioner="natural", partition_args='partition_by = "qid"')
    task.check(3)
    assert [task.test_client({"x": np.zeros(1)}, i, 3)["num-examples"] for i in range(3)] == [4, 3, 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("+1 1:2x", "'1:2x' is no INDEX:VALUE"),
        ("+1 1 2", "'1' is no INDEX:VALUE"),
        ("yes 1:2", "label 'yes' is no number"),
        ("nan 1:2", "label nan is not finite"),
        ("+1 2:1 2:3", "index 2 follows 2"),
        ("+1 3:1 2:3", "index 2 follows 3"),
        ("+1 1:inf", "the value in '1:inf' is not finite"),
        ("+1 -1:3", "index -1 in '-1:3' is out of range"),
        ("+1 99999999999:3", "is out of range"),
        ("+1 qid:1 1:2", "a qid, unlike the lines before"),
        ("+1 1:\xff", "is no INDEX:VALUE"),
    ],
)
def test_task_libsvm_names_the_line_of_a_damaged_file(file: Path, line: str, said: str) -> None:
    lines = file.read_text().splitlines()
    lines[41] = line
    file.write_text("\n".join(lines), encoding="latin-1")
    (found,) = problems("libsvm", data_dir=str(file))
    assert found.startswith(f"{file}, line 42: ")
    assert said in found


def test_task_libsvm_names_a_damaged_archive(file: Path) -> None:
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        packed = file.with_name(f"packed{suffix}")
        for content in (pack(file.read_bytes())[:-20], b"something else"):
            packed.write_bytes(content)
            (found,) = problems("libsvm", data_dir=str(packed))
            assert found.startswith(f"{packed}, after line ")
            assert "fetch it again" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no examples; expected a line LABEL INDEX:VALUE"),
        ("1 1:2\n1 1:3\n", "1 labels (1); expected two classes"),
        ("1 1:2\n2 1:3\n3 1:1\n", "3 labels (1, 2, 3); expected two classes"),
    ],
)
def test_task_libsvm_needs_two_classes(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.svm").write_text(text)
    assert said in problems("libsvm", data_dir=str(tmp_path / "x.svm"))[0]


def test_task_libsvm_names_a_foreign_label_of_the_test_file(file: Path) -> None:
    file.with_name("t.svm").write_text("3 1:1\n1 1:1\n")
    (found,) = problems("libsvm", data_dir=str(file), task_args='test = "t.svm"')
    assert "t.svm: label 3, which the training set lacks; expected -1 or 1" in found


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task_args": "lamda = 1"}, "did you mean 'lambda'?"),
        ({"task_args": "lambda = -1"}, "lambda in task-args is -1: "),
        ({"task_args": "lambda = 1, kappa = 10"}, "lambda and kappa are both given"),
        ({"task_args": "kappa = 1"}, "kappa in task-args is 1: Input should be greater than 1"),
        ({"task_args": "kappa = 10", "model": "nonconvex"}, "model nonconvex has no L/mu; give lambda"),
        ({"task_args": 'bias = "yes"'}, "bias in task-args is 'yes': Input should be a valid boolean"),
        ({"model": "svm"}, "unknown model of task libsvm 'svm': expected one of logistic, nonconvex"),
    ],
)
def test_task_libsvm_names_a_mistake(file: Path, options: dict[str, str], said: str) -> None:
    (found,) = problems("libsvm", data_dir=str(file), **options)
    assert said in found


def test_task_libsvm_without_a_file_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "task libsvm needs a file in the svmlight format" in problems("libsvm")[0]
    assert f"{file.parent} holds data.svm" in problems("libsvm", data_dir=str(file.parent))[0]
    assert "61 clients for 60 examples" in problems("libsvm", 61, data_dir=str(file))[0]
    monkeypatch.setenv("KIMAD_DATA", str(file.parent))
    made(Path("data.svm")).check(3)


# ---- real files


def test_task_libsvm_on_real_files() -> None:
    folder = real("libsvm")
    task = made(folder / "mushrooms.bz2", task_args="kappa = 1000", local_lr=0.5)
    task.check(20)
    assert len(task.initial_arrays()["x"]) == 112
    assert task.smoothness(20).kappa == pytest.approx(1000)
    x = task.optimum()
    assert np.linalg.norm(task.gradient(x)) < 1e-15
    assert task.test({"x": x})["loss"] < task.test(averaged(task, 20, 20))["loss"] < 0.3
    tested = made(folder / "a9a.bz2", task_args='test = "a9a.t.bz2", lambda = 1e-4, bias = true')
    assert tested.test({"x": tested.optimum()})["accuracy"] == pytest.approx(0.85, abs=0.003)
