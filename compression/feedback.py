"""The one feedback engine of both ends: EF21, DIANA and the plain compressors between them.

    client: d = C(u - h), h += rate * d          server: mirror += rate * d, total += weight * d

(algorithms.md, section 3: EF21 is rate 1, DIANA is rate alpha.) The arithmetic is part of
the specification, because the client's memory and the server's mirror must stay equal bit by
bit on unlike hardware: the rate is cast to the layer's dtype, multiplied and rounded, then
added and rounded, element by element; never a fused multiply-add, never a matmul, never
`torch.add(alpha=)`. Only operators and indexing are used, so memories may be NumPy arrays or
torch tensors on any device, and torch is not imported here.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compression.wire import LayerUpdate

Memory = TypeVar("Memory", bound=Any)


def difference(u: Memory, h: Memory) -> Memory:
    """What an update differs from its memory by: u - h, rounded once in their dtype; shape (d,)."""
    result: Memory = u - h
    return result


def largest_step(dtype: str) -> float:
    """Largest magnitude of a value that a message may carry: the square root of the dtype's largest number.

    So no number of messages brings a memory to infinity, and no peer brings the sums over all clients there.
    """
    return math.sqrt(float(np.finfo(dtype).max))


def too_large(update: LayerUpdate) -> bool:
    """Whether an update has a value above `largest_step`."""
    values = update.values
    most = largest_step(values.dtype.name)
    return bool(values.size) and not (float(values.max()) <= most and float(values.min()) >= -most)


def averaged(v: Memory, u: Memory, eta: float) -> Memory:
    """EF21-SGDM's average, (1 - eta) v + eta u, each operation rounded in their dtype; shape (d,)."""
    dtype = v.dtype.type
    result: Memory = v * dtype(1.0 - eta) + u * dtype(eta)
    return result


def corrected(delta: Memory, e: Memory, eta: float) -> Memory:
    """What EControl compresses, delta + eta e of delta = u - h, each operation rounded in their dtype; shape (d,)."""
    result: Memory = delta + e * e.dtype.type(eta)
    return result


def left_over(delta: Memory, e: Memory, update: LayerUpdate) -> Memory:
    """EControl's error after an update, e + delta - d of delta = u - h; shape (d,)."""
    result: Memory = e + delta
    move(result, LayerUpdate(update.indices, -update.values))
    return result


def move(h: Any, update: LayerUpdate, rate: float = 1.0) -> None:
    """Move a memory in place: h[i] = h[i] + rate * v[i] where the update has a value.

    Args:
        h: flat memory of one layer, shape (d,), a NumPy array or a torch tensor.
        update: decoded update in the same dtype.
        rate: 1 for EF21, alpha for DIANA; cast to the layer's dtype before use.

    Raises:
        TypeError: the dtypes differ; adding would round differently on the two ends.
        ValueError: a dense update has another shape.
    """
    values = update.values
    if str(h.dtype).removeprefix("torch.") != values.dtype.name:
        raise TypeError(f"the memory is {h.dtype}, the update {values.dtype.name}")
    if update.indices is None and tuple(h.shape) != values.shape:
        raise ValueError(f"the memory has shape {tuple(h.shape)}, the dense update {values.shape}")
    step: Any = values if isinstance(h, np.ndarray) else h.new_tensor(values)
    if rate != 1.0:
        step = step * values.dtype.type(rate).item()
    if update.indices is None:
        h += step
    else:
        h[update.indices] = h[update.indices] + step


def accumulate(total: NDArray[np.float64], update: LayerUpdate, weight: float, rate: float = 1.0) -> None:
    """Add to a server's sum in place: total[i] += weight * (rate * v[i]); shape (d,).

    rate * v is rounded in the update's dtype, as `move` does it; the rest is in float64.
    """
    values = update.values if rate == 1.0 else update.values * update.values.dtype.type(rate)
    step = np.float64(weight) * values.astype(np.float64)
    if update.indices is None:
        total += step
    else:
        total[update.indices] += step
