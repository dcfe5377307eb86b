from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import (
    DOWN,
    UP,
    Expect,
    Header,
    Layer,
    LayerUpdate,
    Layout,
    Record,
    Slot,
    decode,
    encode,
    peek,
    predicted_bytes,
    tag4,
)
from compression.coded import CODED, Key
from compression.errors import LayoutError, UpdateError, WireError
from compression.indices import seeded_support
from compression.operators import IDENTITY, OPERATORS, TOPK, Operator
from compression.values import BF16, FP32, FP64, VALUES
from compression.wire import Item, header_bytes, largest_bytes
from tests.compression.support import dense_of, flat_layout, header_of, same_update


def sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def sparse(indices: list[int], values: list[float], dtype: str = "float32") -> LayerUpdate:
    return LayerUpdate(np.array(indices, dtype=np.int64), np.array(values, dtype=dtype))


def test_golden_message() -> None:
    layout = Layout((Layer("w", (300,), "float32", False), Layer("n", (), "int64", True)))
    header = Header(DOWN, layout.digest, tag4("run"), tag4("c1"), 3, 300, 0, 2, ((Slot.H, bytes(range(8))),))
    items: list[Item] = [Record(TOPK, BF16, sparse([1, 2, 9], [1.0, -2.0, 0.5])), np.array(-2, dtype=np.int64)]
    expected = (
        "4b4d44"  # "KMD"
        "01"  # version
        "01" + layout.digest.hex() + tag4("run").hex() + tag4("c1").hex() + "03"  # down  # incarnation
        "ac02"  # round 300 = 0b10_0101100
        "00"  # part
        "02"  # parts
        "01"  # one slot
        "000001020304050607"  # slot H, its digest
        "01"  # operator topk
        "12"  # rice, bf16
        "03"  # K
        "006040"  # test_codings.test_rice_golden
        "803f00c0003f"  # 1, -2, 0.5: the upper halves of 3f800000, c0000000, 3f000000
        "ff0f"  # whole, raw
        "feffffffffffffff"  # -2
    )
    assert encode(layout, header, items).hex() == sealed(bytes.fromhex(expected)).hex()


def test_framing_of_a_one_layer_message() -> None:
    # 21 fixed + 5 varints (incarnation and round to 16,383, rest one byte) + 9 slot + 4 checksum + 2 record + 4 K.
    layout = flat_layout([1 << 20])
    header = header_of(layout, incarnation=16_383, round=16_383)
    assert header_bytes(header) + 2 + 4 <= 48
    # K = 1 takes one byte instead of four; its rice stream is r = 0 and 000001, two bytes, and its value four.
    blob = encode(layout, header, [Record(TOPK, FP32, sparse([5], [1.0]))])
    assert len(blob) == header_bytes(header) + 2 + 1 + 2 + 4


def whole_of(layer: Layer) -> LayerUpdate:
    return LayerUpdate(None, np.zeros(layer.size, layer.dtype))


def coded_record(layer: Layer, operator: Operator, rng: np.random.Generator) -> Record:
    x = (rng.standard_normal(layer.size) * 10.0 ** rng.integers(-30, 30)).astype(layer.dtype)
    coded = CODED[operator.name]
    made = coded.make({name: parameter.default for name, parameter in coded.parameters.items()})
    body = coded.encode(layer, x, made, bool(rng.integers(2)), Key(int(rng.integers(2**32)), 3))
    (support, values), used = coded.decode(memoryview(body), layer)
    assert used == len(body) <= coded.most_bytes(made, layer)
    return Record(operator, FP32, LayerUpdate(support, values), body=body)


