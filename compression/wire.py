"""Wire format, version 1. Append-only: ids are never reused, a change of meaning is a new version.

All numbers are little-endian. A varint is unsigned LEB128 in its shortest form, below 2**63.

| field        | bytes  | what                                                              |
|--------------|--------|-------------------------------------------------------------------|
| magic        | 3      | "KMD"                                                             |
| version      | 1      | 1                                                                 |
| flags        | 1      | bit 0: kind, 0 = up (client to server), 1 = down; others zero     |
| layout       | 8      | `Layout.digest`                                                   |
| experiment   | 4      | `tag4` of the experiment's name                                   |
| client       | 4      | `tag4` of the client's id                                         |
| incarnation  | varint | of the server                                                     |
| round        | varint |                                                                   |
| part, parts  | varint | part < parts; two varints                                         |
| slots        | varint | n, then n times: slot id (1, `Slot`, ascending), digest (8)       |
| records      |        | one for EVERY layer of the layout, in its order                   |
| checksum     | 4      | CRC-32 (zlib) of all bytes before                                 |

| record of a compressed layer | bytes  | what                                              |
|------------------------------|--------|---------------------------------------------------|
| operator                     | 1      | `operators`; 0 when absent                        |
| coding                       | 1      | index coding << 4, plus value coding              |
| K                            | varint | number of values; not when dense or absent        |
| index stream                 |        | `indices`; not when dense or absent               |
| value stream                 |        | K (dense: d) values, `values`; not when absent    |

| record of a coded layer      | bytes  | what                                              |
|------------------------------|--------|---------------------------------------------------|
| operator                     | 1      | 4 to 8                                            |
| body                         |        | `coded`                                           |

| record of a whole layer      | bytes  | what                                              |
|------------------------------|--------|---------------------------------------------------|
| operator                     | 1      | 255, or 0 when absent                             |
| coding                       | 1      | 0x0F, or 0xF0 when absent                         |
| data                         |        | the array, C order; not when absent               |

A layer goes dense, with zeros where it had no value, when its sparse record would be no
smaller; so no record is longer than its dense form. (Fitted levels have no zero: such a layer goes
dense only with all its values.) A value coding is never wider than its
layer. Values are finite. No stream carries a length: all of them follow from the layout, K
and the streams themselves, and nothing received is believed before it is bounded by these.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression import indices as ix
from compression import values as vx
from compression.coded import CODED
from compression.errors import LayoutError, UpdateError, WireError
from compression.frames import VARINT_MOST_BYTES, read_varint, varint, varint_bytes
from compression.layout import Layer, Layout
from compression.operators import NONE, OPERATORS, WHOLE, Operator
from compression.values import VALUES, ValueCoding

MAGIC = b"KMD"
VERSION = 1
UP, DOWN = 0, 1
CHECKSUM_BYTES = 4
_ABSENT = bytes((NONE, ix.ABSENT << 4))
_WHOLE = bytes((WHOLE, ix.DENSE << 4 | vx.RAW))

Buffer = bytes | bytearray | memoryview


class Slot(IntEnum):
    """Named pieces of client state whose digests travel in a header."""

    H = 0
    V = 1
    E = 2
    Q = 3
    W_BASE = 4
    W_NEW = 5
    USER = 6


def tag4(text: str) -> bytes:
    """Four bytes that stand for a name on the wire: BLAKE2b-32 of its UTF-8.

    >>> tag4("client-7").hex()
    'defab3bf'
    """
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).digest()


@dataclass(frozen=True, slots=True)
class Header:
    """What a message is about.

    Args:
        kind: UP (0) or DOWN (1).
        layout_digest: 8 bytes, `Layout.digest`.
        experiment: 4 bytes, `tag4`.
        client: 4 bytes, `tag4`.
        incarnation: of the server, counts its restarts.
        round: round number.
        part: which part of the message, 0 <= part < parts.
        parts: how many parts there are.
        slots: (slot id, 8-byte digest), ids ascending.

    Raises:
        WireError: a field that the format cannot carry.
    """

    kind: int
    layout_digest: bytes
    experiment: bytes
    client: bytes
    incarnation: int
    round: int
    part: int = 0
    parts: int = 1
    slots: tuple[tuple[int, bytes], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (UP, DOWN):
            raise WireError("flags", f"kind {self.kind}, expected 0 (up) or 1 (down)")
        for name, got, size in (
            ("layout", self.layout_digest, 8),
            ("experiment", self.experiment, 4),
            ("client", self.client, 4),
        ):
            if len(got) != size:
                raise WireError(name, f"{len(got)} bytes, expected {size}")
        for name in ("incarnation", "round", "part", "parts"):
            number = getattr(self, name)
            if not 0 <= number < 1 << 63:
                raise WireError(name, f"{number} is outside 0 to 2**63 - 1")
        if self.part >= self.parts:
            raise WireError("part", f"part {self.part} of {self.parts}")
        ids = [slot for slot, _ in self.slots]
        if ids != sorted(set(ids)) or not set(ids) <= set(Slot):
            raise WireError("slots", f"ids {ids}: expected ascending ids out of {[int(slot) for slot in Slot]}")
        if any(len(digest) != 8 for _, digest in self.slots):
            raise WireError("slots", "a slot's digest has 8 bytes")


@dataclass(frozen=True, slots=True, eq=False)
class LayerUpdate:
    """The decoded update of one compressed layer.

    Args:
        indices: ascending unique positions, int64, shape (K,); None for a dense update.
        values: in the layer's dtype, exactly what the decoder sees; shape (K,), or (d,) when dense.
    """

    indices: NDArray[np.int64] | None
    values: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One compressed layer in a message to be.

    Args:
        operator: what chose the values.
        coding: how they are written; `coding.round` must already have been applied.
        update: positions and values.
        seed: what the positions were drawn from, in [0, 2**32), for a seeded operator; else None.
        stream: `coding.encode` of the values, where it is known already.
        rice: parameter of the index stream, where it is known already.
        gaps: the index stream in another coding, to be written instead.
        body: of a coded operator; `update` must be what it decodes to.
    """

    operator: Operator
    coding: ValueCoding
    update: LayerUpdate
    seed: int | None = None
    stream: bytes | None = None
    rice: int | None = None
    gaps: bytes | None = None
    body: bytes | None = None


