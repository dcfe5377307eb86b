"""Apps of Flower's older kind, ClientApp(client_fn=...) with a Client or NumPyClient, behind the mod.

Flower runs such an app by translating each message: "fitins.parameters" and "fitins.config"
go in, the model as a list of arrays without names; "fitres.parameters", "fitres.num_examples",
"fitres.metrics" and "fitres.status" come out. The mod asks in those words, so that the app's
code and the mods around it see what they always saw, and reads the answer back into arrays by
name and metrics. The i-th array of the list is the i-th layer of the layout.

Whether an app is of this kind is read off the function that Flower made of it, before any user
code runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Final, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.common import Code, EvaluateIns, FitIns, ndarrays_to_parameters
from flwr.compat.client.client import Client
from flwr.compat.common import recorddict_compat as compat
from numpy.typing import NDArray

from compression.errors import ProtocolError
from protocol.records import ARRAYS

METRICS: Final = "metrics"
NUM_EXAMPLES: Final = "num-examples"
LOSS: Final = "loss"
NUMPY: Final = "numpy.ndarray"  # what Flower calls the bytes of np.save
Scalars = Mapping[str, bool | int | float | str | bytes]


def is_legacy(call_next: ClientAppCallable) -> bool:
    """Whether what a mod is to call next leads to Flower's translator for `client_fn`.

    Flower wraps each mod around the next in a closure of one and the same code, down to the
    app's own function; the closures are followed, and nothing is called. Should Flower make
    apps in another way one day, none is taken for an old one.
    """
    wrapper, translator = _flowers_own()
    following: object = call_next
    while (code := getattr(following, "__code__", None)) is not None and code is wrapper:
        following = inspect.getclosurevars(cast(ClientAppCallable, following)).nonlocals.get("_ffn")
    return code is not None and code is translator


@cache
def _flowers_own() -> tuple[CodeType | None, CodeType | None]:
    """Code of the function that Flower wraps around a mod, and of its translator for `client_fn`."""

    def client_fn(context: Context) -> Client:
        raise NotImplementedError

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        raise NotImplementedError

    def code(app: ClientApp) -> CodeType | None:
        return getattr(getattr(app, "_call", None), "__code__", None)

    return code(ClientApp(client_fn=client_fn, mods=[mod])), code(ClientApp(client_fn=client_fn))


def instructions(kind: str, arrays: Mapping[str, NDArray[np.generic]], config: Scalars) -> RecordDict:
    """The content that Flower's own strategies of that time would send.

    Args:
        kind: "train" or "evaluate".
        arrays: the model, in layout order.
        config: what `fit` or `evaluate` gets as its config.
    """
    parameters = ndarrays_to_parameters([np.asarray(array) for array in arrays.values()])
    if kind == "evaluate":
        return compat.evaluateins_to_recorddict(EvaluateIns(parameters, dict(config)), keep_input=True)
    return compat.fitins_to_recorddict(FitIns(parameters, dict(config)), keep_input=True)


def result(kind: str, content: RecordDict, names: list[str]) -> RecordDict:
    """What the client answered, as an app of today would have: arrays by name, and metrics.

    Metrics that are numbers are taken, and "num-examples" and, of `evaluate`, "loss" beside
    them; text and bytes have no mean and are left out.

    Args:
        kind: "train" or "evaluate".
        content: of the reply.
        names: of the layers, in layout order; arrays beyond them are named by their number,
            so that whoever compares with the layout can say what is too many.

    Raises:
        ProtocolError: the client implements no such method, says that it failed, or returns
            parameters in a serialisation of its own.
    """
    prefix, method = ("evaluateres", "evaluate") if kind == "evaluate" else ("fitres", "fit")
    try:
        status = content.config_records[f"{prefix}.status"]
        user_metrics = content.config_records[f"{prefix}.metrics"]
        examples = content.metric_records[f"{prefix}.num_examples"]["num_examples"]
        loss = content.metric_records[f"{prefix}.loss"][LOSS] if kind == "evaluate" else None
        tensors = content.array_records[f"{prefix}.parameters"] if kind != "evaluate" else ArrayRecord()
    except KeyError as error:
        raise ProtocolError("user-code", f"the answer of the client's {method} lost its {error}") from error
    if status["code"] != Code.OK.value:
        raise ProtocolError("user-code", f"the client's {method} did not succeed: {status['message']!s}")
    metrics = _numbers(user_metrics)
    metrics[NUM_EXAMPLES] = examples
    if loss is not None:
        metrics[LOSS] = loss
        return RecordDict({METRICS: metrics})
    arrays = [array for key, array in tensors.items() if key != compat.EMPTY_TENSOR_KEY]
    if foreign := {array.stype for array in arrays} - {NUMPY}:
        raise ProtocolError(
            "user-code", f"the client's fit returned tensors of type {sorted(foreign)}, expected {NUMPY!r}"
        )
    named = {names[i] if i < len(names) else str(i): array for i, array in enumerate(arrays)}
    return RecordDict({ARRAYS: ArrayRecord(named), METRICS: metrics})


def _numbers(metrics: ConfigRecord) -> MetricRecord:
    """The metrics that have a mean; truth values count as 0 and 1."""
    numbers = MetricRecord()
    for name, value in metrics.items():
        if isinstance(value, int | float):
            numbers[name] = int(value) if isinstance(value, bool) else value
    return numbers
