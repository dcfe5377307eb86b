"""What lost replies cost: nothing is lost, 5 % are lost, 5 % are lost and nobody settles.

EF21 with 30 % of the clients a round. A lost reply was made, stored and sent, and never arrives.
The third arm is here only: its clients take every reply of theirs for accepted, and its server does
not ask from which memory a reply was made, as in software without a protocol for it. Arms are
paired by seed: the same data, clients, draws and, in the last two, the same replies lost.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from benchmarks.feedback import _quiet, bootstrap
from protocol import Attempt, Entry, Store
from strategies import InProcessGrid, Kimad, SimulatedNetwork
from strategies.receive import Receiver

SHARE: Final = 0.05
PARTICIPATION: Final = 0.3
ARMS: Final = ("lossless", "exactly once", "nobody settles")
PROBLEMS: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "logistic": (
        20,
        {
            "task": "libsvm",
            "data-dir": "libsvm/mushrooms.bz2",
            "partitioner": "contiguous",
            "task-args": "lambda = 0.01",
            "batch-size": 0,
            "local-steps": 1,
            "local-lr": 0.5,
            "ratio": 0.1,
            "num-rounds": 600,
        },
    ),
    "fashion-mnist": (
        10,
        {"task": "fashion-mnist", "model": "mlp", "local-lr": 0.1, "ratio": 0.01, "num-rounds": 450},
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    problem: str
    arm: str
    seed: int
    rounds: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to.

    Args:
        figure: f(x) - f* (logistic), or accuracy on the test set.
        lost: replies that were lost.
        sent: replies that were made.
    """

    figure: float
    lost: int
    sent: int


class LosingGrid(InProcessGrid):
    """Loses its share of the replies to train messages that carry an update."""

    rng: random.Random | None = None
    lost = sent = 0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are not lost."""
        return [self._meet(message) for message in super().pull_messages(message_ids)]

    def _meet(self, message: Message) -> Message:
        if message.has_error() or "kimad.payloads" not in message.content.array_records:
            return message
        self.sent += 1
        if self.rng is None or self.rng.random() >= SHARE:
            return message
        self.lost += 1
        lost = Message(Error(ErrorCode.NODE_UNAVAILABLE, "lost"), reply_to=message)
        lost.metadata.__dict__.update(message.metadata.__dict__)
        return lost


def nobody_settles() -> ExitStack:
    """Clients take their replies for accepted, and the server takes them from any memory."""
    plain = Store.settle

    def settle(store: Store, entry: Entry, accepted: Attempt | None, digest: bytes | None) -> str:
        return "nothing" if entry.pending is None else plain(store, entry, entry.pending.attempt, None)

    stack = ExitStack()
    stack.enter_context(patch.object(Store, "settle", settle))
    stack.enter_context(patch.object(Receiver, "_check", lambda *_: None))
    return stack


def run_one(job: Job) -> Outcome:
    """Train for a number of rounds."""
    from app.client_app import app as client_app
    from app.config import parse
    from app.experiment import evaluator, to_record
    from clients.tasks import make_task

    clients, keys = PROBLEMS[job.problem]
    rounds = job.rounds or keys["num-rounds"]
    config = parse(
        {
            **keys,
            "num-rounds": rounds,
            "seed": job.seed,
            "fraction": PARTICIPATION,
            "stop-at-target": False,
            "evaluate-every": rounds,
            "links": "constant",
            "uplink-bps-min": 1e9,
            "uplink-bps-max": 1e9,
            "time-budget": 10.0,
            "deadline": 0.0,
            "overhead-s": 0.0,
        }
    )
    task = make_task(config.task, config.train_options())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if job.arm == "nobody settles":
            stack.enter_context(nobody_settles())
        grid = LosingGrid.of_partitions(client_app, clients, config.as_dict(), Path(folder))
        assert isinstance(grid, LosingGrid)
        grid.rng = None if job.arm == "lossless" else random.Random(job.seed)
        Kimad(
            config.settings(f"loss-{job.seed}"),
            SimulatedNetwork(config.link_settings()),
            on_round=lambda row, wall: rows.append(row),
        ).start(
            grid=grid,
            initial_arrays=to_record(task.initial_arrays()),
            num_rounds=rounds,
            evaluate_fn=evaluator(task),
        )
    if job.problem == "logistic":
        least = task.objective(task.optimum())  # type: ignore[attr-defined]
        return Outcome(float(rows[-1]["test_loss"]) - least, grid.lost, grid.sent)
    return Outcome(float(rows[-1]["test_accuracy"]), grid.lost, grid.sent)


def _silent() -> None:
    _quiet()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # every lost reply would be a line


def difference(values: Sequence[float], *, seed: int = 1, draws: int = 20_000) -> tuple[float, float, float]:
    """(mean, ends of its 90 % interval) over seeds drawn with replacement."""
    array = np.array(values)
    rng = np.random.Generator(np.random.Philox(seed))
    means = array[rng.integers(0, array.size, (draws, array.size))].mean(axis=1)
    low, high = np.quantile(means, (0.05, 0.95))
    return float(array.mean()), float(low), float(high)


def run(names: Sequence[str], seeds: int, processes: int, json_path: Path | None) -> int:
    """Run all arms, print and write; returns 0."""
    from benchmarks.codec import conditions

    under = conditions()
    print("; ".join(f"{name} {value}" for name, value in under.items()), flush=True)
    report: dict[str, Any] = {"conditions": under, "problems": {}}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _silent) as pool:
        for name in names:
            jobs = [Job(name, arm, seed) for seed in range(1, seeds + 1) for arm in ARMS]
            results = dict(zip(jobs, pool.map(run_one, jobs), strict=True))
            report["problems"][name] = _print(name, seeds, results)
            if json_path is not None:
                json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _print(name: str, seeds: int, results: Mapping[Job, Outcome]) -> dict[str, Any]:
    clients, keys = PROBLEMS[name]
    gaps = name == "logistic"
    figure, against = ("f - f*", "over lossless") if gaps else ("accuracy", "minus lossless")
    print(f"\n{name}: {clients} clients, {PARTICIPATION:.0%} a round, {keys['num-rounds']} rounds, {seeds} seeds")
    print(f"{'':16}{figure:>10}{'min':>10}{'max':>10}{'lost':>7}  {against} (90 % interval)")
    arms: dict[str, Any] = {}
    base = {seed: results[Job(name, ARMS[0], seed)].figure for seed in range(1, seeds + 1)}
    for arm in ARMS:
        mine = {seed: results[Job(name, arm, seed)] for seed in range(1, seeds + 1)}
        figures = [o.figure for o in mine.values()]
        if gaps:
            centre = statistics.geometric_mean(figures)
            mean, low, high = bootstrap([mine[seed].figure / base[seed] for seed in base])
        else:
            centre = statistics.fmean(figures)
            mean, low, high = difference([mine[seed].figure - base[seed] for seed in base])
        lost = sum(o.lost for o in mine.values()) / sum(o.sent for o in mine.values())
        form = ".2e" if gaps else ".4f"
        print(
            f"{arm:16}{centre:>10{form}}{min(figures):>10{form}}{max(figures):>10{form}}{lost:>7.1%}"
            f"  {mean:.4g} ({low:.4g} to {high:.4g})",
            flush=True,
        )
        arms[arm] = {
            "by_seed": {seed: o.figure for seed, o in mine.items()},
            "lost": lost,
            "against_lossless": {"mean": mean, "low_90": low, "high_90": high},
        }
    return {"rounds": keys["num-rounds"], "clients": clients, "arms": arms}