Item = Record | NDArray[Any] | None
"""Content of one layer: a Record (compressed), an array (whole) or None (absent)."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """A decoded message.

    Args:
        header: its header.
        updates: one for each compressed layer in layout order; None where absent.
        whole: name -> array with its shape, for the whole layers that are present.
    """

    header: Header
    updates: tuple[LayerUpdate | None, ...]
    whole: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Expect:
    """Fields that a decoded header must have; None accepts any."""

    kind: int | None = None
    experiment: bytes | None = None
    client: bytes | None = None
    incarnation: int | None = None
    round: int | None = None
    part: int | None = None
    parts: int | None = None

    def check(self, header: Header) -> None:
        """Raise WireError naming the first field that differs."""
        for field in fields(self):
            wanted, got = getattr(self, field.name), getattr(header, field.name)
            if wanted is not None and wanted != got:
                raise WireError(field.name, f"got {got!r}, expected {wanted!r}")


# ---- sizes ------------------------------------------------------------------------------------


def header_bytes(header: Header) -> int:
    """Bytes of the header and the checksum: a message without its records."""
    numbers = (header.incarnation, header.round, header.part, header.parts, len(header.slots))
    return 21 + sum(map(varint_bytes, numbers)) + 9 * len(header.slots) + CHECKSUM_BYTES


def whole_record_bytes(layer: Layer) -> int:
    """Bytes of a layer that travels whole."""
    return 2 + layer.nbytes


def dense_record_bytes(d: int, coding: ValueCoding) -> int:
    """Bytes of a dense record of d values."""
    return 2 + coding.stream_bytes(d)


def sparse_record_bytes(indices: NDArray[np.int64], d: int, coding: ValueCoding) -> int:
    """Bytes of a sparse record with this support; it goes dense if that is no larger."""
    return 2 + varint_bytes(indices.size) + ix.rice_bytes(indices, d) + coding.stream_bytes(indices.size)


def seeded_record_bytes(k: int, coding: ValueCoding) -> int:
    """Bytes of a record of k values whose positions travel as a seed; it goes dense if that is no larger."""
    return 2 + varint_bytes(k) + (ix.SEED_BYTES if k else 0) + coding.stream_bytes(k)


def largest_bytes(layout: Layout) -> int:
    """No legal message of this layout is longer."""
    header = 21 + 5 * VARINT_MOST_BYTES + 9 * len(Slot) + CHECKSUM_BYTES
    # A coded layer with blocks of 1 takes a norm as wide as its value and a level of up to 15 bits for each.
    return header + 32 * len(layout.layers) + 2 * layout.dense_bytes


def _item_bytes(layer: Layer, item: Item) -> int:
    if item is None:
        return len(_ABSENT)
    if not isinstance(item, Record):
        return whole_record_bytes(layer)
    if item.body is not None:
        return 1 + len(item.body)
    dense = dense_record_bytes(layer.size, item.coding)
    if item.update.indices is None:
        return dense
    if item.seed is not None:
        sparse = seeded_record_bytes(item.update.indices.size, item.coding)
    else:
        sparse = sparse_record_bytes(item.update.indices, layer.size, item.coding)
        if item.gaps is not None:
            sparse += len(item.gaps) - ix.rice_bytes(item.update.indices, layer.size)
    return sparse if item.coding.fitted else min(dense, sparse)


def predicted_bytes(layout: Layout, header: Header, items: Sequence[Item]) -> int:
    """The exact length of `encode(layout, header, items)`, without building it."""
    _check_items(layout, header, items)
    return header_bytes(header) + sum(map(_item_bytes, layout.layers, items))


# ---- encode -----------------------------------------------------------------------------------


def encode_header(header: Header) -> bytes:
    """The header alone."""
    numbers = (header.incarnation, header.round, header.part, header.parts, len(header.slots))
    return b"".join(
        (
            MAGIC,
            bytes((VERSION, header.kind)),
            header.layout_digest,
            header.experiment,
            header.client,
            *map(varint, numbers),
            *(bytes((slot,)) + digest for slot, digest in header.slots),
        )
    )


def _check_items(layout: Layout, header: Header, items: Sequence[Item], verified: bool = False) -> None:
    if header.layout_digest != layout.digest:
        raise LayoutError(f"the header names layout {header.layout_digest.hex()}, this is {layout.digest.hex()}")
    if len(items) != len(layout.layers):
        raise LayoutError(f"{len(items)} items for {len(layout.layers)} layers")
    for layer, item in zip(layout.layers, items, strict=True):
        if isinstance(item, Record):
            if not verified:
                _check_record(layer, item)
        elif item is not None:
            if not layer.whole:
                raise UpdateError(layer.name, None, "a compressed layer needs a Record, got an array")
            if tuple(item.shape) != layer.shape or item.dtype.name != layer.dtype:
                got = f"{item.dtype.name}{tuple(item.shape)}"
                raise UpdateError(layer.name, None, f"got {got}, expected {layer.dtype}{layer.shape}")


def _check_record(layer: Layer, record: Record) -> None:
    update = record.update
    if layer.whole:
        raise UpdateError(layer.name, None, "a whole layer needs an array, got a Record")
    if record.operator.coded != (record.body is not None):
        raise UpdateError(layer.name, None, f"operator {record.operator.name} with body {record.body!r}")
    if record.body is not None:
        _check_body(layer, record, record.body)
        return
    if record.coding.itemsize > layer.itemsize:
        raise UpdateError(layer.name, None, f"{record.coding.name} is wider than {layer.dtype}")
    if update.values.dtype != np.dtype(layer.dtype):
        raise UpdateError(layer.name, None, f"values are {update.values.dtype}, expected {layer.dtype}")
    if update.indices is None:
        if update.values.shape != (layer.size,):
            raise UpdateError(
                layer.name, None, f"dense values of shape {update.values.shape}, expected ({layer.size},)"
            )
        return
    support = update.indices
    if support.ndim != 1 or support.dtype != np.int64 or support.shape != update.values.shape:
        raise UpdateError(layer.name, None, "indices must be int64 and as many as values")
    if (record.seed is not None) != record.operator.seeded:
        raise UpdateError(layer.name, None, f"operator {record.operator.name} with seed {record.seed!r}")
    if record.gaps is not None:
        _check_gaps(layer, record.gaps, support)
    if record.seed is not None and not np.array_equal(
        support, ix.seeded_support(record.seed, support.size, layer.size)
    ):
        raise UpdateError(layer.name, None, f"indices are not those of seed {record.seed}")
    if support.size and (support[0] < 0 or support[-1] >= layer.size or bool(np.any(support[1:] <= support[:-1]))):
        raise UpdateError(layer.name, None, f"indices must ascend within 0 to {layer.size - 1}")


def _check_gaps(layer: Layer, gaps: bytes, support: NDArray[np.int64]) -> None:
    try:
        found, used = ix.decode_gaps(memoryview(gaps), support.size, layer.size)
    except WireError as error:
        raise UpdateError(layer.name, None, f"its gaps are no index stream: {error}") from error
    if used != len(gaps) or not np.array_equal(found, support):
        raise UpdateError(layer.name, None, "the gaps are those of another support")


def _check_body(layer: Layer, record: Record, body: bytes) -> None:
    try:
        (support, values), used = CODED[record.operator.name].decode(memoryview(body), layer)
    except WireError as error:
        raise UpdateError(layer.name, None, f"its body is no {record.operator.name}: {error}") from error
    told = record.update
    places = [np.empty(0, np.int64) if at is None else at for at in (support, told.indices)]
    same = (support is None) == (told.indices is None) and np.array_equal(places[0], places[1])
    if used != len(body) or not same or values.tobytes() != told.values.tobytes():
        raise UpdateError(layer.name, None, "the update is not what the body decodes to")


def first_non_finite(x: NDArray[Any]) -> tuple[int, str] | None:
    """Flat position and name ("NaN", "+Inf", "-Inf") of the first value that is not finite, or None."""
    bad = np.flatnonzero(~np.isfinite(x.reshape(-1)))
    if bad.size == 0:
        return None
    at = int(bad[0])
    value = x.reshape(-1)[at]
    if np.iscomplexobj(value):
        return at, "not finite"
    return at, "NaN" if np.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _require_finite(layer: Layer, x: NDArray[Any]) -> None:
    if x.dtype.kind in "fc" and not bool(np.isfinite(x).all()):
        found = first_non_finite(x)
        raise UpdateError(layer.name, found[0] if found else None, found[1] if found else "not finite")


def _encode_record(layer: Layer, record: Record, verified: bool) -> list[bytes]:
    if record.body is not None:
        return [bytes((record.operator.id,)), record.body]
    update, coding, d = record.update, record.coding, layer.size
    support, values = update.indices, update.values
    if not verified:
        _require_finite(layer, values)
        if coding.itemsize < layer.itemsize and coding.round(values).tobytes() != values.tobytes():
            raise UpdateError(layer.name, None, f"values are not rounded to {coding.name}; apply coding.round first")
    stream = coding.encode(values) if record.stream is None else record.stream
    if support is None:
        return [bytes((record.operator.id, ix.DENSE << 4 | coding.id)), stream]
    count = varint(support.size)
    if record.gaps is not None:
        how, index_stream = ix.GAPS, record.gaps
    elif record.seed is None:
        how, index_stream = ix.RICE, ix.encode_rice(support, d, record.rice)
    else:
        how, index_stream = ix.SEED, record.seed.to_bytes(ix.SEED_BYTES, "little") if support.size else b""
    if not coding.fitted and 2 + len(count) + len(index_stream) + len(stream) >= dense_record_bytes(d, coding):
        full = np.zeros(d, dtype=layer.dtype)
        full[support] = values
        return [bytes((record.operator.id, ix.DENSE << 4 | coding.id)), coding.encode(full)]
    return [bytes((record.operator.id, how << 4 | coding.id)), count, index_stream, stream]


def encode(layout: Layout, header: Header, items: Sequence[Item], *, verified: bool = False) -> bytes:
    """One message.

    Args:
        layout: of the model; `header.layout_digest` must be its digest.
        header: what the message is about.
        items: one for every layer in layout order.
        verified: the records come from `compress` and are not checked again.

    Returns:
        bytes of length `predicted_bytes(layout, header, items)`.

    Raises:
        LayoutError: header or items do not match the layout.
        UpdateError: values that are not finite or not rounded, indices that do not ascend.
    """
    _check_items(layout, header, items, verified)
    out = [encode_header(header)]
    for layer, item in zip(layout.layers, items, strict=True):
        if item is None:
            out.append(_ABSENT)
        elif isinstance(item, Record):
            out += _encode_record(layer, item, verified)
        else:
            _require_finite(layer, item)
            out += [_WHOLE, np.ascontiguousarray(item, dtype=_little(layer.dtype)).tobytes()]
    body = b"".join(out)
    return body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little")


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


# ---- decode -----------------------------------------------------------------------------------


class _Reader:
    """A cursor over received bytes; every read is bounded and names its field."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, n: int, field: str) -> memoryview:
        if n > len(self.data) - self.at:
            raise WireError(field, f"needs {n} bytes, {len(self.data) - self.at} are left")
        self.at += n
        return self.data[self.at - n : self.at]

    def varint(self, field: str) -> int:
        number, used = read_varint(self.data[self.at :], field)
        self.at += used
        return number


