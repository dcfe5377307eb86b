"""What every operator promises, whatever the vector: new ones are tested by being registered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compression import Layer, Layout, Scheme, compress, decode, guaranteed_alpha, smallest_bytes
from compression.coded import CODED, Key, arguments_of
from compression.errors import ConfigError, UpdateError, WireError
from compression.operators import NAMED, OPERATORS
from compression.quantise import Quantiser, variance
from tests.compression.support import KINDS, dense_of, header_of, same_update, vector

CONFIGURED = [
    ("topk", ""),
    ("randk", ""),
    ("identity", ""),
    ("quant", "p = 1, block = 64"),
    ("quant", "p = 2"),
    ("quant", "p = inf, levels = 5, norms = 'native'"),
    ("terngrad", "block = 100"),
    ("qsgd", "levels = 8"),
    ("one-bit-qsgd", "norms = 'native'"),
    ("round", "bits = 8, block = 256"),
    ("round", "bits = 4"),
    ("round", "bits = 3, block = 64, norms = 'native'"),
    ("round", "bits = 2, block = 16"),
    ("sign", "block = 256"),
    ("sign", "norms = 'native'"),
    ("natural", ""),
    ("lowrank", "rank = 3"),
]
BY_CHANCE = ("quant", "terngrad", "qsgd", "one-bit-qsgd", "randk", "lowrank")  # contractive in expectation only
UNBIASED = ("quant", "terngrad", "qsgd", "one-bit-qsgd", "natural")
SHAPES = [(40, 60), (700,), (3,), (1,), (), (0,)]


def scheme_of(operator: str, args: str, *, contractive: bool = True) -> Scheme:
    return Scheme(operator=operator, operator_args=args, contractive=contractive, ratio=0.1, values="native")


def layout_of(dtype: str, shapes: list[tuple[int, ...]] = SHAPES) -> Layout:
    return Layout(tuple(Layer(f"layer{i}", shape, dtype, False) for i, shape in enumerate(shapes)))


def error_of(x: NDArray[Any], sent: NDArray[np.float64]) -> float:
    return float(np.sum((x.astype(np.float64) - sent) ** 2))


def test_every_operator_is_here() -> None:
    named = {NAMED.get(name, (name, ""))[0] for name, _ in CONFIGURED}
    assert named == {operator.name for operator in OPERATORS}
    assert {name for name, _ in CONFIGURED} >= set(NAMED)
    assert {operator.name for operator in OPERATORS if operator.coded} == set(CODED)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("operator", "args"), CONFIGURED)
def test_messages_are_what_they_decode_to(operator: str, args: str, dtype: str) -> None:
    layout = layout_of(dtype)
    scheme = scheme_of(operator, args)
    most = smallest_bytes(layout, header_of(layout), scheme)
    for kind in KINDS:
        x = [vector(kind, layer.size, dtype, 5) for layer in layout.layers]
        before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
        got = compress(layout, header_of(layout), x, None, scheme, None, seed=11)
        again = compress(layout, header_of(layout), x, None, scheme, None, seed=11)
        assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002
        assert got.payload == again.payload
        decoded = decode(layout, got.payload)
        assert all(same_update(a, b) for a, b in zip(got.updates, decoded.updates, strict=True))
        for v, update, error_sq in zip(x, got.updates, got.error_sq, strict=True):
            assert error_sq == pytest.approx(error_of(v, dense_of(update, v.size)), rel=1e-6, abs=1e-300)
        if operator not in ("topk", "randk"):  # a ratio sends more than the floor
            assert len(got.payload) <= most


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("operator", "args"), [c for c in CONFIGURED if c[0] not in BY_CHANCE])
def test_contraction_whatever_the_vector(operator: str, args: str, dtype: str) -> None:
    """||C(x) - x||^2 <= (1 - alpha) ||x||^2 for each layer, with the alpha that is promised before training."""
    for d in (1, 2, 17, 300):
        layout = layout_of(dtype, [(d,)])
        scheme = scheme_of(operator, args)
        alpha = guaranteed_alpha(layout, scheme)
        assert 0 < alpha <= 1
        for x in hard_vectors(d, dtype):
            got = compress(layout, header_of(layout), [x], None, scheme, None, seed=1)
            assert got.error_sq[0] <= (1 - alpha) * got.norm_sq[0] * (1 + 1e-5) + 1e-300
            assert got.alpha >= alpha * (1 - 1e-5)


def hard_vectors(d: int, dtype: str) -> list[NDArray[Any]]:
    """All kinds, and for each rounding one coordinate at N with the others just below half a step."""
    found = [vector(kind, d, dtype, 2) for kind in KINDS if kind != "tiny"]
    for steps in (1, 3, 7, 127):
        x = np.full(d, 0.4999 / steps)
        x[0] = 1.0
        found.append(x.astype(dtype))
    lone = np.zeros(d)
    lone[-1] = -3.0
    return [*found, lone.astype(dtype), np.full(d, 1.5).astype(dtype), (1e30 * np.arange(1.0, d + 1)).astype(dtype)]


@pytest.mark.parametrize(("operator", "args"), [c for c in CONFIGURED if c[0] in BY_CHANCE])
def test_contraction_in_expectation(operator: str, args: str) -> None:
    """The mean error over 300 keys; its standard deviation is estimated from them, and 4 of them are allowed."""
    layout = layout_of("float64", [(20, 30)])
    scheme = scheme_of(operator, args)
    alpha = guaranteed_alpha(layout, scheme) if operator != "randk" else 0.1
    for kind in ("heavy", "gauss", "equal"):
        x = vector(kind, 600, "float64", 3)
        errors = np.array(
            [compress(layout, header_of(layout), [x], None, scheme, None, seed=seed).error_sq[0] for seed in range(300)]
        )
        allowed = 4 * errors.std(ddof=1) / math.sqrt(errors.size)
        assert errors.mean() <= (1 - alpha) * float(x @ x) + allowed


@pytest.mark.parametrize(("operator", "args"), [c for c in CONFIGURED if c[0] in UNBIASED])
def test_unbiased_with_the_variance_that_is_claimed(operator: str, args: str) -> None:
    """Mean and mean square over 400 keys: ||mean - x||^2 has expectation Var/400, and 2.5 times that is allowed.

    (For p = 1 a block sends one coordinate in the mean, so few terms make up the sum.)
    """
    layout = layout_of("float64", [(600,)])
    name = NAMED.get(operator, (operator, ""))[0]
    omega = CODED[name].omega
    assert omega is not None
    scheme = scheme_of(operator, args, contractive=False)
    for kind in ("heavy", "gauss"):
        x = vector(kind, 600, "float64", 4)
        draws = np.stack(
            [
                dense_of(compress(layout, header_of(layout), [x], None, scheme, None, seed=seed).updates[0], 600)
                for seed in range(400)
            ]
        )
        errors = np.sum((draws - x) ** 2, axis=1)
        bound = omega(scheme.made, layout.layers[0]) * float(x @ x)
        assert errors.mean() <= bound * (1 + 1e-6) + 4 * errors.std() / 20
        if isinstance(scheme.made, Quantiser):
            assert errors.mean() == pytest.approx(variance(x, scheme.made), abs=4 * errors.std() / 20)
        assert float(np.sum((draws.mean(axis=0) - x) ** 2)) <= 2.5 * errors.mean() / 400


def test_other_seeds_and_layers_draw_otherwise() -> None:
    layer, x = Layer("w", (300,), "float32", False), vector("gauss", 300, "float32", 1)
    made = arguments_of("quant", "p = 2")
    bodies = {CODED["quant"].encode(layer, x, made, False, Key(seed, at)) for seed in (1, 2) for at in (0, 1)}
    assert len(bodies) == 4


@pytest.mark.parametrize(("operator", "args"), [c for c in CONFIGURED if c[0] in {*CODED, *NAMED}])
def test_damaged_bodies_are_wire_errors_or_other_legal_ones(operator: str, args: str) -> None:
    layer = Layer("w", (12, 10), "float32", False)
    name, given = NAMED.get(operator, (operator, ""))
    coded, made = CODED[name], arguments_of(name, given, args)
    rng = np.random.default_rng(0)
    body = coded.encode(layer, vector("gauss", 120, "float32", 1), made, True, Key(1, 0))
    refused = 0
    for at in range(len(body)):
        for damaged in (body[:at], body[:at] + bytes((body[at] ^ (1 << int(rng.integers(8))),)) + body[at + 1 :]):
            try:
                (support, values), used = coded.decode(memoryview(damaged), layer)
            except WireError:
                refused += 1
                continue
            assert used <= len(damaged)
            n = 120 if support is None else support.size
            assert values.shape == (n,)
            if support is not None:
                assert n == 0 or (support[0] >= 0 and support[-1] < 120 and np.all(np.diff(support) > 0))
    assert refused >= len(body)  # every shorter one, at least


@pytest.mark.parametrize(("operator", "args"), CONFIGURED)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_with_its_place(operator: str, args: str, bad: float) -> None:
    layout = layout_of("float32", [(5,), (200,)])
    x = [vector("gauss", 5, "float32", 1), vector("gauss", 200, "float32", 2)]
    x[1][17] = bad
    with pytest.raises(UpdateError, match=r"layer1.*17"):
        compress(layout, header_of(layout), x, None, scheme_of(operator, args), None)


def test_wrong_arguments_are_told() -> None:
    with pytest.raises(ConfigError, match=r"operator-args = 'bits = 4': operator 'topk' takes none"):
        Scheme(operator="topk", operator_args="bits = 4")
    with pytest.raises(ConfigError, match=r"bits of operator 'round' is 9, expected 2 to 8"):
        Scheme(operator="round", operator_args="bits = 9")
    with pytest.raises(ConfigError, match=r"unknown parameter 'blok'.*did you mean 'block'"):
        Scheme(operator="sign", operator_args="blok = 9")
    with pytest.raises(ConfigError, match=r"unknown operator 'terngrd'.*did you mean 'terngrad'"):
        Scheme(operator="terngrd")
    with pytest.raises(ConfigError, match="rank of operator 'lowrank' is 0"):
        Scheme(operator="lowrank", operator_args="rank = 0")
    assert Scheme(operator="qsgd", operator_args="levels = 2").made == Quantiser(2.0, 2, 512, "fp16")


def test_low_rank_matrices_come_back() -> None:
    """A matrix of rank 2 is its own projection; and the factors of rank 2 are all that is sent."""
    rng = np.random.default_rng(7)
    matrix = (rng.standard_normal((30, 2)) @ rng.standard_normal((2, 50))).astype(np.float32)
    layout = Layout((Layer("w", (30, 50), "float32", False),))
    scheme = Scheme(operator="lowrank", operator_args="rank = 2")
    got = compress(layout, header_of(layout), [matrix.reshape(-1)], None, scheme, None)
    assert got.error_sq[0] <= 1e-10 * got.norm_sq[0]
    plain = compress(layout, header_of(layout), [matrix.reshape(-1)], None, Scheme(operator="identity"), None)
    assert len(plain.payload) - len(got.payload) == 4 * (30 * 50 - 2 * (30 + 50)) - 1  # and a varint for the rank


def test_rounding_by_hand() -> None:
    """Three bits: levels -3 .. 3 of a block's largest, 6: steps of 2. 2.9 goes to 2, 3.1 to 4, -.9 to 0."""
    layer = Layer("w", (4,), "float32", False)
    body = CODED["round"].encode(
        layer, np.array([6, 2.9, 3.1, -0.9], np.float32), arguments_of("round", "bits = 3"), True, Key(0, 0)
    )
    (support, values), _ = CODED["round"].decode(memoryview(body), layer)
    assert support is None
    assert values.tolist() == [6.0, 2.0, 4.0, 0.0]


def test_signs_by_hand() -> None:
    """Blocks of 2: means 2 and 5; a last block of one is itself. Zero counts as positive."""
    layer = Layer("w", (5,), "float32", False)
    x = np.array([1, -3, 0, 10, -7], np.float32)
    body = CODED["sign"].encode(layer, x, arguments_of("sign", "block = 2"), True, Key(0, 0))
    (support, values), _ = CODED["sign"].decode(memoryview(body), layer)
    assert support is None
    assert values.tolist() == [2.0, -2.0, 5.0, 5.0, -7.0]
