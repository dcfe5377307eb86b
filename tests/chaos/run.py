"""One run under kills, beside an undisturbed one."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.cli import main
from tests.chaos.cluster import Cluster, kill

NODES: Final = 3
WEIGHTS: Final = {"clientapp": 4, "serverapp": 3, "supernode": 2, "superlink": 1}
PAUSE_S: Final = (0.5, 6.0)  # between kills
AHEAD: Final = 2  # kills without a round done in between, ...
PATIENCE_S: Final = 180.0  # ... unless nothing moves for so long
KEYS: Final = {
    "task": '"quadratic"',
    "local-steps": "1",
    "local-lr": "0.19",
    "min-clients": str(NODES),
    "time-budget": "1.3",
    "target-loss": "1e-12",
    "evaluate-every": "5",
    "dense-run": "false",
    "on-failure": '"retry"',
    "checkpoint-every": "1",
    "resume": "true",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Args:
        kills: processes killed, by kind.
        starts: how often a run was started.
        rounds: of each run.
        same_model, same_rows: whether they are those of the undisturbed run, byte for byte.
        seconds: it took.
        faults: of the summary.
    """

    kills: dict[str, int]
    starts: int
    rounds: int
    same_model: bool
    same_rows: bool
    seconds: float
    faults: dict[str, int]


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run(folder: Path, kills: int, seed: int, *, kinds: tuple[str, ...] = (), limit_s: float = 3600.0) -> Outcome:
    """Kill so many processes at random moments of a run, and compare it with one that nobody disturbs.

    Args:
        folder: an empty folder.
        kills: how many.
        seed: of the moments and the kinds.
        kinds: what to kill, in this order, instead of drawing it.
        limit_s: give up after these seconds.

    Raises:
        TimeoutError: it did not end.
    """
    rng = random.Random(seed)
    wanted = list(kinds) or rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=kills)
    keys = {**KEYS, "num-rounds": str(len(wanted) + 2)}
    here, there = folder / "undisturbed", folder / "disturbed"
    plain = [f"{key}={value.strip(chr(34))}" for key, value in keys.items()]
    assert main(["run", "--clients", str(NODES), "--run-dir", str(here), *plain]) == 0

    cluster = Cluster(folder, NODES)
    began_s = time.monotonic()
    killed: Counter[str] = Counter()
    starts, next_s, submitted_s = 0, began_s + 12.0, 0.0
    try:
        while not (there / "summary.json").exists():
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                raise TimeoutError(f"no end after {limit_s:g} s; the logs are in {folder}")
            cluster.heal()
            if cluster.processes("serverapp"):
                submitted_s = now_s
            elif now_s - submitted_s > 5.0:
                starts += cluster.submit({**keys, "run-dir": f'"{there}"'})
                submitted_s = time.monotonic() + 10.0
            rounds = _lines(there / "rows.jsonl")
            is_time = now_s >= next_s and (killed.total() < rounds + AHEAD or now_s >= next_s + PATIENCE_S)
            if wanted and is_time and (found := cluster.processes(wanted[0])):
                if wanted[0] == "clientapp":
                    time.sleep(rng.uniform(0.0, 2.0))  # anywhere in its life, which is short
                if kill(rng.choice(found), group=wanted[0] == "superlink"):
                    killed[wanted.pop(0)] += 1
                    next_s = time.monotonic() + rng.uniform(*PAUSE_S)
            time.sleep(0.05)
    finally:
        cluster.stop()
    summary = json.loads((there / "summary.json").read_text())
    names = ("model.safetensors", "rows.jsonl")
    same_model, same_rows = ((there / name).read_bytes() == (here / name).read_bytes() for name in names)
    return Outcome(
        dict(killed), starts, summary["rounds"], same_model, same_rows, time.monotonic() - began_s, summary["faults"]
    )