def _bytes(blob: Buffer) -> memoryview:
    try:
        return memoryview(blob).cast("B")
    except TypeError:
        raise WireError("message", f"expected contiguous bytes, got {type(blob).__name__}") from None


def _read_header(reader: _Reader) -> Header:
    if reader.take(3, "magic") != MAGIC:
        raise WireError("magic", f"{bytes(reader.data[:3])!r}, expected {MAGIC!r}: not a message of this project")
    version = reader.take(1, "version")[0]
    if version != VERSION:
        raise WireError("version", f"{version}, this side speaks {VERSION}")
    kind = reader.take(1, "flags")[0]
    digest = bytes(reader.take(8, "layout"))
    experiment, client = bytes(reader.take(4, "experiment")), bytes(reader.take(4, "client"))
    incarnation, round_ = reader.varint("incarnation"), reader.varint("round")
    part, parts = reader.varint("part"), reader.varint("parts")
    count = reader.varint("slots")
    if count > len(Slot):
        raise WireError("slots", f"{count} slots, at most {len(Slot)} exist")
    slots = tuple((reader.take(1, "slots")[0], bytes(reader.take(8, "slots"))) for _ in range(count))
    return Header(kind, digest, experiment, client, incarnation, round_, part, parts, slots)


def peek(blob: Buffer) -> Header:
    """The header alone, for routing; the checksum is NOT verified, `decode` does that.

    Raises:
        WireError: there is no legal header.
    """
    return _read_header(_Reader(_bytes(blob)[: 21 + 5 * VARINT_MOST_BYTES + 9 * len(Slot)]))


