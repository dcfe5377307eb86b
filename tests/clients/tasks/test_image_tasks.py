"""Image tasks: layouts of the data, damaged files, downloads, models, and training on real images."""

from __future__ import annotations

import gzip
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from clients.tasks import Arrays, TrainOptions, data, make_task, whole_of
from clients.tasks.cifar10 import CLASSES, Cifar10
from clients.tasks.digits import Digits
from clients.tasks.fashion_mnist import FashionMnist, read_idx
from clients.tasks.images import BATCH_NORM_WHOLE, Examples, ImageTask, Model
from compression.errors import ConfigError
from compression.layout import Layout
from tests.clients.tasks.support import (
    Loose,
    averaged,
    equal,
    patterns,
    problems,
    real,
    write_fashion,
    write_idx,
    write_images,
)


def size(arrays: Arrays) -> int:
    return sum(array.size for array in arrays.values())


# ---- models


@pytest.mark.parametrize(
    ("task", "model", "parameters"),
    [
        (Digits, "", 38_282),
        (FashionMnist, "", 46_730),
        (FashionMnist, "cnn", 46_730),
        (FashionMnist, "mlp", 55_050),
        (Cifar10, "", 62_006),
        (Cifar10, "lenet", 62_006),
        (Cifar10, "resnet18", 11_173_962),
    ],
)
def test_task_models_have_the_stated_parameters(task: type[ImageTask], model: str, parameters: int) -> None:
    made = task(TrainOptions(model=model))
    patterns = tuple(one.strip() for one in whole_of(made).split(",") if one.strip())
    layout = Layout.of(made.initial_arrays(), patterns)
    assert sum(layout.layers[i].size for i in layout.compressed) == parameters
    assert all(layout.layers[i].name.rpartition(".")[2].startswith(("running", "num_b")) for i in layout.whole)
    assert bool(layout.whole) == (model == "resnet18")


# ---- fashion-mnist


@pytest.mark.parametrize(("suffix", "inner"), [("", ""), (".gz", ""), ("", "FashionMNIST/raw")])
def test_task_fashion_reads_plain_gzipped_and_torchvisions_files(tmp_path: Path, suffix: str, inner: str) -> None:
    write_fashion(tmp_path / inner, suffix)
    task = FashionMnist(TrainOptions(data_dir=str(tmp_path)))
    task.check(4)
    images, labels = patterns(200, 28)
    read, test = FashionMnist.read(tmp_path, [tmp_path])
    assert np.array_equal(read.x.squeeze(1).numpy(), images)
    assert np.array_equal(read.y.numpy(), labels)
    assert test is not None
    assert len(test) == 50


def test_task_fashion_without_test_files_holds_a_fifth_out(tmp_path: Path) -> None:
    task = FashionMnist(TrainOptions(data_dir=str(write_fashion(tmp_path, test=0)), partitioner="iid"))
    assert task.test_client(task.initial_arrays(), 0, 1)["num-examples"] == 160


def test_task_fashion_with_a_folder_for_each_client(tmp_path: Path) -> None:
    for i, one in enumerate("cab"):
        write_fashion(tmp_path / one, train=30 + 10 * i, test=10 * i, seed=i)
    task = FashionMnist(TrainOptions(data_dir=str(tmp_path), partitioner="folders"))
    task.check(3)
    start: Loose = task.initial_arrays()
    assert [task.train(start, i, 3, 1)[1]["num-examples"] for i in range(3)] == [40, 50, 24]  # a, b, c less its fifth
    assert task.test(averaged(task, 3, 3))["loss"] < task.test(start)["loss"]
    assert problems("fashion-mnist", 4, data_dir=str(tmp_path), partitioner="folders") == (
        f"partitioner folders: {tmp_path} holds 3 folders; expected 4, one for each client; their names, sorted, give "
        "the clients' order",
    )


