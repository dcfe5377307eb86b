"""What each allocation loses of a vector at the same bytes, and how long it takes, on a ResNet-18's layers.

The layers are the codec benchmark's (11.17 M float32, Student t with 3 degrees of freedom, a
log-normal scale each). Beside them, in the same run: pairs of a 32-bit index and a float32 value,
1 % of every layer, as most frameworks send.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import vectors
from benchmarks.codec import conditions
from compression import Scheme, compress
from compression.allocation import ALLOCATIONS

SHARES = (0.01, 0.05, 0.1, 0.3)
PAIR_BYTES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One message.

    Args:
        share: its budget as a share of the dense float32 bytes.
        allocation, values: of its scheme; "pairs" for the peer.
        nbytes: its length.
        error: ||x - C(x)||^2 / ||x||^2.
        kept: share of the values sent.
        ms: least wall time of the runs, milliseconds.
    """

    share: float
    allocation: str
    values: str
    nbytes: int
    error: float
    kept: float
    ms: float


def run(repeat: int, json_path: Path | None) -> int:
    """Measure, print the table, write the JSON; returns 0."""
    layout, header, x = vectors.prepared(vectors.t3())
    dense = 4 * sum(v.size for v in x)
    norm_sq = sum(float(np.sum(v.astype(np.float64) ** 2)) for v in x)
    rows: list[Row] = []
    for share in SHARES:
        budget = int(share * dense)
        rows.append(_pairs(x, share, dense, norm_sq))
        schemes = [(a.name, "bf16") for a in ALLOCATIONS] + [("hull", "auto")]
        for allocation, values in schemes:
            times: list[float] = []
            for _ in range(repeat):
                begun = time.perf_counter()
                got = compress(layout, header, x, None, Scheme(allocation=allocation, values=values), budget)
                times.append(time.perf_counter() - begun)
            error, kept = sum(got.error_sq) / norm_sq, sum(got.kept) / layout.compressed_size
            rows.append(Row(share, allocation, values, len(got.payload), error, kept, 1e3 * min(times)))
    under = conditions()
    print("; ".join(f"{name} {value}" for name, value in under.items()))
    head = f"{'budget':>7}  {'allocation':<11}{'values':<7}{'bytes':>11}  {'error':>7}  {'of pairs':>8}"
    print(f"{head}  {'sent':>7}  {'ms':>6}")
    for share in SHARES:
        group = [row for row in rows if row.share == share]
        for row in group:
            print(
                f"{100 * share:>6g}%  {row.allocation:<11}{row.values:<7}{row.nbytes:>11,}  {row.error:>7.4f}"
                f"  {row.error / group[0].error:>8.3f}  {100 * row.kept:>6.2f}%  {row.ms:>6.0f}"
            )
    if json_path is not None:
        result = {"conditions": under, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _pairs(x: list[NDArray[Any]], share: float, dense: int, norm_sq: float) -> Row:
    """The same share of every layer's largest values, as 32-bit indices and float32 values."""
    ratio = share * 4 / PAIR_BYTES
    begun = time.perf_counter()
    kept = [max(1, int(ratio * v.size)) for v in x]
    chosen = [np.argpartition(np.abs(v), v.size - k)[v.size - k :] for v, k in zip(x, kept, strict=True)]
    ms = 1e3 * (time.perf_counter() - begun)
    sent_sq = sum(float(np.sum(v[at].astype(np.float64) ** 2)) for v, at in zip(x, chosen, strict=True))
    return Row(share, "pairs", "fp32", PAIR_BYTES * sum(kept), 1 - sent_sq / norm_sq, sum(kept) * 4 / dense, ms)
