"""From an update and a budget to one message: select, allocate, round, encode.

The budget counts every byte of the payload. A message ends within 1 % below it, unless all
that is not zero fits, or it is shorter than 4 kB, or an element limit (`ratio`) binds, or the
allocation is `knapsack`, which knows 50 ratios a layer and nothing between, or every value is sent
and a bit more for each would be too much, or zstd shrinks index streams so much that sizes jump: then
the message with the least error among a few that fit is sent.

With unit "coordinates", as in the Kimad paper's toy problem, the budget counts values sent and
nothing else. Then no more than K values of a layer that are not zero go out, even where its
record is written dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compression import allocation as al
from compression import knapsack
from compression import precision as pr
from compression.allocation import ALLOCATIONS, Counts, ErrorTable, Sizes
from compression.coded import CODED, Arguments, Key, arguments_of
from compression.errors import ConfigError, LayoutError, UpdateError, unknown_name
from compression.frames import varint_bytes
from compression.indices import encode_gaps, rice_bytes, rice_bytes_bound, rice_parameter, seeded_support
from compression.layout import Layer, Layout
from compression.levels import TOP
from compression.operators import IDENTITY, NAMED, OPERATORS, Operator
from compression.randomness import words
from compression.selection import Buffers, Candidates, candidates, largest, sum_squares
from compression.values import BF16, FITTED, VALUES, ValueCoding, coding_for
from compression.wire import (
    Header,
    Item,
    LayerUpdate,
    Record,
    dense_record_bytes,
    encode,
    first_non_finite,
    header_bytes,
    seeded_record_bytes,
    whole_record_bytes,
)

AUTO, NATIVE_NAME = "auto", "native"
UNITS = ("bytes", "coordinates")
CODECS = ("auto", "portable")
ERRORS = ("squared", "plain")
Floors = tuple[tuple[str, float], ...]
REFILL, REFILLS = 0.005, 6  # share of a budget that zstd must save before the choice is made again, and how often
SLACK = 2.5  # standard deviations a sampled bound is lowered by: a few more candidates against a rare second pass


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a client does to an update.

    Args:
        operator: name in `OPERATORS`.
        allocation: name in `ALLOCATIONS`; used when there is a budget.
        values: name in `VALUES`, "native" (the layer's own width) or "auto": with topk, hull and a
            budget in bytes, the precision of each layer is chosen together with its K (1 to 6
            bits of fitted levels, or bf16); else bf16, and native for identity. A layer never gets
            a wider coding than its own dtype.
        ratio: most that is kept of each layer, in (0, 1]; without a budget, exactly that.
        floor: least K of every non-empty layer (EF21 needs alpha > 0 in each).
        floors: of single layers, as (fnmatch pattern of names, value): a value of 1 or more is a
            count, below 1 a share of the layer. The first pattern that fits wins, else `floor`.
        errors: what knapsack adds up over the layers: "squared" errors, or "plain" norms.
        unit: what a budget counts: "bytes", or "coordinates".
        operator_args: arguments of a coded operator, such as `p = inf, block = 256` (compression/coded.py).
        codec: "auto": index streams go through zstd where that makes them smaller and zstandard is
            installed; "portable": the same bytes everywhere, and every peer can read them.
        contractive: an operator that is unbiased is used in its contractive form, as EF21 needs it:
            divided by 1 + omega, or without chance; else as it is, as DIANA needs it.

    Raises:
        ConfigError: all problems together.
    """

    operator: str = "topk"
    allocation: str = "hull"
    values: str = AUTO
    ratio: float | None = None
    floor: int = 1
    floors: Floors = ()
    errors: str = "squared"
    unit: str = "bytes"
    operator_args: str = ""
    codec: str = "auto"
    contractive: bool = True

    def __post_init__(self) -> None:
        problems: list[str] = []
        for check in (lambda: self.made, lambda: ALLOCATIONS[self.allocation], self._check_values):
            try:
                check()
            except ConfigError as error:
                problems += error.problems
        if self.ratio is not None and not 0 < self.ratio <= 1:
            problems.append(f"ratio {self.ratio} is outside (0, 1]; leave it out to spend the budget")
        if self.floor < 1:
            problems.append(f"floor {self.floor} is below 1; a layer that never sends anything never converges")
        problems += [problem for floor in self.floors if (problem := _floor_problem(*floor))]
        for name, valid in (("errors", ERRORS), ("unit", UNITS), ("codec", CODECS)):
            if getattr(self, name) not in valid:
                problems.append(unknown_name(name, getattr(self, name), valid))
        if problems:
            raise ConfigError(problems)

    @property
    def joint(self) -> bool:
        """Whether a budget decides the precision of values, too."""
        operator = self.what
        return (
            self.values == AUTO
            and self.unit == "bytes"
            and self.allocation == al.HULL.name
            and operator.adaptive
            and not operator.seeded
        )

    @property
    def what(self) -> Operator:
        """The operator; of a named case, the one that it is a configuration of."""
        return OPERATORS[NAMED.get(self.operator, (self.operator, ""))[0]]

    @property
    def made(self) -> Arguments:
        """Arguments of a coded operator."""
        name, given = NAMED.get(self.operator, (self.operator, ""))
        if name not in OPERATORS:
            raise ConfigError(unknown_name("operator", name, sorted([*(o.name for o in OPERATORS), *NAMED])))
        if OPERATORS[name].coded:
            return arguments_of(name, given, self.operator_args)
        if self.operator_args:
            raise ConfigError(f"operator-args = {self.operator_args!r}: operator {name!r} takes none")
        return None

    def floor_of(self, layer: Layer) -> int:
        """Least K of a layer."""
        for pattern, value in self.floors:
            if fnmatchcase(layer.name, pattern):
                return min(layer.size, max(1, math.ceil(value * layer.size) if value < 1 else int(value)))
        return min(layer.size, self.floor)

    def _check_values(self) -> None:
        if self.values not in (AUTO, NATIVE_NAME):
            VALUES[self.values]

    def coding(self, layer: Layer) -> ValueCoding:
        """How values of this layer are written."""
        name = self.what.values if self.values == AUTO else self.values
        return coding_for(name, layer.dtype)