def _read_values(reader: _Reader, layer: Layer, coding: ValueCoding, n: int) -> NDArray[Any]:
    data = reader.take(coding.stream_bytes(n), f"values of {layer.name!r}")
    try:
        values = coding.decode(data, n, layer.dtype)
    except WireError as error:
        raise WireError(f"{error.field} of {layer.name!r}", error.detail) from None
    if not bool(np.isfinite(values).all()):
        raise WireError(f"values of {layer.name!r}", "a value is not finite")
    return values


def _read_update(reader: _Reader, layer: Layer) -> LayerUpdate | None:
    lead = reader.take(2, f"record of {layer.name!r}")
    if lead == _ABSENT:
        return None
    operator = OPERATORS.by_id(lead[0])
    if operator is None:
        raise WireError(f"operator of {layer.name!r}", f"{lead[0]} is none that this side knows")
    if operator.coded:
        reader.at -= 1
        return _read_coded(reader, layer, operator)
    how, coding = lead[1] >> 4, VALUES.by_id(lead[1] & 15)
    if coding is None or coding.itemsize > layer.itemsize:
        raise WireError(f"coding of {layer.name!r}", f"value coding {lead[1] & 15} for {layer.dtype}")
    if how == ix.DENSE:
        return LayerUpdate(None, _read_values(reader, layer, coding, layer.size))
    if how not in ((ix.SEED,) if operator.seeded else (ix.RICE, ix.GAPS)):
        raise WireError(f"coding of {layer.name!r}", f"index coding {how} of operator {operator.name}")
    k = reader.varint(f"K of {layer.name!r}")
    left = len(reader.data) - reader.at
    if k > layer.size or coding.stream_bytes(k) > left:
        raise WireError(f"K of {layer.name!r}", f"{k} of {layer.size} values, {left} bytes are left")
    if how == ix.SEED:
        seed = int.from_bytes(reader.take(ix.SEED_BYTES, f"seed of {layer.name!r}"), "little") if k else 0
        return LayerUpdate(ix.seeded_support(seed, k, layer.size), _read_values(reader, layer, coding, k))
    try:
        read = ix.decode_gaps if how == ix.GAPS else ix.decode_rice
        support, used = read(reader.data[reader.at :], k, layer.size)
    except WireError as error:
        raise WireError(f"{error.field} of {layer.name!r}", error.detail) from None
    reader.at += used
    return LayerUpdate(support, _read_values(reader, layer, coding, k))


