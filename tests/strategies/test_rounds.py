"""Whole rounds in this process: the real mod, the real wire, the real store, links on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from clients import kimad_mod
from compression.errors import ConfigError
from protocol import Store
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork
from tests.apps import (
    SHAPES,
    SIZE,
    LeastSquares,
    cut,
    grid_of,
    join,
    least_squares_app,
    read,
    record,
    settled_memories,
)

Rows = list[dict[str, Any]]
# 30 float64 values take 240 bytes dense: links of this speed carry one to a few values in a round.
SLOW = LinkSettings(uplink_bps_min=400, uplink_bps_max=3000, overhead_s=0.05, compute_s=0.2, seed=3)
BASE = Settings(experiment="t", seed=5, time_budget_s=1.0, initial_rate_bps=1000, values="fp64", forget=False)


def run(
    tmp_path: Path,
    settings: Settings,
    *,
    clients: int = 5,
    rounds: int = 12,
    step: float = 1e-3,
    links: LinkSettings = SLOW,
    dtype: str = "float64",
    spoil: Any = None,
    extra: dict[str, NDArray[Any]] | None = None,
    each_round: Any = None,
) -> tuple[Kimad, Rows, dict[str, NDArray[Any]]]:
    problem = LeastSquares.make(clients)
    rows: Rows = []

    def on_round(row: dict[str, Any], _: dict[str, Any]) -> None:
        rows.append(row)
        if each_round is not None:
            each_round(strategy)

    strategy = Kimad(settings, SimulatedNetwork(links), on_round=on_round)
    result = strategy.start(
        grid=grid_of(least_squares_app(problem, step, spoil), clients, tmp_path),
        initial_arrays=record(cut(np.ones(SIZE), dtype) | (extra or {})),
        num_rounds=rounds,
    )
    return strategy, rows, read(result.arrays)


def test_identity_is_plain_gradient_descent(tmp_path: Path) -> None:
    settings = replace(BASE, operator="identity", weights="uniform")
    _, rows, arrays = run(tmp_path, settings, rounds=20)
    problem, x = LeastSquares.make(5), np.ones(SIZE)
    for _ in range(20):
        x = x - 1e-3 * np.mean([problem.gradient(i, x) for i in range(5)], axis=0)
    np.testing.assert_allclose(join(arrays), x, rtol=1e-12)
    assert all(row["uplink_bytes"] == row["uplink_dense_bytes"] for row in rows)


@pytest.mark.parametrize("allocation", ["uniform", "hull"])
@pytest.mark.parametrize("late", ["absorb", "drop"])
@pytest.mark.parametrize(("dtype", "ulp"), [("float32", 2.0**-23), ("float64", 2.0**-52)])
def test_sums_equal_the_clients_memories_after_every_round(
    tmp_path: Path, allocation: str, late: str, dtype: str, ulp: float
) -> None:
    """30 % participation, fading links, a deadline: sum_i w_i h_i on both ends, within rounds * ulp * sum w max|h|."""
    number = 0
    largest = np.zeros(SIZE)

    def check(strategy: Kimad) -> None:
        nonlocal number, largest
        number += 1
        memories = settled_memories(strategy, tmp_path)
        weights = {c: strategy.memory.client(c).weight or 0.0 for c in memories}
        total = sum((weights[c] * np.concatenate(m.h).astype(np.float64) for c, m in memories.items()), np.zeros(SIZE))
        bound = sum((weights[c] * np.abs(np.concatenate(m.h)) for c, m in memories.items()), np.zeros(SIZE))
        largest = np.maximum(largest, bound)
        assert np.all(np.abs(np.concatenate(strategy.memory.sums) - total) <= number * ulp * largest)

    settings = replace(BASE, fraction=0.3, late=late, deadline_s=1.1, allocation=allocation, values="auto")
    _, rows, _ = run(tmp_path, settings, clients=10, rounds=30, dtype=dtype, each_round=check)
    assert number == 30
    assert sum(len(row["late"]) for row in rows) > 0, "the links never made anyone late: nothing was tested"
    assert sum(len(row["absorbed"]) for row in rows) > 0 or late == "drop"
    assert all(row["participants"] <= 3 for row in rows)


def test_budgets_follow_the_links_and_no_message_exceeds_its_own(tmp_path: Path) -> None:
    _, rows, _ = run(tmp_path, BASE, rounds=25)
    for row in rows:
        for client, size in row["uplink_bytes_by_client"].items():
            assert size <= row["budget_bytes_by_client"][client] or row["budget_misses"] > 0
    last = rows[-1]
    rates = [rate for _, rate in sorted(last["predicted_up_bps"].items())]
    budgets = [budget for _, budget in sorted(last["budget_bytes_by_client"].items())]
    assert np.argsort(rates).tolist() == np.argsort(budgets).tolist()
    for rate, budget in zip(rates, budgets, strict=True):  # c = B (t - T_comp - a) / 8
        assert budget == int(rate * (1.0 - 0.2 - 0.05) / 8)


def test_same_seed_same_rows_and_another_seed_other_rows(tmp_path: Path) -> None:
    settings = replace(BASE, fraction=0.5, deadline_s=1.2)
    rows = [run(tmp_path / str(i), replace(settings, seed=seed))[1] for i, seed in enumerate((5, 5, 6))]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


def test_nan_of_one_client_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    def spoil(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if index == 2 and number in (3, 4):
            arrays["b"][1] = np.nan if number == 3 else -np.inf
        return arrays

    strategy, rows, arrays = run(tmp_path, BASE, spoil=spoil)
    assert rows[2]["refused"]["2"].startswith("layer 'b', element 1: NaN")
    assert rows[3]["refused"]["2"].startswith("layer 'b', element 1: +Inf")  # received - (-Inf)
    assert strategy.counts["refused"] == 2
    assert rows[4]["refused"] == {}
    assert "2" in rows[5]["accepted"]
    assert np.all(np.isfinite(join(arrays)))


def test_an_app_that_raises_costs_that_message_only(tmp_path: Path) -> None:
    def spoil(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if index == 1 and number == 2:
            raise RuntimeError("disk full, say")
        return arrays

    strategy, rows, _ = run(tmp_path, BASE, spoil=spoil, rounds=4)
    assert rows[1]["refused"] == {"1": "no reply"}
    assert strategy.counts["client-error"] == 1
    assert "1" in rows[2]["accepted"]


def test_wrong_shape_names_the_array(tmp_path: Path) -> None:
    def spoil(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {**arrays, "w": arrays["w"].T} if index == 0 else arrays

    _, rows, _ = run(tmp_path, BASE, spoil=spoil, rounds=1)
    assert "'w'" in rows[0]["refused"]["0"]
    assert "(3, 8)" in rows[0]["refused"]["0"]


def test_whole_arrays_are_combined_and_counted(tmp_path: Path) -> None:
    def spoil(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        arrays["steps"] = arrays["steps"] + np.int64(index)
        arrays["running_mean"] = np.full(2, float(index), np.float32)
        return arrays

    extra: dict[str, NDArray[Any]] = {"steps": np.array(0, np.int64), "running_mean": np.zeros(2, np.float32)}
    settings = replace(BASE, whole=("running_*",), whole_every=2, time_budget_s=5.0, weights="uniform")
    strategy, rows, arrays = run(tmp_path, settings, spoil=spoil, extra=extra, rounds=4)
    # sent in rounds 1 and 3: the counter's maximum grows by 4 each time, the statistic is the mean of 0..4
    assert arrays["steps"] == 8
    assert arrays["running_mean"].tolist() == [2.0, 2.0]
    assert strategy.layout.compressed_size == SIZE
    assert rows[0]["uplink_bytes"] > rows[1]["uplink_bytes"]


def test_too_short_a_time_budget_warns_and_sends_floors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = replace(BASE, time_budget_s=0.1)
    with caplog.at_level("WARNING", logger="flwr.kimad"):
        strategy, rows, _ = run(tmp_path, settings, rounds=2)
    warning = next(r.getMessage() for r in caplog.records if "time-budget is 0.1 s" in r.getMessage())
    smallest = float(warning.rsplit(" ", 1)[1])
    assert all(row["budget_misses"] == 5 for row in rows)
    assert all(set(row["ratios_by_layer"]) == set(SHAPES) for row in rows)
    assert rows[0]["ratios_by_layer"] == {"w": 1 / 24, "b": 1 / 6}
    assert strategy.counts == {}
    # the value it names works on the mean rates: nobody is warned of any more
    caplog.clear()
    with caplog.at_level("WARNING", logger="flwr.kimad"):
        run(tmp_path / "again", replace(BASE, time_budget_s=smallest * 1.01), rounds=1)
    assert not [r for r in caplog.records if "too short" in r.getMessage()]


def test_whole_arrays_over_the_budget_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="flwr.kimad"):
        run(tmp_path, replace(BASE, whole=("big",)), rounds=1, extra={"big": np.zeros(1000, np.float32)})
    assert any("travel whole take 4000 bytes" in r.getMessage() for r in caplog.records)


def test_clients_evaluate_when_asked_and_it_counts_as_downlink(tmp_path: Path) -> None:
    none, there = (
        run(tmp_path / e, replace(BASE, evaluate=e, evaluate_every=2), rounds=4)[1] for e in ("none", "clients")
    )
    assert [row["test_loss"] is None for row in there] == [True, False, True, False]
    assert there[1]["downlink_bytes"] == 2 * none[1]["downlink_bytes"]
    assert there[0]["downlink_bytes"] == none[0]["downlink_bytes"]
    assert [r["uplink_bytes"] for r in there] == [r["uplink_bytes"] for r in none]


def test_clients_forget_the_run_at_its_end_when_told(tmp_path: Path) -> None:
    run(tmp_path, replace(BASE, forget=True), rounds=2)
    assert list(tmp_path.iterdir()) == []


def test_closing_settle_leaves_nothing_pending(tmp_path: Path) -> None:
    strategy, _, _ = run(tmp_path, BASE, rounds=3)
    for client in strategy.memory:
        with Store(tmp_path, strategy.settings.experiment, client) as store:
            entry = store.entry(client)
            assert entry.pending is None
            assert entry.accepted == strategy.memory.client(client).accepted is not None


def test_too_few_clients_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.roster.FIRST_HELLO_S", 0.0)
    with pytest.raises(ConfigError, match="start more nodes or lower min-clients"):
        run(tmp_path, replace(BASE, min_clients=9), rounds=1)


def test_train_config_and_a_seed_for_each_round_reach_user_code(tmp_path: Path) -> None:
    seen: list[ConfigRecord] = []
    app = ClientApp(mods=[kimad_mod])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(message.content.config_records["config"])
        content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    Kimad(BASE, SimulatedNetwork(SLOW)).start(
        grid=grid_of(app, 1, tmp_path),
        initial_arrays=record(cut(np.ones(SIZE), "float64")),
        num_rounds=3,
        train_config=ConfigRecord({"lr": 0.1}),
    )
    assert [(c["lr"], c["server-round"]) for c in seen] == [(0.1, 1), (0.1, 2), (0.1, 3)]
    assert len({c["seed"] for c in seen}) == 3


def test_oracle_budgets_arrive_exactly_at_the_end_of_the_time_budget(tmp_path: Path) -> None:
    """unit = coordinates and the true future rate: what is left of the time is less than one value's."""
    links = LinkSettings("cellular", 40, 400, overhead_s=0.05, compute_s=0.2, seed=3)  # 5 to 50 values a second
    settings = replace(BASE, budget_rate="oracle", unit="coordinates", allocation="uniform", time_budget_s=3.0)
    _, rows, _ = run(tmp_path, settings, rounds=12, links=links)
    for row in rows:  # the smallest reply has a value of each of the two layers
        assert row["deadline_misses"] <= sum(b < 2 for b in row["budget_bytes_by_client"].values())
    budgets = [b for row in rows for b in row["budget_bytes_by_client"].values()]
    assert len(set(budgets)) > 10
    for row in rows:
        if min(row["budget_bytes_by_client"].values()) >= 2 and max(row["budget_bytes_by_client"].values()) < SIZE:
            slowest = min(row["true_up_bps"].values())
            assert 3.0 - row["round_s"] < 8 / slowest * 2


