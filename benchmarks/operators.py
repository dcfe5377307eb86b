"""What each operator sends of one vector: bits a coordinate, error, and time, encoding and decoding.

A million float32, normal, as one layer of 1000 x 1000. Beside each the entropy of what it sends: for levels, of the
levels of all blocks as if they were drawn by themselves, and 16 bits a norm; for TopK and RandK
log2 C(d, K) and the values. Errors of operators by chance are of one draw.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import vectors
from benchmarks.codec import conditions
from compression import Scheme, compress, decode
from compression.coded import CODED
from compression.quantise import Quantiser, quantise

SIDE = 1000
CASES = (
    ("topk", "", 0.01),
    ("randk", "", 0.01),
    ("quant", "p = 2, block = 512", None),
    ("quant", "p = 2, block = 10000", None),
    ("quant", "p = inf, block = 512", None),
    ("quant", "p = inf, block = 10000", None),
    ("qsgd", "levels = 2", None),
    ("qsgd", "levels = 4", None),
    ("qsgd", "levels = 8", None),
    ("natural", "", None),
    ("round", "bits = 8, block = 256", None),
    ("round", "bits = 4, block = 256", None),
    ("round", "bits = 3, block = 64", None),
    ("round", "bits = 2, block = 64", None),
    ("sign", "block = 512", None),
    ("lowrank", "rank = 4", None),
    ("identity", "", None),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One operator.

    Args:
        operator, args: of its scheme.
        bits: a coordinate, the whole message counted.
        bound: entropy, bits a coordinate; None: not computed.
        error: ||x - C(x)||^2 / ||x||^2 of the form that EF21 uses; of the unbiased form: unbiased_error.
        unbiased_error: None where there is no unbiased form.
        encode_ms, decode_ms: least wall time of the runs.
    """

    operator: str
    args: str
    bits: float
    bound: float | None
    error: float
    unbiased_error: float | None
    encode_ms: float
    decode_ms: float


def run(repeat: int, json_path: Path | None) -> int:
    """Measure, print the table, write the JSON; returns 0."""
    rng = np.random.default_rng(2026)
    layout, header, x = vectors.prepared({"w": rng.standard_normal((SIDE, SIDE)).astype(np.float32)})
    d = x[0].size
    rows: list[Row] = []
    for operator, args, ratio in CASES:
        scheme = Scheme(operator=operator, operator_args=args, ratio=ratio)
        encode_s, decode_s = math.inf, math.inf
        for _ in range(repeat):
            begun = time.perf_counter()
            got = compress(layout, header, x, None, scheme, None, seed=1)
            middle = time.perf_counter()
            decode(layout, got.payload)
            encode_s, decode_s = min(encode_s, middle - begun), min(decode_s, time.perf_counter() - middle)
        unbiased = None
        if scheme.what.coded and CODED[scheme.what.name].omega is not None:
            plain = Scheme(operator=operator, operator_args=args, contractive=False)
            draw = compress(layout, header, x, None, plain, None, seed=1)
            unbiased = sum(draw.error_sq) / sum(draw.norm_sq)
        bits, error = 8 * len(got.payload) / d, sum(got.error_sq) / sum(got.norm_sq)
        rows.append(Row(operator, args, bits, _bound(scheme, x[0]), error, unbiased, 1e3 * encode_s, 1e3 * decode_s))
    under = conditions()
    print("; ".join(f"{name} {value}" for name, value in under.items()))
    head = f"{'':9}{'':24}{'bits':>8}{'bound':>8}{'ratio':>7}{'error':>9}{'unbiased':>10}"
    print(f"{head}{'encode ms':>11}{'decode ms':>11}")
    for row in rows:
        bound = f"{row.bound:8.4f}{row.bits / row.bound:7.3f}" if row.bound else " " * 15
        unbiased_text = f"{row.unbiased_error:10.4f}" if row.unbiased_error is not None else " " * 10
        print(
            f"{row.operator:9}{row.args:24}{row.bits:8.4f}{bound}{row.error:9.4f}{unbiased_text}"
            f"{row.encode_ms:11.1f}{row.decode_ms:11.1f}"
        )
    if json_path is not None:
        result: dict[str, Any] = {"conditions": under, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _bound(scheme: Scheme, x: NDArray[Any]) -> float | None:
    """Entropy of what is sent, bits a coordinate."""
    made = scheme.made
    if scheme.operator in ("topk", "randk") and scheme.ratio is not None:
        k = int(scheme.ratio * x.size)
        places = (math.lgamma(x.size + 1) - math.lgamma(k + 1) - math.lgamma(x.size - k + 1)) / math.log(2)
        return ((places if scheme.operator == "topk" else 0.0) + 16 * k) / x.size
    if scheme.what.name != "quant" or not isinstance(made, Quantiser):
        return None
    levels = quantise(x, made, seed=1, purpose="bound").levels
    share = np.unique(levels, return_counts=True)[1] / levels.size
    return float(-np.sum(share * np.log2(share))) + 16 / made.block