def _read_coded(reader: _Reader, layer: Layer, operator: Operator) -> LayerUpdate:
    try:
        (support, values), used = CODED[operator.name].decode(reader.data[reader.at :], layer)
    except WireError as error:
        raise WireError(f"{error.field} of {layer.name!r}", error.detail) from None
    reader.at += used
    if not bool(np.isfinite(values).all()):
        raise WireError(f"values of {layer.name!r}", "a value is not finite")
    return LayerUpdate(support, values)


def _read_whole(reader: _Reader, layer: Layer) -> NDArray[Any] | None:
    lead = reader.take(2, f"record of {layer.name!r}")
    if lead == _ABSENT:
        return None
    if lead != _WHOLE:
        raise WireError(f"record of {layer.name!r}", f"{bytes(lead).hex()} for a layer that travels whole")
    data = reader.take(layer.nbytes, f"data of {layer.name!r}")
    if layer.dtype == "bool" and bool(np.any(np.frombuffer(data, dtype=np.uint8) > 1)):
        raise WireError(f"data of {layer.name!r}", "a truth value is neither 0 nor 1")
    array = np.frombuffer(data, dtype=_little(layer.dtype)).astype(layer.dtype).reshape(layer.shape)
    if array.dtype.kind in "fc" and not bool(np.isfinite(array).all()):
        raise WireError(f"data of {layer.name!r}", "a value is not finite")
    return array


