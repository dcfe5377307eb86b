"""What is fuzzed: decoding bytes that nobody vouches for, behind the checksum."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from compression import UP, Header, Layer, Layout, Scheme, Slot, compress, decode, tag4
from compression.errors import WireError

LAYOUT = Layout(
    (
        Layer("matrix", (12, 20), "float32", False),
        Layer("bias", (12,), "float32", False),
        Layer("wide", (40,), "float64", False),
        Layer("scalar", (), "float32", False),
        Layer("empty", (0,), "float32", False),
        Layer("count", (), "int64", True),
        Layer("flags", (5,), "bool", True),
    )
)
HEADER = Header(UP, LAYOUT.digest, tag4("fuzz"), tag4("client"), 1, 2, slots=((int(Slot.H), bytes(8)),))
CORPUS = Path(__file__).parent / "corpus"
SCHEMES = {
    "topk-joint": (Scheme(), 200),
    "topk-bf16": (Scheme(values="bf16"), 220),
    "topk-fp32": (Scheme(values="fp32", ratio=0.2), None),
    "topk-6bit": (Scheme(values="6bit", ratio=0.5), None),
    "randk-fp16": (Scheme(operator="randk", values="fp16", ratio=0.1), None),
    "identity": (Scheme(operator="identity"), None),
    "quant2": (Scheme(operator="quant"), None),
    "quantinf-5": (Scheme(operator="quant", operator_args="p = inf, levels = 5, block = 32, norms = 'native'"), None),
    "terngrad-small": (Scheme(operator="terngrad", operator_args="block = 4"), None),
    "round-4": (Scheme(operator="round", operator_args="bits = 4"), None),
    "sign": (Scheme(operator="sign", operator_args="block = 16"), None),
    "natural": (Scheme(operator="natural"), None),
    "lowrank": (Scheme(operator="lowrank", operator_args="rank = 2"), None),
}


def messages() -> dict[str, bytes]:
    """Legal messages by name: what fuzzing starts from."""
    rng = np.random.default_rng(0)
    layers = [LAYOUT.layers[at] for at in LAYOUT.compressed]
    x = [(rng.standard_t(3, layer.size) * np.exp(rng.standard_normal())).astype(layer.dtype) for layer in layers]
    whole = {"count": np.array(7, np.int64), "flags": np.array([True, False, True, True, False])}
    return {
        name: compress(LAYOUT, HEADER, x, whole if at % 2 else None, scheme, budget, seed=3).payload
        for at, (name, (scheme, budget)) in enumerate(SCHEMES.items())
    }


def sealed(body: bytes) -> bytes:
    """The body with the checksum that lets it pass."""
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode_anything(body: bytes) -> bool:
    """Whether a body without its checksum is a legal message; anything but a WireError comes through."""
    try:
        decoded = decode(LAYOUT, sealed(body))
    except WireError:
        return False
    for layer, update in zip((LAYOUT.layers[at] for at in LAYOUT.compressed), decoded.updates, strict=True):
        if update is None:
            continue
        assert update.values.dtype == np.dtype(layer.dtype)
        assert np.isfinite(update.values).all()
        if update.indices is None:
            assert update.values.shape == (layer.size,)
            continue
        assert update.indices.shape == update.values.shape
        if update.indices.size:
            assert update.indices[0] >= 0
            assert update.indices[-1] < layer.size
            assert bool(np.all(update.indices[1:] > update.indices[:-1]))
    return True
