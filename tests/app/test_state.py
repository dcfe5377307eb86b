"""`kimad state`: what it lists, what it finds damaged, and what it removes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from app.cli import main
from compression import LayerUpdate, Layout
from protocol import Attempt, Store

LAYOUT = Layout.of({"w": np.zeros(50, np.float32)})


def make(root: Path, experiment: str, client: str, *, days_old: float = 0.0) -> Path:
    with Store(root, experiment, client) as store:
        store.use(LAYOUT)
        update = LayerUpdate(np.arange(3), np.ones(3, np.float32))
        store.pend(store.entry(client), Attempt(1, 1, client), b"payload" * 30, [update], report={})
        store.commit()
        folder = store.folder
    for path in folder.iterdir():
        when = path.stat().st_mtime - days_old * 86400
        os.utime(path, (when, when))
    return folder


def state(*arguments: str) -> int:
    return main(["state", *arguments])


def test_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert state("ls", "--state-dir", str(tmp_path)) == 0
    assert "no client state" in capsys.readouterr().out


def test_a_line_a_node_and_nothing_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path, "run-1", "a/b", days_old=2)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert state("verify", "--state-dir", str(tmp_path)) == 0
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line == ["run-1", "a/b", "1", str(sum(map(len, before.values()))), "2.0", "whole"]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_damage_is_found_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = make(tmp_path, "r", "a") / "log-00000001"
    data = bytearray(log.read_bytes())
    data[data.rindex(b"payload") + 3] ^= 1
    log.write_bytes(data)
    assert state("ls", "--state-dir", str(tmp_path)) == 0
    assert state("verify", "--state-dir", str(tmp_path)) == 1
    assert "is not what was written" in capsys.readouterr().out
    log.write_bytes(data[:-5])
    assert state("ls", "--state-dir", str(tmp_path)) == 1
    assert "a torn tail" in capsys.readouterr().out
    assert log.read_bytes() == data[:-5]


def test_prune_by_age_and_by_quota(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make(tmp_path, f"r{days}", "a", days_old=days) for days in (40, 20, 10, 1)]
    each = sum(path.stat().st_size for path in folders[0].iterdir())
    quota = ["--state-dir", str(tmp_path), "--older-than-days", "30", "--most-bytes", str(2 * each)]
    assert state("prune", *quota, "--dry-run") == 0
    assert all(folder.exists() for folder in folders)
    with Store(tmp_path, "r20", "a"):  # in use: the next oldest goes
        assert state("prune", *quota) == 0
    assert [folder.exists() for folder in folders] == [False, True, False, True]
    assert not folders[0].parent.exists()
    assert "2 of 4" in capsys.readouterr().out


def test_prune_without_a_limit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert state("prune", "--state-dir", str(tmp_path)) == 2
    assert "--older-than-days" in capsys.readouterr().err
