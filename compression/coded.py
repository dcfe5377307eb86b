"""Operators whose record is their own: levels with a norm a block, powers of two, and factors of a matrix.

They have no K: every coordinate is coded. After the operator's byte a record holds

| operator            | body                                                                              |
|---------------------|-----------------------------------------------------------------------------------|
| quant, round, sign  | mode << 4 | norm coding (fp64, fp32 or fp16); varint s; varint B; norms; levels   |
| natural             | mode << 4; exponents                                                              |
| lowrank             | value coding of the factors; varint r; P by columns; Q by columns                 |

with norms, levels and exponents as level_coding.py writes them. The decoder needs to know nothing
of how an encoder chose them; so sign (the mean magnitude of a block as its norm, every level 1 or -1) and
round (the largest magnitude as norm, the nearest level) are read as quant is.

**quant** is Quant_p and QSGD (quantise.py): unbiased with omega. EF21 needs it divided by 1 + omega,
contractive with alpha = 1/(1 + omega) in expectation; the norms carry the factor. Several `levels`, or
several `block`, are a ladder: ladder.py chooses one quantiser for each layer.

**round**: L = the nearest integer to s x/N, N = max|x| of the block. Every coordinate is moved by at most its own
magnitude, so it is contractive for every x: 1 - alpha <= a/(1 + a), a = (B - 1)/(4 s^2), met by one
coordinate at N and the others just below N/(2 s) (algorithms.md, section 2).

**sign**: alpha = ||x||_1^2/(B ||x||_2^2) a block, at least 1/B (Karimireddy et al., 2019).

**natural**: stochastic powers of two, unbiased with omega = 1/8; under EF21 the nearest power instead. A value
beyond the dtype's largest power of two (2**127 in float32) has no power above it, and the unbiased form refuses it.

**lowrank**: the layer as a matrix of its first dimension by all others, M ~ P Q^T with P = the
orthonormal basis of M M^T M G, G a fresh Gaussian drawn from the key, and Q = M^T P (PowerSGD, Vogels et
al., 2019; without its warm start, which alone is not contractive). E alpha >= r/min(m, n). Rebuilt as
rank-ordered outer products, each multiplied and then added in the layer's dtype, so both ends have the same
bits. A layer whose factors would not be smaller, or would not bring anything nearer, is sent as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.arguments import Parameter, arguments, checked
from compression.errors import ConfigError, UpdateError, WireError
from compression.frames import read_varint, varint, varint_bytes
from compression.layout import Layer
from compression.level_coding import (
    decode_exponents,
    decode_levels,
    decode_norms,
    encode_exponents,
    encode_levels,
    encode_norms,
    exponents_bytes_bound,
    levels_bytes_bound,
    norms_bytes,
)
from compression.quantise import (
    NATURAL_OMEGA,
    NEAREST_ALPHA,
    Ladder,
    Quantised,
    Quantiser,
    block_norms,
    exponent_range,
    natural,
    nearest_power,
    omega,
    quantise,
    restore,
    restore_nonzero,
    restore_powers,
)
from compression.randomness import normals
from compression.values import FP16, NATIVE, VALUES, ValueCoding

Arguments = Quantiser | Ladder | int | None
Found = tuple[NDArray[np.int64] | None, NDArray[Any]]
SPARSE_BELOW = 8  # one coordinate in so many is not zero: decoded as positions and values


@dataclass(frozen=True, slots=True)
class Key:
    """What a record's draws are a function of, with the layer's position."""

    seed: int
    layer: int


@dataclass(frozen=True, slots=True)
class Coded:
    """One operator with a record of its own.

    Args:
        parameters: arguments it takes, with their defaults.
        make: the arguments, checked by type -> what encode gets.
        encode: (layer, x, made, contractive, key) -> body.
        decode: (body, more may follow; layer) -> ((positions or None for all, values), bytes read).
        most_bytes: (made, layer) -> no body is longer, whatever is drawn.
        alpha: (made, layer) -> contraction factor of the contractive form; of quant and lowrank, in expectation.
        omega: (made, layer) -> variance factor of the unbiased form; None: it has none.
    """

    parameters: Mapping[str, Parameter]
    make: Callable[[Mapping[str, Any]], Arguments]
    encode: Callable[[Layer, NDArray[Any], Any, bool, Key], bytes]
    decode: Callable[[memoryview, Layer], tuple[Found, int]]
    most_bytes: Callable[[Any, Layer], int]
    alpha: Callable[[Any, Layer], float]
    omega: Callable[[Any, Layer], float] | None = None


def arguments_of(name: str, *texts: str) -> Arguments:
    """What an operator's arguments say.

    Args:
        name: in `CODED`.
        texts: as a configuration writes them, such as `p = inf, block = 256`; a later one wins.

    Raises:
        ConfigError: all that is wrong.

    >>> arguments_of("quant", "p = inf, levels = 4")
    Quantiser(p=inf, levels=4, block=512, norms='fp16')
    """
    coded = CODED[name]
    what = f"operator {name!r}"
    given = {k: v for text in texts for k, v in arguments(text, "operator-args").items()}
    return coded.make(checked(given, coded.parameters, what))


class _Reader:
    """A cursor over a body from a peer."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        if self.at >= len(self.data):
            raise WireError("record", "ends early")
        self.at += 1
        return self.data[self.at - 1]

    def varint(self, least: int, most: int, what: str) -> int:
        number, used = read_varint(self.rest(), what, least, most)
        self.at += used
        return number

    def rest(self) -> memoryview:
        return self.data[self.at :]