def test_data_is_found_below_kimad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fashion(tmp_path / "fashion-mnist", train=20, test=10)
    write_fashion(tmp_path / "mine", train=40, test=10)
    monkeypatch.setenv("KIMAD_DATA", str(tmp_path))
    for given, n in (("", 20), ("mine", 40)):
        task = make_task("fashion-mnist", TrainOptions(data_dir=given, partitioner="iid"))
        assert task.test_client(task.initial_arrays(), 0, 1)["num-examples"] == n
    assert problems("fashion-mnist", data_dir="other") == (f"data-dir is 'other': there is no {tmp_path / 'other'}",)
    monkeypatch.delenv("KIMAD_DATA")
    assert (
        "expected an absolute path, because Flower runs the app from a copy"
        in problems("fashion-mnist", data_dir="mine")[0]
    )


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "file", "said"),
    [
        (
            lambda p: p.write_bytes(p.read_bytes()[:-5]),
            "train-images-idx3-ubyte",
            "holds 156795 bytes after its header",
        ),
        (lambda p: p.write_bytes(p.read_bytes()[:-5]), "train-images-idx3-ubyte", "expected 156800, an array of shape"),
        (lambda p: p.write_bytes(b"<html>"), "train-labels-idx1-ubyte", "begins with 3c 68 74 6d; expected 00 00 08"),
        (lambda p: p.write_bytes(b""), "t10k-images-idx3-ubyte", "begins with nothing"),
        (lambda p: p.unlink(), "train-labels-idx1-ubyte", "has train-images-idx3-ubyte but no train-labels-idx1-ubyte"),
        (lambda p: p.unlink(), "train-images-idx3-ubyte", "has no train-images-idx3-ubyte, plain or .gz; expected a"),
        (lambda p: write_idx(p, np.zeros((200, 8, 8), np.uint8)), "train-images-idx3-ubyte", "expected (n, 28, 28)"),
        (lambda p: write_idx(p, np.zeros(7, np.uint8)), "train-labels-idx1-ubyte", "of shape (7,); expected (200,)"),
        (
            lambda p: write_idx(p, np.full(50, 10, np.uint8)),
            "t10k-labels-idx1-ubyte",
            "label 10 of image 0; expected 0",
        ),
    ],
)
def test_task_fashion_names_a_damaged_file(tmp_path: Path, damage: Damage, file: str, said: str) -> None:
    damage(write_fashion(tmp_path) / file)
    found = problems("fashion-mnist", data_dir=str(tmp_path))
    assert len(found) == 1
    assert said in found[0]
    assert file in found[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"no gzip at all",
        lambda content: content[:40] + bytes(40) + content[80:],
    ],
)
def test_task_fashion_names_a_damaged_gzip_file(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "x-idx3-ubyte.gz"
    file.write_bytes(damage(gzip.compress(np.random.default_rng(1).bytes(500))))
    with pytest.raises(ConfigError) as caught:
        read_idx(file)
    assert f"{file}: cannot be read (" in str(caught.value)


# ---- downloads


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_task_without_network_says_what_to_put_where(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", offline)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", offline)
    (found,) = problems(name)
    assert f"task {name}: no data: data-dir is empty and the download failed (" in found
    assert "Temporary failure in name resolution" in found
    for said in {
        "fashion-mnist": ["train-images-idx3-ubyte, ", ".gz", "set data-dir to it", "F('FOLDER', download=True)"],
        "cifar10": ["cifar-10-batches-py", "train/CLASS", "set data-dir to it", "C('FOLDER', download=True)"],
    }[name]:
        assert said in found
    assert not list((Path.home() / ".kimad" / "data").iterdir())  # nothing half done is left


def test_task_downloads_once_into_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(folder: str) -> None:
        calls.append(folder)
        write_fashion(Path(folder) / "FashionMNIST" / "raw", train=20, test=10)

    monkeypatch.setattr("clients.tasks.fashion_mnist._fetch", fetch)
    for seed in (9_001, 9_002):  # no other test's cached data
        FashionMnist(TrainOptions(seed=seed, partitioner="iid")).check(2)
    assert len(calls) == 1
    assert (Path.home() / ".kimad/data/fashion-mnist/FashionMNIST/raw/train-images-idx3-ubyte").is_file()


def test_of_two_downloads_at_the_same_time_one_is_kept() -> None:
    def fetch(folder: str) -> None:
        (Path(folder) / "slow").touch()
        (Path.home() / ".kimad/data/x").mkdir()
        (Path.home() / ".kimad/data/x/fast").touch()

    folder = data.downloaded("x", fetch, "")
    assert [one.name for one in folder.iterdir()] == ["fast"]
    assert [one.name for one in folder.parent.iterdir()] == ["x"]


def test_a_download_that_breaks_off_is_no_data() -> None:
    def fetch(folder: str) -> None:
        (Path(folder) / "half").touch()
        raise RuntimeError("File not found or corrupted.")

    with pytest.raises(ConfigError, match="File not found or corrupted"):
        data.downloaded("x", fetch, "put it there")
    assert not list((Path.home() / ".kimad/data").iterdir())


# ---- cifar10


def test_task_cifar_reads_images_by_class(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 3, CLASSES)
    write_images(tmp_path / "test", 2, CLASSES, seed=1)
    train, test = Cifar10.read(tmp_path, [tmp_path])
    assert test is not None
    assert (train.x.shape, train.x.dtype, len(test)) == ((30, 3, 32, 32), torch.uint8, 20)
    assert train.y.tolist() == [label for label in range(10) for _ in range(3)]
    first = np.asarray(Image.open(tmp_path / "train" / "bird" / "0001.png"))
    assert np.array_equal(train.x[2 * 3 + 1].numpy(), first.transpose(2, 0, 1))


def test_task_cifar_without_a_test_folder_holds_a_fifth_out(tmp_path: Path) -> None:
    task = Cifar10(TrainOptions(data_dir=str(write_images(tmp_path, 5, CLASSES, ".jpg")), partitioner="iid"))
    assert task.test_client(task.initial_arrays(), 0, 1)["num-examples"] == 40
    assert task.test(task.initial_arrays())["accuracy"] * 10 == pytest.approx(
        round(task.test(task.initial_arrays())["accuracy"] * 10)
    )


def test_task_cifar_labels_mean_the_same_in_each_clients_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "c0" / "train", 2, ("cat", "ship"))
    write_images(tmp_path / "c1", 5, ("ship",))
    folders = [tmp_path / "c0", tmp_path / "c1"]
    assert [sorted(set(Cifar10.read(one, folders)[0].y.tolist())) for one in folders] == [[3, 8], [8]]
    write_images(tmp_path / "c2", 5, ("zebra", "apple"))  # classes of one's own: by their sorted names
    folders.append(tmp_path / "c2")
    assert [sorted(set(Cifar10.read(one, folders)[0].y.tolist())) for one in folders] == [[1, 2], [2], [0, 3]]
    task = Cifar10(TrainOptions(data_dir=str(tmp_path), partitioner="folders"))
    task.check(3)
    assert [task.train(task.initial_arrays(), i, 3, 1)[1]["num-examples"] for i in range(3)] == [3, 4, 8]


