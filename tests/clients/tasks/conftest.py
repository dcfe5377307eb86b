"""No test of a task reads the user's data or home unless it says so."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KIMAD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
