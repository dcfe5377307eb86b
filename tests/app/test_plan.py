"""What a plan says, against a run of the same configuration and against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.client_app import app as client_app
from app.config import parse
from app.experiment import to_record
from app.plan import make_plan, plan_text
from app.rundir import read_rows
from clients.tasks import make_task
from strategies import InProcessGrid, Kimad, SimulatedNetwork
from strategies.allowance import DAY_S

CONSTANT = {"links": "constant", "uplink-bps-min": 40_000.0, "uplink-bps-max": 90_000.0, "overhead-s": 0.05}


def plan_of(count: int = 4, **changes: object):  # type: ignore[no-untyped-def]
    config = parse({**CONSTANT, **{k.replace("_", "-"): v for k, v in changes.items()}})
    return make_plan(config, make_task(config.task, config.train_options()).initial_arrays(), count)


def test_the_plan_by_hand() -> None:
    plan = plan_of()
    slowest, fastest = plan.clients[0], plan.clients[-1]
    assert (slowest.up_bps, fastest.up_bps) == (40_000.0, 90_000.0)
    assert slowest.budget_bytes == int(5000 * (1.6 - 1.0 - 0.05))
    assert 0.99 * slowest.budget_bytes <= slowest.message_bytes <= slowest.budget_bytes
    assert slowest.reply_s == pytest.approx(1.05 + slowest.message_bytes / 5000)
    assert slowest.dense_reply_s == pytest.approx(1.05 + plan.dense_reply_bytes / 5000)
    assert plan.round_s == max(c.reply_s for c in plan.clients)
    assert plan.rounds_per_day == pytest.approx(DAY_S / plan.round_s)
    assert slowest.up_bytes_per_day == pytest.approx(plan.rounds_per_day * slowest.message_bytes)
    assert slowest.down_bytes_per_day == pytest.approx(plan.rounds_per_day * plan.model_bytes)
    assert plan.values == 38282
    assert 4 * 38282 < plan.model_bytes < 4 * 38282 + 100
    assert not any(c.miss for c in plan.clients)


def test_clients_stay_within_the_disk_of_the_plan(tmp_path: Path) -> None:
    keys = {**CONSTANT, "checkpoint-every": 3, "num-rounds": 25, "evaluate": "none", "local-steps": 1}
    config = parse(keys)
    arrays = make_task(config.task, config.train_options()).initial_arrays()
    most: list[int] = []

    def on_round(row: dict[str, Any], wall: dict[str, Any]) -> None:
        folders = (tmp_path / "clients").glob("run-*/node-*")
        most.append(max(sum(path.stat().st_size for path in folder.iterdir()) for folder in folders))

    Kimad(
        config.settings("disk"),
        SimulatedNetwork(config.link_settings()),
        on_round=on_round,
        state_dir=tmp_path / "server",
    ).start(
        grid=InProcessGrid.of_partitions(client_app, 2, config.as_dict(), tmp_path / "clients"),
        initial_arrays=to_record(arrays),
        num_rounds=config.num_rounds,
    )
    planned = make_plan(config, arrays, 2).client_disk_bytes
    assert len(most) == 25
    assert 0.3 * planned < max(most) <= planned


def test_a_cap_a_day_bounds_the_rounds() -> None:
    plan = plan_of(max_bytes_per_day=1_000_000)
    for client in plan.clients:
        assert client.rounds_per_day == 1_000_000 // (client.message_bytes + plan.model_bytes)
        assert client.up_bytes_per_day + client.down_bytes_per_day <= 1_000_000
    assert "max-bytes-per-day 1.00 MB" in plan_text(plan)


def test_many_clients_are_shown_from_the_slowest_to_the_fastest() -> None:
    plan = plan_of(count=100)
    rates = [c.up_bps for c in plan.clients]
    assert len(rates) == 8
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (40_000.0, 90_000.0)
    assert "shown are 8 of 100 clients" in plan_text(plan)


def test_a_budget_that_is_too_small_is_said() -> None:
    plan = plan_of(time_budget=1.051)
    assert all(c.miss for c in plan.clients)
    assert "raise time-budget" in plan_text(plan)


def test_the_plan_is_what_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Constant links: every client's second message is as long as planned, within 1 %."""
    settings = [f"{k}={v}" for k, v in CONSTANT.items()] + ["dense-run=false", "num-rounds=3"]
    assert main(["plan", *settings, "--clients", "3", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["run", *settings, "--clients", "3", "--run-dir", str(tmp_path / "run")]) == 0
    last = read_rows(tmp_path / "run")[-1]
    for client in planned["clients"]:
        sent = last["uplink_bytes_by_client"][str(client["client"])]
        assert sent == pytest.approx(client["message_bytes"], rel=0.01)
    assert last["round_s"] == pytest.approx(planned["round_s"], rel=0.01)


def test_plan_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--clients", "2"]) == 0
    out = capsys.readouterr().out
    assert "kbit/s" in out
    assert "rounds a day" in out
    assert main(["plan", "--clients", "0"]) == 2
    assert "--clients is 0" in capsys.readouterr().err
