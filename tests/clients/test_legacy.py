"""Apps made with client_fn, behind the mod: the same bytes as today's apps, and clear words when they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from numpy.typing import NDArray

from clients import kimad_mod
from clients.legacy import is_legacy
from compression.errors import ConfigError
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork
from tests.apps import SHAPES, SIZE, LeastSquares, cut, grid_of, join, least_squares_app, read, record, settled_memories

PROBLEM = LeastSquares.make(3)
STEP = 1e-3
SLOW = LinkSettings(uplink_bps_min=400, uplink_bps_max=3000, overhead_s=0.05, compute_s=0.2, seed=3)
SETTINGS = Settings(
    experiment="t", seed=5, time_budget_s=1.0, initial_rate_bps=1000, values="fp64", evaluate="clients", forget=False
)
Fit = Callable[[list[NDArray[Any]], dict[str, Any]], tuple[list[NDArray[Any]], int, dict[str, Any]]]
OK = Status(Code.OK, "Success")


class OldClient(NumPyClient):
    """What tests.apps.least_squares_app does, as apps were written before the message API."""

    def __init__(self, index: int) -> None:
        self.index = index

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        x = join(dict(zip(SHAPES, parameters, strict=True)))
        trained = cut(x - STEP * PROBLEM.gradient(self.index, x), "float64")
        metrics = {"train_loss": PROBLEM.value(self.index, x), "note": "text", "raw": b"bytes"}
        return list(trained.values()), 10 * (self.index + 1), metrics

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        x = join(dict(zip(SHAPES, parameters, strict=True)))
        return PROBLEM.value(self.index, x), 10 * (self.index + 1), {}


def old_client(context: Context) -> Client:
    return OldClient(int(context.node_config["partition-id"])).to_client()


def fitting(fit: Fit) -> ClientApp:
    """An app whose client has this `fit`."""

    class Fitting(NumPyClient):
        def fit(
            self, parameters: list[NDArray[Any]], config: dict[str, Any]
        ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
            return fit(parameters, config)

    return ClientApp(client_fn=lambda context: Fitting().to_client(), mods=[kimad_mod])


def run(
    app: ClientApp,
    state: Path,
    *,
    rounds: int = 8,
    settings: Settings = SETTINGS,
    initial: ArrayRecord | None = None,
    **more: Any,
) -> tuple[Kimad, list[dict[str, Any]], dict[str, NDArray[Any]]]:
    rows: list[dict[str, Any]] = []
    strategy = Kimad(settings, SimulatedNetwork(SLOW), on_round=lambda row, _: rows.append(row))
    result = strategy.start(
        grid=grid_of(app, 3, state),
        initial_arrays=initial or record(cut(np.ones(SIZE), "float64")),
        num_rounds=rounds,
        **more,
    )
    return strategy, rows, read(result.arrays)


def refusals(app: ClientApp, state: Path, caplog: pytest.LogCaptureFixture, **more: Any) -> str:
    """What the server logs of one round in which nobody's reply is accepted."""
    _, rows, _ = run(app, state, rounds=1, **more)
    assert rows[0]["accepted"] == []
    return caplog.text


def test_a_client_fn_app_sends_the_bytes_of_a_message_api_app(tmp_path: Path) -> None:
    old = ClientApp(client_fn=old_client, mods=[kimad_mod])
    new = least_squares_app(PROBLEM, STEP)
    (old_strategy, old_rows, old_arrays), (new_strategy, new_rows, new_arrays) = (
        run(app, tmp_path / name) for name, app in (("old", old), ("new", new))
    )
    assert old_rows == new_rows
    assert {n: a.tobytes() for n, a in old_arrays.items()} == {n: a.tobytes() for n, a in new_arrays.items()}
    old_memories = settled_memories(old_strategy, tmp_path / "old")
    new_memories = settled_memories(new_strategy, tmp_path / "new")
    assert {c: m.digest for c, m in old_memories.items()} == {c: m.digest for c, m in new_memories.items()}
    assert sum(row["uplink_bytes"] for row in old_rows) < 0.7 * sum(row["uplink_dense_bytes"] for row in old_rows)
    assert old_rows[-1]["test_loss"] < old_rows[0]["test_loss"]


