"""Ladders of quantisers: rungs within a budget in bytes, chosen before anything is drawn."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression import (
    Header,
    Layer,
    Layout,
    Scheme,
    compress,
    decode,
    dense_bytes_on_wire,
    guaranteed_alpha,
    smallest_bytes,
    worst_omega,
)
from compression.allocation import lower_hull
from compression.errors import ConfigError, UpdateError
from compression.ladder import choose, largest_omega, least_bytes, rungs
from compression.quantise import Ladder, Quantiser, omega, variance
from compression.wire import header_bytes
from tests.compression.support import KINDS, dense_of, flat_layout, header_of, same_update, vector

ARGS = [
    ("quant", 'block = "auto"'),
    ("quant", 'p = inf, block = "auto", levels = 3'),
    ("quant", "p = 1, block = [64, 7, 1000]"),
    ("qsgd", 'levels = "auto"'),
    ("terngrad", "levels = [1, 2, 5], block = 100"),
    ("one-bit-qsgd", 'block = "auto", norms = "native"'),
]


def ladder(operator: str = "quant", args: str = 'block = "auto"', **changes: Any) -> Scheme:
    return Scheme(operator, operator_args=args, contractive=False, **changes)


def points(layout: Layout, x: list[NDArray[Any]], scheme: Scheme) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(most bytes, variance) of every rung of layers that are not empty."""
    assert scheme.ladder is not None
    longest = max(layer.size for layer in layout.layers)
    steps = [rungs(scheme.ladder, layer, longest) for layer in layout.layers if layer.size]
    errors = [
        [0.0 if rung is None else variance(v, rung) for rung, _ in row]
        for row, v in zip(steps, (v for v in x if v.size), strict=True)
    ]
    return np.array([[size for _, size in row] for row in steps]), np.array(errors)


def rung_sent(layout: Layout, payload: bytes, header: Header) -> list[tuple[int, int] | None]:
    """(levels, block) of each record, read from a message of one layer; None: the layer as it is."""
    body = payload[header_bytes(header) - 4 :]
    assert len(layout.layers) == 1
    if body[0] != 4:
        return [None]
    numbers, at = [], 2
    for _ in range(2):
        number = shift = 0
        while True:
            number |= (body[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if body[at - 1] < 128:
                break
        numbers.append(number)
    return [(numbers[0], numbers[1])]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([0, 1, 5, 40, 300, 3000])), min_size=1, max_size=4),
    st.sampled_from(ARGS),
    st.sampled_from(["hull", "uniform"]),
    st.sampled_from(["float32", "float64"]),
    st.floats(0, 1.1),
)
@settings(max_examples=120)
def test_no_payload_exceeds_its_budget_and_no_choice_depends_on_the_draw(
    data: list[tuple[str, int]], which: tuple[str, str], allocation: str, dtype: str, share: float
) -> None:
    layout = flat_layout([d for _, d in data], dtype, whole=1)
    header, x = header_of(layout), [vector(kind, d, dtype, i) for i, (kind, d) in enumerate(data)]
    scheme, whole = ladder(*which, allocation=allocation), {"count0": np.array(3)}
    least, most = smallest_bytes(layout, header, scheme), dense_bytes_on_wire(layout, header)
    assert least <= most
    for budget in (int(share**2 * most), least, most):
        drawn = [compress(layout, header, x, whole, scheme, budget, seed=seed) for seed in range(3)]
        # alpha is 1/(1 + omega) of the rungs in use; nothing else tells them apart so shortly
        assert len({(got.alpha, got.everything_fits or got.miss) for got in drawn}) == 1
        for got in drawn:
            assert len(got.payload) <= max(budget, least)
            assert got.miss == (len(got.payload) > budget)
            assert not got.miss or budget < least
            assert guaranteed_alpha(layout, scheme) <= got.alpha <= 1
            told = decode(layout, got.payload).updates
            for vec, update, other, error_sq in zip(x, got.updates, told, got.error_sq, strict=True):
                assert same_update(update, other)
                left = vec.astype(np.float64) - dense_of(update, vec.size)
                assert error_sq == pytest.approx(float(left @ left), rel=1e-6, abs=1e-300)
            if got.everything_fits:
                assert [u.values.tobytes() for u in got.updates] == [v.tobytes() for v in x]
    assert all(e <= 1e-12 * n for e, n in zip(got.error_sq, got.norm_sq, strict=True))