# ---- levels -----------------------------------------------------------------------------------

_BLOCK = {"block": Parameter(int, 512), "norms": Parameter(str, "fp16")}


def _make_quantiser(args: Mapping[str, Any]) -> Quantiser | Ladder:
    if isinstance(args["levels"], int) and isinstance(args["block"], int):
        return Quantiser(**args)
    return Ladder(**args)


def _make_round(args: Mapping[str, Any]) -> Quantiser:
    bits = args["bits"]
    if bits not in range(2, 9):
        raise ConfigError(f"bits of operator 'round' is {bits}, expected 2 to 8")
    return Quantiser(math.inf, (1 << (bits - 1)) - 1, args["block"], args["norms"])


def _make_sign(args: Mapping[str, Any]) -> Quantiser:
    return Quantiser(1, 1, args["block"], args["norms"])


def _write_levels(q: Quantised, layer: Layer) -> bytes:
    mode, stream = encode_levels(q.levels, q.quantiser.levels)
    coding = FP16 if q.quantiser.norms == "fp16" else NATIVE[layer.dtype]
    head = bytes((mode << 4 | coding.id,)) + varint(q.quantiser.levels) + varint(q.quantiser.block)
    return head + encode_norms(q) + stream


def _read_levels(data: memoryview, layer: Layer) -> tuple[Found, int]:
    reader = _Reader(data)
    lead = reader.byte()
    native = NATIVE[layer.dtype]
    if lead & 15 not in (FP16.id, native.id):
        raise WireError("norms", f"norm coding {lead & 15} for {layer.dtype}")
    levels = reader.varint(1, 1 << 14, "levels")
    block = reader.varint(1, max(1, layer.size), "block")
    quantiser = Quantiser(math.inf, levels, block, "fp16" if lead & 15 == FP16.id else "native")
    norms, exponent, used = decode_norms(reader.rest(), quantiser.blocks(layer.size), quantiser, layer.dtype)
    reader.at += used
    found, used = decode_levels(lead >> 4, reader.rest(), layer.size, levels)
    q = Quantised(quantiser, norms, exponent, found)
    if SPARSE_BELOW * int(np.count_nonzero(found)) < layer.size:
        return restore_nonzero(q, layer.dtype), reader.at + used
    return (None, restore(q, layer.dtype)), reader.at + used


def _levels_bytes(made: Quantiser, layer: Layer) -> int:
    quantiser = _fitting(made, layer)
    norms = norms_bytes(quantiser.blocks(layer.size), quantiser, layer.dtype)
    head = 1 + varint_bytes(quantiser.levels) + varint_bytes(quantiser.block)
    return head + norms + levels_bytes_bound(layer.size, quantiser.levels)


def _fitting(quantiser: Quantiser, layer: Layer) -> Quantiser:
    """A block longer than the layer is the layer."""
    return replace(quantiser, block=max(1, min(quantiser.block, layer.size)))


def _scaled(norms: NDArray[Any], factor: float, quantiser: Quantiser) -> tuple[NDArray[Any], int]:
    """(norms times a factor as they are written, their exponent), nearest."""
    wide = norms.astype(np.float64) * factor
    if quantiser.norms == "native":
        return wide.astype(norms.dtype), 0
    largest = float(wide.max(initial=0.0))
    exponent = math.frexp(largest)[1] - 15 if largest else 0
    return np.ldexp(wide, -exponent).astype(np.float16), exponent


