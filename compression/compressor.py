"""From an update and a budget to one message: select, allocate, round, encode.

The budget counts every byte of the payload. A message ends within 1 % below it, unless all
that is not zero fits, or it is shorter than 4 kB, or an element limit (`ratio`) binds, or the
allocation is `knapsack`, which knows 50 ratios a layer and nothing between, or a ladder of quantisers, which is
chosen by the most bytes that its records can take (ladder.py), or every value is sent
and a bit more for each would be too much, or zstd shrinks index streams so much that sizes jump: then
the message with the least error among a few that fit is sent.

With unit "coordinates", as in the Kimad paper's toy problem, the budget counts values sent and
nothing else. Then no more than K values of a layer that are not zero go out, even where its
record is written dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import allocation as al
from compression import ladder as ld
from compression.allocation import Counts, Sizes
from compression.choice import Sent, choose, refilled, send, short_streams, total_size
from compression.coded import CODED, Arguments, Key
from compression.errors import ConfigError, LayoutError, UpdateError
from compression.frames import varint_bytes
from compression.indices import rice_bytes_bound
from compression.layout import Layer, Layout
from compression.operators import IDENTITY, QUANT, biased
from compression.randomness import words
from compression.scheme import Scheme
from compression.selection import Buffers
from compression.wire import (
    Header,
    Item,
    LayerUpdate,
    Record,
    dense_record_bytes,
    encode,
    header_bytes,
    seeded_record_bytes,
    whole_record_bytes,
)
from compression.work import CodedWork, Piece, SeededWork, Work


@dataclass(frozen=True, slots=True, eq=False)
class Compressed:
    """A message and what it cost.

    Per-layer tuples have one entry for each compressed layer in layout order.

    Args:
        payload: the message.
        updates: exactly what `decode(layout, payload).updates` gives.
        kept: values sent (d when dense; in unit "coordinates" those that are not zero).
        ratios: kept / d; 1 for an empty layer.
        error_sq: ||x - C(x)||^2 with the rounding of values, float64.
        norm_sq: ||x||^2, float64.
        budget_bytes: as given, in the scheme's unit; None means none.
        miss: the smallest legal message, and it is larger than the budget.
        everything_fits: every non-zero element was sent; of a ladder, every layer as it is.
        alpha: worst contraction factor over the layers, (1 - delta) alpha(K, d), with
            delta = roundoff**2 of the value coding, measured where levels are fitted; what EF21's
            step size may rely on. With contractive = False: 1/(1 + omega), omega the largest over the layers at
            their K or rung, before the draw: the contraction of C/(1 + omega), not of C.
    """

    payload: bytes
    updates: tuple[LayerUpdate, ...]
    kept: tuple[int, ...]
    ratios: tuple[float, ...]
    error_sq: tuple[float, ...]
    norm_sq: tuple[float, ...]
    budget_bytes: int | None
    miss: bool
    everything_fits: bool
    alpha: float


def _checked(layout: Layout, difference: Sequence[NDArray[Any]]) -> list[Layer]:
    layers = [layout.layers[at] for at in layout.compressed]
    if len(difference) != len(layers):
        raise LayoutError(f"{len(difference)} arrays for {len(layers)} compressed layers")
    for layer, x in zip(layers, difference, strict=True):
        if x.shape != (layer.size,):
            raise UpdateError(layer.name, None, f"shape {x.shape}, expected the flat ({layer.size},)")
        if x.dtype != np.dtype(layer.dtype):  # a foreign byte order, too
            raise UpdateError(layer.name, None, f"dtype {x.dtype}, expected {layer.dtype}")
    return layers


def compress(
    layout: Layout,
    header: Header,
    difference: Sequence[NDArray[Any]],
    whole: Mapping[str, NDArray[Any]] | None,
    scheme: Scheme,
    budget_bytes: int | None,
    *,
    seed: int = 0,
) -> Compressed:
    """Compress u - h into one message.

    Args:
        layout: agreed layout.
        header: of the message.
        difference: u - h, flat, one for each compressed layer in layout order.
        whole: all whole layers by name; None leaves them out of this message.
        scheme: operator, allocation, values.
        budget_bytes: most that the payload may take, in the scheme's unit; None for no budget.
        seed: of the draws of a seeded operator; name each round and client by another.

    Returns:
        The payload is never longer than the budget, unless `miss`: then it is the smallest
        legal message (K = floor everywhere; of a ladder, the rungs of least bytes). Elements that are exactly
        zero are not sent. With contractive = False, E C(x) = x over seeds: K and rung are functions of
        x, the layout and the budget, never of the draw.

    Raises:
        UpdateError: NaN, Inf, a wrong shape or dtype, or a value that its unbiased form cannot write in the
            layer's dtype, naming the layer and the element.
        ConfigError: an unbiased operator with a value coding narrower than a layer.
        LayoutError: wrong number of arrays, missing whole layers, or a foreign header.
    """
    layers = _checked(layout, difference)
    buffers = Buffers()
    operator = scheme.what
    counted = scheme.unit == "coordinates"
    works: list[Work] = []
    for at, (layer, x) in enumerate(zip(layers, difference, strict=True)):
        coding = scheme.coding(layer)
        if operator.coded and layer.size:
            works.append(CodedWork(layer, x, coding, buffers, scheme, Key(_layer_seed(seed, at), at)))
        elif operator.seeded:
            works.append(SeededWork(layer, x, coding, buffers, counted, _layer_seed(seed, at), not scheme.contractive))
        else:
            works.append(Work(layer, x, coding, buffers, counted))
    base = (
        sum(layout.layers[at].size for at in layout.whole) * (whole is not None)
        if counted
        else header_bytes(header)
        + sum(whole_record_bytes(layout.layers[at]) if whole is not None else 2 for at in layout.whole)
    )
    d = np.array([work.d for work in works], dtype=np.int64)
    floor = np.array([scheme.floor_of(layer) for layer in layers], dtype=np.int64)
    cap = d
    if not operator.adaptive:
        floor = d
    elif scheme.ratio is not None:
        cap = np.maximum(floor, np.floor(scheme.ratio * d).astype(np.int64))
    counts = cap
    gaps: dict[int, bytes] = {}
    if operator.adaptive and works and budget_bytes is not None and _exceeds(scheme, works, cap, base, budget_bytes):
        itemsize = np.array([work.coding.itemsize for work in works], dtype=np.float64)
        model = al.coordinates if counted else al.seeded_bytes if operator.seeded else al.modelled_bytes
        sizes = Sizes(d, itemsize, floor, cap, model)
        counts, sent = choose(works, sizes, base, scheme, budget_bytes)
        counts, sent, gaps = refilled(works, sizes, base, scheme, budget_bytes, counts, sent)
    elif operator.adaptive:
        sent = send(works, counts)
        gaps = short_streams(works, sent, scheme)
    else:
        if scheme.ladder is not None:
            coded = [work for work in works if isinstance(work, CodedWork)]
            empty = sum(work.dense for work in works if not isinstance(work, CodedWork))
            room = None if budget_bytes is None else budget_bytes - base - empty
            ld.use(coded, scheme.ladder, _longest(layout), room, even=scheme.allocation == al.UNIFORM.name)
        sent = [work.all() for work in works]
    updates = tuple(piece.update for piece in sent)
    payload = encode(layout, header, _items(layout, works, sent, whole, scheme, gaps), verified=True)
    complete = [not operator.adaptive or work.everything(int(k)) for work, k in zip(works, counts, strict=True)]
    if scheme.ladder is not None:
        complete = [not isinstance(work, CodedWork) or work.plain for work in works]
    zeros_between = counted and operator.adaptive
    kept = tuple(int(np.count_nonzero(u.values)) if zeros_between else u.values.size for u in updates)
    size = base + sum(int(k) for k in counts) if counted else len(payload)
    miss = budget_bytes is not None and size > budget_bytes
    return Compressed(
        payload=payload,
        updates=updates,
        kept=kept,
        ratios=tuple(k / work.d if work.d else 1.0 for k, work in zip(kept, works, strict=True)),
        error_sq=tuple(piece.error_sq for piece in sent),
        norm_sq=tuple(piece.norm_sq for piece in sent),
        budget_bytes=budget_bytes,
        miss=miss,
        everything_fits=all(complete) and not miss,
        alpha=min(
            (
                _alpha(work, piece, k, done, scheme)
                for work, piece, k, done in zip(
                    works, sent, kept if scheme.contractive else counts.tolist(), complete, strict=True
                )
            ),
            default=1.0,
        ),
    )


def _exceeds(scheme: Scheme, works: Sequence[Work], cap: Counts, base: int, budget_bytes: int) -> bool:
    """The largest choice does not fit; a ratio's is tried exactly, else only where it costs no selection."""
    if works and works[0].counted:
        return base + int(cap.sum()) > budget_bytes
    if scheme.ratio is None and not all(work.must_be_dense(work.d) for work in works):
        return True
    if scheme.ratio is None:
        return base + sum(work.dense for work in works) > budget_bytes
    return total_size(works, cap, base) > budget_bytes


