from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compression import Layer, Layout
from compression.errors import LayoutError, WireError

ARRAYS: dict[str, NDArray[Any]] = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.arange(2, dtype=np.float64),
    "bn.running_mean": np.ones(2, dtype=np.float32),
    "bn.num_batches_tracked": np.array(5, dtype=np.int64),
    "scale": np.array(1.5, dtype=np.float32),
    "empty": np.empty((0, 4), dtype=np.float32),
}
PATTERNS = ("*.running_*",)


def test_floats_are_compressed_and_the_rest_travels_whole() -> None:
    layout = Layout.of(ARRAYS, PATTERNS)
    assert [layout.layers[i].name for i in layout.compressed] == ["weight", "bias", "scale", "empty"]
    assert [layout.layers[i].name for i in layout.whole] == ["bn.running_mean", "bn.num_batches_tracked"]
    assert layout.compressed_size == 6 + 2 + 1 + 0
    assert layout.dense_bytes == 24 + 16 + 8 + 8 + 4 + 0


def test_digest_is_pinned() -> None:
    # blake2b-64 of '{"layers":[["w",[2,3],"float32",false]],"version":1}'; a change breaks every stored state.
    layout = Layout((Layer("w", (2, 3), "float32", False),))
    assert layout.to_json() == '{"layers":[["w",[2,3],"float32",false]],"version":1}'
    assert layout.digest.hex() == "1ec121d54fa89007"


@pytest.mark.parametrize(
    "other",
    [
        Layer("v", (2, 3), "float32", False),
        Layer("w", (3, 2), "float32", False),
        Layer("w", (2, 3), "float64", False),
        Layer("w", (2, 3), "float32", True),
    ],
)
def test_digest_depends_on_every_property(other: Layer) -> None:
    assert Layout((Layer("w", (2, 3), "float32", False),)).digest != Layout((other,)).digest


def test_split_and_join_are_inverse() -> None:
    layout = Layout.of(ARRAYS, PATTERNS)
    flat, whole = layout.split(ARRAYS)
    assert all(x.ndim == 1 and x.flags.c_contiguous for x in flat)
    joined = layout.join(flat, whole)
    assert list(joined) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert joined[name].shape == array.shape
        assert joined[name].dtype == array.dtype
        assert np.array_equal(joined[name], array)


def test_split_takes_transposed_and_big_endian_arrays() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    layout = Layout.of({"w": array})
    (flat,), _ = layout.split({"w": array})
    assert flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert flat.dtype == np.dtype("<f4")


def test_json_round_trip() -> None:
    layout = Layout.of(ARRAYS, PATTERNS)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.digest == layout.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        "1" * 5000,
        '{"layers":[],"version":2}',
        '{"layers":[],"version":true}',
        '{"layers":{},"version":1}',
        '{"layers":[["w",[2],"float32"]],"version":1}',
        '{"layers":[["w",[true],"float32",false]],"version":1}',
        '{"layers":[["w",[2.0],"float32",false]],"version":1}',
        '{"layers":[["w",2,"float32",false]],"version":1}',
        '{"layers":[[1,[2],"float32",false]],"version":1}',
        '{"layers":[["w",[2],"float32",0]],"version":1}',
    ],
)
def test_malformed_json_is_a_wire_error(text: str) -> None:
    with pytest.raises(WireError, match="layout"):
        Layout.from_json(text)


@pytest.mark.parametrize(
    "row",
    [
        ["w", [-1], "float32", False],
        ["w", [1 << 60], "float32", False],
        ["w", [1 << 30, 1 << 30], "float32", False],
        ["w", [1] * 33, "float32", False],
        ["w", [1], "object", True],
        ["w", [1], "<U3", True],
        ["w", [1], "int64", False],
        ["", [1], "float32", False],
        ["w" * 5000, [1], "float32", False],
    ],
)
def test_impossible_layers_are_layout_errors(row: list[object]) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps({"layers": [row], "version": 1}))


def test_names_are_unique() -> None:
    with pytest.raises(LayoutError, match="not unique: 'w'"):
        Layout((Layer("w", (1,), "float32", False), Layer("w", (2,), "float32", False)))


def test_object_arrays_are_refused() -> None:
    with pytest.raises(LayoutError, match="'o': dtype 'object' cannot travel"):
        Layout.of({"o": np.array([{}], dtype=object)})


def test_check_names_every_difference() -> None:
    layout = Layout.of(ARRAYS, PATTERNS)
    wrong: dict[str, NDArray[Any]] = dict(ARRAYS) | {"extra": np.zeros(1), "weight": np.zeros((3, 2), np.float64)}
    del wrong["bias"]
    with pytest.raises(LayoutError) as caught:
        layout.check(wrong)
    text = str(caught.value)
    for part in ("4 differences", "missing 'bias'", "unexpected 'extra'", "shape (3, 2), expected (2, 3)", "float64"):
        assert part in text


def test_more_than_two_to_the_31_elements() -> None:
    layout = Layout((Layer("huge", (3, 1 << 40), "float32", False),))
    assert layout.compressed_size == 3 << 40
    assert layout.dense_bytes == 12 << 40