def test_mean_rate_gives_each_client_a_static_budget(tmp_path: Path) -> None:
    links = LinkSettings("cellular", 400, 3000, overhead_s=0.05, compute_s=0.2, seed=3)
    strategy, rows, _ = run(tmp_path, replace(BASE, budget_rate="mean"), rounds=6, links=links)
    assert len({tuple(sorted(row["budget_bytes_by_client"].items())) for row in rows}) == 1
    for client, budget in rows[0]["budget_bytes_by_client"].items():
        rate = strategy.network.mean_up_bps(client)
        assert rate is not None
        assert budget == int(rate / 8 * (1.0 - 0.2 - 0.05))


@pytest.mark.parametrize("budget_rate", ["oracle", "mean"])
def test_a_budget_rate_that_nobody_knows_is_refused(
    tmp_path: Path, budget_rate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedNetwork, "coming_up_bps", lambda *_: None)
    monkeypatch.setattr(SimulatedNetwork, "mean_up_bps", lambda *_: None)
    with pytest.raises(ConfigError, match="expected a simulated network, or budget-rate = estimated"):
        run(tmp_path, replace(BASE, budget_rate=budget_rate), rounds=1)


def test_a_target_loss_ends_the_run(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 0.5, 0.1])
    strategy = Kimad(replace(BASE, target_loss=0.5), SimulatedNetwork(SLOW), on_round=lambda row, _: rows.append(row))
    rows: Rows = []
    strategy.start(
        grid=grid_of(least_squares_app(LeastSquares.make(2), 1e-3), 2, tmp_path),
        initial_arrays=record(cut(np.ones(SIZE), "float64")),
        num_rounds=9,
        evaluate_fn=lambda *_: MetricRecord({"loss": next(losses)}),
    )
    assert [row["test_loss"] for row in rows] == [3.0, 1.0, 0.5]


def test_poisson_rounds_may_have_nobody_and_the_run_goes_on(tmp_path: Path) -> None:
    strategy, rows, _ = run(tmp_path, replace(BASE, sampling="poisson", fraction=0.3), rounds=30, clients=3)
    participants = [row["participants"] for row in rows]
    assert {0, 1} <= set(participants)
    for client, memory in settled_memories(strategy, tmp_path).items():
        assert strategy.memory.client(client).digest == memory.digest
