"""The codec on the layers of a ResNet-18 (11.17 M float32): times as ratios to a memcpy, bytes and errors.

Absolute times drift from run to run on shared machines, so every way is timed in turn with a
memcpy, the minimum of N is taken of each, and the ratio is what counts. Bytes and errors do not
drift: they are those of three vectors (vectors.py), each message as long as pairs of a 32-bit index and a
float32 value for the 1 % largest of every layer.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import vectors
from compression import Scheme, compress, decode, move, topk_indices
from compression.indices import encode_gaps, rice_bytes

SELECT_LIMIT = 4.0  # times memcpy, 1 % of one vector
ENCODE_LIMIT = 8.0  # times memcpy, whole compress at 1 %, fixed ratio or uniform budget
ATTEMPTS = 3
RATIO = 0.01
PAIR_BYTES = 8
ERROR_LIMITS = {"t3": 0.47, "gradient": 0.55, "feedback": 0.76}  # of the pairs' error, by joint precision
SCHEMES = {
    "one ratio, bf16": Scheme(allocation="uniform", values="bf16"),
    "hull, bf16": Scheme(allocation="hull", values="bf16"),
    "hull, joint precision": Scheme(allocation="hull", values="auto"),
}
JOINT = "hull, joint precision"


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


@dataclass(frozen=True, slots=True)
class Loss:
    """One vector by one scheme, at the bytes of 1 % of pairs.

    Args:
        vector, scheme: names.
        nbytes: length of the message.
        kept: share of the values sent.
        bits: bits a kept value, everything counted.
        error: ||x - C(x)||^2 / ||x||^2; of_pairs: the same over the pairs' error.
        limit: of of_pairs, that `--check` enforces, or None.
    """

    vector: str
    scheme: str
    nbytes: int
    kept: float
    bits: float
    error: float
    of_pairs: float
    limit: float | None


def losses() -> tuple[list[Loss], list[str]]:
    """All schemes on all vectors, and a line on the indices of each."""
    gradient, feedback = vectors.trained()
    rows: list[Loss] = []
    lines: list[str] = []
    for name, arrays in (("t3", vectors.t3()), ("gradient", gradient), ("feedback", feedback)):
        layout, header, x = vectors.prepared(arrays)
        supports = [topk_indices(v, max(1, int(RATIO * v.size))) for v in x]
        kept = sum(s.size for s in supports)
        norm_sq = sum(float(np.sum(v.astype(np.float64) ** 2)) for v in x)
        sent_sq = sum(float(np.sum(v[s].astype(np.float64) ** 2)) for v, s in zip(x, supports, strict=True))
        pairs = 1 - sent_sq / norm_sq
        size = layout.compressed_size
        rows.append(Loss(name, "pairs, 32 + 32 bit", PAIR_BYTES * kept, kept / size, 64.0, pairs, 1.0, None))
        for scheme_name, scheme in SCHEMES.items():
            got = compress(layout, header, x, None, scheme, PAIR_BYTES * kept)
            error = sum(got.error_sq) / norm_sq
            limit = ERROR_LIMITS[name] if scheme_name == JOINT else None
            share, bits = sum(got.kept) / size, 8 * len(got.payload) / sum(got.kept)
            rows.append(Loss(name, scheme_name, len(got.payload), share, bits, error, error / pairs, limit))
        rice = 8 * sum(rice_bytes(s, v.size) for v, s in zip(x, supports, strict=True)) / kept
        gaps = 8 * sum(min(_gaps_bytes(s), rice_bytes(s, v.size)) for v, s in zip(x, supports, strict=True)) / kept
        bound = sum(_log2_choose(v.size, s.size) for v, s in zip(x, supports, strict=True)) / kept
        lines.append(
            f"indices of the 1 % largest, {name}: rice {rice:.3f} bits each, {rice / bound:.4f} x log2 C(d, K)/K; "
            f"with zstd where smaller {gaps:.3f}, {gaps / bound:.4f}"
        )
    return rows, lines


def _gaps_bytes(support: NDArray[np.int64]) -> int:
    stream = encode_gaps(support)
    return 1 << 62 if stream is None else len(stream)


def _log2_choose(d: int, k: int) -> float:
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)


def loss_table(rows: list[Loss]) -> str:
    """The rows as aligned text."""
    lines = [f"{'':10}{'':24}{'bytes':>10}{'sent':>8}{'bits':>7}{'error':>8}{'of pairs':>10}{'limit':>7}"]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g}"
        lines.append(
            f"{row.vector:10}{row.scheme:24}{row.nbytes:>10,}{100 * row.kept:>7.2f}%{row.bits:>7.2f}{row.error:>8.4f}"
            f"{row.of_pairs:>10.3f}{limit:>7}"
        )
    return "\n".join(lines)


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
    layout, header, flat = vectors.prepared(vectors.t3())
    x = np.concatenate(flat)
    target = np.empty_like(x)
    k = int(RATIO * x.size)
    tensor = torch.from_numpy(x)
    fixed, even = Scheme(ratio=RATIO), Scheme(allocation="uniform")
    hull, joint = Scheme(allocation="hull", values="bf16"), Scheme(allocation="hull")
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
        "compress, hull budget, bf16": lambda: compress(layout, header, flat, None, hull, budget),
        "compress, hull budget, joint": lambda: compress(layout, header, flat, None, joint, budget),
        "decode and move 1 %": receive,
    }
    times = timed(ways, repeat)
    results = {
        "compress, fixed 1 %": sent,
        "compress, uniform budget": compress(layout, header, flat, None, even, budget),
        "compress, hull budget, bf16": compress(layout, header, flat, None, hull, budget),
        "compress, hull budget, joint": compress(layout, header, flat, None, joint, budget),
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
    """Measure, print and write; with `check` 1 when an error limit, or a time limit in each attempt, is broken."""
    lost, lines = losses()
    print(loss_table(lost))
    print("\n".join(lines), flush=True)
    wrong = [f"{row.vector}, {row.scheme}" for row in lost if row.limit is not None and row.of_pairs > row.limit]
    if check and wrong:
        print(f"beyond the limit: {', '.join(wrong)}", file=sys.stderr)
        return 1
    for attempt in range(1, ATTEMPTS + 1):
        rows, under = measure(repeat), conditions()
        print("; ".join(f"{name} {value}" for name, value in under.items()))
        print(table(rows), flush=True)
        if path is not None:
            report = {
                "conditions": under,
                "rows": [asdict(row) for row in rows],
                "losses": [asdict(row) for row in lost],
            }
            path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        over = broken(rows)
        if not check or not over:
            return 0
        print(f"attempt {attempt} of {ATTEMPTS}: beyond the limit: {', '.join(over)}", file=sys.stderr)
    return 1