def test_task_cifar_names_a_bad_image_and_a_bad_folder(tmp_path: Path) -> None:
    write_images(tmp_path, 1, CLASSES)
    bad = tmp_path / "cat" / "0000.png"
    whole = bad.read_bytes()
    for content in (whole[: len(whole) // 2], b"no image", b"", whole[:60] + bytes(30) + whole[90:]):
        bad.write_bytes(content)
        (found,) = problems("cifar10", data_dir=str(tmp_path))
        assert found.startswith(f"{bad}: no readable image (")
    Image.new("RGB", (28, 30)).save(bad)
    assert f"{bad}: 28 x 30 pixels; expected 32 x 32" in problems("cifar10", data_dir=str(tmp_path))[0]
    (tmp_path / "empty").mkdir()
    assert (
        "holds no images; expected a folder with one folder of .png or .jpg images for each class"
        in problems("cifar10", data_dir=str(tmp_path / "empty"))[0]
    )
    archive = tmp_path / "cifar.tar.xz"
    archive.touch()
    assert "cifar.tar.xz', a file; expected a folder" in problems("cifar10", data_dir=str(archive))[0]
    write_images(tmp_path / "many", 1, tuple(f"c{i}" for i in range(11)))
    assert "images of 11 classes; expected at most 10" in problems("cifar10", data_dir=str(tmp_path / "many"))[0]
    (tmp_path / "torn" / "cifar-10-batches-py").mkdir(parents=True)
    assert (
        "cifar-10-batches-py: Dataset not found or corrupted" in problems("cifar10", data_dir=str(tmp_path / "torn"))[0]
    )


def test_task_cifar_with_resnet18_moves_its_running_statistics(tmp_path: Path) -> None:
    write_images(tmp_path, 1, CLASSES)
    task = Cifar10(
        TrainOptions(data_dir=str(tmp_path), model="resnet18", batch_size=3, local_steps=1, partitioner="iid")
    )
    assert task.whole == BATCH_NORM_WHOLE
    start: Loose = task.initial_arrays()
    trained, metrics = task.train(start, 0, 2, 1)
    assert trained["bn1.num_batches_tracked"] == start["bn1.num_batches_tracked"] + 1
    assert not np.array_equal(trained["layer4.1.bn2.running_var"], start["layer4.1.bn2.running_var"])
    assert np.isfinite(metrics["train_loss"])
    assert set(task.test(trained)) == {"loss", "accuracy"}


# ---- the shared base


class TinyNet(nn.Module):
    """Batch normalisation of single values: torch refuses a batch of one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 5)
        self.norm = nn.BatchNorm1d(5)
        self.fc2 = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc2(self.norm(self.fc1(x.flatten(1))))
        return logits


class TinyLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(x.flatten(1))
        return logits


class Tiny(ImageTask):
    """A whole image task: its name, its models, and how it is read."""

    name = "tiny"
    models: ClassVar[Mapping[str, Model]] = {
        "normed": Model(TinyNet, BATCH_NORM_WHOLE),
        "linear": Model(TinyLinear),
        "chunked": Model(TinyLinear, chunk=7),
    }

    @classmethod
    def read(cls, folder: Path | None, siblings: Sequence[Path]) -> tuple[Examples, Examples | None]:
        x, y = patterns(50, 8)
        return Examples(torch.from_numpy(x).unsqueeze(1), torch.from_numpy(y.astype(np.int64))), None


def test_an_image_task_of_ones_own_is_small() -> None:
    task = make_task(f"{__name__}:Tiny", TrainOptions(local_lr=0.05))
    task.check(4)
    assert task.test(averaged(task, 4, 5))["loss"] < task.test(task.initial_arrays())["loss"]
    (found,) = problems(f"{__name__}:Tiny", model="lineer")
    assert (
        found == "unknown model of task tiny 'lineer': expected one of chunked, linear, normed; did you mean 'linear'?"
    )


def test_a_batch_of_one_image_does_not_stop_batch_normalisation() -> None:
    task = Tiny(TrainOptions(partitioner="iid", local_steps=2))
    start: Loose = task.initial_arrays()
    trained, metrics = task.train(start, 0, 40, 1)  # one image
    assert metrics["num-examples"] == 1
    assert np.array_equal(trained["norm.running_mean"], start["norm.running_mean"])  # one image teaches no statistics
    assert not np.array_equal(trained["fc1.weight"], start["fc1.weight"])
    odd = Tiny(TrainOptions(partitioner="iid", batch_size=3, local_steps=2))
    trained, _ = odd.train(start, 0, 10, 1)  # four images: a batch of three, a batch of one
    assert trained["norm.num_batches_tracked"] == 1


def test_a_client_without_examples_returns_the_model_unchanged() -> None:
    task = Tiny(TrainOptions(partition_args="alpha = 0.01, min_partition_size = 0", model="linear"))
    sizes = [task._client(i, 20)[1].size for i in range(20)]
    empty, start = sizes.index(0), task.initial_arrays()
    trained, metrics = task.train(start, empty, 20, 1)
    assert equal(trained, start)
    assert metrics == {"num-examples": 0, "train_loss": 0.0}
    assert task.test_client(start, empty, 20) == {"num-examples": 0, "loss": 0.0, "accuracy": 0.0}


def test_chunks_change_memory_and_not_the_gradient() -> None:
    one, parts = (
        Tiny(TrainOptions(model=m, batch_size=0, partitioner="iid", local_steps=1)) for m in ("linear", "chunked")
    )
    (a, ma), (b, mb) = (task.train(one.initial_arrays(), 0, 2, 1) for task in (one, parts))
    assert ma["train_loss"] == pytest.approx(mb["train_loss"], rel=1e-5)
    for name in a:
        np.testing.assert_allclose(a[name].astype(float), b[name].astype(float), rtol=1e-4, atol=1e-6)
    tested = one.test(a), parts.test(a)
    assert tested[0]["accuracy"] == tested[1]["accuracy"]
    assert tested[0]["loss"] == pytest.approx(tested[1]["loss"], rel=1e-5)


def test_one_step_is_the_gradient_of_the_mean_loss() -> None:
    task = Tiny(TrainOptions(model="linear", batch_size=0, partitioner="iid", local_steps=1, local_lr=0.5))
    start: Loose = task.initial_arrays()
    examples, mine = task._client(1, 4)
    x = examples.at(mine).x.flatten(1).double().numpy() / 255
    logits = x @ start["fc.weight"].T + start["fc.bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(p)), examples.y[mine].numpy()] -= 1
    trained: Loose = task.train(start, 1, 4, 1)[0]
    np.testing.assert_allclose(trained["fc.weight"], start["fc.weight"] - 0.5 * p.T @ x / len(x), rtol=1e-4, atol=1e-6)


def test_training_leaves_torchs_generator_alone() -> None:
    task = Digits(TrainOptions(local_steps=1))
    before = torch.random.get_rng_state()
    task.train(task.initial_arrays(), 0, 5, 1)
    task.test(task.initial_arrays())
    assert torch.equal(before, torch.random.get_rng_state())


def test_task_digits_takes_no_files(tmp_path: Path) -> None:
    (found,) = problems("digits", data_dir=str(tmp_path))
    assert found == "task digits reads no files: leave data-dir empty, without partitioner folders"
    (found,) = problems("digits", 2000)
    assert "2000 clients for 1438 examples" in found


# ---- real images


def test_task_fashion_learns_from_real_images() -> None:
    task = make_task("fashion-mnist", TrainOptions(data_dir=str(real("fashion-mnist")), local_lr=0.1, model="mlp"))
    task.check(100)
    assert task.test(averaged(task, 100, 5))["accuracy"] > 0.5


def test_task_cifar_learns_from_real_images(tmp_path: Path) -> None:
    archive = real("cifar10_jpeg_24k.tar.xz")
    taken: dict[str, int] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile():
                continue
            folder = member.name.rpartition("/")[0]
            most = 30 if folder.startswith("train") else 10
            taken[folder] = taken.get(folder, 0) + 1
            if taken[folder] > most:
                continue
            target = tmp_path / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    assert len(taken) == 20
    task = make_task("cifar10", TrainOptions(data_dir=str(tmp_path), local_lr=0.1, local_steps=20))
    task.check(5)
    start = task.test(task.initial_arrays())
    after = task.test(averaged(task, 5, 8))
    assert after["loss"] < start["loss"]
    assert after["accuracy"] > 0.15
