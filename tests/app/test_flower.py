"""The real thing: `flwr run` on the Ray engine gives the rows of the in-process grid, byte for byte."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli import main

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"num-rounds": 5, "fraction": 0.75, "dense-run": "false", "time-budget": 1.4}

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its own processes in /proc")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def marked(mark: bytes) -> list[int]:
    """Processes whose environment holds this entry."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended, or is not ours
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment of its own for Flower; every process that carries it is stopped afterwards."""
    home = str(tmp_path / "flwr-home")
    yield {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": home,
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "KIMAD_STATE_DIR": str(tmp_path / "state"),
    }
    mark = f"FLWR_HOME={home}".encode()
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + 10
        for pid in marked(mark):
            os.kill(pid, number)
        while marked(mark) and time.monotonic() < until:
            time.sleep(0.1)
    assert not marked(mark)


def test_flwr_run_gives_the_rows_of_the_in_process_grid(environment: dict[str, str], tmp_path: Path) -> None:
    ray, here = tmp_path / "ray", tmp_path / "here"
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items())
    command = ["flwr", "run", str(ROOT), "--stream"]
    command += ["--federation-config", "num-supernodes=4 client-resources-num-cpus=1"]
    command += ["--run-config", f'{settings} run-dir="{ray}"']
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (ray / "summary.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    pairs = [f"{key}={value}" for key, value in SETTINGS.items()]
    assert main(["run", "--clients", "4", "--run-dir", str(here), *pairs]) == 0
    assert (ray / "rows.jsonl").read_bytes() == (here / "rows.jsonl").read_bytes()
    assert (ray / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
    rows = [json.loads(line) for line in (ray / "rows.jsonl").read_text().splitlines()]
    assert [row["participants"] for row in rows] == [3] * 5
    assert len({json.dumps(row["uplink_bytes_by_client"]) for row in rows}) == 5
    assert not list((tmp_path / "state").glob("*")), "clients did not forget a finished run"