def decode(layout: Layout, blob: Buffer, *, expect: Expect | None = None) -> Decoded:
    """Decode and check one message from a peer.

    Memory stays below a small multiple of the layout's dense size, whatever the bytes say.

    Args:
        layout: agreed layout; its digest must be the message's.
        blob: the message, not trusted.
        expect: header fields that must have given values.

    Returns:
        new arrays that do not share memory with `blob`.

    Raises:
        WireError: naming the field that is wrong. Nothing else is raised for any bytes.
    """
    data = _bytes(blob)
    reader = _Reader(data)
    header = _read_header(reader)
    if header.layout_digest != layout.digest:
        raise WireError("layout", f"{header.layout_digest.hex()}, expected {layout.digest.hex()}")
    if len(data) > largest_bytes(layout):
        raise WireError("length", f"{len(data)} bytes, this layout has at most {largest_bytes(layout)}")
    end = len(data) - CHECKSUM_BYTES
    if end < reader.at:
        raise WireError("checksum", "the message ends before it")
    if zlib.crc32(data[:end]) != int.from_bytes(data[end:], "little"):
        raise WireError("checksum", "the message was damaged")
    if expect is not None:
        expect.check(header)
    reader.data = data[:end]
    updates: list[LayerUpdate | None] = []
    whole: dict[str, NDArray[Any]] = {}
    for layer in layout.layers:
        if not layer.whole:
            updates.append(_read_update(reader, layer))
        elif (array := _read_whole(reader, layer)) is not None:
            whole[layer.name] = array
    if reader.at != end:
        raise WireError("length", f"{end - reader.at} bytes follow the last record")
    return Decoded(header, tuple(updates), whole)