def test_arrays_are_taken_in_layout_order_whatever_their_names(tmp_path: Path) -> None:
    """Twelve arrays "0" to "11": the order is that of the list, not of the alphabet."""
    seen: list[list[float]] = []

    def fit(parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        seen.append([float(p[0]) for p in parameters])
        return [p + i for i, p in enumerate(parameters)], 1, {}

    values = [np.full(1, 100.0 * i) for i in range(12)]
    run(fitting(fit), tmp_path, rounds=1, initial=ArrayRecord(values))
    assert seen == [[100.0 * i for i in range(12)]] * 3


def test_config_reaches_fit_and_evaluate(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    class Curious(OldClient):
        def fit(
            self, parameters: list[NDArray[Any]], config: dict[str, Any]
        ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
            seen.append(("fit", config))
            return super().fit(parameters, config)

        def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
            seen.append(("evaluate", config))
            return super().evaluate(parameters, config)

    app = ClientApp(client_fn=lambda context: Curious(0).to_client(), mods=[kimad_mod])
    train, evaluate = ConfigRecord({"lr": 0.1}), ConfigRecord({"batch": 8})
    run(app, tmp_path, rounds=1, train_config=train, evaluate_config=evaluate)
    assert {name for name, _ in seen} == {"fit", "evaluate"}
    for name, config in seen:
        if name == "fit":
            assert (config["lr"], config["server-round"]) == (0.1, 1)
            assert isinstance(config["seed"], int)
        else:
            assert config["batch"] == 8


def test_a_client_without_numpy_helper_works_and_its_truth_values_are_numbers(tmp_path: Path) -> None:
    class Plain(Client):
        def fit(self, ins: FitIns) -> FitRes:
            arrays = [a - 0.1 for a in parameters_to_ndarrays(ins.parameters)]
            return FitRes(OK, ndarrays_to_parameters(arrays), 7, {"good": True, "num-examples": 3})

        def evaluate(self, ins: EvaluateIns) -> EvaluateRes:
            return EvaluateRes(OK, 0.25, 7, {"accuracy": 0.5, "loss": 9.0})

    app = ClientApp(client_fn=lambda context: Plain(), mods=[kimad_mod])
    strategy, rows, _ = run(app, tmp_path, rounds=1)
    assert (rows[0]["test_loss"], rows[0]["test_accuracy"]) == (0.25, 0.5)
    assert [strategy.memory.client(c).weight for c in strategy.clients] == [7.0] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "missing 'b'"),
        (lambda p: [*p, p[0]], "unexpected '2'"),
        (lambda p: p[::-1], "'w' has shape (6,), expected (8, 3)"),
        (lambda p: [a.astype(np.int32) for a in p], "'w' has dtype int32, expected float64"),
        (lambda p: [], "missing 'w'; missing 'b'"),
    ],
)
def test_arrays_that_are_not_the_layouts_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], Any], said: str
) -> None:
    assert said in refusals(fitting(lambda parameters, _: (change(parameters), 1, {})), tmp_path, caplog)


def test_a_client_without_fit_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Idle(NumPyClient):
        pass

    app = ClientApp(client_fn=lambda context: Idle().to_client(), mods=[kimad_mod])
    assert "the client's fit did not succeed: Client does not implement `fit`" in refusals(app, tmp_path, caplog)


@pytest.mark.parametrize(
    ("status", "tensor_type", "said"),
    [
        (Status(Code.FIT_NOT_IMPLEMENTED, "no data today"), "numpy.ndarray", "did not succeed: no data today"),
        (OK, "mine", "returned tensors of type ['mine'], expected 'numpy.ndarray'"),
    ],
)
def test_what_a_client_says_of_itself_is_heeded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: Status, tensor_type: str, said: str
) -> None:
    class Odd(Client):
        def fit(self, ins: FitIns) -> FitRes:
            return FitRes(status, Parameters(ins.parameters.tensors, tensor_type), 1, {})

    app = ClientApp(client_fn=lambda context: Odd(), mods=[kimad_mod])
    assert said in refusals(app, tmp_path, caplog)