def _quant(layer: Layer, x: NDArray[Any], made: Quantiser, contractive: bool, key: Key) -> bytes:
    quantiser = _fitting(made, layer)
    q = quantise(x, quantiser, seed=key.seed, round_=key.layer, purpose=layer.name)
    if contractive:
        wide = q.norm_values() if quantiser.norms == "fp16" else q.norms
        norms, exponent = _scaled(wide, 1.0 / (1.0 + omega(quantiser, layer.size)), quantiser)
        q = Quantised(quantiser, norms, exponent, q.levels)
    return _write_levels(q, layer)


def _round(layer: Layer, x: NDArray[Any], made: Quantiser, contractive: bool, key: Key) -> bytes:
    quantiser = _fitting(made, layer)
    norms, exponent = _scaled(block_norms(x, quantiser), 1.0, quantiser)
    written = np.ldexp(norms.astype(np.float64), exponent)
    steps = np.repeat(np.where(written > 0, written, np.inf), quantiser.block)[: x.size] / quantiser.levels
    levels = np.clip(np.rint(x / steps), -quantiser.levels, quantiser.levels).astype(quantiser.level_dtype)
    return _write_levels(Quantised(quantiser, norms, exponent, levels), layer)


def _sign(layer: Layer, x: NDArray[Any], made: Quantiser, contractive: bool, key: Key) -> bytes:
    quantiser = _fitting(made, layer)
    means = block_norms(x / x.dtype.type(quantiser.block), quantiser)  # divided first: a sum may be too large
    tail = x.size % quantiser.block
    if tail:
        means[-1] = block_norms(x[-tail:] / x.dtype.type(tail), quantiser)[0]
    norms, exponent = _scaled(means, 1.0, quantiser)
    levels = np.where(np.signbit(x), np.int8(-1), np.int8(1))
    return _write_levels(Quantised(quantiser, norms, exponent, levels), layer)


def _quant_alpha(made: Quantiser, layer: Layer) -> float:
    return 1.0 / (1.0 + _quant_omega(made, layer))


def _quant_omega(made: Quantiser, layer: Layer) -> float:
    return omega(_fitting(made, layer), layer.size)


_HALF_SLACK = 1.0 + 2.0**-10  # of a norm in half precision


def _round_alpha(made: Quantiser, layer: Layer) -> float:
    block = _fitting(made, layer).block
    lost = (block - 1) * _HALF_SLACK**2 / (4.0 * made.levels**2) + 2.0**-20
    return 1.0 - lost / (1.0 + lost)


def _sign_alpha(made: Quantiser, layer: Layer) -> float:
    return (1.0 - 2.0**-20) / _fitting(made, layer).block


# ---- powers of two ----------------------------------------------------------------------------


def _natural(layer: Layer, x: NDArray[Any], made: None, contractive: bool, key: Key) -> bytes:
    if contractive:
        powers = nearest_power(x)
    else:
        largest = math.ldexp(1.0, exponent_range(layer.dtype)[1])
        if float(np.abs(x).max(initial=0.0)) > largest:
            at = int(np.argmax(np.abs(x)))
            raise UpdateError(layer.name, at, f"{x[at]} has no power of two above it in {layer.dtype}; scale it down")
        powers = natural(x, seed=key.seed, round_=key.layer, purpose=layer.name)
    mode, stream = encode_exponents(powers)
    return bytes((mode << 4,)) + stream


def _make_none(args: Mapping[str, Any]) -> None:
    return None


def _natural_bytes(made: None, layer: Layer) -> int:
    return 1 + exponents_bytes_bound(layer.size, *exponent_range(layer.dtype))


def _natural_alpha(made: None, layer: Layer) -> float:
    return NEAREST_ALPHA


def _natural_omega(made: None, layer: Layer) -> float:
    return NATURAL_OMEGA


def _read_natural(data: memoryview, layer: Layer) -> tuple[Found, int]:
    reader = _Reader(data)
    lead = reader.byte()
    if lead & 15:
        raise WireError("coding", f"value coding {lead & 15} of powers of two")
    powers, used = decode_exponents(lead >> 4, reader.rest(), layer.size, *exponent_range(layer.dtype))
    return (None, restore_powers(powers, layer.dtype)), reader.at + used


# ---- low rank ---------------------------------------------------------------------------------

_LOWRANK = {"rank": Parameter(int, 2)}
_POWER = 1  # multiplications with M M^T before the basis is taken


def _make_rank(args: Mapping[str, Any]) -> int:
    rank: int = args["rank"]
    if rank < 1:
        raise ConfigError(f"rank of operator 'lowrank' is {rank}, expected at least 1")
    return rank


def _shape(layer: Layer) -> tuple[int, int]:
    rows = layer.shape[0] if len(layer.shape) > 1 else 1
    return rows, layer.size // max(1, rows)