def _alpha(work: Work, piece: Piece, k: int, complete: bool, scheme: Scheme) -> float:
    """Contraction factor of one layer: of chance in expectation, else as measured or as K says."""
    operator = scheme.what
    if not scheme.contractive:
        if isinstance(work, CodedWork):
            return 1.0 if work.plain else 1.0 / (1.0 + _omega(work.layer, k, work.made, scheme))
        return 1.0 if complete else 1.0 / (1.0 + _omega(work.layer, k, None, scheme))
    if isinstance(work, CodedWork):
        if operator is QUANT:
            return CODED[operator.name].alpha(work.made, work.layer)
        return max(0.0, 1.0 - piece.error_sq / piece.norm_sq) if piece.norm_sq > 0 else 1.0
    return _kept_after_rounding(work, piece) * (1.0 if complete else operator.alpha(k, work.d))


def _omega(layer: Layer, k: int, made: Arguments, scheme: Scheme) -> float:
    """Variance factor of a layer at this K, or with these arguments (not a ladder), of an unbiased operator."""
    operator = scheme.what
    if not layer.size:
        return 0.0
    if operator.coded:
        of_made = CODED[operator.name].omega
        assert of_made is not None  # its operator is unbiased
        return of_made(made, layer)
    assert operator.omega is not None
    return operator.omega(k, layer.size)


