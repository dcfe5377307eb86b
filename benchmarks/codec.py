"""Times of the codec on the layers of a ResNet-18 (11.17 M float32), as ratios to a memcpy of them.

Absolute times drift from run to run on shared machines, so every way is timed in turn with a
memcpy, the minimum of N is taken of each, and the ratio is what counts. The values follow a
Student t with 3 degrees of freedom and a log-normal scale for each layer.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from compression import UP, Header, Layout, Scheme, Slot, compress, decode, move, tag4, topk_indices

SELECT_LIMIT = 4.0  # times memcpy, 1 % of one vector
ENCODE_LIMIT = 8.0  # times memcpy, whole compress at 1 %, fixed ratio or uniform budget
ATTEMPTS = 3
RATIO = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """One way that was timed.

    Args:
        name: what was done.
        ms: least wall time of the run, milliseconds.
        memcpy: the same over the least time of a memcpy of the input in the same run.
        limit: the ratio that `--check` enforces, or None.
        note: size or error reached.
    """

    name: str
    ms: float
    memcpy: float
    limit: float | None
    note: str


def resnet18() -> dict[str, tuple[int, ...]]:
    """Shapes of the 62 trainable layers of a ResNet-18 for 10 classes."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{stage}.{block}"
            for at, inputs in ((1, before), (2, width)):
                shapes[f"{name}.conv{at}"] = (width, inputs, 3, 3)
                shapes[f"{name}.bn{at}.weight"] = shapes[f"{name}.bn{at}.bias"] = (width,)
            if block == 0 and stage > 1:
                shapes[f"{name}.downsample.0"] = (width, before, 1, 1)
                shapes[f"{name}.downsample.1.weight"] = shapes[f"{name}.downsample.1.bias"] = (width,)
            before = width
    return shapes | {"fc.weight": (10, 512), "fc.bias": (10,)}


def inputs() -> tuple[Layout, Header, list[NDArray[Any]]]:
    """The layout, a header, and t3-like layers; the same in every run."""
    rng = np.random.default_rng(2026)
    arrays = {
        name: (rng.standard_t(3, shape) * np.exp(rng.standard_normal())).astype(np.float32)
        for name, shape in resnet18().items()
    }
    layout = Layout.of(arrays)
    flat, _ = layout.split(arrays)
    header = Header(UP, layout.digest, tag4("benchmark"), tag4("client"), 1, 1, slots=((int(Slot.H), bytes(8)),))
    return layout, header, flat


def timed(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Least seconds of each way; the ways take turns, so that a slow moment hits all of them."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(repeat + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            took = time.perf_counter() - start
            if turn:  # the first turn warms up
                best[name] = min(best[name], took)
    return best


def measure(repeat: int) -> list[Row]:
    """All rows of one run; the first is the memcpy."""
    layout, header, flat = inputs()
    x = np.concatenate(flat)
    target = np.empty_like(x)
    k = int(RATIO * x.size)
    tensor = torch.from_numpy(x)
    fixed, even, best = Scheme(ratio=RATIO), Scheme(allocation="uniform"), Scheme(allocation="hull")
    sent = compress(layout, header, flat, None, fixed, None)
    budget = len(sent.payload)
    memories = [np.zeros(layer.size, dtype=layer.dtype) for layer in layout.layers]

    def pairs() -> bytes:
        found = torch.topk(tensor.abs(), k, sorted=False).indices.to(torch.int32).numpy()
        return b"".join((found.tobytes(), x[found].tobytes()))

    def receive() -> None:
        for memory, update in zip(memories, decode(layout, sent.payload).updates, strict=True):
            if update is not None:
                move(memory, update)

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, x),
        "select 0.1 %": lambda: topk_indices(x, k // 10),
        "select 1 %": lambda: topk_indices(x, k),
        "select 10 %": lambda: topk_indices(x, 10 * k),
        "np.argpartition 1 %": lambda: np.argpartition(np.abs(x), x.size - k)[x.size - k :],
        "torch.topk + int32/fp32 pairs 1 %": pairs,
        "compress, fixed 1 %": lambda: compress(layout, header, flat, None, fixed, None),
        "compress, uniform budget": lambda: compress(layout, header, flat, None, even, budget),
        "compress, hull budget": lambda: compress(layout, header, flat, None, best, budget),
        "decode and move 1 %": receive,
    }
    times = timed(ways, repeat)
    results = {
        "compress, fixed 1 %": sent,
        "compress, uniform budget": compress(layout, header, flat, None, even, budget),
        "compress, hull budget": compress(layout, header, flat, None, best, budget),
    }
    notes = {
        name: f"{len(got.payload):,} bytes, {8 * len(got.payload) / sum(got.kept):.2f} bits a kept value, "
        f"error {sum(got.error_sq) / sum(got.norm_sq):.4f}"
        for name, got in results.items()
    }
    notes["torch.topk + int32/fp32 pairs 1 %"] = f"{8 * k:,} bytes, 64 bits a kept value"
    notes["memcpy"] = f"{x.nbytes:,} bytes"
    limits = {
        "select 1 %": SELECT_LIMIT,
        "compress, fixed 1 %": ENCODE_LIMIT,
        "compress, uniform budget": ENCODE_LIMIT,
    }
    return [
        Row(name, took * 1e3, took / times["memcpy"], limits.get(name), notes.get(name, ""))
        for name, took in times.items()
    ]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def conditions() -> dict[str, str]:
    """Machine, versions and time of a run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
    }


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'':36}{'ms':>8}{'x memcpy':>10}{'limit':>7}"]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:.0f}"
        lines.append(f"{row.name:36}{row.ms:8.1f}{row.memcpy:10.2f}{limit:>7}  {row.note}".rstrip())
    return "\n".join(lines)


def broken(rows: list[Row]) -> list[str]:
    """Names of the rows beyond their limit."""
    return [row.name for row in rows if row.limit is not None and row.memcpy > row.limit]


def run(repeat: int, path: Path | None, *, check: bool) -> int:
    """Measure, print and write; 1 when `check` is set and each attempt broke a limit."""
    for attempt in range(1, ATTEMPTS + 1):
        rows, under = measure(repeat), conditions()
        print("; ".join(f"{name} {value}" for name, value in under.items()))
        print(table(rows), flush=True)
        if path is not None:
            report = {"conditions": under, "rows": [{n: getattr(row, n) for n in Row.__slots__} for row in rows]}
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        over = broken(rows)
        if not check or not over:
            return 0
        print(f"attempt {attempt} of {ATTEMPTS}: beyond the limit: {', '.join(over)}", file=sys.stderr)
    return 1
