"""Cuts into clients: disjoint, complete, repeatable, and clear about what cannot be cut."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from clients.tasks import TrainOptions, partitions
from clients.tasks.digits import Digits
from compression.errors import ConfigError

LABELS = np.repeat(np.arange(10), 30)
ARGUMENTS = {"natural": 'partition_by = "writer"'}
GOLDEN_SIZES = [101, 51, 146, 211, 208, 170, 167, 158, 131, 95]
GOLDEN_DIGEST = "3a1120df7e05dc2c"
WRITERS = np.arange(len(LABELS)) % 6


def cut(
    name: str, text: str = "", count: int = 6, seed: int = 1, labels: NDArray[Any] = LABELS
) -> partitions.Positions:
    return partitions.cut(
        name,
        text or ARGUMENTS.get(name, ""),
        labels=labels,
        count=count,
        seed=seed,
        task="t",
        columns={"writer": WRITERS},
    )


def refused(name: str, text: str = "", **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        cut(name, text, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(set(partitions.PARTITIONERS) - {"folders"}))
def test_every_partitioner_gives_each_example_to_one_client(name: str) -> None:
    parts = cut(name)
    joined = np.concatenate(parts)
    assert len(parts) == 6
    assert all(len(part) for part in parts)
    assert len(np.unique(joined)) == len(joined)
    if name != "pathological":  # which may leave a label out
        assert len(joined) == len(LABELS)
    assert all(np.array_equal(a, b) for a, b in zip(parts, cut(name), strict=True))


@pytest.mark.parametrize("name", ["iid", "dirichlet", "shards", "pathological", "linear", "square", "exponential"])
def test_drawn_partitions_depend_on_the_seed(name: str) -> None:
    assert any(not np.array_equal(a, b) for a, b in zip(cut(name), cut(name, seed=2), strict=True))


def test_what_each_partitioner_is_for() -> None:
    assert all(len(np.unique(LABELS[part])) >= 8 for part in cut("iid"))  # the file is sorted by label
    assert [len(part) for part in cut("iid", count=7)] == [43] * 6 + [42]
    assert np.array_equal(np.concatenate(cut("contiguous", count=7)), np.arange(300))
    assert max(len(np.unique(LABELS[part])) for part in cut("shards", "num_shards_per_partition = 1", count=10)) == 1
    assert [len(np.unique(LABELS[part])) for part in cut("pathological", "num_classes_per_partition = 3")] == [3] * 6
    sizes = [len(part) for part in cut("linear")]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 5 * sizes[0]
    assert [set(WRITERS[part].tolist()) for part in cut("natural")] == [{i} for i in range(6)]
    assert [set(LABELS[part].tolist()) for part in cut("natural", 'partition_by = "label"')] == [{i} for i in range(6)]
    alike, unlike = (np.std([len(p) for p in cut("dirichlet", f"alpha = {alpha}")]) for alpha in (100.0, 0.2))
    assert alike < unlike


def test_an_empty_and_a_single_example_are_partitions() -> None:
    sizes = {len(part) for part in cut("dirichlet", "alpha = 0.01, min_partition_size = 0", count=30)}
    assert 0 in sizes
    assert {len(part) for part in cut("iid", count=300)} == {1}


def test_the_default_cut_of_digits_never_changes() -> None:
    """Golden: taken before there were other partitioners."""
    task, sizes, digest = Digits(TrainOptions()), [], hashlib.sha256()
    for i in range(10):
        data, mine = task._client(i, 10)
        sizes.append(len(mine))
        digest.update(mine.astype("<i8").tobytes() + data.y.numpy().astype("<i8").tobytes())
    assert sizes == GOLDEN_SIZES
    assert digest.hexdigest()[:16] == GOLDEN_DIGEST


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("dirichlett", "", "unknown partitioner 'dirichlett': expected one of contiguous, dirichlet, exponential"),
        ("dirichlett", "", "did you mean 'dirichlet'?"),
        ("dirichlet", "alhpa = 1.0", "partition-args has 'alhpa': no argument of partitioner dirichlet; expected "),
        ("dirichlet", "alhpa = 1.0", "partition_by, alpha, min_partition_size, self_balancing, shuffle"),
        ("dirichlet", "seed = 1", "partition-args has 'seed'"),
        ("dirichlet", "alpha = -1.0", "partitioner dirichlet cannot cut 300 examples for 6 clients with alpha = -1.0"),
        ("dirichlet", 'alpha = "x"', "The given alpha format is not supported."),
        ("dirichlet", "alpha = 0.001, min_partition_size = 40", "Please update the values of alpha and try again."),
        ("dirichlet", "alpha", "partition-args is 'alpha': "),
        ("dirichlet", "alpha = 1.0} \nb = {", "more than one table; expected the inside of a TOML inline table"),
        ("dirichlet", 'partition_by = "lable"', "unknown column for partition_by in partition-args 'lable'"),
        ("iid", "alpha = 1.0", "no argument of partitioner iid; it takes none"),
        ("contiguous", "alpha = 1.0", "it takes none"),
        ("pathological", "num_classes_per_partition = 11", "is greater than the number of unique classes"),
        ("natural", 'partition_by = "nothing"', "expected one of label, writer"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(name: str, text: str, said: str) -> None:
    assert said in refused(name, text)


def test_counts_that_do_not_fit() -> None:
    assert "301 clients for 300 examples: expected at least one example a client" in refused("iid", count=301)
    assert "'writer' has 6 values, which is too few for 7 clients" in refused("natural", count=7)
    assert "exponential cannot cut 300 examples for 50 clients" in refused("exponential", count=50)
    with pytest.raises(ConfigError, match="partitioner natural needs partition_by in partition-args"):
        partitions.check("natural", "")


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    cut("natural", count=4)
    assert "partitioner natural leaves 100 of 300 examples to no client" in caplog.text


def test_no_global_random_state_is_touched() -> None:
    np.random.seed(3)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    for name in set(partitions.PARTITIONERS) - {"folders"}:
        cut(name)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index] # noqa: NPY002


def test_folders_are_clients_in_the_order_of_their_names(tmp_path: Path) -> None:
    for one in ("b", "a", ".hidden", "c"):
        (tmp_path / one).mkdir()
    (tmp_path / "file").touch()
    assert [one.name for one in partitions.client_folders(tmp_path, 3)] == ["a", "b", "c"]
    for folder, count, said in (
        (tmp_path, 4, "holds 3 folders; expected 4, one for each client"),
        (tmp_path / "a", None, "holds 0 folders; expected one for each client"),
        (tmp_path / "file", None, "is a file; expected a folder"),
        (None, None, "needs data-dir"),
    ):
        with pytest.raises(ConfigError) as caught:
            partitions.client_folders(folder, count)
        assert said in str(caught.value)