@st.composite
def messages(draw: st.DrawFn) -> tuple[Layout, Header, list[Item]]:
    layers: list[Layer] = []
    items: list[Item] = []
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for at in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
        if draw(st.booleans()):
            dtype = draw(st.sampled_from(["float32", "float64"]))
            layer = Layer(f"layer{at}", shape, dtype, False)
            coding = draw(st.sampled_from([coding for coding in VALUES if coding.itemsize <= layer.itemsize]))
            density = draw(st.sampled_from([None, 0.0, 0.02, 0.2, 0.6, 1.0]))
            support = None if density is None else np.flatnonzero(rng.random(layer.size) < density).astype(np.int64)
            n = layer.size if support is None else support.size
            values = coding.round((rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30)).astype(dtype))
            operator = draw(st.sampled_from(list(OPERATORS)))
            seed = draw(st.integers(0, 2**32 - 1)) if operator.seeded and support is not None else None
            if seed is not None and support is not None:
                support = seeded_support(seed, support.size, layer.size)
            record = Record(operator, coding, LayerUpdate(support, values), seed)
            if operator.coded:
                record = coded_record(layer, operator, rng) if layer.size else Record(IDENTITY, FP32, whole_of(layer))
            items.append(None if draw(st.integers(0, 5)) == 0 else record)
        else:
            dtype = draw(st.sampled_from(["bool", "int8", "uint16", "int64", "float16", "float32", "complex64"]))
            layer = Layer(f"layer{at}", shape, dtype, True)
            array = (rng.standard_normal(shape) * 3).astype(dtype)
            items.append(None if draw(st.integers(0, 5)) == 0 else array)
        layers.append(layer)
    layout = Layout(tuple(layers))
    number = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
    parts = draw(st.integers(1, 300))
    slots = draw(st.sets(st.sampled_from(list(Slot))))
    header = header_of(
        layout,
        kind=draw(st.sampled_from([UP, DOWN])),
        incarnation=draw(number),
        round=draw(number),
        part=draw(st.integers(0, parts - 1)),
        parts=parts,
        slots=tuple((int(slot), rng.bytes(8)) for slot in sorted(slots)),
    )
    return layout, header, items


@given(messages())
@settings(max_examples=300)
def test_round_trip_and_predicted_bytes(message: tuple[Layout, Header, list[Item]]) -> None:
    layout, header, items = message
    blob = encode(layout, header, items)
    assert len(blob) == predicted_bytes(layout, header, items) <= largest_bytes(layout)
    assert peek(blob) == header
    found = decode(layout, bytearray(blob))
    assert found.header == header
    updates = iter(found.updates)
    for layer, item in zip(layout.layers, items, strict=True):
        if layer.whole:
            assert (layer.name in found.whole) == (item is not None)
            if isinstance(item, np.ndarray):
                assert found.whole[layer.name].dtype == item.dtype
                assert found.whole[layer.name].shape == item.shape
                assert found.whole[layer.name].tobytes() == item.tobytes()
            continue
        update = next(updates)
        if not isinstance(item, Record):
            assert update is None
        elif update is not None and update.indices is None and item.update.indices is not None:
            # went dense, which is allowed only where sparse saves nothing
            assert np.array_equal(dense_of(update, layer.size), dense_of(item.update, layer.size))
        else:
            assert same_update(update, item.update)


def test_a_layer_goes_dense_when_sparse_saves_nothing() -> None:
    layout = flat_layout([8])
    header = header_of(layout)
    dense = len(encode(layout, header, [Record(IDENTITY, FP32, LayerUpdate(None, np.ones(8, np.float32)))]))
    sizes = [len(encode(layout, header, [Record(TOPK, FP32, sparse(list(range(k)), [1.0] * k))])) for k in range(9)]
    # sparse costs 2 + 1 + 2 + 4 K for these supports, dense 2 + 32: equal sizes go dense from K = 8 on
    assert sizes == [dense - 31, *[dense - 34 + 5 + 4 * k for k in range(1, 8)], dense]


MANY = Layout(
    (
        Layer("w", (40, 10), "float32", False),
        Layer("b", (30,), "float64", False),
        Layer("flag", (3,), "bool", True),
        Layer("mean", (4,), "float32", True),
    )
)


def example() -> bytes:
    rng = np.random.default_rng(0)
    support = np.flatnonzero(rng.random(400) < 0.1).astype(np.int64)
    values = BF16.round(rng.standard_normal(support.size).astype(np.float32))
    items: list[Item] = [
        Record(TOPK, BF16, LayerUpdate(support, values)),
        Record(IDENTITY, FP64, LayerUpdate(None, rng.standard_normal(30))),
        np.array([True, False, True]),
        np.ones(4, dtype=np.float32),
    ]
    return encode(MANY, header_of(MANY), items)