@pytest.mark.parametrize(("operator", "args"), ARGS)
def test_the_rung_in_the_record_is_the_same_for_all_seeds_and_within_its_bound(operator: str, args: str) -> None:
    layout = flat_layout([3000])
    header, scheme = header_of(layout), ladder(operator, args)
    assert scheme.ladder is not None
    told = {None if r is None else (r.levels, r.block): n for r, n in rungs(scheme.ladder, layout.layers[0], 3000)}
    met = set()
    for kind in ("heavy", "equal"):
        x = [vector(kind, 3000, "float32", 1)]
        for budget in (100, 700, 900, 1300, 2000, 3000, 4500, 13_000):
            found = set()
            for seed in range(6):
                got = compress(layout, header, x, None, scheme, budget, seed=seed)
                (rung,) = rung_sent(layout, got.payload, header)
                assert len(got.payload) <= header_bytes(header) + told[rung]
                found.add(rung)
            assert len(found) == 1
            met |= found
    assert len(met) >= 3


def test_moments_through_the_wire_at_the_rung_that_a_budget_chooses() -> None:
    """300 messages: ||mean - x||^2 has expectation Var/300, 2.5 times that is allowed; errors within 5 deviations."""
    for dtype in ("float32", "float64"):
        layout = flat_layout([500, 120], dtype)
        header, x = header_of(layout), [vector("gauss", 500, dtype, 1), vector("heavy", 120, dtype, 2)]
        for args, budget in (('block = "auto"', 260), ('levels = "auto", block = 64', 400)):
            draws: list[list[NDArray[np.float64]]] = [[], []]
            errors = []
            for seed in range(300):
                got = compress(layout, header, x, None, ladder(args=args), budget, seed=seed)
                assert not got.miss
                for at, update in enumerate(decode(layout, got.payload).updates):
                    assert update is not None
                    draws[at].append(dense_of(update, x[at].size))
                errors.append(got.error_sq)
            mean = np.mean(errors, axis=0)
            assert mean[0] > 0
            sizes, spread = points(layout, x, ladder(args=args))
            room = budget - header_bytes(header)
            chosen = choose(sizes, spread, room, even=False)
            for at in range(2):
                off = np.mean(draws[at], axis=0) - x[at].astype(np.float64)
                norm_sq = float(np.sum(x[at].astype(np.float64) ** 2))
                assert float(off @ off) <= 2.5 * mean[at] / 300 + 1e-13 * norm_sq
                allowed = 5 * float(np.std([e[at] for e in errors])) / math.sqrt(300)
                assert mean[at] == pytest.approx(spread[at, chosen[at]], abs=allowed + 1e-12 * norm_sq)


# ---- the choice -------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    layers, positions = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    sizes = np.sort(rng.integers(1, 30, (layers, positions)), axis=1)
    errors = -np.sort(-np.round(rng.exponential(10, (layers, positions)), 1), axis=1)
    errors[:, -1] = 0.0
    return sizes, errors


def totals_of(sizes: NDArray[np.int64], errors: NDArray[np.float64], at: NDArray[np.int64]) -> tuple[int, float]:
    rows = np.arange(len(sizes))
    return int(sizes[rows, at].sum()), math.fsum(errors[rows, at].tolist())


@given(tables(), st.integers(0, 130))
@settings(max_examples=300)
def test_the_hull_is_near_brute_force_and_never_above_one_rung_for_all(
    table: tuple[NDArray[np.int64], NDArray[np.float64]], room: int
) -> None:
    sizes, errors = table
    chosen = {even: choose(sizes, errors, room, even=even) for even in (False, True)}
    every = [np.array(at) for at in itertools.product(range(sizes.shape[1]), repeat=len(sizes))]
    fits = [e for n, e in (totals_of(sizes, errors, at) for at in every) if n <= room]
    least = int(sizes.min(axis=1).sum())
    for at in chosen.values():
        assert totals_of(sizes, errors, at)[0] <= max(room, least)
    if not fits:
        assert all(totals_of(sizes, errors, at)[0] == least for at in chosen.values())
        return
    lost, even_lost = (totals_of(sizes, errors, chosen[even])[1] for even in (False, True))
    shared = [totals_of(sizes, errors, np.full(len(sizes), j)) for j in range(sizes.shape[1])]
    assert even_lost <= min([e for n, e in shared if n <= room], default=math.inf)
    assert lost <= min([e for n, e in shared if n <= room], default=math.inf)
    # the relaxed problem, in which a step may be taken in part, is below the best; the hull is above it by one step
    steps = [
        a[2] - b[2]
        for i in range(len(sizes))
        for a, b in itertools.pairwise(lower_hull(*sorted_points(sizes[i], errors[i])))
    ]
    assert min(fits) <= lost <= min(fits) + max(steps, default=0.0) + 1e-9


