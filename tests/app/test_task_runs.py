"""Built-in tasks by the whole strategy: running statistics, EF21's theory, and what the configurations promise."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from app.cli import main
from app.rundir import read_rows
from clients import kimad_mod
from clients.tasks import Task, TrainOptions, make_task, whole_of
from strategies import InProcessGrid, Kimad, LinkSettings, Settings, SimulatedNetwork

ROOT = Path(__file__).resolve().parents[2]
Arrays = dict[str, NDArray[Any]]


def data_folder(name: str) -> Path:
    """A data set's folder or file below KIMAD_DATA; skips the test when there is none."""
    root = os.environ.get("KIMAD_DATA")
    if not root:
        pytest.skip("KIMAD_DATA is not set: it names the folder that holds the data sets")
    if not (Path(root) / name).exists():
        pytest.skip(f"no {name} in the folder that KIMAD_DATA names")
    return Path(root) / name


def app_of(task: Task, seen: dict[tuple[int, int], Arrays] | None = None) -> ClientApp:
    """A ClientApp that trains a task; what client i returned in round r is kept as seen[r, i]."""
    app = ClientApp(mods=[kimad_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        index, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
        config = message.content.config_records["config"]
        received = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        arrays, metrics = task.train(received, index, count, int(str(config["seed"])))
        if seen is not None:
            seen[int(str(config["server-round"])), index] = {n: np.array(a) for n, a in arrays.items()}
        content = RecordDict({"arrays": record(arrays), "metrics": MetricRecord(dict(metrics))})
        return Message(content, reply_to=message)

    return app


def record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def images_by_class(folder: Path, per_class: int) -> None:
    """Small noisy images of ten colours, as .png files by class."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for label in range(10):
        where = folder / f"class{label}"
        where.mkdir(parents=True)
        for i in range(per_class):
            colour = 25 * label + rng.integers(-10, 10, size=(32, 32, 3))
            Image.fromarray(np.clip(colour, 0, 255).astype(np.uint8)).save(where / f"{i:03}.png")


def test_task_cifar10_resnet18_statistics_arrive_whole_with_partial_participation(tmp_path: Path) -> None:
    """Running statistics are their participants' weighted means, counters their maximum, and all bytes are counted."""
    images_by_class(tmp_path / "images", per_class=4)
    options = TrainOptions(
        batch_size=4,
        local_steps=2,
        local_lr=0.01,
        model="resnet18",
        data_dir=str(tmp_path / "images"),
        partitioner="iid",
    )
    task = make_task("cifar10", options)
    seen: dict[tuple[int, int], Arrays] = {}
    rows: list[dict[str, Any]] = []
    models: list[Arrays] = []

    def on_round(row: dict[str, Any], _: dict[str, Any]) -> None:
        rows.append(row)
        models.append({name: np.array(array) for name, array in strategy.arrays.items()})

    whole = tuple(whole_of(task).split(", "))
    settings = Settings(
        time_budget_s=3.0, fraction=0.5, whole=whole, allocation="uniform", initial_rate_bps=1e6, evaluate="none"
    )
    links = LinkSettings("constant", 1e6, 2e6, overhead_s=0.0, compute_s=1.0)
    strategy = Kimad(settings, SimulatedNetwork(links), on_round=on_round)
    initial = task.initial_arrays()
    strategy.start(
        grid=InProcessGrid.of_partitions(app_of(task, seen), 4, {}, tmp_path / "state"),
        initial_arrays=record(dict(initial)),
        num_rounds=2,
    )
    names = [n for n in initial if "running_" in n or "num_batches_tracked" in n]
    assert len(names) == 60  # 20 batch normalisations: mean, variance, counter
    assert {strategy.layout.layers[i].name for i in strategy.layout.whole} == set(names)
    whole_bytes = sum(initial[n].nbytes for n in names)
    counter = "bn1.num_batches_tracked"
    for row, model in zip(rows, models, strict=True):
        participants = [int(c) for c in row["accepted"]]
        assert len(participants) == 2
        answers = [seen[row["round"], i] for i in participants]
        weights = np.array([8.0, 8.0])  # 32 training images, four equal parts
        for name in names:
            parts = [np.asarray(a[name], np.float64) for a in answers]
            if "num_batches_tracked" in name:
                assert model[name] == max(parts)
            else:
                mean = sum(w * p for w, p in zip(weights / weights.sum(), parts, strict=True))
                np.testing.assert_array_equal(model[name], np.asarray(mean, np.float32))
        assert all(whole_bytes < n <= 500_000 for n in row["uplink_bytes_by_client"].values())
        budgets = row["budget_bytes_by_client"]
        assert all(n <= budgets[c] for c, n in row["uplink_bytes_by_client"].items())
        assert row["uplink_bytes"] == sum(row["uplink_bytes_by_client"].values())
    assert models[0][counter] == 2  # two local steps
    assert models[1][counter] == 4  # of the received counter's maximum: each round adds two


def ef21_gaps(path: Path, tmp_path: Path, rounds: int, every: int) -> list[float]:
    """EF21, Top-56 of 112, five workers in file order, kappa 101, the theory's step; gaps f - f* every so often."""
    options = TrainOptions(
        batch_size=0,
        local_steps=1,
        local_lr=1.0,
        data_dir=str(path),
        partitioner="contiguous",
        task_args="kappa = 101.0",
    )
    task = make_task("libsvm", options)
    constants = task.smoothness(5)  # type: ignore[attr-defined]
    assert constants.kappa == pytest.approx(101.0)
    alpha = 0.5
    step = 1 / (constants.L + constants.L_tilde * ((1 + np.sqrt(1 - alpha)) / alpha - 1))
    best = task.objective(task.optimum())  # type: ignore[attr-defined]
    settings = Settings(
        operator="topk",
        ratio=0.5,
        values="fp64",
        server_lr=float(step),
        evaluate_every=every,
        weights="examples",
    )
    gaps: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        gaps.append(task.objective(arrays["x"].numpy()) - best)  # type: ignore[attr-defined]
        return MetricRecord({"loss": gaps[-1]})

    Kimad(settings, SimulatedNetwork(LinkSettings("constant", 1e6, 1e6))).start(
        grid=InProcessGrid.of_partitions(app_of(task), 5, {}, tmp_path / "state"),
        initial_arrays=record(dict(task.initial_arrays())),
        num_rounds=rounds,
        evaluate_fn=evaluate,
    )
    return gaps


@pytest.mark.slow
def test_task_mushrooms_converges_linearly_by_ef21_with_the_theorys_step(tmp_path: Path) -> None:
    gaps = ef21_gaps(data_folder("libsvm/mushrooms.bz2"), tmp_path, rounds=4000, every=100)
    print("gaps:", " ".join(f"{gap:.1e}" for gap in gaps))
    assert gaps[-1] < 1e-10
    # linear: between gaps of 1e-2 and 1e-12 the logarithm falls on a line, within a factor of 3
    logs = np.log([gap for gap in gaps if 1e-12 < gap < 1e-2])
    rounds = np.arange(len(logs))
    slope, start = np.polyfit(rounds, logs, 1)
    assert slope < 0
    assert np.max(np.abs(logs - (start + slope * rounds))) < np.log(3)


@pytest.mark.slow
def test_task_fashion_mnist_reaches_80_percent_with_3_percent_of_the_bytes(tmp_path: Path) -> None:
    """conf/fashion-mnist.toml, as a stranger would run it."""
    folder = data_folder("fashion-mnist")
    file = ROOT / "conf" / "fashion-mnist.toml"
    settings = [f"data-dir={folder}", "dense-run=false"]
    assert main(["run", *settings, "--config", str(file), "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run")
    wanted = tomllib.loads(file.read_text())["target-accuracy"]
    assert wanted >= 0.8
    assert rows[-1]["test_accuracy"] >= wanted
    assert sum(r["uplink_bytes"] for r in rows) <= 0.03 * sum(r["uplink_dense_bytes"] for r in rows)


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(head + array.tobytes())


def idx_folder(folder: Path) -> Path:
    """Fashion-MNIST's files with 200 + 50 images whose brightness is their label."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for which, n in (("train", 200), ("t10k", 50)):
        labels = rng.integers(0, 10, n).astype(np.uint8)
        images = (labels[:, None, None] * 25 + rng.integers(0, 20, (n, 28, 28))).astype(np.uint8)
        write_idx(folder / f"{which}-images-idx3-ubyte", images)
        write_idx(folder / f"{which}-labels-idx1-ubyte", labels)
    return folder


def svmlight_file(path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(60):
        x = rng.normal(size=6)
        lines.append(f"{1 if x.sum() > 0 else -1} " + " ".join(f"{i + 1}:{v:.4f}" for i, v in enumerate(x)))
    path.write_text("\n".join(lines) + "\n")
    return path


def task_settings(task: str, folder: Path) -> list[str]:
    """Run keys with which a task trains on data made here."""
    if task == "fashion-mnist":
        return [f"data-dir={idx_folder(folder / 'idx')}", "local-lr=0.05"]
    if task == "cifar10":
        images_by_class(folder / "images", per_class=10)
        return [f"data-dir={folder / 'images'}", "local-lr=0.05", "partitioner=iid"]
    if task == "libsvm":
        return [
            f"data-dir={svmlight_file(folder / 'x.txt')}",
            "local-lr=1.0",
            "partitioner=shards",
            "target-accuracy=0.0",
        ]
    if task == "quadratic":
        return ["local-lr=0.01", "task-args=spread = 1.0", "uplink-bps-min=2000", "uplink-bps-max=4000"]
    return []


@pytest.mark.parametrize("task", ["digits", "fashion-mnist", "cifar10", "libsvm", "quadratic"])
def test_task_trains_a_few_rounds(task: str, tmp_path: Path) -> None:
    settings = [f"task={task}", "num-rounds=6", "dense-run=false", *task_settings(task, tmp_path)]
    assert main(["run", *settings, "--clients", "3", "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 6
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    assert (rows[-1]["test_accuracy"] is None) == (task == "quadratic")
    assert all(not row["refused"] for row in rows)
    assert all(n <= row["budget_bytes_by_client"][c] for row in rows for c, n in row["uplink_bytes_by_client"].items())
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 10_000


RIVALS = {
    "dense": ["operator=identity", "deadline=0.0"],
    "fixed ratio": ["ratio=0.05", "deadline=0.0"],
    "fixed ratio, deadline": ["ratio=0.05", "late=drop"],
    "static": ["budget-rate=mean"],
    "oracle": ["budget-rate=oracle"],
    "kimad": ["allocation=uniform"],
    "kimad+": ["allocation=knapsack"],
    "global": ["allocation=global"],
    "plain errors": ["allocation=knapsack", "errors=plain"],
    "randk": ["operator=randk"],
    "fp16": ["values=fp16"],
    "floors": ["floors=conv*=0.02, fc2*=5"],
    "poisson": ["sampling=poisson", "fraction=0.7"],
    "coordinates": ["unit=coordinates", "uplink-bps-min=1600", "uplink-bps-max=16000", "initial-rate-bps=4000"],
}


@pytest.mark.parametrize("rival", RIVALS)
def test_rivals_run_on_the_same_network_and_wire(rival: str, tmp_path: Path) -> None:
    settings = [
        "num-rounds=4",
        "dense-run=false",
        "compute-s=0.5",
        "time-budget=2.0",
        "seed=3",
        "local-lr=0.1",
        *RIVALS[rival],
    ]
    assert main(["run", *settings, "--clients", "3", "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 4
    assert rows[-1]["test_loss"] < 2.5  # a guess has 2.30, and four rounds teach little
    sent = sum(row["uplink_bytes"] for row in rows)
    whole = sum(row["uplink_dense_bytes"] for row in rows)
    assert (sent == whole) == (rival == "dense")
    if rival == "oracle":  # it knows what it must: nothing is late, and little time is left over
        assert sum(row["deadline_misses"] for row in rows) == 0
        assert all(1.9 < row["round_s"] <= 2.0 for row in rows)
    if rival == "static":
        assert len({pair for row in rows for pair in row["budget_bytes_by_client"].items()}) == 3
    if rival == "floors":
        for row in rows:
            assert row["ratios_by_layer"]["conv2.weight"] >= 0.02
            assert row["ratios_by_layer"]["fc2.weight"] >= 5 / 640
    if rival == "coordinates":
        for row in rows:
            kept = sum(r for r in row["ratios_by_layer"].values())
            assert kept > 0
            assert all(b <= 2000 * 1.5 for b in row["budget_bytes_by_client"].values())


def test_task_on_traces_and_by_a_link_file(tmp_path: Path) -> None:
    """A step trace for one client, a constant line for the others, as a link file says."""
    (tmp_path / "step.csv").write_text("seconds,kbps\n10,40\n10,400\n")
    links = tmp_path / "links.toml"
    links.write_text(
        '[[link]]\nclients = "0"\nkind = "trace"\nup = "step.csv"\nformat = "csv"\nduration_column = "seconds"\n'
        'rate_column = "kbps"\nrate_unit = "kbit/s"\noffset_s = 0.0\n'
        '[default]\nkind = "constant"\nuplink_bps = 80000.0\n'
    )
    settings = [f"link-file={links}", "num-rounds=12", "dense-run=false", "deadline=0.0"]
    assert main(["run", *settings, "--clients", "3", "--run-dir", str(tmp_path / "run")]) == 0
    rows = read_rows(tmp_path / "run")
    assert {row["true_up_bps"]["1"] for row in rows} == {80_000.0}
    for row in rows:
        began = row["virtual_s"] - row["round_s"]
        assert row["true_up_bps"]["0"] == (40_000.0 if began % 20 < 10 else 400_000.0)


def test_task_on_a_real_trace(tmp_path: Path) -> None:
    root = os.environ.get("KIMAD_TRACES")
    if not root:
        pytest.skip("KIMAD_TRACES is not set: it names the folder that holds the bandwidth traces")
    settings = ["links=trace", 'link-args=path = "mahimahi/ATT-LTE-driving.up.gz"', "num-rounds=5", "dense-run=false"]
    assert main(["run", *settings, "--clients", "3", "--run-dir", str(tmp_path / "run")]) == 0
    rates = {rate for row in read_rows(tmp_path / "run") for rate in row["true_up_bps"].values()}
    assert len(rates) > 5
