"""A few kills of a real local run; `python -m tests.chaos --kills 50` is the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its own processes in /proc")


def test_a_run_whose_processes_are_killed_gives_the_undisturbed_model(tmp_path: Path) -> None:
    kinds = ("clientapp", "serverapp", "clientapp", "supernode", "superlink")
    outcome = run(tmp_path, 5, 1, kinds=kinds, limit_s=1200.0)
    assert outcome.kills == {"clientapp": 2, "serverapp": 1, "supernode": 1, "superlink": 1}
    assert outcome.same_model
    assert outcome.same_rows
