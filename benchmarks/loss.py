"""What lost replies cost: nothing is lost, 5 % are lost, the same asked again, the same and nobody settles.

EF21 with 30 % of the clients a round. A lost reply was made, stored and sent, and never arrives (run
key faults). The last arm is here only: its clients take every reply of theirs for accepted, and its
server does not ask from which memory a reply was made, as in software without a protocol for it. Arms
are paired by seed: the same data, clients, draws and the same replies lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from flwr.app import ArrayRecord

from benchmarks.feedback import _quiet, bootstrap
from protocol import Attempt, Entry, Store
from strategies import InProcessGrid, Kimad, SimulatedNetwork
from strategies.receive import Receiver

PARTICIPATION: Final = 0.3
_FAULTS: Final[Mapping[str, Any]] = {"faults": "lose_reply = 0.05"}
LOSSLESS, ONCE, RETRY, UNSETTLED = "lossless", "exactly once", "retry", "nobody settles"
ARMS: Final[Mapping[str, Mapping[str, Any]]] = {
    LOSSLESS: {},
    ONCE: _FAULTS,
    RETRY: {**_FAULTS, "on-failure": "retry"},
    UNSETTLED: _FAULTS,
}
MOST_RATIO, MOST_POINTS, LEAST_HARM = 2.0, 1.0, 10.0  # of f - f*; points of accuracy with the protocol, and without
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
        sent: replies that were sent, lost ones included.
        model: digest of the last model's bytes.
    """

    figure: float
    lost: int
    sent: int
    model: str


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
            **ARMS[job.arm],
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
        stack.enter_context(patch("strategies.asking.FIRST_TRY_S", 0.0))  # real seconds, which nothing here counts
        if job.arm == UNSETTLED:
            stack.enter_context(nobody_settles())
        strategy = Kimad(
            config.settings(f"loss-{job.seed}"),
            SimulatedNetwork(config.link_settings()),
            on_round=lambda row, wall: rows.append(row),
        )
        result = strategy.start(
            grid=InProcessGrid.of_partitions(client_app, clients, config.as_dict(), Path(folder)),
            initial_arrays=to_record(task.initial_arrays()),
            num_rounds=rounds,
            evaluate_fn=evaluator(task),
        )
    if job.problem == "logistic":
        least = task.objective(task.optimum())  # type: ignore[attr-defined]
        figure = float(rows[-1]["test_loss"]) - least
    else:
        figure = float(rows[-1]["test_accuracy"])
    lost = strategy.counts["client-error"]  # each is a reply that never came: nothing else fails here
    arrived = sum(len(row["uplink_bytes_by_client"]) for row in rows)
    return Outcome(figure, lost, arrived + lost, _digest(result.arrays))


def _digest(model: ArrayRecord) -> str:
    """Of names and bytes, 16 hex digits."""
    whole = hashlib.blake2b(digest_size=8)
    for name, array in sorted(model.items()):
        whole.update(name.encode() + b"\0" + array.numpy().tobytes())
    return whole.hexdigest()


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
    print(f"{'':16}{figure:>10}{'min':>10}{'max':>10}{'lost':>7}{'equal':>7}  {against} (90 % interval)")
    arms: dict[str, Any] = {}
    base = {seed: results[Job(name, LOSSLESS, seed)] for seed in range(1, seeds + 1)}
    intervals: dict[str, tuple[float, float, float]] = {}
    for arm in ARMS:
        mine = {seed: results[Job(name, arm, seed)] for seed in base}
        figures = [o.figure for o in mine.values()]
        if gaps:
            centre = statistics.geometric_mean(figures)
            mean, low, high = bootstrap([mine[seed].figure / base[seed].figure for seed in base])
        else:
            centre = statistics.fmean(figures)
            mean, low, high = difference([mine[seed].figure - base[seed].figure for seed in base])
        intervals[arm] = mean, low, high
        lost = sum(o.lost for o in mine.values()) / sum(o.sent for o in mine.values())
        equal = sum(mine[seed].model == base[seed].model for seed in base)
        form = ".2e" if gaps else ".4f"
        print(
            f"{arm:16}{centre:>10{form}}{min(figures):>10{form}}{max(figures):>10{form}}{lost:>7.1%}"
            f"{equal:>4}/{seeds:<2}  {mean:.4g} ({low:.4g} to {high:.4g})",
            flush=True,
        )
        arms[arm] = {
            "by_seed": {seed: o.figure for seed, o in mine.items()},
            "lost": lost,
            "models_equal_to_lossless": equal,
            "against_lossless": {"mean": mean, "low_90": low, "high_90": high},
        }
    targets = verdicts(intervals, gaps=gaps)
    print("\n".join(f"{'met' if met else 'NOT MET':8}{text}" for text, met in targets.items()), flush=True)
    return {"rounds": keys["num-rounds"], "clients": clients, "arms": arms, "targets": targets}


def verdicts(intervals: Mapping[str, tuple[float, float, float]], *, gaps: bool) -> dict[str, bool]:
    """Each target, and whether the whole interval keeps it.

    Args:
        intervals: (mean, low, high) of each arm against the lossless one.
        gaps: ratios of f - f*; else differences in accuracy.
    """
    if gaps:
        kept = {arm: (high, high <= MOST_RATIO) for arm, (_, _, high) in intervals.items()}
        return {f"{arm}: at most {MOST_RATIO:g} x the gap: {kept[arm][0]:.4g}": kept[arm][1] for arm in (ONCE, RETRY)}
    found = {}
    for arm in (ONCE, RETRY):
        _, low, high = intervals[arm]
        furthest = 100 * max(abs(low), abs(high))
        found[f"{arm}: within {MOST_POINTS:g} point of accuracy: {furthest:.2f}"] = furthest <= MOST_POINTS
    fall = -100 * intervals[UNSETTLED][2]
    found[f"{UNSETTLED}: falls by more than {LEAST_HARM:g} points: {fall:.1f}"] = fall > LEAST_HARM
    return found