def worst_omega(layout: Layout, scheme: Scheme) -> float:
    """The largest omega that any round of this scheme can have: E||C(x) - x||^2 <= omega ||x||^2 for each layer.

    For DIANA's memory, alpha = 1/(1 + omega). Of `randk` d/K - 1 at a layer's floor, 0 where that goes dense; of
    `quant` its own, and of a ladder that of the worst rung that can be chosen; of `natural` 1/8 (larger
    values than the dtype's largest power of two are refused in a message). The last rounding to the
    layer's dtype is not counted: 2**-24 of a value in float32.

    Raises:
        ConfigError: the operator has no unbiased form, or values are narrower than a layer.
    """
    operator, ladder = scheme.what, scheme.ladder
    if not operator.unbiased:
        raise ConfigError(biased(scheme.operator))
    worst = 0.0
    for at in layout.compressed:
        layer = layout.layers[at]
        if ladder is not None:
            worst = max(worst, ld.largest_omega(ladder, layer, _longest(layout)) if layer.size else 0.0)
            continue
        k, coding = scheme.floor_of(layer), scheme.coding(layer)
        if operator.seeded and scheme.unit == "bytes" and not scheme.contractive:
            k = layer.size if seeded_record_bytes(k, coding) >= dense_record_bytes(layer.size, coding) else k
        worst = max(worst, _omega(layer, k, scheme.made, scheme))
    return worst


def _longest(layout: Layout) -> int:
    """Elements of the longest compressed layer."""
    return max((layout.layers[at].size for at in layout.compressed), default=0)


def _kept_after_rounding(work: Work, piece: Piece) -> float:
    if work.coding.fitted:
        norm_sq = piece.norm_sq - (piece.error_sq - piece.lost_sq)  # of the values sent
        return 1.0 - piece.lost_sq / norm_sq if norm_sq > 0 else 1.0
    return 1.0 if work.coding.itemsize == work.layer.itemsize else 1.0 - work.coding.roundoff**2


