"""Rounds to a target accuracy when every message may take as many bytes as 1 % of uncoded pairs.

EF21 on ten clients with unlike labels. Pairs are the field's usual message: the 1 % largest values
of every layer, each as a 32-bit index and a float32 value, 8 bytes, nothing else counted. The other
methods get exactly these bytes for their whole payload, header and checksum included. Every
method's step is tuned on the same grid by other seeds than those it is judged by; judged is the
ratio of rounds, seed by seed, with a bootstrap interval over seeds.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

CLIENTS: Final = 10
PAIR_BYTES: Final = 8
SHARE: Final = 0.01
FIRST_TUNING_SEED: Final = 1001
METHODS: Final[Mapping[str, Mapping[str, Any]]] = {
    "pairs": {"values": "fp32", "ratio": SHARE},
    "one ratio, bf16": {"allocation": "uniform", "values": "bf16"},
    "hull, bf16": {"allocation": "hull", "values": "bf16"},
    "hull, joint precision": {"allocation": "hull", "values": "auto"},
}
JOINT: Final = "hull, joint precision"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is trained.

    Args:
        settings: run keys.
        steps: grid of local step sizes.
        tuning, seeds: how many seeds each step is tried with, and how many judge.
        most_rounds: after these a run counts as not having reached the target.
    """

    settings: Mapping[str, Any]
    steps: tuple[float, ...]
    tuning: int
    seeds: int
    most_rounds: int


