"""Run key faults: what is lost is counted, both ends stay equal, and asking again brings it all back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compression.errors import ConfigError
from strategies import Settings
from tests.strategies.test_faults import BASE, Run

ROUNDS = 30


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ("lose_request = 0.3", "client-error"),
        ("lose_reply = 0.3", "client-error"),
        ("corrupt = 0.3", "bad-payload"),
    ],
)
def test_what_goes_wrong_costs_that_message_only(tmp_path: Path, faults: str, kind: str) -> None:
    run, same = Run(tmp_path / "a", replace(BASE, faults=faults)), Run(tmp_path / "b", replace(BASE, faults=faults))
    x = run.start(ROUNDS)
    assert np.array_equal(x, same.start(ROUNDS))
    refused = sum(len(row["refused"]) for row in run.rows)
    assert run.strategy.counts == {kind: refused}
    assert 0.15 * 3 * ROUNDS < refused < 0.45 * 3 * ROUNDS
    run.check_memories()


def test_a_reply_that_comes_twice_counts_once(tmp_path: Path) -> None:
    plain, doubled = Run(tmp_path / "a"), Run(tmp_path / "b", replace(BASE, faults="duplicate = 0.5"))
    assert np.array_equal(plain.start(ROUNDS), doubled.start(ROUNDS))
    assert plain.rows == doubled.rows


def test_asked_again_the_model_is_that_of_a_run_without_faults(tmp_path: Path) -> None:
    plain = Run(tmp_path / "a", replace(BASE, on_failure="retry"))
    faulty = Run(
        tmp_path / "b",
        replace(BASE, on_failure="retry", faults="lose_request = 0.1, lose_reply = 0.1, duplicate = 0.1"),
    )
    assert np.array_equal(plain.start(ROUNDS), faulty.start(ROUNDS))
    assert plain.rows == faulty.rows
    assert faulty.strategy.counts["client-error"] > 5


def test_a_wrong_plan_is_told_with_everything_else() -> None:
    with pytest.raises(ConfigError, match="2 settings are wrong"):
        Settings(faults="lose_reply = 2", late="x")