def sorted_points(sizes: NDArray[np.int64], errors: NDArray[np.float64]) -> tuple[list[float], list[float]]:
    order = np.lexsort((errors, sizes))
    return sizes[order].tolist(), errors[order].tolist()


@given(tables(), st.booleans())
@settings(max_examples=150)
def test_more_room_never_means_more_error(table: tuple[NDArray[np.int64], NDArray[np.float64]], even: bool) -> None:
    sizes, errors = table
    lost = [totals_of(sizes, errors, choose(sizes, errors, room, even=even))[1] for room in range(130)]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(lost))
    assert lost[-1] == 0


def test_a_choice_by_hand() -> None:
    """Bytes 10, 20, 40 and errors 8, 2, 0; and 10, 30 with 5, 0: slopes .6, .25 and .1 a byte, from 20 bytes on."""
    sizes = np.array([[10, 20, 40], [10, 30, 30]])
    errors = np.array([[8.0, 2.0, 0.0], [5.0, 0.0, 0.0]])
    steps = ((5, [0, 0]), (29, [0, 0]), (30, [1, 0]), (49, [1, 0]), (50, [1, 1]), (69, [1, 1]), (70, [2, 1]))
    for room, at in steps:
        assert choose(sizes, errors, room, even=False).tolist() == at
    assert choose(sizes, errors, 49, even=True).tolist() == [0, 0]
    assert choose(sizes, errors, 50, even=True).tolist() == [1, 1]


def test_hull_spends_where_it_counts_and_more_bytes_lower_the_variance() -> None:
    sizes = [6000, 6000, 500, 20]
    layout = flat_layout(sizes)
    header = header_of(layout)
    x = [vector("gauss", d, "float32", i) * np.float32(20.0**-i) for i, d in enumerate(sizes)]
    for operator, args in (("quant", 'block = "auto"'), ("qsgd", 'levels = "auto"')):
        lost: dict[str, list[float]] = {"hull": [], "uniform": []}
        scheme = ladder(operator, args)
        least = smallest_bytes(layout, header, scheme)
        table = points(layout, x, scheme)
        for budget in (least, least + 300, 4000, 5000, 8000, 20_000, 50_300):
            for name, row in lost.items():
                chosen = choose(*table, budget - header_bytes(header), even=name == "uniform")
                got = compress(layout, header, x, None, ladder(operator, args, allocation=name), budget)
                assert not got.miss
                omegas = [
                    0.0 if rung is None else omega(rung, layer.size)
                    for layer, at in zip(layout.layers, chosen, strict=True)
                    for rung, _ in [rungs(scheme.ladder, layer, 6000)[at]]  # type: ignore[arg-type]
                ]
                assert got.alpha == pytest.approx(1 / (1 + max(omegas)))
                row.append(totals_of(*table, chosen)[1])
        for row in lost.values():
            assert row == sorted(row, reverse=True)
        assert all(a <= b for a, b in zip(lost["hull"], lost["uniform"], strict=True))
        assert lost["hull"][2] < 0.8 * lost["uniform"][2]  # at 4000 bytes
        assert lost["hull"][-1] == 0


# ---- rungs ------------------------------------------------------------------------------------


def test_rungs_by_hand() -> None:
    layer = Layer("w", (100,), "float32", False)
    # operator and mode, s, B: 4 bytes; norms: 2 and 2 a block; 100 levels in base 3: 20 bytes
    found = rungs(Ladder(2.0, 1, "auto", "fp16"), layer, 300)
    assert [(None if r is None else r.block, size) for r, size in found] == [
        (100, 28),
        (100, 28),
        (100, 28),
        (64, 30),
        (32, 34),
        (16, 40),
        (None, 402),
    ]
    # bits of 2 s: 3, 4, ... 11 of 100 coordinates; above 127 levels s takes a byte more
    widths = [size for _, size in rungs(Ladder(2.0, "auto", 512, "fp16"), layer, 300)]
    assert widths == [28, *(8 + math.ceil(100 * bits / 8) for bits in range(3, 9)), 122, 134, 147, 402]
    assert [r.levels for r, _ in rungs(Ladder(2.0, "auto", 512, "fp16"), layer, 300) if r] == [
        2**m - 1 for m in range(1, 11)
    ]
    # one element takes 2 + 4 bytes as it is, and 4 + 4 + 1 by a quantiser
    short = Layer("b", (1,), "float32", False)
    assert {r for r, _ in rungs(Ladder(2.0, 1, "auto", "fp16"), short, 300)} == {None}
    assert least_bytes(Ladder(2.0, 1, "auto", "fp16"), short, 300) == 6
    assert largest_omega(Ladder(2.0, 1, "auto", "fp16"), short, 300) == 0
    assert largest_omega(Ladder(2.0, 1, "auto", "native"), layer, 300) == math.sqrt(100) - 1


