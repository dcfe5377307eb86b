"""What a client compresses, and the slots beside its memory h: EF21-SGDM's average, EControl's error.

A slot moves with a reply, as h does, or not at all: its next generation is stored in the pending
reply (protocol/store.py). A client that has lost its disk starts v and e anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compression import LayerUpdate, Layout, difference
from compression.feedback import averaged, corrected, left_over
from protocol import NodeRequest
from protocol.store import FloatArray

Slots = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Sought:
    """What is to be sent.

    Args:
        deltas: flat, one a compressed layer.
        after: of the updates that stand for them, the next generation of the method's slot.
    """

    deltas: Sequence[FloatArray]
    after: Callable[[Sequence[LayerUpdate]], dict[str, bytes]]


def sought(
    layout: Layout, request: NodeRequest, u: Sequence[FloatArray], h: Sequence[FloatArray], slots: Slots
) -> Sought:
    """What a method compresses of an update.

    Args:
        layout: the agreed layout.
        request: its method and eta.
        u: the update, flat, one a compressed layer.
        h: the memory.
        slots: the client's other slots as they are now.

    Returns:
        EF21, DIANA and plain compression: u - h. EF21-SGDM (Fatkhullin et al. 2023): v - h of
        v = (1 - eta) v + eta u, which begins at the first u. EControl (Gao et al. 2023): u - h + eta e of
        the error e, which begins at 0; e += u - h - C(...).
    """
    if request.method == "ef21-sgdm":
        v = u
        if (before := slots.get("v")) is not None:
            v = [averaged(old, new, request.eta) for old, new in zip(_read(layout, before), u, strict=True)]
        stored = {"v": _write(v)}
        return Sought([difference(one, memory) for one, memory in zip(v, h, strict=True)], lambda _: stored)
    deltas = [difference(one, memory) for one, memory in zip(u, h, strict=True)]
    if request.method == "econtrol":
        before = slots.get("e")
        e = _read(layout, before) if before is not None else [np.zeros_like(one) for one in u]
        return Sought(
            [corrected(delta, error, request.eta) for delta, error in zip(deltas, e, strict=True)],
            lambda updates: {"e": _write([left_over(*one) for one in zip(deltas, e, updates, strict=True)])},
        )
    return Sought(deltas, lambda _: {})


def _write(parts: Sequence[FloatArray]) -> bytes:
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)


def _read(layout: Layout, data: bytes) -> list[FloatArray]:
    parts, at = [], 0
    for layer in (layout.layers[i] for i in layout.compressed):
        parts.append(np.frombuffer(data, layer.dtype, layer.size, at))
        at += layer.nbytes
    return parts