def _floor_problem(pattern: str, value: float) -> str:
    if pattern and (0 < value < 1 or (value >= 1 and value == int(value))):
        return ""
    return f"floors: {pattern}={value:g}: expected a pattern and a count of 1 or more, or a share between 0 and 1"


def parse_floors(text: str) -> Floors:
    """Floors as a configuration writes them.

    Raises:
        ConfigError: all pieces that cannot be read.

    >>> parse_floors("conv1*=10, fc*=0.01")
    (('conv1*', 10.0), ('fc*', 0.01))
    """
    found: list[tuple[str, float]] = []
    problems: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        pattern, equals, number = (part.strip() for part in piece.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or math.isnan(value) or math.isinf(value) or _floor_problem(pattern, value):
            problems.append(
                f"floors: {piece!r}: expected PATTERN=COUNT or PATTERN=SHARE, such as conv1*=10 or fc*=0.01"
            )
        else:
            found.append((pattern, value))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def idle_floors(layout: Layout, scheme: Scheme) -> tuple[str, ...]:
    """Patterns of floors that fit no compressed layer: most likely misspelt."""
    names = [layout.layers[at].name for at in layout.compressed]
    return tuple(p for p, _ in scheme.floors if not any(fnmatchcase(name, p) for name in names))


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
        everything_fits: every non-zero element was sent.
        alpha: worst contraction factor over the layers, (1 - delta) alpha(K, d), with
            delta = roundoff**2 of the value coding, measured where levels are fitted; what EF21's
            step size may rely on.
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


class _Piece(NamedTuple):
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


class _Work:
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
        return values, stream, _error_sq(exact, values)

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
                _refuse(self.layer, self.x)
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

    def update(self, k: int) -> _Piece:
        """What is sent at K."""
        if self.goes_dense(k) and not (self.counted and k < self.d):
            return self.all()
        support, places = self.top(k)
        found = self.prepare(k, SLACK)
        exact = found.values[places]
        dropped = np.ones(found.indices.size, dtype=np.bool_)
        dropped[places] = False
        return self._piece(k, support, exact, found.rest_sq + sum_squares(found.magnitudes[dropped]))

    def _piece(self, k: int, support: NDArray[np.int64], exact: NDArray[Any], left_sq: float) -> _Piece:
        """As the record will hold them: where a dense record is no larger, zeros stand between."""
        values, stream, lost_sq = self.rounded(exact)
        if not (self.counted and self.goes_dense(k)):
            rice = self.rice if self.rice_of == k else None
            return _Piece(LayerUpdate(support, values), left_sq + lost_sq, self.norm_sq, stream, lost_sq, rice)
        full = np.zeros(self.d, dtype=self.x.dtype)
        full[support] = values
        return _Piece(LayerUpdate(None, full), left_sq + lost_sq, self.norm_sq, None, lost_sq)

    def all(self) -> _Piece:
        """The same for a dense record."""
        norm_sq = sum_squares(self.x)
        if not math.isfinite(norm_sq):
            _refuse(self.layer, self.x)
        values, stream, lost_sq = self.rounded(self.x)
        return _Piece(LayerUpdate(None, values), lost_sq, norm_sq, stream, lost_sq)

    def everything(self, k: int) -> bool:
        """All non-zero elements are sent at K."""
        if self.goes_dense(k) and not (self.counted and k < self.d):
            return True
        found = self.prepare(k, SLACK)
        if k < found.indices.size:
            return False
        return found.complete or (found.rest_sq == 0.0 and int(np.count_nonzero(self.x)) <= k)


class _SeededWork(_Work):
    """The same where positions come from a seed and no value is looked at before it is sent."""

    __slots__ = ("seed",)

    def __init__(
        self, layer: Layer, x: NDArray[Any], coding: ValueCoding, buffers: Buffers, counted: bool, seed: int
    ) -> None:
        super().__init__(layer, x, coding, buffers, counted)
        self.seed = seed
        self.norm_sq = sum_squares(x)
        if not math.isfinite(self.norm_sq):
            _refuse(layer, x)

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

    def update(self, k: int) -> _Piece:
        """What is sent at K."""
        if k >= self.d or (self.goes_dense(k) and not self.counted):
            return self.all()
        support = seeded_support(self.seed or 0, k, self.d)
        exact = self.x[support]
        rest = self.x.copy()
        rest[support] = 0.0
        return self._piece(k, support, exact, sum_squares(rest))

    def everything(self, k: int) -> bool:
        """All elements are sent at K."""
        return k >= self.d or (self.goes_dense(k) and not self.counted)


class _CodedWork(_Work):
    """The same for an operator with a record of its own: there is no K to choose."""

    __slots__ = ("body", "contractive", "key", "made", "operator")

    def __init__(
        self, layer: Layer, x: NDArray[Any], coding: ValueCoding, buffers: Buffers, scheme: Scheme, key: Key
    ) -> None:
        super().__init__(layer, x, coding, buffers, False)
        self.operator, self.made, self.contractive, self.key = scheme.what, scheme.made, scheme.contractive, key
        self.body = b""

    def all(self) -> _Piece:
        """The one record there is."""
        norm_sq = sum_squares(self.x)
        if not math.isfinite(norm_sq):
            _refuse(self.layer, self.x)
        coded = CODED[self.operator.name]
        self.body = coded.encode(self.layer, self.x, self.made, self.contractive, self.key)
        (support, values), _ = coded.decode(memoryview(self.body), self.layer)
        left = self.x.copy()
        if support is None:
            error_sq = _error_sq(self.x, values)
        else:
            lost_sq = _error_sq(self.x[support], values)
            left[support] = 0.0
            error_sq = sum_squares(left) + lost_sq
        return _Piece(LayerUpdate(support, values), error_sq, norm_sq, None, error_sq)


def _error_sq(exact: NDArray[Any], rounded: NDArray[Any]) -> float:
    total = 0.0
    for start in range(0, exact.size, 1 << 16):
        part = slice(start, start + (1 << 16))
        total += sum_squares(np.subtract(exact[part], rounded[part], dtype=np.float64))
    return total


def _refuse(layer: Layer, x: NDArray[Any]) -> None:
    found = first_non_finite(x)
    if found:
        raise UpdateError(layer.name, found[0], f"{found[1]}; such a value must not enter a memory")
    at = int(np.argmax(np.abs(x)))
    raise UpdateError(layer.name, at, f"{x[at]}: the layer's squared norm is beyond float64; scale the update down")


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


_Sent = list[_Piece]


def _send(works: Sequence[_Work], counts: Counts) -> _Sent:
    return [work.update(int(k)) for work, k in zip(works, counts, strict=True)]


def _total(works: Sequence[_Work], counts: Counts, base: int) -> int:
    return base + sum(work.size(int(k)) for work, k in zip(works, counts, strict=True))


def _choose(works: Sequence[_Work], sizes: Sizes, base: int, scheme: Scheme, budget_bytes: int) -> tuple[Counts, _Sent]:
    """K of each layer within a budget (the floor when not even that fits), and what is sent."""

    def total(counts: Counts) -> int:
        return _total(works, counts, base)

    def prepare(counts: Counts) -> None:
        for work, k in zip(works, counts, strict=True):
            if not work.must_be_dense(int(k)):
                work.prepare(int(k) + int(k) // 16 + 8, 2.0)

    tables: list[ErrorTable] | None = None
    if scheme.joint:
        sizes, tables = _precision(works, sizes, budget_bytes - base, prepare)
    # The model of sizes leaves out what a value coding puts before the values; every layer sends some.
    modelled = base if scheme.unit == "coordinates" else base + sum(w.coding.overhead_bytes for w in works if w.d)
    shifted = max(0, budget_bytes - modelled)
    even = al.uniform(sizes, ())

    def walked(path: al.Path, slack: float = al.SLACK) -> tuple[Counts, bool]:
        return al.fit(_Shifted(path, modelled), total, budget_bytes, 0.0 if works[0].counted else slack)

    chosen = ALLOCATIONS[scheme.allocation]
    if chosen is al.UNIFORM:
        prepare(even.counts(shifted))
        return _sent_at(works, walked(even)[0])
    if chosen.path is None:
        counts, fits = _on_grid(works, sizes, scheme, total, budget_bytes)
    else:
        if tables is None:
            tables = [_table(work) for work in works]
            prepare(np.maximum(chosen.path(sizes, tables).counts(shifted), even.counts(shifted)))
        if works[0].seed is not None:
            counts, fits = walked(chosen.path(sizes, tables))
        elif chosen is al.GLOBAL:
            counts, fits = _by_threshold(works, sizes, prepare, walked)
            return _sent_at(works, counts)
        else:
            tables = [_refined(work, table) for work, table in zip(works, tables, strict=True)]
            counts, fits = walked(chosen.path(sizes, tables), al.FINE_SLACK)
    sent = _send(works, counts)
    if not fits:
        return counts, sent
    if scheme.joint:
        return _or_uniform(works, sizes, base, budget_bytes, tables or (), counts, sent)
    even_counts, _ = walked(even)
    even_sent = _send(works, even_counts)
    if math.fsum(p.error_sq for p in even_sent) < math.fsum(p.error_sq for p in sent):
        return even_counts, even_sent
    return counts, sent


def _precision(
    works: Sequence[_Work], sizes: Sizes, budget: float, prepare: Callable[[Counts], None]
) -> tuple[Sizes, list[ErrorTable]]:
    """Set the precision of each layer: (sizes with it, tables with its rounding error)."""
    rough = [_table(work) for work in works]
    prepare(pr.rough_counts(sizes, rough, budget))
    tables = [_sampled(work, table) for work, table in zip(works, rough, strict=True)]
    codings = (BF16, *FITTED)
    widths = [pr.Width(c.itemsize, c.overhead_bytes, c.bits if c.fitted else 0) for c in codings]
    precision = pr.choose(sizes, tables, widths, budget)
    for work, at in zip(works, precision.option.tolist(), strict=True):
        work.write_as(codings[at])
    prepare(precision.counts)
    return replace(sizes, itemsize=np.array([work.coding.itemsize for work in works])), precision.tables


def _sampled(work: _Work, table: ErrorTable) -> ErrorTable:
    """The table refined where candidates are known, with a sample for fitted levels."""
    found = work.found
    if table.known == work.d and table.magnitudes is not None:
        return al.with_sample(table, work.d, table.magnitudes)
    if found is None or found.magnitudes.size < min(TOP, work.d):
        found = work.prepare(TOP, SLACK)
    ascending = np.sort(found.magnitudes)
    return al.with_sample(al.refined_table(table, work.d, ascending, found.rest_sq), work.d, ascending)


PROBED = 2048  # indices of a long stream that say whether zstd is worth its time
FEW_INDICES = 64  # a frame costs about 20 bytes


def _gaps(works: Sequence[_Work], sent: _Sent, scheme: Scheme) -> dict[int, bytes]:
    """Index streams that are smaller by zstd than by rice, by the layer's number."""
    if scheme.codec != "auto":
        return {}
    found: dict[int, bytes] = {}
    for number, (work, piece) in enumerate(zip(works, sent, strict=True)):
        support = piece.update.indices
        if support is None or work.seed is not None or support.size < FEW_INDICES:
            continue
        if support.size > 2 * PROBED and not _repeats(support[:PROBED]):
            continue
        stream = encode_gaps(support)
        if stream is not None and len(stream) < rice_bytes(support, work.d):
            found[number] = stream
    return found


def _lost(sent: _Sent) -> float:
    return math.fsum(piece.error_sq for piece in sent)


def _repeats(support: NDArray[np.int64]) -> bool:
    """Whether zstd makes these smaller than rice does."""
    stream = encode_gaps(support)
    return stream is not None and len(stream) < rice_bytes(support, int(support[-1]) + 1)


def _saved(works: Sequence[_Work], sent: _Sent, gaps: Mapping[int, bytes]) -> int:
    """Bytes that these streams are shorter than rice's."""
    supports = {at: sent[at].update.indices for at in gaps}
    return sum(rice_bytes(s, works[at].d) - len(gaps[at]) for at, s in supports.items() if s is not None)


def _refilled(
    works: Sequence[_Work],
    sizes: Sizes,
    base: int,
    scheme: Scheme,
    budget_bytes: int,
    counts: Counts,
    sent: _Sent,
) -> tuple[Counts, _Sent, dict[int, bytes]]:
    """Spend what zstd saves on the index streams: chosen again for a budget that is larger by that."""
    gaps = _gaps(works, sent, scheme)
    saved = _saved(works, sent, gaps)
    if scheme.unit != "bytes" or saved < REFILL * budget_bytes:
        return counts, sent, gaps
    best, least = (counts, sent, gaps, [work.coding for work in works]), _lost(sent)
    low, high = (
        (budget_bytes, _total(works, counts, base) - saved),
        (0, 0),
    )  # (budget asked for, bytes made of it): fits; does not
    wider = budget_bytes + saved
    for _ in range(REFILLS):
        counts, sent = _choose(works, sizes, base, scheme, wider)
        gaps = _gaps(works, sent, scheme)
        nbytes = _total(works, counts, base) - _saved(works, sent, gaps)
        if nbytes > budget_bytes:
            high = (wider, nbytes)
        else:
            low = (wider, nbytes)
            if (lost := _lost(sent)) < least:
                best, least = (counts, sent, gaps, [work.coding for work in works]), lost
            if nbytes >= (1 - REFILL / 2) * budget_bytes:
                break
        if high[1] > low[1]:
            share = (0.998 * budget_bytes - low[1]) / (high[1] - low[1])
            wider = low[0] + int((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        else:
            wider += 2 * (budget_bytes - nbytes)
    counts, sent, gaps, codings = best
    for work, coding in zip(works, codings, strict=True):
        work.write_as(coding)
    return counts, sent, gaps


def _or_uniform(
    works: Sequence[_Work],
    sizes: Sizes,
    base: int,
    budget_bytes: int,
    tables: Sequence[ErrorTable],
    counts: Counts,
    sent: _Sent,
) -> tuple[Counts, _Sent]:
    """A joint choice, or one ratio at bf16 where that loses less: tried where the tables say that it might."""
    lost = math.fsum(piece.error_sq for piece in sent)
    plain = replace(sizes, itemsize=np.full(len(works), BF16.itemsize))
    path = al.uniform(plain, ())
    guess = path.counts(max(0, budget_bytes - base))
    expected = [
        replace(t, rounding=None).at(guess[i : i + 1], w.d)[0]
        for i, (t, w) in enumerate(zip(tables, works, strict=True))
    ]
    if math.fsum(expected) > 1.5 * lost:
        return counts, sent
    chosen = [work.coding for work in works]
    for work in works:
        work.write_as(BF16)
    even_counts, _ = al.fit(_Shifted(path, base), lambda k: _total(works, k, base), budget_bytes)
    even_sent = _send(works, even_counts)
    if math.fsum(piece.error_sq for piece in even_sent) < lost:
        return even_counts, even_sent
    for work, coding in zip(works, chosen, strict=True):
        work.write_as(coding)
    return counts, sent


def _sent_at(works: Sequence[_Work], counts: Counts) -> tuple[Counts, _Sent]:
    return counts, _send(works, counts)


def _by_threshold(
    works: Sequence[_Work],
    sizes: Sizes,
    prepare: Callable[[Counts], None],
    walked: Callable[[al.Path], tuple[Counts, bool]],
) -> tuple[Counts, bool]:
    """K of each layer by one exact threshold; more magnitudes are collected until it is among those known."""
    while True:
        found = [work.prepare(0, SLACK) for work in works]
        whole = [f.complete or f.indices.size >= work.d for f, work in zip(found, works, strict=True)]
        path = al.global_topk(sizes, [f.magnitudes for f in found], whole)
        counts, fits = walked(path)
        if all(whole) or not fits or not np.array_equal(counts, path.counts(path.most)):
            return counts, fits
        for work, f in zip(works, found, strict=True):
            work.prepare(min(work.d, 2 * f.indices.size + 64), SLACK)


def _on_grid(
    works: Sequence[_Work], sizes: Sizes, scheme: Scheme, total: Callable[[Counts], int], budget_bytes: int
) -> tuple[Counts, bool]:
    """K of each layer by the paper's dynamic programme.

    Its sizes are the model's (exact in unit "coordinates"); the exact size of what it chose is
    tested, and it runs again for a smaller budget while that is too large.
    """
    ratios = np.array(knapsack.RATIOS)[:, None]
    counts = np.minimum(np.maximum(np.floor(ratios * sizes.d).astype(np.int64), sizes.floor), sizes.cap).T
    errors = np.stack([_grid_errors(work, k, scheme.errors) for work, k in zip(works, counts, strict=True)])
    model = sizes.model(counts, sizes.d[:, None], sizes.itemsize[:, None])
    rows = np.arange(len(works))
    floor_bytes = total(sizes.floor)
    constant = floor_bytes - math.fsum(sizes.model(sizes.floor, sizes.d, sizes.itemsize).tolist())
    room = budget_bytes - constant
    for _ in range(8):
        chosen = knapsack.choose(errors, model, room)
        picked = counts[rows, chosen.choice]
        over = total(picked) - budget_bytes
        if over <= 0:
            return picked, True
        if not chosen.fits:
            break
        room -= over + 1
    return sizes.floor.copy(), floor_bytes <= budget_bytes


def _grid_errors(work: _Work, counts: Counts, measure: str) -> NDArray[np.float64]:
    """Error of a layer at each of these K: exact for TopK, expected for a seeded support."""
    if work.seed is not None:
        errors = work.norm_sq * (1.0 - counts / max(1, work.d))
    else:
        table = al.exact_table(work.x)
        if not math.isfinite(float(table[-1])):
            _refuse(work.layer, work.x)
        errors = table[work.d - counts]
    return np.sqrt(errors) if measure == "plain" else np.asarray(errors, dtype=np.float64)


def _table(work: _Work) -> ErrorTable:
    if work.seed is not None:
        return ErrorTable(np.array([0.0, work.d]), np.array([0.0, work.norm_sq]))
    table = al.error_table(work.x)
    if not math.isfinite(float(table.errors[-1])):
        _refuse(work.layer, work.x)
    return table


def _refined(work: _Work, table: ErrorTable) -> ErrorTable:
    """The table made exact where the candidates are known, unless it is already."""
    found = work.found
    if found is None or table.known >= found.magnitudes.size:
        return table
    return al.refined_table(table, work.d, np.sort(found.magnitudes), found.rest_sq)


class _Shifted:
    """A path whose number counts the bytes outside the compressed layers, too."""

    def __init__(self, path: al.Path, base: int) -> None:
        self._path, self._base = path, base
        self.least, self.most = path.least + base, path.most + base

    def counts(self, size: float) -> Counts:
        ends = {self.least: -math.inf, self.most: math.inf}  # subtracting would round past them
        return self._path.counts(ends.get(size, size - self._base))


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
        legal message (K = floor everywhere). Elements that are exactly zero are not sent.

    Raises:
        UpdateError: NaN, Inf, or a wrong shape or dtype, naming the layer and the element.
        LayoutError: wrong number of arrays, missing whole layers, or a foreign header.
    """
    layers = _checked(layout, difference)
    buffers = Buffers()
    operator = scheme.what
    counted = scheme.unit == "coordinates"
    works: list[_Work] = []
    for at, (layer, x) in enumerate(zip(layers, difference, strict=True)):
        coding = scheme.coding(layer)
        if operator.coded and layer.size:
            works.append(_CodedWork(layer, x, coding, buffers, scheme, Key(_layer_seed(seed, at), at)))
        elif operator.seeded:
            works.append(_SeededWork(layer, x, coding, buffers, counted, _layer_seed(seed, at)))
        else:
            works.append(_Work(layer, x, coding, buffers, counted))
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
        counts, sent = _choose(works, sizes, base, scheme, budget_bytes)
        counts, sent, gaps = _refilled(works, sizes, base, scheme, budget_bytes, counts, sent)
    elif operator.adaptive:
        sent = _send(works, counts)
        gaps = _gaps(works, sent, scheme)
    else:
        sent = [work.all() for work in works]
    updates = tuple(piece.update for piece in sent)
    payload = encode(layout, header, _items(layout, works, sent, whole, scheme, gaps), verified=True)
    complete = [not operator.adaptive or work.everything(int(k)) for work, k in zip(works, counts, strict=True)]
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
                _alpha(work, piece, k, done, operator)
                for work, piece, k, done in zip(works, sent, kept, complete, strict=True)
            ),
            default=1.0,
        ),
    )


def _exceeds(scheme: Scheme, works: Sequence[_Work], cap: Counts, base: int, budget_bytes: int) -> bool:
    """The largest choice does not fit; a ratio's is tried exactly, else only where it costs no selection."""
    if works and works[0].counted:
        return base + int(cap.sum()) > budget_bytes
    if scheme.ratio is None and not all(work.must_be_dense(work.d) for work in works):
        return True
    if scheme.ratio is None:
        return base + sum(work.dense for work in works) > budget_bytes
    return _total(works, cap, base) > budget_bytes


def _alpha(work: _Work, piece: _Piece, k: int, complete: bool, operator: Operator) -> float:
    """Contraction factor of one layer: of chance in expectation, else as measured or as K says."""
    if isinstance(work, _CodedWork):
        if operator.unbiased and CODED[operator.name].omega is not None and work.made is not None:
            return CODED[operator.name].alpha(work.made, work.layer)
        return max(0.0, 1.0 - piece.error_sq / piece.norm_sq) if piece.norm_sq > 0 else 1.0
    return _kept_after_rounding(work, piece) * (1.0 if complete else operator.alpha(k, work.d))


def _kept_after_rounding(work: _Work, piece: _Piece) -> float:
    if work.coding.fitted:
        norm_sq = piece.norm_sq - (piece.error_sq - piece.lost_sq)  # of the values sent
        return 1.0 - piece.lost_sq / norm_sq if norm_sq > 0 else 1.0
    return 1.0 if work.coding.itemsize == work.layer.itemsize else 1.0 - work.coding.roundoff**2


def _items(
    layout: Layout,
    works: Sequence[_Work],
    sent: _Sent,
    whole: Mapping[str, NDArray[Any]] | None,
    scheme: Scheme,
    gaps: Mapping[int, bytes],
) -> list[Item]:
    operator = scheme.what
    items: list[Item] = [None] * len(layout.layers)
    for number, (at, work, piece) in enumerate(zip(layout.compressed, works, sent, strict=True)):
        if isinstance(work, _CodedWork):
            items[at] = Record(operator, work.coding, piece.update, body=work.body)
            continue
        if operator.coded:  # an empty layer
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
    range of the coding (bf16: 1.2e-38 to 3.4e38).
    """
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
        bytes; the true smallest message depends on the support and may be a few bytes shorter.
    """
    operator = scheme.what
    total = header_bytes(header)
    for layer in layout.layers:
        if layer.whole:
            total += whole_record_bytes(layer) if whole else 2
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