def mutate(blob: bytes, rng: np.random.Generator) -> bytes:
    body = bytearray(blob[:-4])
    for _ in range(int(rng.integers(1, 4))):
        what = int(rng.integers(0, 6))
        at = int(rng.integers(0, max(1, len(body))))
        if what == 0:
            del body[at:]
        elif what <= 2 and body:
            body[at] ^= 1 << int(rng.integers(0, 8))
        elif what == 3:
            body[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif what == 4:
            del body[at : at + int(rng.integers(1, 9))]
        else:
            body[at : at + 4] = bytes(4) if rng.random() < 0.5 else b"\xff" * 4
    if rng.random() < 0.02:
        body += bytes(100_000)
    return sealed(bytes(body)) if rng.random() < 0.8 else bytes(body) + blob[-4:]


def check_legal(blob: bytes, layout: Layout) -> bool:
    try:
        found = decode(layout, blob)
    except WireError:
        return False
    for at, update in zip(layout.compressed, found.updates, strict=True):
        d = layout.layers[at].size
        if update is None:
            continue
        assert np.isfinite(update.values).all()
        if update.indices is None:
            assert update.values.shape == (d,)
        else:
            assert update.values.shape == update.indices.shape
            bounded = [-1, *update.indices.tolist(), d]
            assert all(a < b for a, b in itertools.pairwise(bounded))
    return True


@given(st.integers(0, 2**63 - 1), st.booleans())
@settings(max_examples=10_000)
def test_ten_thousand_mutations(seed: int, foreign: bool) -> None:
    check_legal(mutate(example(), np.random.default_rng(seed)), flat_layout([400, 30]) if foreign else MANY)


def test_mutations_take_little_memory_and_some_are_legal() -> None:
    rng = np.random.default_rng(11)
    blob = example()
    assert check_legal(blob, MANY)
    legal = 0
    tracemalloc.start()
    try:
        for _ in range(1_000):
            legal += check_legal(mutate(blob, rng), MANY)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < legal < 500  # values and whole bytes may change legally under a repaired checksum
    assert peak < 40 * MANY.dense_bytes + 500_000  # the oversized message itself takes 200 kB


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_after_a_legal_header(tail: bytes) -> None:
    start = example()[: header_bytes(header_of(MANY)) - 4]
    check_legal(sealed(start + tail), MANY)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_peek_of_any_bytes(blob: bytes) -> None:
    for data in (blob, b"KMD\x01\x00" + blob):
        try:
            peek(data)
        except WireError:
            continue


def test_memory_is_bounded_by_the_layout() -> None:
    d = 500_000
    layout = flat_layout([d])
    start = example()[:5] + layout.digest + example()[13:RECORD]
    count = bytes((d & 127 | 128, d >> 7 & 127 | 128, d >> 14))
    claims = start + b"\x01\x12" + count + bytes(1) + b"\xff" * (d // 8 + 2 * d)  # d neighbours, bf16 of ffff = NaN
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="not finite"):
            decode(layout, sealed(claims))
        with pytest.raises(WireError, match="length"):
            decode(layout, sealed(start + bytes(3 * layout.dense_bytes)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * layout.dense_bytes


RECORD = header_bytes(header_of(MANY)) - 4  # where the first record begins


def edit(at: int, value: int) -> bytes:
    body = bytearray(example()[:-4])
    body[at] = value
    return sealed(bytes(body))


@pytest.mark.parametrize(
    ("blob", "field"),
    [
        (b"", "magic"),
        (b"PK\x03\x04", "magic"),
        (edit(3, 2), "version"),
        (edit(4, 2), "flags"),
        (edit(5, 0), "layout"),
        (edit(23, 9), "part"),
        (edit(25, 8), "slots"),
        (edit(26, 7), "slots"),
        (edit(RECORD, 0), "operator"),
        (edit(RECORD, 77), "operator"),
        (edit(RECORD, 255), "operator"),
        (edit(RECORD + 1, 0x22), "coding"),  # seed: reserved
        (edit(RECORD + 1, 0x10), "coding"),  # fp64 for a float32 layer
        (edit(RECORD + 1, 0x1E), "coding"),  # no such value coding
        (edit(RECORD + 3, 60), "index stream"),
        (example()[:-1], "checksum"),
        (example() + b"\0", "checksum"),
        (sealed(example()[:-4] + b"\0"), "length"),
        (sealed(example()[:-5]), "data of 'mean'"),
        (sealed(example()[:RECORD]), "record of 'w'"),
        (sealed(example()[:-4] + bytes(10_000)), "length"),
    ],
)
def test_faults_name_their_field(blob: bytes, field: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(MANY, blob)
    assert field in caught.value.field


def test_values_that_are_not_finite_are_refused_on_arrival() -> None:
    layout = flat_layout([4])
    blob = encode(layout, header_of(layout), [Record(IDENTITY, FP32, LayerUpdate(None, np.ones(4, np.float32)))])
    for bad in ("0000c07f", "0000807f", "000080ff"):
        with pytest.raises(WireError, match="not finite"):
            decode(layout, sealed(blob[:-8] + bytes.fromhex(bad)))


def test_expectations() -> None:
    blob = example()
    header = peek(blob)
    decode(MANY, blob, expect=Expect(kind=UP, client=header.client, experiment=header.experiment, round=7, parts=1))
    for field in dataclasses.fields(Expect):
        wrong: Any = bytes(4) if field.name in ("client", "experiment") else 99
        with pytest.raises(WireError, match="expected") as caught:
            decode(MANY, blob, expect=Expect(**{field.name: wrong}))
        assert caught.value.field == field.name


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 2},
        {"layout_digest": b"short"},
        {"experiment": b""},
        {"client": bytes(5)},
        {"round": -1},
        {"incarnation": 1 << 63},
        {"part": 1},
        {"parts": 0},
        {"slots": ((7, bytes(8)),)},
        {"slots": ((1, bytes(8)), (0, bytes(8)))},
        {"slots": ((1, bytes(8)), (1, bytes(8)))},
        {"slots": ((1, bytes(7)),)},
    ],
)
def test_headers_the_format_cannot_carry(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        header_of(MANY, **change)


def w(values: NDArray[Any]) -> Record:
    return Record(IDENTITY, FP32, LayerUpdate(None, values))


@pytest.mark.parametrize(
    ("item", "what"),
    [
        (np.zeros(4, np.float32), "needs a Record"),
        (w(np.zeros(3, np.float32)), "shape"),
        (w(np.zeros(4)), "float64"),
        (Record(TOPK, FP64, LayerUpdate(None, np.zeros(4, np.float32))), "wider"),
        (w(np.array([0, 0, np.nan, 0], np.float32)), "element 2: NaN"),
        (w(np.array([0, 0, 0, -np.inf], np.float32)), "element 3: -Inf"),
        (Record(TOPK, BF16, sparse([1], [1.001])), "not rounded to bf16"),
        (Record(TOPK, FP32, sparse([2, 1], [1.0, 1.0])), "ascend"),
        (Record(TOPK, FP32, sparse([1, 1], [1.0, 1.0])), "ascend"),
        (Record(TOPK, FP32, sparse([4], [1.0])), "ascend"),
        (Record(TOPK, FP32, sparse([-1], [1.0])), "ascend"),
        (Record(TOPK, FP32, sparse([1, 2], [1.0])), "as many"),
    ],
)
def test_illegal_updates_are_not_encoded(item: Item, what: str) -> None:
    layout = flat_layout([4])
    with pytest.raises(UpdateError, match=what):
        encode(layout, header_of(layout), [item])


def test_foreign_headers_and_counts_are_refused() -> None:
    layout = flat_layout([4])
    with pytest.raises(LayoutError, match="names layout"):
        encode(layout, header_of(MANY), [None])
    with pytest.raises(LayoutError, match="2 items for 1 layers"):
        predicted_bytes(layout, header_of(layout), [None, None])


def test_decoded_arrays_are_copies() -> None:
    blob = bytearray(example())
    found = decode(MANY, blob)
    before = found.whole["mean"].copy()
    blob[:] = bytes(len(blob))
    assert np.array_equal(found.whole["mean"], before)
    found.whole["mean"][0] = 5.0  # writable
