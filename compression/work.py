"""One compressed layer while its K is being chosen: candidates, sizes and what would be sent, found once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compression.allocation import DrawnTable
from compression.coded import CODED, Key
from compression.errors import UpdateError
from compression.frames import varint_bytes
from compression.indices import rice_parameter, seeded_support
from compression.layout import Layer
from compression.quantise import Quantiser
from compression.scheme import Scheme
from compression.selection import Buffers, Candidates, candidates, largest, sum_squares
from compression.values import NATIVE, ValueCoding
from compression.wire import (
    LayerUpdate,
    dense_record_bytes,
    first_non_finite,
    seeded_record_bytes,
)

SLACK = 2.5  # standard deviations a sampled bound is lowered by: a few more candidates against a rare second pass


class Piece(NamedTuple):
    """One layer as it is sent.

    Args:
        update: positions and values.
        error_sq: ||x - C(x)||^2; norm_sq: ||x||^2.
        stream: the values' stream, where it is known.
        lost_sq: what rounding took of error_sq.
        rice: parameter of the index stream, where it is known.
    """

    update: LayerUpdate
    error_sq: float
    norm_sq: float
    stream: bytes | None
    lost_sq: float
    rice: int | None = None


class Work:
    """One compressed layer while its K is being chosen: candidates and sizes, found once."""

    __slots__ = (
        "buffers",
        "coding",
        "counted",
        "d",
        "dense",
        "found",
        "layer",
        "norm_sq",
        "rice",
        "rice_of",
        "sizes",
        "support",
        "x",
    )
    seed: int | None = None

    def __init__(self, layer: Layer, x: NDArray[Any], coding: ValueCoding, buffers: Buffers, counted: bool) -> None:
        self.buffers = buffers
        self.layer, self.x, self.d = layer, x, layer.size
        self.counted = counted  # unit "coordinates": a size is K
        self.write_as(coding)
        self.found: Candidates | None = None
        self.norm_sq = 0.0
        self.support: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None

    def write_as(self, coding: ValueCoding) -> None:
        """Choose how values are written; sizes are found anew."""
        self.coding = coding
        self.rice, self.rice_of = 0, -1  # parameter of the index stream, and the K that it is of
        self.dense = dense_record_bytes(self.d, coding)
        self.sizes: dict[int, int] = {}

    def rounded(self, exact: NDArray[Any]) -> tuple[NDArray[Any], bytes | None, float]:
        """(values as the decoder will see them, their stream, the squared error of rounding)."""
        if self.coding.itemsize >= self.layer.itemsize:
            return exact.copy(), None, 0.0
        stream = self.coding.encode(exact)
        values = self.coding.decode(stream, exact.size, exact.dtype)
        return values, stream, error_sq_of(exact, values)

    def must_be_dense(self, k: int) -> bool:
        """Even if all K were neighbours, one bit each, sparse would not be smaller."""
        return 3 + varint_bytes(k) + (k + 7) // 8 + self.coding.stream_bytes(k) >= self.dense

    def prepare(self, k: int, slack: float) -> Candidates:
        """Candidates for at least min(k, non-zero) elements.

        Raises:
            UpdateError: an element is not finite, or too large for its square.
        """
        if self.found is None or (self.found.indices.size < k and not self.found.complete):
            found = candidates(self.x, min(k, self.d), slack=slack, buffers=self.buffers)
            self.norm_sq = found.rest_sq + sum_squares(found.magnitudes)
            if not math.isfinite(self.norm_sq):
                refuse(self.layer, self.x)
            self.found, self.support = found, None  # its places are among the candidates
        return self.found

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The min(k, non-zero) largest: ascending positions in the layer, and among the candidates."""
        if self.support is None or self.support[0] != k:
            found = self.prepare(k, SLACK)
            places = largest(found.magnitudes, k)
            self.support = (k, found.indices[places], places)
        return self.support[1], self.support[2]

    def size(self, k: int) -> int:
        """Exact size of this layer's record at K, in the budget's unit."""
        return k if self.counted else self.record_bytes(k)

    def record_bytes(self, k: int) -> int:
        """Exact bytes of this layer's record at K."""
        if k not in self.sizes:
            if self.must_be_dense(k) and self.must_be_dense(min(k, self._nonzero())):
                self.sizes[k] = self.dense
            else:
                support = self.top(k)[0]
                self.rice, index_bytes = rice_parameter(support)
                sparse = 2 + varint_bytes(support.size) + index_bytes + self.coding.stream_bytes(support.size)
                self.sizes[k] = min(self.dense, sparse)
                self.rice_of = k
        return self.sizes[k]

    def _nonzero(self) -> int:
        if self.found is not None and self.found.complete:
            return self.found.indices.size
        return int(np.count_nonzero(self.x))

    def goes_dense(self, k: int) -> bool:
        """A sparse record would be no smaller at K; its exact size is taken only when that is close."""
        if k not in self.sizes:
            r = max(0, (self.d // max(1, k)).bit_length() - 1)
            bound = 15 + (k * (r + 1) + ((self.d - k) >> r)) // 8 + self.coding.stream_bytes(k)
            if 0 < k < self.d and bound < self.dense:
                return False
        return self.record_bytes(k) >= self.dense

    def update(self, k: int) -> Piece:
        """What is sent at K."""
        if self.goes_dense(k) and not (self.counted and k < self.d):
            return self.all()
        support, places = self.top(k)
        found = self.prepare(k, SLACK)
        exact = found.values[places]
        dropped = np.ones(found.indices.size, dtype=np.bool_)
        dropped[places] = False
        return self._piece(k, support, exact, found.rest_sq + sum_squares(found.magnitudes[dropped]))

    def _piece(self, k: int, support: NDArray[np.int64], exact: NDArray[Any], left_sq: float) -> Piece:
        """As the record will hold them: where a dense record is no larger, zeros stand between."""
        values, stream, lost_sq = self.rounded(exact)
        if not (self.counted and self.goes_dense(k)):
            rice = self.rice if self.rice_of == k else None
            return Piece(LayerUpdate(support, values), left_sq + lost_sq, self.norm_sq, stream, lost_sq, rice)
        full = np.zeros(self.d, dtype=self.x.dtype)
        full[support] = values
        return Piece(LayerUpdate(None, full), left_sq + lost_sq, self.norm_sq, None, lost_sq)

    def all(self) -> Piece:
        """The same for a dense record."""
        norm_sq = sum_squares(self.x)
        if not math.isfinite(norm_sq):
            refuse(self.layer, self.x)
        values, stream, lost_sq = self.rounded(self.x)
        return Piece(LayerUpdate(None, values), lost_sq, norm_sq, stream, lost_sq)

    def everything(self, k: int) -> bool:
        """All non-zero elements are sent at K."""
        if self.goes_dense(k) and not (self.counted and k < self.d):
            return True
        found = self.prepare(k, SLACK)
        if k < found.indices.size:
            return False
        return found.complete or (found.rest_sq == 0.0 and int(np.count_nonzero(self.x)) <= k)


class SeededWork(Work):
    """The same where positions come from a seed and no value is looked at before it is sent.

    Unbiased: the K values are sent times d/K, computed in float64 and rounded once to the layer's dtype. E C(x) = x
    holds for a K that is fixed before the draw: no size and no error that K is chosen by may look at the support.
    A layer that goes dense is sent as it is.
    """

    __slots__ = ("seed", "unbiased")

    def __init__(
        self,
        layer: Layer,
        x: NDArray[Any],
        coding: ValueCoding,
        buffers: Buffers,
        counted: bool,
        seed: int,
        unbiased: bool = False,
    ) -> None:
        super().__init__(layer, x, coding, buffers, counted)
        self.seed, self.unbiased = seed, unbiased
        self.norm_sq = sum_squares(x)
        if not math.isfinite(self.norm_sq):
            refuse(layer, x)

    def must_be_dense(self, k: int) -> bool:
        """The size of a record does not depend on its values."""
        return self.goes_dense(k)

    def prepare(self, k: int, slack: float) -> Candidates:
        """There is nothing to prepare."""
        none = np.empty(0, dtype=np.int64)
        return Candidates(none, self.x[:0], self.x[:0], self.norm_sq, False)

    def record_bytes(self, k: int) -> int:
        """Exact bytes of this layer's record at K."""
        return min(self.dense, seeded_record_bytes(k, self.coding))

    def goes_dense(self, k: int) -> bool:
        """A seeded record would be no smaller at K."""
        return seeded_record_bytes(k, self.coding) >= self.dense

    def update(self, k: int) -> Piece:
        """What is sent at K."""
        if k >= self.d or (self.goes_dense(k) and not self.counted):
            return self.all()
        support = seeded_support(self.seed or 0, k, self.d)
        exact = self.x[support]
        rest = self.x.copy()
        rest[support] = 0.0
        left_sq = sum_squares(rest)
        if self.unbiased and k:
            sent = self._times(exact, self.d / k)
            return self._piece(k, support, sent, left_sq + error_sq_of(exact, sent))
        return self._piece(k, support, exact, left_sq)

    def _times(self, exact: NDArray[Any], scale: float) -> NDArray[Any]:
        limit = float(np.finfo(self.x.dtype).max)
        if math.sqrt(self.norm_sq) * scale > limit:
            at = int(np.argmax(np.abs(self.x)))  # of all: whether x is refused must not depend on the draw
            if abs(float(self.x[at])) * scale > limit:
                raise UpdateError(
                    self.layer.name, at, f"{self.x[at]} times d/K = {scale:g} is beyond {self.x.dtype}; scale it down"
                )
        scaled: NDArray[Any] = np.multiply(exact, scale, dtype=np.float64).astype(self.x.dtype)
        return scaled

    @property
    def table(self) -> DrawnTable:
        """Expected squared error at every K, while the record is not dense."""
        return DrawnTable(self.norm_sq, self.unbiased)

    def expected_sq(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """E||x - C(x)||^2 at each of these K; shape (n,)."""
        dense = np.array([self.everything(int(k)) for k in counts], dtype=np.bool_)
        return np.where(dense, 0.0, self.table.at(counts, self.d))

    def everything(self, k: int) -> bool:
        """All elements are sent at K."""
        return k >= self.d or (self.goes_dense(k) and not self.counted)


class CodedWork(Work):
    """The same for an operator with a record of its own: there is no K to choose.

    Of a ladder, one quantiser is chosen by `use`; None is the layer as it is.
    """

    __slots__ = ("body", "contractive", "key", "made", "operator", "plain")

    def __init__(
        self, layer: Layer, x: NDArray[Any], coding: ValueCoding, buffers: Buffers, scheme: Scheme, key: Key
    ) -> None:
        super().__init__(layer, x, coding, buffers, False)
        self.operator, self.made, self.contractive, self.key = scheme.what, scheme.made, scheme.contractive, key
        self.body = b""
        self.plain = False  # the layer as it is

    def use(self, rung: Quantiser | None) -> None:
        """Choose a rung of a ladder."""
        self.plain = rung is None
        if rung is None:
            self.write_as(NATIVE[self.layer.dtype])
        else:
            self.made = rung

    def all(self) -> Piece:
        """The one record there is."""
        if self.plain:
            return super().all()
        norm_sq = sum_squares(self.x)
        if not math.isfinite(norm_sq):
            refuse(self.layer, self.x)
        coded = CODED[self.operator.name]
        self.body = coded.encode(self.layer, self.x, self.made, self.contractive, self.key)
        (support, values), _ = coded.decode(memoryview(self.body), self.layer)
        if support is None:
            error_sq = error_sq_of(self.x, values)
        else:
            lost_sq = error_sq_of(self.x[support], values)
            left = self.x.copy()
            left[support] = 0.0
            error_sq = sum_squares(left) + lost_sq
        return Piece(LayerUpdate(support, values), error_sq, norm_sq, None, error_sq)


def error_sq_of(exact: NDArray[Any], rounded: NDArray[Any]) -> float:
    """||exact - rounded||^2 in float64, in pieces of 64 Ki."""
    total = 0.0
    for start in range(0, exact.size, 1 << 16):
        part = slice(start, start + (1 << 16))
        total += sum_squares(np.subtract(exact[part], rounded[part], dtype=np.float64))
    return total


def refuse(layer: Layer, x: NDArray[Any]) -> None:
    """Raise the UpdateError of a layer that holds NaN, Inf, or values too large for their squares."""
    found = first_non_finite(x)
    if found:
        raise UpdateError(layer.name, found[0], f"{found[1]}; such a value must not enter a memory")
    at = int(np.argmax(np.abs(x)))
    raise UpdateError(layer.name, at, f"{x[at]}: the layer's squared norm is beyond float64; scale the update down")
