"""Layouts: the names, shapes and dtypes that both ends agree on, and their digest.

A layout says which arrays are compressed (float32 and float64, kept in memories on both
ends) and which travel whole (every other dtype, and names the user lists, such as running
statistics). Compressed layers are handled as flat one-dimensional arrays in layout order.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compression.errors import LayoutError, WireError

COMPRESSIBLE = ("float32", "float64")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
MAX_LAYERS = 1 << 20
MAX_DIMS = 32
MAX_SIZE = 1 << 48  # elements, one layer and all together
MAX_NAME = 4096
MAX_JSON = 1 << 28


@dataclass(frozen=True, slots=True)
class Layer:
    """One named array.

    Args:
        name: unique in its layout.
        shape: dimensions; () is a scalar, and a dimension may be 0.
        dtype: NumPy's name, e.g. "float32"; on the wire always little-endian.
        whole: travels uncompressed, outside the memories.

    Raises:
        LayoutError: a name, dimension or dtype that no message could carry.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_NAME:
            raise LayoutError(f"a layer's name has 1 to {MAX_NAME} characters, got {len(self.name)}")
        if len(self.shape) > MAX_DIMS:
            raise LayoutError(f"layer {self.name!r}: {len(self.shape)} dimensions, at most {MAX_DIMS} are possible")
        if any(n < 0 for n in self.shape) or max(self.shape, default=0) > MAX_SIZE or self.size > MAX_SIZE:
            raise LayoutError(f"layer {self.name!r}: shape {self.shape} is outside 0 to 2**48 elements")
        if self.dtype not in DTYPES:
            raise LayoutError(f"layer {self.name!r}: dtype {self.dtype!r} cannot travel; expected {', '.join(DTYPES)}")
        if not self.whole and self.dtype not in COMPRESSIBLE:
            raise LayoutError(f"layer {self.name!r}: {self.dtype} cannot be compressed; it must travel whole")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the dense array."""
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers of a model in the order in which they travel.

    Attributes:
        digest: 8 bytes, BLAKE2b of the canonical JSON; equal exactly when all names, shapes,
            dtypes, whole flags and the order are equal.
        compressed: positions of the layers that are compressed.
        whole: positions of the layers that travel whole.
        dense_bytes: bytes of all layers at their own dtypes.
        compressed_size: elements of all compressed layers.

    Raises:
        LayoutError: two layers share a name, or there are too many elements.
    """

    layers: tuple[Layer, ...]
    digest: bytes = field(init=False, repr=False)
    compressed: tuple[int, ...] = field(init=False, repr=False, compare=False)
    whole: tuple[int, ...] = field(init=False, repr=False, compare=False)
    dense_bytes: int = field(init=False, repr=False, compare=False)
    compressed_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if len(names) > MAX_LAYERS:
            raise LayoutError(f"{len(names)} layers, at most {MAX_LAYERS} are possible")
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise LayoutError(f"layer names are not unique: {', '.join(map(repr, twice))}")
        size = sum(layer.size for layer in self.layers)
        if size > MAX_SIZE:
            raise LayoutError(f"{size} elements in all, at most 2**48 are possible")
        put = object.__setattr__
        put(self, "digest", hashlib.blake2b(self.to_json().encode("ascii"), digest_size=8).digest())
        put(self, "compressed", tuple(i for i, layer in enumerate(self.layers) if not layer.whole))
        put(self, "whole", tuple(i for i, layer in enumerate(self.layers) if layer.whole))
        put(self, "dense_bytes", sum(layer.nbytes for layer in self.layers))
        put(self, "compressed_size", sum(layer.size for layer in self.layers if not layer.whole))

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], whole_patterns: Sequence[str] = ()) -> Layout:
        """The layout of these arrays, in the mapping's order.

        Args:
            arrays: name -> array of any shape.
            whole_patterns: shell patterns (`fnmatch`, case-sensitive) of names that travel whole
                although they are float32 or float64, e.g. "*.running_mean".

        Raises:
            LayoutError: a dtype that cannot travel (object, string, datetime).
        """
        layers = []
        for name, array in arrays.items():
            dtype = array.dtype.name
            matched = any(fnmatch.fnmatchcase(name, pattern) for pattern in whole_patterns)
            layers.append(Layer(name, tuple(array.shape), dtype, matched or dtype not in COMPRESSIBLE))
        return cls(tuple(layers))

    def to_json(self) -> str:
        """Canonical JSON, ASCII: the digest is taken over this text."""
        rows = [[layer.name, list(layer.shape), layer.dtype, layer.whole] for layer in self.layers]
        return json.dumps({"layers": rows, "version": 1}, separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout in this text, which may come from a peer.

        Raises:
            WireError: the text is not JSON of this form.
            LayoutError: it is, but says something impossible.
        """
        if len(text) > MAX_JSON:
            raise WireError("layout", f"{len(text)} characters, at most {MAX_JSON} are possible")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError("layout", f"not JSON: {error}") from None
        if not isinstance(found, dict) or set(found) != {"layers", "version"} or not isinstance(found["layers"], list):
            raise WireError("layout", 'expected an object {"layers": [...], "version": 1}')
        if found["version"] != 1 or isinstance(found["version"], bool):
            raise WireError("layout", f"version {found['version']!r}, expected 1")
        if len(found["layers"]) > MAX_LAYERS:
            raise WireError("layout", f"{len(found['layers'])} layers, at most {MAX_LAYERS} are possible")
        return cls(tuple(_layer(row, at) for at, row in enumerate(found["layers"])))

    def check(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Raise LayoutError naming every difference between these arrays and the layout."""
        wrong = [f"missing {layer.name!r}" for layer in self.layers if layer.name not in arrays]
        known = {layer.name: layer for layer in self.layers}
        for name, array in arrays.items():
            layer = known.get(name)
            if layer is None:
                wrong.append(f"unexpected {name!r}")
                continue
            if tuple(array.shape) != layer.shape:
                wrong.append(f"{name!r} has shape {tuple(array.shape)}, expected {layer.shape}")
            if array.dtype.name != layer.dtype:
                wrong.append(f"{name!r} has dtype {array.dtype.name}, expected {layer.dtype}")
        if wrong:
            raise LayoutError(f"{len(wrong)} differences from the agreed layout: " + "; ".join(wrong))

    def split(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[list[NDArray[Any]], dict[str, NDArray[Any]]]:
        """Flat arrays of the compressed layers in layout order, and the whole ones by name.

        Contiguous little-endian input is not copied, so the flat arrays may be views of it.

        Raises:
            LayoutError: the arrays are not those of the layout.
        """
        self.check(arrays)
        flat = []
        for at in self.compressed:
            layer = self.layers[at]
            flat.append(np.ascontiguousarray(arrays[layer.name], dtype=_little(layer.dtype)).reshape(-1))
        names = [self.layers[at].name for at in self.whole]
        return flat, {name: arrays[name] for name in names}

    def join(self, flat: Sequence[NDArray[Any]], whole: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The inverse of `split`: name -> array with its shape, in layout order (views of `flat`).

        Raises:
            LayoutError: the arrays are not those of the layout.
        """
        if len(flat) != len(self.compressed):
            raise LayoutError(f"{len(flat)} flat arrays, expected {len(self.compressed)}")
        parts = dict(zip(self.compressed, flat, strict=True))
        joined: dict[str, NDArray[Any]] = {}
        for at, layer in enumerate(self.layers):
            if layer.whole:
                if layer.name in whole:
                    joined[layer.name] = whole[layer.name]
            elif parts[at].size != layer.size:
                raise LayoutError(f"{layer.name!r} has {parts[at].size} elements, expected {layer.size}")
            else:
                joined[layer.name] = parts[at].reshape(layer.shape)
        self.check(joined)
        return joined


def _little(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _layer(row: object, at: int) -> Layer:
    if not isinstance(row, list) or len(row) != 4:
        raise WireError("layout", f"layer {at}: expected [name, shape, dtype, whole]")
    name, shape, dtype, whole = row
    if not isinstance(name, str) or not isinstance(dtype, str) or not isinstance(whole, bool):
        raise WireError("layout", f"layer {at}: expected [string, list, string, bool]")
    if not isinstance(shape, list) or any(not isinstance(n, int) or isinstance(n, bool) for n in shape):
        raise WireError("layout", f"layer {at}: the shape is not a list of whole numbers")
    return Layer(name, tuple(shape), dtype, whole)
