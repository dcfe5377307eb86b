"""How examples are cut into clients: flwr-datasets' partitioners by short name, and two of our own.

Only labels and positions are handed to a partitioner, never the examples. Every draw comes from the
run's seed, so that server and clients, each in a process of its own, cut alike.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from clients.tasks.arguments import table
from compression.errors import ConfigError, unknown_name
from compression.randomness import derived_seed, permutation

_log = logging.getLogger("flwr.kimad")
Positions = tuple[NDArray[np.int64], ...]
KEY: Final = "partition-args"
MIN_PARTITION: Final = 10  # examples that dirichlet leaves every client, where there are enough


def _dirichlet(examples: int, count: int) -> dict[str, Any]:
    return {"alpha": 0.5, "min_partition_size": min(MIN_PARTITION, examples // (2 * count))}


def _always(**arguments: Any) -> Callable[[int, int], dict[str, Any]]:
    return lambda examples, count: arguments


@dataclass(frozen=True, slots=True)
class Partitioner:
    """One way to cut.

    Args:
        cls: class of flwr_datasets.partitioner; "": our own.
        defaults: of examples and number of clients: arguments where the user gives none.
        shuffled: whether the class cuts in the order it finds and draws nothing, so that we shuffle before it.
        needs: arguments without a default, which the user must give.
    """

    cls: str = ""
    defaults: Callable[[int, int], dict[str, Any]] = field(default_factory=_always)
    shuffled: bool = False
    needs: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """The arguments that a user may give: name -> default value, or inspect's `empty`."""
        if not self.cls:
            return {}
        parameters = inspect.signature(_class(self.cls)).parameters
        fixed = {"num_partitions", "seed"}
        return {name: p.default for name, p in parameters.items() if name not in fixed}


def _class(name: str) -> Any:
    import flwr_datasets.partitioner  # heavy (pandas, pyarrow): only where something is cut

    return getattr(flwr_datasets.partitioner, name)


PARTITIONERS: Final[Mapping[str, Partitioner]] = {
    "iid": Partitioner("IidPartitioner", shuffled=True),
    "contiguous": Partitioner(),
    "dirichlet": Partitioner("DirichletPartitioner", _dirichlet),
    "shards": Partitioner("ShardPartitioner", _always(num_shards_per_partition=2)),
    "pathological": Partitioner("PathologicalPartitioner", _always(num_classes_per_partition=2)),
    "linear": Partitioner("LinearPartitioner", shuffled=True),
    "square": Partitioner("SquarePartitioner", shuffled=True),
    "exponential": Partitioner("ExponentialPartitioner", shuffled=True),
    "natural": Partitioner("NaturalIdPartitioner", needs=("partition_by",)),
    "folders": Partitioner(),
}
"""contiguous: equal blocks in file order; folders: one folder of the data a client."""


def check(name: str, text: str) -> dict[str, Any]:
    """The arguments for a partitioner, checked against its signature; needs no data.

    Raises:
        ConfigError: unknown partitioner (the valid ones are listed), or wrong arguments (the partitioner's are listed).
    """
    if name not in PARTITIONERS:
        raise ConfigError(unknown_name("partitioner", name, PARTITIONERS))
    given, kind = table(KEY, text), PARTITIONERS[name]
    known = kind.arguments() if given or kind.needs else {}
    listed = f"expected {', '.join(known)}" if known else "it takes none"
    problems = [f"{KEY} has {one!r}: no argument of partitioner {name}; {listed}" for one in given if one not in known]
    problems += [f"partitioner {name} needs {one} in {KEY}; {listed}" for one in kind.needs if one not in given]
    if problems:
        raise ConfigError(problems)
    return given