def _items(
    layout: Layout,
    works: Sequence[Work],
    sent: Sent,
    whole: Mapping[str, NDArray[Any]] | None,
    scheme: Scheme,
    gaps: Mapping[int, bytes],
) -> list[Item]:
    operator = scheme.what
    items: list[Item] = [None] * len(layout.layers)
    for number, (at, work, piece) in enumerate(zip(layout.compressed, works, sent, strict=True)):
        if isinstance(work, CodedWork) and not work.plain:
            items[at] = Record(operator, work.coding, piece.update, body=work.body)
            continue
        if operator.coded:  # an empty layer, or a ladder's last rung
            items[at] = Record(IDENTITY, work.coding, piece.update)
            continue
        seed = None if piece.update.indices is None else work.seed
        items[at] = Record(operator, work.coding, piece.update, seed, piece.stream, piece.rice, gaps.get(number))
    if whole is not None:
        missing = [layout.layers[at].name for at in layout.whole if layout.layers[at].name not in whole]
        if missing:
            raise LayoutError(f"whole layers are missing: {', '.join(map(repr, missing))}")
        for at in layout.whole:
            items[at] = whole[layout.layers[at].name]
    return items


def guaranteed_alpha(layout: Layout, scheme: Scheme) -> float:
    """The worst contraction factor any round of this scheme can have: K = floor in the largest layer.

    Deterministic, known before training; the rounding factor holds for values in the normal
    range of the coding (bf16: 1.2e-38 to 3.4e38). With contractive = False: 1/(1 + worst_omega), the
    contraction of C/(1 + omega).
    """
    if not scheme.contractive:
        return 1.0 / (1.0 + worst_omega(layout, scheme))
    operator = scheme.what
    worst = 1.0
    for at in layout.compressed:
        layer = layout.layers[at]
        if operator.coded:
            worst = min(worst, CODED[operator.name].alpha(scheme.made, layer) if layer.size else 1.0)
            continue
        coding = scheme.coding(layer)
        exact = 1.0 if coding.itemsize == layer.itemsize else 1.0 - coding.roundoff**2
        worst = min(worst, exact * operator.alpha(scheme.floor_of(layer), layer.size))
        if layer.size and (coding.fitted or scheme.joint):  # one level for K values keeps 1/K of them at least
            worst = min(worst, exact / layer.size)
    return worst


def smallest_bytes(layout: Layout, header: Header, scheme: Scheme, *, whole: bool = True) -> int:
    """A budget of this size is never missed: most bytes the smallest legal message can take.

    Args:
        layout: agreed layout.
        header: of the message.
        scheme: operator, values and floors.
        whole: the layers that travel whole are in this message.

    Returns:
        bytes; the true smallest message depends on the support, or on the levels drawn, and may be shorter.
    """
    operator, ladder = scheme.what, scheme.ladder
    total = header_bytes(header)
    for layer in layout.layers:
        if layer.whole:
            total += whole_record_bytes(layer) if whole else 2
            continue
        if ladder is not None and layer.size:
            total += ld.least_bytes(ladder, layer, _longest(layout))
            continue
        if operator.coded and layer.size:
            total += 1 + CODED[operator.name].most_bytes(scheme.made, layer)
            continue
        coding = scheme.coding(layer)
        dense = dense_record_bytes(layer.size, coding)
        if not operator.adaptive:
            total += dense
            continue
        k = scheme.floor_of(layer)
        if operator.seeded:
            sparse = seeded_record_bytes(k, coding)
        else:
            sparse = 2 + varint_bytes(k) + rice_bytes_bound(k, layer.size) + coding.stream_bytes(k)
        total += min(sparse, dense)
    return total


def _layer_seed(seed: int, position: int) -> int:
    """Seed of one layer's draw, in [0, 2**32)."""
    return int(words(1, seed=seed, round_=position, purpose="randk")[0] >> np.uint64(32))


def dense_bytes_on_wire(layout: Layout, header: Header) -> int:
    """Exact bytes of the uncompressed message at the layers' own dtypes, whole layers included."""
    return header_bytes(header) + sum(2 + layer.nbytes for layer in layout.layers)
