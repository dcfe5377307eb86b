"""A SuperLink and SuperNodes on this machine, each a process of its own that may be killed and is started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
KINDS: Final = {  # what the command line of each kind of process names
    "superlink": "flower-superlink",
    "supernode": "flower-supernode",
    "serverapp": "flwr-serverapp",
    "clientapp": "flwr-clientapp",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """Flower on one machine, without TLS.

    Args:
        folder: its files and logs.
        nodes: how many SuperNodes; each holds one partition.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, nodes
        self.port, self.node_ports = free_port(), [free_port() for _ in range(nodes)]
        home = folder / "flwr-home"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "chaos"\n[superlink.chaos]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self._mark = f"FLWR_HOME={home}".encode()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self.starts = 0

    def heal(self) -> None:
        """Start the SuperLink and the SuperNodes that are not there."""
        if self._ended("superlink"):
            self._start(
                "superlink",
                *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
                *("--database", str(self.folder / "superlink.db")),
            )
        for number, port in enumerate(self.node_ports):
            if self._ended(f"node{number}"):
                state = self.folder / f"state{number}"
                config = f'partition-id={number} num-partitions={self.nodes} state-dir="{state}"'
                self._start(
                    f"node{number}",
                    *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}"),
                    *("--host", "127.0.0.1", "--port", str(port), "--node-config", config),
                )

    def _ended(self, name: str) -> bool:
        return name not in self._started or self._started[name].poll() is not None

    def _start(self, name: str, *command: str) -> None:
        self.starts += 1
        with (self.folder / f"{name}.log").open("ab") as log:
            self._started[name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def submit(self, keys: Mapping[str, str]) -> bool:
        """Start a run of this project's app; whether the SuperLink took it."""
        settings = " ".join(f"{key}={value}" for key, value in keys.items())
        with (self.folder / "submit.log").open("ab") as log:
            done = subprocess.run(
                ["flwr", "run", str(ROOT), "chaos", "--run-config", settings],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                timeout=120,
                check=False,
            )
        return done.returncode == 0

    def processes(self, kind: str | None = None) -> list[int]:
        """Ids of this cluster's living processes, of one kind or of all."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or self._mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if kind is None or KINDS[kind].encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is not ours
        return sorted(found)

    def stop(self) -> None:
        """Stop everything."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + 10
            for pid in self.processes():
                kill(pid, number)
            while self.processes() and time.monotonic() < until_s:
                time.sleep(0.1)
        for process in self._started.values():
            process.wait(timeout=10)


def kill(pid: int, number: int = signal.SIGKILL, *, group: bool = False) -> bool:
    """Send a signal; whether the process was there.

    Args:
        pid: the process.
        number: of the signal.
        group: to its children, too, as a service manager does; a ServerApp whose SuperLink is gone lingers else.
    """
    try:
        (os.killpg if group else os.kill)(pid, number)
    except ProcessLookupError:
        return False
    return True
