"""The Flower ClientApp of built-in tasks: ordinary user code, plus the mod.

Nothing below knows of compression; a ClientApp of your own gets it the same way.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from app.config import RunConfig, parse
from clients import kimad_mod
from clients.tasks import Arrays, Task, TrainOptions, make_task

app = ClientApp(mods=[kimad_mod])


@cache
def _task(name: str, options: TrainOptions) -> Task:
    return make_task(name, options)


def _of(context: Context) -> tuple[Task, int, int]:
    config: RunConfig = parse(context.run_config)
    index, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    return _task(config.task, config.train_options()), index, count


def _arrays(message: Message) -> Arrays:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train this node's partition from the received model."""
    task, index, count = _of(context)
    seed = message.content.config_records["config"]["seed"]
    arrays, metrics = task.train(_arrays(message), index, count, int(str(seed)))
    record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    return Message(RecordDict({"arrays": record, "metrics": MetricRecord(dict(metrics))}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the received model on this node's partition."""
    task, index, count = _of(context)
    metrics = task.test_client(_arrays(message), index, count)
    return Message(RecordDict({"metrics": MetricRecord(dict(metrics))}), reply_to=message)
