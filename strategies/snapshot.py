"""What a run is, taken and put back: every part of the strategy says itself what it must keep."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bandwidth import Arrival, Sample
from compression.errors import ConfigError
from protocol import Report
from strategies.checkpoint import Checkpoint
from strategies.methods import Engine
from strategies.network import Arrived
from strategies.receive import Reply

if TYPE_CHECKING:
    from strategies.kimad import Kimad

Arrays = dict[str, NDArray[np.generic]]


def take(run: Kimad, number: int) -> Checkpoint:
    """Everything that a run is after a round, the mirrors excepted, which are on disk already."""
    network = run.network.state()
    optimizer, tensors = run.stepper.state()
    arrays: Arrays = {f"model/{name}": array for name, array in run.arrays.items()}
    arrays |= {f"sum/{at}": total for at, total in enumerate(run.memory.sums)}
    arrays |= {f"optimizer/{name}": tensor for name, tensor in tensors.items()}
    coming = []
    for at, (client, since_s, arrived) in enumerate(network.pop("coming")):
        arrays[f"coming/{at}"] = np.frombuffer(arrived.reply.payload, np.uint8)
        coming.append([client, since_s, _plain_report(arrived.reply.report), dict(arrived.reply.metrics)])
        coming[-1].append(asdict(arrived.transfer))
    plain = {
        "experiment": run.settings.experiment,
        "layout": run.layout.digest.hex(),
        "names": list(run.arrays),
        "memory": run.memory.state(),
        "mirrors": run.memory.mirrors.number if run.memory.mirrors is not None else None,
        "engine": asdict(run.memory.engine),
        "optimizer": optimizer,
        "server_lr": run.server_lr,
        "rates": run.rates.state(),
        "allowance": run.allowance.state(),
        "receiver": run.receiver.state(),
        "roster": run.roster.state(),
        "network": network,
        "coming": coming,
        "over": run.over,
    }
    return Checkpoint(number, plain, arrays)


def restore(run: Kimad, checkpoint: Checkpoint) -> None:
    """Put back what `take` took.

    Raises:
        StateError: the mirrors on disk do not reach this checkpoint.
        ConfigError: the run had another method, or another operator, with which memories move differently.
    """
    plain, arrays = checkpoint.plain, checkpoint.arrays
    saved, now = Engine(**plain["engine"]), run.memory.engine
    if replace(saved, gain=now.gain) != now:  # the gain is the server's own
        raise ConfigError(
            f"resume: memories moved by {saved} and would by {now}, and both ends' copies would part; give method, "
            "memory-rate, start and the operator as they were, or another run-dir"
        )
    run.memory.engine = saved
    run.arrays = {name: arrays[f"model/{name}"].copy() for name in plain["names"]}
    sums = tuple(arrays[f"sum/{at}"].astype(np.float64) for at in range(len(run.memory.sums)))
    run.memory.restore(plain["memory"], sums)
    if run.memory.mirrors is not None and plain["mirrors"] is not None:
        run.memory.mirrors.rewind(plain["mirrors"])
    run.server_lr = plain["server_lr"]
    flat, _ = run.layout.split(run.arrays)
    run.stepper = run.optimizer(flat)
    run.stepper.restore(plain["optimizer"], _under(arrays, "optimizer/"))
    run.rates.restore(plain["rates"])
    run.allowance.restore(plain["allowance"])
    run.receiver.restore(plain["receiver"])
    run.roster.restore(plain["roster"])
    coming = []
    for at, (client, since_s, report, metrics, transfer) in enumerate(plain["coming"]):
        reply = run.receiver.reply_of(_read_report(report), arrays[f"coming/{at}"].tobytes(), metrics)
        arrival = Arrival(**{**transfer, "sample": Sample(**transfer["sample"])})
        arrived: Arrived[Reply] = Arrived(client, reply, arrival)
        coming.append((client, since_s, arrived))
    run.network.restore({**plain["network"], "coming": coming})
    run.over = plain["over"]


def _under(arrays: Any, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _plain_report(report: Report) -> dict[str, Any]:
    plain = {f.name: getattr(report, f.name) for f in fields(report)}
    return {**plain, "digest": None if report.digest is None else report.digest.hex()}


def _read_report(plain: dict[str, Any]) -> Report:
    digest = plain["digest"]
    return replace(Report(**{**plain, "digest": None}), digest=None if digest is None else bytes.fromhex(digest))