def test_smallest_and_worst_golden() -> None:
    layout = flat_layout([100, 1, 0], whole=1)
    header, scheme = header_of(layout), ladder(args='block = "auto", norms = "native"')
    # 4 + one norm of 4 + 20; as it is 2 + 4; empty 2; the whole scalar 2 + 8
    assert smallest_bytes(layout, header, scheme) == header_bytes(header) + 28 + 6 + 2 + 10
    assert worst_omega(layout, scheme) == 9
    assert worst_omega(layout, ladder(args='block = [25, 50], norms = "native"')) == math.sqrt(50) - 1


def test_without_a_budget_everything_goes_as_it_is() -> None:
    layout = flat_layout([700, 3, 0])
    x = [vector("heavy", d, "float32", d) for d in (700, 3, 0)]
    got = compress(layout, header_of(layout), x, None, ladder(), None)
    assert len(got.payload) == dense_bytes_on_wire(layout, header_of(layout))
    assert [u.values.tobytes() for u in got.updates] == [v.tobytes() for v in x]
    assert (got.error_sq, got.alpha, got.everything_fits) == ((0.0,) * 3, 1.0, True)


def test_below_the_smallest_rung_the_smallest_goes() -> None:
    layout = flat_layout([2000, 300])
    header, x = header_of(layout), [np.ones(2000, np.float32), np.ones(300, np.float32)]
    for name in ("hull", "uniform"):
        scheme = ladder("qsgd", 'levels = "auto"', allocation=name)
        least = smallest_bytes(layout, header, scheme)
        at_least = compress(layout, header, x, None, scheme, least, seed=2)
        below = compress(layout, header, x, None, scheme, 20, seed=2)
        assert not at_least.miss
        assert below.miss
        assert below.payload == at_least.payload
        assert below.alpha == at_least.alpha == guaranteed_alpha(layout, scheme)


def test_what_is_not_finite_is_refused_before_a_choice() -> None:
    layout = flat_layout([50])
    for bad in (np.nan, np.inf):
        x = np.ones(50, np.float32)
        x[7] = bad
        with pytest.raises(UpdateError, match=r"layer0.*7"):
            compress(layout, header_of(layout), [x], None, ladder(), 100)


def test_wrong_ladders_are_told() -> None:
    wrong = {
        'block = "big"': 'expected a whole number, a list of them, or "auto"',
        "block = []": "expected a whole number, a list of them",
        "block = [1.5]": "expected a whole number, a list of them",
        "block = [true]": "expected a whole number, a list of them",
        "block = true": "expected a whole number",
        'block = "auto", levels = [1, 2]': "levels and block are both ladders",
        "levels = [0, 4]": r"levels is in 1 \.\. 16384, got 0",
        "p = 3, block = [0, 4]": "block is at least 1, got 0",
    }
    for args, text in wrong.items():
        with pytest.raises(ConfigError, match=text):
            ladder(args=args)
    with pytest.raises(ConfigError, match="whole number"):
        Scheme("round", operator_args='bits = "auto"')
    with pytest.raises(ConfigError, match="a ladder needs the unbiased form"):
        Scheme("quant", operator_args='block = "auto"')
    for changes, text in (({"allocation": "global"}, "no allocation 'global'"), ({"unit": "coordinates"}, "in bytes")):
        with pytest.raises(ConfigError, match=text):
            ladder(**changes)
    assert ladder(args="block = [512, 16, 16]").made == Ladder(2.0, 1, (16, 512), "fp16")
    assert ladder("qsgd", "levels = 2").made == Quantiser(2.0, 2, 512, "fp16")