def _rank(layer: Layer, rank: int) -> int:
    """Rank that is sent; 0: the layer as it is, the factors would not be smaller."""
    rows, columns = _shape(layer)
    return rank if rank * (rows + columns) < layer.size else 0


def _rebuilt(p: NDArray[Any], q: NDArray[Any]) -> NDArray[Any]:
    """P Q^T as rank-ordered outer products; (r, rows) and (r, columns) -> (rows * columns,)."""
    total = np.zeros((p.shape[1], q.shape[1]), p.dtype)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for left, right in zip(p, q, strict=True):
            total += np.multiply.outer(left, right)
    return total.reshape(-1)


def _lowrank(layer: Layer, x: NDArray[Any], made: int, contractive: bool, key: Key) -> bytes:
    coding = NATIVE[layer.dtype]
    rank = _rank(layer, made)
    if rank:
        rows, columns = _shape(layer)
        largest = float(np.abs(x).max())
        matrix = x.astype(np.float64).reshape(rows, columns) / (largest or 1.0)
        drawn = normals(columns * rank, seed=key.seed, round_=key.layer, purpose=f"{layer.name}/lowrank")
        basis = matrix @ drawn.reshape(columns, rank)
        for _ in range(_POWER):
            basis = matrix @ (matrix.T @ np.linalg.qr(basis)[0])
        p = np.linalg.qr(basis)[0].T.astype(layer.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # factors beyond the dtype bring nothing nearer
            q = (largest * (matrix.T @ p.T.astype(np.float64))).T.astype(layer.dtype)
            left = float(np.linalg.norm((x - _rebuilt(p, q)) / (largest or 1.0)))
        if left < float(np.linalg.norm(x / (largest or 1.0))) or not largest:
            return bytes((coding.id,)) + varint(rank) + coding.encode(p.reshape(-1)) + coding.encode(q.reshape(-1))
    return bytes((coding.id,)) + varint(0) + coding.encode(x)


def _lowrank_bytes(made: int, layer: Layer) -> int:
    rows, columns = _shape(layer)
    rank = _rank(layer, made)  # values near the dtype's largest, whose factors overflow, may be sent as they are
    return 1 + 9 + (rank * (rows + columns) if rank else layer.size) * layer.itemsize


def _read_lowrank(data: memoryview, layer: Layer) -> tuple[Found, int]:
    reader = _Reader(data)
    lead = reader.byte()
    coding: ValueCoding | None = VALUES.by_id(lead)
    if coding is not NATIVE[layer.dtype]:
        raise WireError("coding", f"factors in value coding {lead} for {layer.dtype}")
    rows, columns = _shape(layer)
    rank = reader.varint(0, max(0, (layer.size - 1) // max(1, rows + columns)), "rank")
    n = rank * (rows + columns) if rank else layer.size
    size = coding.stream_bytes(n)
    if len(reader.rest()) < size:
        raise WireError("factors", f"needs {size} bytes, {len(reader.rest())} are left")
    values = coding.decode(reader.rest()[:size], n, layer.dtype)
    if not np.isfinite(values).all():
        raise WireError("factors", "a value is not finite")
    if rank:
        values = _rebuilt(values[: rank * rows].reshape(rank, rows), values[rank * rows :].reshape(rank, columns))
        if not np.isfinite(values).all():
            raise WireError("factors", "their product is not finite")
    return (None, values), reader.at + size


def _lowrank_alpha(made: int, layer: Layer) -> float:
    rows, columns = _shape(layer)
    return min(1.0, made / max(1, min(rows, columns))) if _rank(layer, made) else 1.0


CODED: Mapping[str, Coded] = {
    "quant": Coded(
        {
            "p": Parameter(float, 2.0),
            "levels": Parameter(int, 1, ladder=True),
            "block": Parameter(int, 512, ladder=True),
            "norms": _BLOCK["norms"],
        },
        _make_quantiser,
        _quant,
        _read_levels,
        _levels_bytes,
        _quant_alpha,
        _quant_omega,
    ),
    "round": Coded(
        {"bits": Parameter(int, 4), **_BLOCK}, _make_round, _round, _read_levels, _levels_bytes, _round_alpha
    ),
    "sign": Coded(_BLOCK, _make_sign, _sign, _read_levels, _levels_bytes, _sign_alpha),
    "natural": Coded({}, _make_none, _natural, _read_natural, _natural_bytes, _natural_alpha, _natural_omega),
    "lowrank": Coded(_LOWRANK, _make_rank, _lowrank, _read_lowrank, _lowrank_bytes, _lowrank_alpha),
}