def around(app_mods: list[Mod], *, old: bool) -> list[bool]:
    """What is_legacy says inside a mod that stands first among these."""
    found: list[bool] = []

    def first(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        found.append(is_legacy(call_next))
        raise RuntimeError("that was all")

    app = ClientApp(client_fn=old_client if old else None, mods=[first, *app_mods])
    if not old:

        @app.train()
        def train(message: Message, context: Context) -> Message:
            raise AssertionError("user code ran")

    grid = grid_of(app, 1, Path())
    grid.push_messages([grid.create_message(RecordDict(), "train", 1, "")])
    return found


class Passing:
    """A mod that is an object."""

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        return call_next(message, context)


@pytest.mark.parametrize("mods", [[], [Passing()], [fixedclipping_mod, Passing(), LocalDpMod(1.0, 1.0, 1.0, 0.1)]])
def test_the_kind_of_app_is_known_before_its_code_runs(mods: list[Mod]) -> None:
    assert around(mods, old=True) == [True]
    assert around(mods, old=False) == [False]


def test_other_callables_are_not_taken_for_a_client_fn() -> None:
    assert not is_legacy(Passing())  # type: ignore[arg-type]
    assert not is_legacy(lambda message, context: message)


@pytest.mark.parametrize("old", [True, False])
def test_flowers_clipping_works_inside_the_mod(tmp_path: Path, old: bool) -> None:
    """kimad_mod first: the clipping sees the model and the trained one as it does without compression."""
    norm = 1e-4
    norms: list[float] = []

    def measure(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        (before,) = message.content.array_records.values()
        reply = call_next(message, context)
        (after,) = reply.content.array_records.values()
        pairs = zip(before.to_numpy_ndarrays(), after.to_numpy_ndarrays(), strict=True)
        norms.append(float(np.sqrt(sum(((b - a) ** 2).sum() for b, a in pairs))))
        return reply

    mods: list[Mod] = [kimad_mod, measure, fixedclipping_mod]
    app = ClientApp(client_fn=old_client, mods=mods) if old else ClientApp(mods=mods)
    if not old:

        @app.train()
        def train(message: Message, context: Context) -> Message:
            x = join(read(message.content.array_records["arrays"]))
            x = x - STEP * PROBLEM.gradient(int(context.node_config["partition-id"]), x)
            metrics = MetricRecord({"num-examples": 1})
            content = RecordDict({"arrays": record(cut(x, "float64")), "metrics": metrics})
            return Message(content, reply_to=message)

    settings = replace(SETTINGS, operator="identity", evaluate="none")
    config = ConfigRecord({"clipping_norm": norm})
    _, rows, _ = run(app, tmp_path, rounds=2, settings=settings, train_config=config)
    assert [len(row["accepted"]) for row in rows] == [3, 3]
    assert len(norms) == 6
    np.testing.assert_allclose(norms, norm, rtol=1e-6)


def test_a_mod_that_changes_arrays_must_stand_behind_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.roster.FIRST_HELLO_S", 0.2)
    app = ClientApp(client_fn=old_client, mods=[LocalDpMod(1.0, 1.0, 1.0, 0.1), kimad_mod])
    with pytest.raises(ConfigError):
        run(app, tmp_path, rounds=1)
    assert "LocalDpMod" in caplog.text


def test_flowers_size_mod_may_stand_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.roster.FIRST_HELLO_S", 0.2)
    app = ClientApp(client_fn=old_client, mods=[message_size_mod, kimad_mod])
    _, rows, _ = run(app, tmp_path, rounds=1)
    assert len(rows[0]["accepted"]) == 3
