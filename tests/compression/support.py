"""Makers of layouts, vectors and headers shared by the tests of compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import UP, Header, Layer, LayerUpdate, Layout, Slot, tag4

KINDS = ("heavy", "gauss", "clustered", "tiny", "equal", "zero", "sparse")


def vector(kind: str, d: int, dtype: str, seed: int) -> NDArray[Any]:
    """One vector of d elements of a named kind."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(d)
    if kind == "heavy":
        x = rng.standard_t(2, d) * np.exp(2 * rng.standard_normal())
    elif kind == "clustered":
        x = x * np.exp(3 * np.sin(np.arange(d) / max(1.0, d / 20)))
    elif kind == "tiny":
        x = x * 1e-40
    elif kind == "equal":
        x = np.where(x > 0, 0.25, -0.25)
    elif kind == "zero":
        x = np.zeros(d)
    elif kind == "sparse":
        x = np.where(rng.random(d) < 0.05, x, 0.0)
    return x.astype(dtype)


def flat_layout(sizes: Sequence[int], dtype: str = "float32", whole: int = 0) -> Layout:
    """Compressed layers of these sizes, then so many whole scalars."""
    layers = [Layer(f"layer{i}", (d,), dtype, False) for i, d in enumerate(sizes)]
    return Layout((*layers, *(Layer(f"count{i}", (), "int64", True) for i in range(whole))))


def header_of(layout: Layout, **changes: Any) -> Header:
    """A header with one slot digest."""
    fields: dict[str, Any] = {
        "kind": UP,
        "layout_digest": layout.digest,
        "experiment": tag4("experiment"),
        "client": tag4("client"),
        "incarnation": 1,
        "round": 7,
        "slots": ((int(Slot.H), bytes(range(8))),),
    }
    return Header(**(fields | changes))


def same_update(a: LayerUpdate | None, b: LayerUpdate | None) -> bool:
    """Equal bit by bit."""
    if a is None or b is None:
        return a is b
    if (a.indices is None) != (b.indices is None):
        return False
    if a.indices is not None and b.indices is not None and not np.array_equal(a.indices, b.indices):
        return False
    return a.values.dtype == b.values.dtype and a.values.tobytes() == b.values.tobytes()


def dense_of(update: LayerUpdate, d: int) -> NDArray[np.float64]:
    """The update as a dense float64 vector."""
    full = np.zeros(d)
    full[slice(None) if update.indices is None else update.indices] = update.values
    return full