def cut(
    name: str,
    text: str,
    *,
    labels: NDArray[Any],
    count: int,
    seed: int,
    task: str,
    columns: Mapping[str, NDArray[Any]] | None = None,
) -> Positions:
    """Positions of each client's examples; no position twice.

    Args:
        name: of the partitioner; not "folders", whose cut is on the disk.
        text: its arguments, as the user wrote them.
        labels: of the examples, shape (n,).
        count: number of clients.
        seed: of the run.
        task: names the draws.
        columns: further columns, shape (n,) each, that `natural` may cut by.

    Raises:
        ConfigError: wrong name or arguments, more clients than examples, or a cut that the partitioner refuses.
    """
    given, kind, n = check(name, text), PARTITIONERS[name], len(labels)
    if name == "folders":
        raise ValueError("folders are cut on the disk; see client_folders")
    if count < 1 or count > n:
        raise ConfigError(
            f"{count} clients for {n} examples: expected at least one example a client; ask for fewer clients or give "
            "more data"
        )
    if name == "contiguous":
        return tuple(np.array_split(np.arange(n), count))

    held = {"label": labels, **(columns or {})}
    arguments = {**kind.defaults(n, count), **given}
    if name == "shards" and "shard_size" in given and "num_shards_per_partition" not in given:
        del arguments["num_shards_per_partition"]  # one of the two
    parameters = inspect.signature(_class(kind.cls)).parameters
    if "seed" in parameters:
        arguments["seed"] = derived_seed(seed=seed, purpose=f"{task}/partition")
    if "num_partitions" in parameters:
        arguments["num_partitions"] = count
    if "partition_by" in parameters:
        arguments.setdefault("partition_by", "label")
        if arguments["partition_by"] not in held:
            raise ConfigError(unknown_name(f"column for partition_by in {KEY}", str(arguments["partition_by"]), held))
    order = permutation(n, seed=seed, purpose=f"{task}/partition") if kind.shuffled else np.arange(n)
    return _cut(name, kind.cls, arguments, {key: column[order] for key, column in held.items()}, order, count)


def _cut(
    name: str,
    cls: str,
    arguments: dict[str, Any],
    columns: dict[str, NDArray[Any]],
    order: NDArray[np.int64],
    count: int,
) -> Positions:
    from datasets import Dataset

    rows = {key: column.tolist() for key, column in columns.items()} | {"position": order.tolist()}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # NaturalIdPartitioner draws a bar
        warnings.simplefilter("ignore")  # of draws that are repeated, of what is left out, of pyarrow's to datasets
        try:
            partitioner = _class(cls)(**arguments)
            partitioner.dataset = Dataset.from_dict(rows)
            found = partitioner.num_partitions
            if found >= count:
                cuts = [partitioner.load_partition(i)["position"] for i in range(count)]
        except Exception as error:  # whatever a library raises for an argument it cannot use
            pairs = ", ".join(f"{k} = {v!r}" for k, v in arguments.items() if k not in ("seed", "num_partitions"))
            said = f" with {pairs}" if pairs else ""
            raise ConfigError(
                f"partitioner {name} cannot cut {len(order)} examples for {count} clients{said}: "
                f"{' '.join(str(error).split())}"
            ) from error
    if found < count:
        raise ConfigError(
            f"partitioner {name}: {arguments['partition_by']!r} has {found} values, which is too few for {count} "
            "clients; ask for fewer clients"
        )
    result = tuple(np.array(one, dtype=np.int64) for one in cuts)
    used = sum(map(len, result))
    if used < len(order):
        _log.warning("partitioner %s leaves %d of %d examples to no client", name, len(order) - used, len(order))
    return result


def client_folders(folder: Path | None, count: int | None = None) -> tuple[Path, ...]:
    """For the partitioner `folders`: the clients' folders, sorted by name; the first is client 0.

    Args:
        folder: what data-dir names.
        count: number of clients, or None where it is not known.

    Raises:
        ConfigError: no folder given, no folders in it, or not as many as there are clients.
    """
    if folder is None:
        raise ConfigError("partitioner folders needs data-dir: a folder with one folder for each client")
    if not folder.is_dir():
        raise ConfigError(f"partitioner folders: {folder} is a file; expected a folder with one folder for each client")
    found = tuple(sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")))
    if not found or (count is not None and len(found) != count):
        wanted = "one for each client" if count is None else f"{count}, one for each client"
        raise ConfigError(
            f"partitioner folders: {folder} holds {len(found)} folders; expected {wanted}; their names, sorted, give "
            "the clients' order"
        )
    return found
