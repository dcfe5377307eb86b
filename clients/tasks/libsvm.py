"""Task `libsvm`: logistic regression on a file in the svmlight format; an optimisation task in float64, without torch.

f(x) = 1/n sum_j log(1 + exp(-b_j a_j.x)) + R(x), over the n examples with rows a_j and labels b_j = +-1:

- model `logistic` (default): R(x) = lambda/2 ||x||^2, strongly convex with mu = lambda;
- model `nonconvex`: R(x) = lambda sum_j x_j^2/(1 + x_j^2), as in the papers of EF21.

f_i is the same mean over client i's examples, with the same R, so that f is the clients' mean weighted by examples.
Without a test file the training set is the test set: the loss is f, and its distance from the minimum is what counts.

Source: Richtarik, Sokolov, Fatkhullin, EF21 (2021), section 5 (nonconvex); Mishchenko et al., DIANA (2019), section 6.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from clients.tasks import Arrays, TrainOptions, partitions
from clients.tasks.arguments import Arguments, read, require
from clients.tasks.batches import batches
from clients.tasks.data import data_path
from clients.tasks.smoothness import Smoothness
from compression.errors import ConfigError, unknown_name

Floats = NDArray[np.float64]
NAME: Final = "libsvm"
MODELS: Final = ("logistic", "nonconvex")
DEFAULT_LAMBDA: Final = {"logistic": 0.001, "nonconvex": 0.1}
NEWTON_STEPS: Final = 100


class LibsvmArguments(Arguments):
    """task-args of `libsvm`."""

    lambda_: float | None = Field(None, alias="lambda", ge=0, description="weight of the regulariser")
    kappa: float | None = Field(None, gt=1, description="instead of lambda, for logistic: L/mu")
    bias: bool = Field(False, description="whether a column of ones is added, regularised like the others")
    test: str = Field("", description="test file, absolute or beside the data; '': the training set is the test set")

    @model_validator(mode="after")
    def _fits(self) -> LibsvmArguments:
        if self.lambda_ is not None and self.kappa is not None:
            raise ValueError("lambda and kappa are both given: one follows from the other, leave one out")
        return self


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples: scipy's sparse rows (n, d) and labels +-1 (n,)."""

    a: Any
    b: Floats

    def __len__(self) -> int:
        return len(self.b)

    def at(self, positions: NDArray[np.int64]) -> Rows:
        """Those at these positions, in that order."""
        return Rows(self.a[positions], self.b[positions])


@dataclass(frozen=True, slots=True)
class Data:
    """What the files hold: rows of all files joined, rows of each file, query ids (n,) or none, test rows."""

    rows: Rows
    sizes: tuple[int, ...]
    qid: NDArray[np.int64]
    test: Rows


