"""Compression: layouts, operators, allocation, the feedback engine and the wire format.

Needs NumPy only. Start with `Layout.of`, `compress`, `decode` and `move`.
"""

from compression.compressor import (
    Compressed,
    compress,
    dense_bytes_on_wire,
    guaranteed_alpha,
    smallest_bytes,
    worst_omega,
)
from compression.feedback import accumulate, difference, largest_step, move, too_large
from compression.layout import Layer, Layout
from compression.scheme import Scheme, idle_floors, parse_floors
from compression.selection import topk_indices
from compression.wire import (
    DOWN,
    UP,
    Decoded,
    Expect,
    Header,
    LayerUpdate,
    Record,
    Slot,
    decode,
    encode,
    peek,
    predicted_bytes,
    tag4,
)

__all__ = [
    "DOWN",
    "UP",
    "Compressed",
    "Decoded",
    "Expect",
    "Header",
    "Layer",
    "LayerUpdate",
    "Layout",
    "Record",
    "Scheme",
    "Slot",
    "accumulate",
    "compress",
    "decode",
    "dense_bytes_on_wire",
    "difference",
    "encode",
    "guaranteed_alpha",
    "idle_floors",
    "largest_step",
    "move",
    "parse_floors",
    "peek",
    "predicted_bytes",
    "smallest_bytes",
    "tag4",
    "too_large",
    "topk_indices",
    "worst_omega",
]