PROBLEMS: Final[Mapping[str, Problem]] = {
    "digits": Problem(
        {"task": "digits", "target-accuracy": 0.95}, (0.05, 0.1, 0.2, 0.3, 0.5), tuning=3, seeds=20, most_rounds=600
    ),
    "fashion-mnist": Problem(
        {"task": "fashion-mnist", "model": "mlp", "target-accuracy": 0.8, "evaluate-every": 2},
        (0.05, 0.1, 0.2, 0.4),
        tuning=2,
        seeds=5,
        most_rounds=400,
    ),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    problem: str
    method: str
    step: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run did.

    Args:
        rounds: to the target; None: never.
        payload_bytes: mean payload of a client in a round.
        allowed_bytes: what pairs take.
    """

    rounds: int | None
    payload_bytes: float
    allowed_bytes: int


def run_one(job: Job) -> Outcome:
    """Train until the target."""
    from app.client_app import app as client_app
    from app.config import parse
    from app.experiment import evaluator, to_record
    from clients.tasks import make_task
    from strategies import InProcessGrid, Kimad, SimulatedNetwork

    logging.getLogger("flwr").setLevel(logging.ERROR)
    problem = PROBLEMS[job.problem]
    plain = parse(dict(problem.settings))
    arrays = make_task(plain.task, plain.train_options()).initial_arrays()
    allowed = PAIR_BYTES * sum(max(1, int(SHARE * array.size)) for array in arrays.values())
    method = dict(METHODS[job.method])
    if "ratio" not in method:  # links so fast that only the limit of bytes counts
        method["max-message-bytes"] = allowed
    config = parse(
        {
            **problem.settings,
            **method,
            "seed": job.seed,
            "local-lr": job.step,
            "num-rounds": problem.most_rounds,
            "links": "constant",
            "uplink-bps-min": 1e9,
            "uplink-bps-max": 1e9,
            "initial-rate-bps": 1e9,
            "time-budget": 10.0,
            "deadline": 0.0,
            "overhead-s": 0.0,
        }
    )
    task = make_task(config.task, config.train_options())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Kimad(
            config.settings(f"feedback-{job.seed}"),
            SimulatedNetwork(config.link_settings()),
            on_round=lambda row, wall: rows.append(row),
        ).start(
            grid=InProcessGrid.of_partitions(client_app, CLIENTS, config.as_dict(), Path(folder)),
            initial_arrays=to_record(task.initial_arrays()),
            num_rounds=config.num_rounds,
            evaluate_fn=evaluator(task),
        )
    target = config.target()
    reached = target.reached(rows[-1][target.field])
    sent = allowed if job.method == "pairs" else sum(r["uplink_bytes"] for r in rows) / (CLIENTS * len(rows))
    return Outcome(len(rows) if reached else None, float(sent), allowed)


def _quiet() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def bootstrap(ratios: Sequence[float], *, seed: int = 1, draws: int = 20_000) -> tuple[float, float, float]:
    """(geometric mean, ends of its 90 % interval) over seeds drawn with replacement."""
    logs = np.log(np.array(ratios))
    rng = np.random.Generator(np.random.Philox(seed))
    means = logs[rng.integers(0, logs.size, (draws, logs.size))].mean(axis=1)
    low, high = np.quantile(means, (0.05, 0.95))
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def run(names: Sequence[str], processes: int, json_path: Path | None) -> int:
    """Tune, judge, print and write; returns 0."""
    from benchmarks.codec import conditions

    under = conditions()
    print("; ".join(f"{name} {value}" for name, value in under.items()), flush=True)
    report: dict[str, Any] = {"conditions": under, "problems": {}}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _quiet) as pool:
        for name in names:
            problem = PROBLEMS[name]
            tried = [
                Job(name, method, step, FIRST_TUNING_SEED + at)
                for method in METHODS
                for step in problem.steps
                for at in range(problem.tuning)
            ]
            tuning = dict(zip(tried, pool.map(run_one, tried), strict=True))
            steps = {method: _best_step(problem, method, tuning) for method in METHODS}
            judged = [
                Job(name, method, steps[method], seed) for seed in range(1, problem.seeds + 1) for method in METHODS
            ]
            results = dict(zip(judged, pool.map(run_one, judged), strict=True))
            report["problems"][name] = _print(name, problem, steps, tuning, results)
            if json_path is not None:
                json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _rounds(outcome: Outcome, problem: Problem) -> int:
    return problem.most_rounds if outcome.rounds is None else outcome.rounds


def _best_step(problem: Problem, method: str, tuning: Mapping[Job, Outcome]) -> float:
    """Least mean rounds over the tuning seeds; a run that never arrives counts as three times the most."""

    def mean(step: float) -> float:
        mine = [o for job, o in tuning.items() if (job.method, job.step) == (method, step)]
        return statistics.fmean(3 * problem.most_rounds if o.rounds is None else o.rounds for o in mine)

    return min(problem.steps, key=mean)


def _print(
    name: str,
    problem: Problem,
    steps: Mapping[str, float],
    tuning: Mapping[Job, Outcome],
    results: Mapping[Job, Outcome],
) -> dict[str, Any]:
    allowed = next(iter(results.values())).allowed_bytes
    print(
        f"\n{name}: {problem.seeds} seeds, {allowed} bytes a message, target {problem.settings['target-accuracy']:.0%}"
    )
    print(f"{'':24}{'step':>6}{'bytes':>8}{'rounds':>8}{'min':>6}{'max':>6}{'never':>7}  pairs' rounds over these")
    by_method: dict[str, Any] = {}
    pairs = {job.seed: _rounds(o, problem) for job, o in results.items() if job.method == "pairs"}
    for method in METHODS:
        mine = {job.seed: o for job, o in results.items() if job.method == method}
        rounds = {seed: _rounds(o, problem) for seed, o in mine.items()}
        mean, low, high = bootstrap([pairs[seed] / rounds[seed] for seed in sorted(rounds)])
        sent = statistics.fmean(o.payload_bytes for o in mine.values())
        never = sum(o.rounds is None for o in mine.values())
        print(
            f"{method:24}{steps[method]:>6g}{sent:>8.0f}{statistics.fmean(rounds.values()):>8.1f}"
            f"{min(rounds.values()):>6}{max(rounds.values()):>6}{never:>7}  {mean:.2f} ({low:.2f} to {high:.2f})",
            flush=True,
        )
        by_method[method] = {
            "step": steps[method],
            "rounds_by_seed": rounds,
            "never": never,
            "payload_bytes": sent,
            "pairs_over_this": {"geometric_mean": mean, "low_90": low, "high_90": high},
        }
    tried = [{**asdict(job), **asdict(outcome)} for job, outcome in tuning.items()]
    return {"allowed_bytes": allowed, "methods": by_method, "tuning": tried}