class Libsvm:
    """The task; see clients.tasks.Task. The model is one array, "x", shape (d,), float64, zero at the start."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self._cuts: dict[int, partitions.Positions] = {}
        self._clients: dict[tuple[int, int], Rows] = {}

    @cached_property
    def arguments(self) -> LibsvmArguments:
        """The checked task-args."""
        found = read("task-args", self.options.task_args, LibsvmArguments)
        if found.kappa is not None and self.model == "nonconvex":
            raise ConfigError("kappa in task-args: model nonconvex has no L/mu; give lambda, or use model logistic")
        return found

    @cached_property
    def model(self) -> str:
        """Name of the regulariser: one of MODELS."""
        name = self.options.model or MODELS[0]
        if name not in MODELS:
            raise ConfigError(unknown_name(f"model of task {NAME}", name, MODELS))
        return name

    @cached_property
    def lambda_(self) -> float:
        """Weight of the regulariser.

        From kappa, it is rounded to 12 digits: an eigenvalue's last bits depend on how many threads found it, and all
        processes must have the same f.
        """
        given = self.arguments
        if given.kappa is not None:
            return float(f"{self._curvature(self._data.rows) / (given.kappa - 1):.11e}")
        return DEFAULT_LAMBDA[self.model] if given.lambda_ is None else given.lambda_

    def check(self, count: int | None) -> None:
        """See clients.tasks.Task."""
        o = self.options
        require(
            lambda: self.model,
            lambda: read("task-args", o.task_args, LibsvmArguments),
            lambda: partitions.check(o.partitioner, o.partition_args),
            lambda: self._files(count),
        )
        _ = self.arguments, self._data.test
        if count is not None:
            self._cut(count)

    def initial_arrays(self) -> Arrays:
        """Zero."""
        return {"x": np.zeros(self._data.rows.a.shape[1])}

    def train(self, arrays: Arrays, index: int, count: int, seed: int) -> tuple[Arrays, dict[str, float | int]]:
        """`local_steps` steps x - lr * gradient; with batch-size 0 of f_i itself, exact and without a draw."""
        o, rows = self.options, self._client(index, count)
        x = np.array(arrays["x"], np.float64)
        if len(rows) == 0:
            return {"x": x}, {"num-examples": 0, "train_loss": 0.0}
        losses: list[float] = []
        for step in batches(len(rows), o.batch_size, o.local_steps, seed=seed, purpose=f"{NAME}/batches"):
            batch = rows if o.batch_size == 0 else rows.at(step)
            losses.append(self._value(x, batch))
            x = x - o.local_lr * self._gradient(x, batch)
        return {"x": x}, {"num-examples": len(rows), "train_loss": math.fsum(losses) / len(losses)}

    def test(self, arrays: Arrays) -> dict[str, float]:
        """f and accuracy on the test file, or on the training set where there is none."""
        return self._metrics(np.asarray(arrays["x"], np.float64), self._data.test)

    def test_client(self, arrays: Arrays, index: int, count: int) -> dict[str, float | int]:
        """f_i and accuracy on one client's examples; 0 and 0 where it has none."""
        rows = self._client(index, count)
        if len(rows) == 0:
            return {"num-examples": 0, "loss": 0.0, "accuracy": 0.0}
        return {"num-examples": len(rows), **self._metrics(np.asarray(arrays["x"], np.float64), rows)}

    def objective(self, x: Floats, index: int | None = None, count: int = 1) -> float:
        """f, or client `index`'s f_i, at x of shape (d,)."""
        return self._value(x, self._data.rows if index is None else self._client(index, count))

    def gradient(self, x: Floats, index: int | None = None, count: int = 1) -> Floats:
        """Gradient of f, or of client `index`'s f_i, at x; shape (d,)."""
        return self._gradient(x, self._data.rows if index is None else self._client(index, count))

    def smoothness(self, count: int) -> Smoothness:
        """Exact constants of f and of `count` clients' f_i.

        The largest eigenvalue of A^T A/(4 n), from all eigenvalues of the smaller of A^T A and A A^T, plus R's lambda
        (logistic) or 2 lambda (nonconvex): both are reached at x = 0. Takes min(n, d)^3 operations.
        """
        extra = self.lambda_ * (1 if self.model == "logistic" else 2)
        clients = [self._client(i, count) for i in range(count)]
        return Smoothness(
            L=self._curvature(self._data.rows) + extra,
            L_clients=tuple(self._curvature(rows) + extra for rows in clients),
            mu=self.lambda_ if self.model == "logistic" else 0.0,
            examples=tuple(map(len, clients)),
        )

    def optimum(self) -> Floats:
        """The minimiser of f, shape (d,), by Newton's method until rounding stops it: ||gradient|| about 1e-16.

        Raises:
            ConfigError: model nonconvex, or lambda 0: there is no single minimiser.
        """
        if self.model != "logistic" or self.lambda_ == 0:
            raise ConfigError("optimum: only model logistic with lambda above 0 has one minimiser")
        rows, x = self._data.rows, np.zeros(self._data.rows.a.shape[1])
        value, gradient = self._value(x, rows), self._gradient(x, rows)
        for _ in range(NEWTON_STEPS):
            direction = np.linalg.solve(self._hessian(x, rows), gradient)
            slope, step = float(np.sum(gradient * direction)), 1.0
            near = slope < 1e-12 * value  # f no longer tells which of two points is better, its gradient does
            while step > 1e-10:
                there = x - step * direction
                value_there, gradient_there = self._value(there, rows), self._gradient(there, rows)
                if near and np.sum(gradient_there**2) >= np.sum(gradient**2) / 4:
                    return x  # Newton's method no longer converges: the rest is rounding
                if near or value_there < value - step * slope / 4:
                    break
                step /= 2
            x, value, gradient = there, value_there, gradient_there
        return x

    @property
    def _data(self) -> Data:
        files, test = self._files()
        return _load(files, test, self.arguments.bias)

    def _files(self, count: int | None = None) -> tuple[tuple[tuple[str, ...], ...], str]:
        """The files of each folder (a file of its own counts as one), and the test file."""
        o = self.options
        path = data_path(NAME, o.data_dir)
        groups: tuple[tuple[str, ...], ...]
        if o.partitioner == "folders":
            folders = partitions.client_folders(path, count)
            groups = tuple(tuple(str(file) for file in _inside(folder)) for folder in folders)
            empty = [folder.name for folder, files in zip(folders, groups, strict=True) if not files]
            if empty:
                raise ConfigError(
                    f"partitioner folders: no file in {', '.join(empty)} of {path}; expected svmlight files"
                )
        elif path is None or path.is_dir():
            inside = ", ".join(file.name for file in _inside(path)) if path is not None else ""
            listed = f"; {path} holds {inside}" if inside else ""
            raise ConfigError(
                f"data-dir is {o.data_dir!r}: task {NAME} needs a file in the svmlight format (LABEL INDEX:VALUE ... "
                f"on each line), plain, .gz, .bz2 or .xz{listed}"
            )
        else:
            groups = ((str(path),),)
        test = read("task-args", o.task_args, LibsvmArguments).test
        if not test or path is None:
            return groups, ""
        beside = (path if path.is_dir() else path.parent) / Path(test).expanduser()
        if not beside.is_file():
            raise ConfigError(f"test in task-args is {test!r}: there is no file {beside}")
        return groups, str(beside)

    def _cut(self, count: int) -> partitions.Positions:
        if count not in self._cuts:
            o, data = self.options, self._data
            if o.partitioner == "folders":
                self._files(count)
                ends = np.cumsum(data.sizes)[:-1]
                self._cuts[count] = tuple(np.split(np.arange(len(data.rows)), ends))
            else:
                columns = {"qid": data.qid} if len(data.qid) else None
                self._cuts[count] = partitions.cut(
                    o.partitioner,
                    o.partition_args,
                    labels=data.rows.b.astype(np.int64),
                    count=count,
                    seed=o.seed,
                    task=NAME,
                    columns=columns,
                )
        return self._cuts[count]

    def _client(self, index: int, count: int) -> Rows:
        if (index, count) not in self._clients:
            self._clients[index, count] = self._data.rows.at(self._cut(count)[index])
        return self._clients[index, count]

    def _value(self, x: Floats, rows: Rows) -> float:
        squares = x * x
        penalty = squares / 2 if self.model == "logistic" else squares / (1 + squares)
        return float(np.mean(np.logaddexp(0.0, -rows.b * (rows.a @ x))) + self.lambda_ * np.sum(penalty))

    def _gradient(self, x: Floats, rows: Rows) -> Floats:
        pull = rows.b * np.exp(-np.logaddexp(0.0, rows.b * (rows.a @ x)))  # b * sigmoid(-b a.x)
        slope = x if self.model == "logistic" else 2 * x / (1 + x * x) ** 2
        return np.asarray(self.lambda_ * slope - (rows.a.T @ pull) / len(rows))

    def _hessian(self, x: Floats, rows: Rows) -> Floats:
        """Of the logistic f, shape (d, d)."""
        z = rows.a @ x
        weight = np.exp(-np.logaddexp(0.0, z) - np.logaddexp(0.0, -z)) / len(rows)
        return np.asarray((rows.a.T @ rows.a.multiply(weight[:, None]).tocsr()).toarray()) + self.lambda_ * np.eye(
            len(x)
        )

    def _metrics(self, x: Floats, rows: Rows) -> dict[str, float]:
        right = np.where(rows.a @ x > 0, 1.0, -1.0) == rows.b
        return {"loss": self._value(x, rows), "accuracy": float(np.mean(right))}

    @staticmethod
    def _curvature(rows: Rows) -> float:
        """Largest eigenvalue of A^T A/(4 n), the Hessian of the mean log-loss at 0."""
        n, d = rows.a.shape
        if n == 0:
            return 0.0
        gram = (rows.a.T @ rows.a if d <= n else rows.a @ rows.a.T).toarray()
        return max(0.0, float(np.linalg.eigvalsh(gram)[-1])) / (4 * len(rows))


