"""One experiment: the main run, the dense run beside it, the summary and the picture.

`flwr run` (app/server_app.py) and the command line (app/cli.py) both end here; they differ
only in the grid.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import Grid

from app import picture, table
from app.config import RunConfig, patterns
from app.rundir import DenseStopped, RunDir, Target, summarise
from clients.tasks import Task, make_task, whole_of
from strategies import InProcessGrid, Kimad, SimulatedNetwork
from strategies.receive import Reply

DENSE_MOST_ROUNDS: Final = 5000
DENSE_NEWS_ROUNDS: Final = 20  # the dense run says something every so many rounds
Rows = list[dict[str, Any]]
_log = logging.getLogger("flwr.kimad")


def run_experiment(config: RunConfig, grid: Grid, experiment: str, run_dir: RunDir) -> dict[str, Any]:
    """Train, compare with a dense run over the same links, and write everything to the run directory.

    Args:
        config: the effective configuration.
        grid: where the clients are.
        experiment: id of the run.
        run_dir: a fresh run directory.

    Returns:
        The summary, as written to summary.json.
    """
    _say_changes(run_dir.config_before(), config)
    run_dir.write_config(config.as_dict())
    effective = ", ".join(f"{key}={value!r}" for key, value in sorted(config.as_dict().items()))
    _log.info("configuration: %s", effective)

    task = make_task(config.task, config.train_options())
    rows: Rows = []
    saved = 0

    def on_round(row: dict[str, Any], wall: dict[str, Any]) -> None:
        nonlocal saved
        saved += row["uplink_dense_bytes"] - row["uplink_bytes"]
        rows.append(row)
        run_dir.append_row(row)
        run_dir.append_wall(wall)
        _log.info("%s", table.live_line(row, rounds=config.num_rounds, dense_bytes=row["uplink_dense_bytes"]))

    def on_resume(rounds: int) -> None:
        nonlocal saved
        rows.extend(run_dir.keep_rounds(rounds))
        saved = sum(row["uplink_dense_bytes"] - row["uplink_bytes"] for row in rows)
        run_dir.clear("dense")

    task.check(None)
    whole = config.whole or whole_of(task)
    settings = replace(config.settings(experiment), whole=patterns(whole))
    network: SimulatedNetwork[Reply] = SimulatedNetwork(config.link_settings())
    strategy = Kimad(
        settings,
        network,
        on_round=on_round,
        on_clients=task.check,
        constants=getattr(task, "smoothness", None),
        state_dir=run_dir.path / "server",
        resume=config.resume,
        on_resume=on_resume,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=to_record(task.initial_arrays()),
        num_rounds=config.num_rounds,
        evaluate_fn=evaluator(task),
    )
    run_dir.write_model({name: array.numpy() for name, array in result.arrays.items()})

    dense_rows: Rows | None = None
    dense_stopped: DenseStopped = "none"
    if config.dense_run and rows and rows[-1]["virtual_s"] <= 0:
        _log.warning("no dense run: nothing was sent in this run, so there is no time to compare with")
    elif config.dense_run and rows:
        dense_rows, dense_stopped = run_dense(
            config, len(strategy.clients), experiment, rows, run_dir.sub("dense"), settings.whole
        )
    target = config.target()
    if not target.loss and all(row["test_accuracy"] is None for row in rows):
        target = Target(0.0, loss=True)  # a task without accuracy
    summary = summarise(
        rows,
        dense_rows,
        target=target,
        uplink_dense_bytes=sum(row["uplink_dense_bytes"] for row in rows),
        dense_stopped=dense_stopped,
    )
    summary["unit"] = config.unit
    summary["faults"] = dict(sorted(strategy.counts.items()))
    clients = "1 client" if len(strategy.clients) == 1 else f"{len(strategy.clients)} clients"
    drawn = picture.draw(
        run_dir.path / "accuracy.png",
        rows,
        dense_rows,
        target=target,
        title=f"{config.task}: {clients} on {links_text(config)}",
        footnote=picture.FOOTNOTE if config.unit == "bytes" else picture.COORDINATES,
        subtitle=f"{config.operator}, {config.allocation}, time budget {config.time_budget:g} s, seed {config.seed}",
    )
    run_dir.write_summary(summary)  # last: a summary says that everything else is there
    for line in table.closing_table(summary).splitlines():
        _log.info("%s", line)
    _log.info("results in %s (summary.json, rows.jsonl, %s)", run_dir.path, drawn.name)
    return summary


def run_dense(
    config: RunConfig, count: int, experiment: str, rows: Rows, run_dir: RunDir, whole: tuple[str, ...]
) -> tuple[Rows, DenseStopped]:
    """Train without compression over the same links, in this process, at the dense run's own step.

    It stops at the target, at dense-time-factor times the main run's virtual time, or after DENSE_MOST_ROUNDS.
    """
    from app.client_app import app as client_app

    limit_s = config.dense_time_factor * rows[-1]["virtual_s"]
    dense = config.model_copy(update={"local_lr": config.dense_local_lr, "operator": "identity"})
    settings = replace(
        dense.settings(f"{experiment}-dense"),
        deadline_s=None,
        stop_at_target=True,
        stop_after_s=limit_s,
        max_bytes_per_day=None,
        whole=whole,
        mirrors=False,
        leave_after=0,
        checkpoint_every=0,
    )
    dense_rows: Rows = []

    def on_round(row: dict[str, Any], wall: dict[str, Any]) -> None:
        dense_rows.append(row)
        run_dir.append_row(row)
        run_dir.append_wall(wall)
        if row["round"] % DENSE_NEWS_ROUNDS == 0:
            _log.info("dense run: %s", table.live_line(row))

    _log.info("dense run over the same links, to the target or %s:", table.human_seconds(limit_s))
    task = make_task(dense.task, dense.train_options())
    Kimad(settings, SimulatedNetwork(dense.link_settings()), on_round=on_round).start(
        grid=InProcessGrid.of_partitions(client_app, count, dense.as_dict(), run_dir.path / "clients"),
        initial_arrays=to_record(task.initial_arrays()),
        num_rounds=DENSE_MOST_ROUNDS,
        evaluate_fn=evaluator(task),
    )
    if config.target().reached(dense_rows[-1][config.target().field]):
        return dense_rows, "target"
    return dense_rows, "time limit" if dense_rows[-1]["virtual_s"] >= limit_s else "round limit"


def _say_changes(before: Mapping[str, Any] | None, config: RunConfig) -> None:
    """Name the keys that a run which goes on has with other values than before."""
    now = config.as_dict()
    changed = {key: value for key, value in (before or {}).items() if now.get(key) != value and key != "resume"}
    for key, value in sorted(changed.items()):
        _log.warning("%s was %r when this run began and is %r now", key, value, now.get(key))


def links_text(config: RunConfig) -> str:
    """The links of a run, in a few words."""
    if config.link_file:
        return f"the links of {os.path.basename(config.link_file)}"
    scale, unit = (8.0, "values/s") if config.unit == "coordinates" else (1e3, "kbit/s")
    low, high = config.uplink_bps_min / scale, config.uplink_bps_max / scale
    return f"{config.links} links, {low:g}{f' to {high:g}' if high > low else ''} {unit} up"


def to_record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Arrays as Flower's record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def evaluator(task: Task) -> Callable[[int, ArrayRecord], MetricRecord]:
    """The server's evaluation of a task, as Flower's strategies call it."""

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord(dict(task.test({name: array.numpy() for name, array in arrays.items()})))

    return evaluate
