"""Bytes a day on a metered link."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Context

from strategies import InProcessGrid, Kimad, LinkSettings, Settings, SimulatedNetwork
from strategies.allowance import DAY_S, Allowance
from tests.apps import SIZE, LeastSquares, cut, grid_of, least_squares_app, record

LINKS = LinkSettings("constant", 2000.0, 2000.0, overhead_s=0.0, compute_s=0.0, seed=3)
# a round lasts 6 h, so that a day has four of them
BASE = Settings(experiment="t", seed=5, time_budget_s=DAY_S / 4, values="fp64", operator="topk", ratio=0.2)


def test_what_is_left_of_a_day() -> None:
    allowance = Allowance(100)
    assert allowance.left("a", 0.0) == 100
    allowance.spend("a", 60, 10.0)
    allowance.spend("a", 30, DAY_S - 1.0)
    assert allowance.left("a", DAY_S - 0.5) == 10
    assert allowance.left("b", 0.0) == 100
    assert allowance.left("a", DAY_S) == 100  # nothing is carried over
    allowance.spend("a", 170, DAY_S)
    assert allowance.left("a", DAY_S) == 0
    assert allowance.next_day_s(DAY_S + 1) == 2 * DAY_S


def test_the_lower_of_both_limits_holds() -> None:
    allowance = Allowance(100)
    for client, own in (("low", 40), ("high", 400), ("none", None)):
        allowance.limit(client, own)
    assert [allowance.left(c, 0.0) for c in ("low", "high", "none")] == [40, 100, 100]
    free = Allowance(None)
    free.limit("low", 40)
    assert [free.left(c, 0.0) for c in ("low", "none")] == [40, None]


def run(tmp_path: Path, settings: Settings, rounds: int, own: dict[int, int]) -> tuple[list[dict[str, object]], Kimad]:
    rows: list[dict[str, object]] = []
    grid = grid_of(least_squares_app(LeastSquares.make(3), 1e-3), 3, tmp_path)
    _limit_nodes(grid, own)
    strategy = Kimad(settings, SimulatedNetwork(LINKS), on_round=lambda row, _: rows.append(row))
    strategy.start(grid=grid, initial_arrays=record(cut(np.ones(SIZE), "float64")), num_rounds=rounds)
    return rows, strategy


def _limit_nodes(grid: InProcessGrid, own: dict[int, int]) -> None:
    contexts: list[Context] = list(grid.contexts.values())
    for context in contexts:
        index = int(context.node_config["partition-id"])
        if index in own:
            context.node_config["max-bytes-per-day"] = own[index]


def test_no_client_passes_its_limit_and_all_take_part_again_on_the_next_day(tmp_path: Path) -> None:
    free, _ = run(tmp_path / "free", BASE, 1, {})
    sizes: dict[str, int] = free[0]["uplink_bytes_by_client"]  # type: ignore[assignment]
    model = int(str(free[0]["downlink_bytes"])) // 3
    limit = 2 * (model + max(sizes.values())) + 40  # two rounds, and something over
    rows, _ = run(tmp_path / "capped", replace(BASE, max_bytes_per_day=limit), 9, {})
    used: Counter[tuple[str, int]] = Counter()
    for row in rows:
        day = int((float(str(row["virtual_s"])) - float(str(row["round_s"]))) // DAY_S)
        for client, nbytes in row["uplink_bytes_by_client"].items():  # type: ignore[attr-defined]
            used[client, day] += nbytes + model
    assert max(used.values()) <= limit
    days = {day for _, day in used}
    assert len(days) >= 3  # the run went on, day after day
    assert all(used[client, day] > limit // 2 for client in ("0", "1", "2") for day in sorted(days)[:-1])
    idle = [row for row in rows if row["participants"] == 0]
    assert idle
    assert all(float(str(row["virtual_s"])) % DAY_S == 0.0 for row in idle)  # nobody to ask: midnight


def test_a_node_that_is_paid_by_the_byte_sits_out_while_others_go_on(tmp_path: Path) -> None:
    rows, strategy = run(tmp_path, BASE, 4, {1: 1200})
    assert strategy.clients["1"].max_bytes_per_day == 1200
    taken = [sorted(row["uplink_bytes_by_client"]) for row in rows]  # type: ignore[call-overload]
    assert taken[0] == ["0", "1", "2"]
    assert ["0", "2"] in taken


def test_a_budget_ends_where_the_allowance_does(tmp_path: Path) -> None:
    settings = replace(BASE, ratio=None, allocation="uniform", time_budget_s=1000.0)
    free, _ = run(tmp_path / "free", settings, 1, {})
    model = int(str(free[0]["downlink_bytes"])) // 3
    largest = max(free[0]["uplink_bytes_by_client"].values())  # type: ignore[attr-defined]
    rows, _ = run(tmp_path / "capped", replace(settings, max_bytes_per_day=model + largest - 60), 1, {})
    sent = rows[0]["uplink_bytes_by_client"].values()  # type: ignore[attr-defined]
    assert all(n <= largest - 60 for n in sent)
    assert all(n > 0 for n in sent)