def _inside(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_file() and not one.name.startswith("."))


@cache
def _load(groups: tuple[tuple[str, ...], ...], test: str, bias: bool) -> Data:
    """All rows, read once a process; with as many columns as any of the files has."""
    from sklearn.datasets import load_svmlight_files

    files = [Path(file) for group in groups for file in group]
    every = [*files, Path(test)] if test else files
    try:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(_open(file)) for file in every]
            out = load_svmlight_files(opened, query_id=True)  # joined: one count of columns, one base of the indices
    except (ValueError, OverflowError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        for file in every:
            _scan(file)
        raise ConfigError(f"{', '.join(map(str, every))}: not in the svmlight format ({error})") from error
    matrices, labels, qids = out[0::3], out[1::3], out[2::3]
    for file, a, b, q in zip(every, matrices, labels, qids, strict=True):
        if not (np.isfinite(a.data).all() and np.isfinite(b).all()) or len(q) not in (0, len(b)):
            _scan(file)
        if len(b) == 0:
            raise ConfigError(f"{file}: no examples; expected a line LABEL INDEX:VALUE ... for each")
    n = len(files)
    if len({len(q) == 0 for q in qids[:n]}) > 1:
        raise ConfigError(f"{', '.join(map(str, files))}: some have qid and some have none; expected all or none")
    names = np.unique(np.concatenate(labels[:n]))
    if len(names) != 2:
        first = ", ".join(f"{name:g}" for name in names[:5])
        raise ConfigError(
            f"{', '.join(map(str, files))}: {len(names)} labels ({first}{', ...' if len(names) > 5 else ''}); expected "
            "two classes, the smaller label becomes -1 and the larger +1"
        )
    rows = [_rows(file, a, b, names, bias) for file, a, b in zip(every, matrices, labels, strict=True)]
    sizes = tuple(sum(len(labels[at]) for at in group) for group in _positions(groups))
    joined = _join(rows[:n])
    return Data(joined, sizes, np.concatenate(qids[:n]).astype(np.int64), rows[n] if test else joined)


def _positions(groups: Sequence[Sequence[str]]) -> Iterator[range]:
    at = 0
    for group in groups:
        yield range(at, at + len(group))
        at += len(group)


def _rows(file: Path, a: Any, b: Floats, names: Floats, bias: bool) -> Rows:
    from scipy.sparse import csr_array, hstack

    foreign = np.setdiff1d(b, names)
    if len(foreign):
        raise ConfigError(
            f"{file}: label {foreign[0]:g}, which the training set lacks; expected {names[0]:g} or {names[1]:g}"
        )
    a = csr_array(a)
    return Rows(hstack([a, np.ones((len(b), 1))], format="csr") if bias else a, np.where(b == names[1], 1.0, -1.0))


def _join(parts: Sequence[Rows]) -> Rows:
    from scipy.sparse import vstack

    if len(parts) == 1:
        return parts[0]
    return Rows(vstack([part.a for part in parts], format="csr"), np.concatenate([part.b for part in parts]))


def _open(file: Path) -> IO[bytes]:
    openers: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opened: IO[bytes] = openers[file.suffix](file) if file.suffix in openers else file.open("rb")
    return opened


def _scan(file: Path) -> None:
    """Find the line that makes a file unreadable.

    Raises:
        ConfigError: naming file and line; nothing where every line is well formed.
    """
    number = 0
    with_qid: bool | None = None
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, start=1):
                fields = line.partition(b"#")[0].split()
                if not fields:
                    continue
                if why := _wrong(fields):
                    raise ConfigError(
                        f"{file}, line {number}: {why}; expected LABEL INDEX:VALUE ..., indices ascending"
                    )
                has_qid = len(fields) > 1 and fields[1].startswith(b"qid:")
                if with_qid not in (None, has_qid):
                    raise ConfigError(f"{file}, line {number}: {'a' if has_qid else 'no'} qid, unlike the lines before")
                with_qid = has_qid
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError(f"{file}, after line {number}: cannot be read ({error}); fetch it again") from error


def _wrong(fields: Sequence[bytes]) -> str:
    """What is wrong with the fields of one line; "" if nothing."""
    try:
        if not math.isfinite(float(fields[0])):
            return f"label {fields[0].decode()} is not finite"
    except ValueError:
        return f"label {fields[0].decode(errors='replace')!r} is no number"
    before = -1
    for at, one in enumerate(fields[1:]):
        text = one.decode(errors="replace")
        index, colon, value = text.partition(":")
        try:
            if index == "qid" and at == 0:
                int(value)
                continue
            now, finite = int(index), math.isfinite(float(value))
        except ValueError:
            return f"{text!r} is no INDEX:VALUE"
        if not colon or now < 0 or now >= 2**31 - 1:
            return f"index {index} in {text!r} is out of range"
        if now <= before:
            return f"index {now} follows {before}"
        if not finite:
            return f"the value in {text!r} is not finite"
        before = now
    return ""
