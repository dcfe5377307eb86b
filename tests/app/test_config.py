"""Run keys: one list, all problems together, and what a mistake is told."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from app.config import RunConfig, keys, parse
from compression.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def defaults() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        config: dict[str, Any] = tomllib.load(file)["tool"]["flwr"]["app"]["config"]
    return config


def test_pyproject_lists_every_key_with_the_default_of_the_code() -> None:
    assert RunConfig().as_dict() == defaults()
    assert {k: type(v) for k, v in RunConfig().as_dict().items()} == {k: type(v) for k, v in defaults().items()}


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.toml")), ids=lambda p: p.name)
def test_every_configuration_in_conf_is_valid(path: Path) -> None:
    parse({**defaults(), **tomllib.loads(path.read_text())})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task": "digit"}, "unknown task 'digit': expected one of cifar10, digits, "),
        ({"task": "digit"}, "did you mean 'digits'?"),
        ({"operator": "topkk"}, "unknown operator 'topkk'"),
        ({"operator": "topkk"}, "did you mean 'topk'?"),
        ({"estimator": "emwa"}, "did you mean 'ewma'?"),
        ({"allocation": "hul"}, "did you mean 'hull'?"),
        ({"links": "celular"}, "did you mean 'cellular'?"),
        ({"late": "wait"}, "unknown late 'wait': expected one of absorb, drop"),
        ({"server-optimizer": "sgd"}, "did you mean 'SGD'?"),
        ({"time-bugdet": 1.0}, "unknown run key 'time-bugdet'"),
        ({"time-bugdet": 1.0}, "did you mean 'time-budget'?"),
        ({"time-budget": "soon"}, "time-budget is 'soon'"),
        ({"time-budget": float("nan")}, "time-budget"),
        ({"time-budget": -1.0}, "time-budget is -1.0"),
        ({"num-rounds": 2.5}, "num-rounds is 2.5"),
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"deadline": 0.5}, "expected 1 or more, or 0 to wait for all"),
        ({"run-dir": "runs/x"}, "expected an absolute path"),
        ({"uplink-bps-min": 2e6, "uplink-bps-max": 1e6}, "swap them"),
    ],
)
def test_a_mistake_is_named_with_what_to_do(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**defaults(), **change})
    assert said in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_problems_are_reported_together() -> None:
    wrong = {"operator": "x", "time-budget": 0.0, "nonsense": 1, "links": "wire", "evaluate": "never"}
    with pytest.raises(ConfigError) as caught:
        parse({**defaults(), **wrong})
    assert len(caught.value.problems) == len(wrong)
    assert "5 settings are wrong" in str(caught.value)


def test_integers_pass_for_floats() -> None:
    assert parse({**defaults(), "time-budget": 3}).time_budget == 3.0


def test_keys_are_kebab_case() -> None:
    assert all(key == key.lower() and "_" not in key for key in keys())
