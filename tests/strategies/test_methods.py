"""The methods on the real path: client mod, wire, store and strategy, on float64 least squares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compression import Layout, decode
from compression.errors import ConfigError
from strategies import Kimad, LinkSettings, Settings, SimulatedNetwork
from strategies.inprocess import InProcessGrid
from strategies.memory import ServerMemory, Taken
from strategies.methods import METHODS, Engine, engine, theory_step
from strategies.prox import make_prox
from strategies.step import FloatArray, Proximal, ServerOptimizer
from tests.apps import SIZE, LeastSquares, cut, grid_of, join, least_squares_app, read, record, settled_memories

Floats = NDArray[np.float64]
FAST = LinkSettings(uplink_bps_min=1e9, uplink_bps_max=1e9, overhead_s=0.0, compute_s=0.1, kind="constant")
SLOW = LinkSettings(uplink_bps_min=400, uplink_bps_max=3000, overhead_s=0.05, compute_s=0.2, seed=3)
BASE = Settings(experiment="t", seed=5, time_budget_s=1.0, values="fp64", forget=False)
TERNARY = replace(
    BASE, method="diana", operator="quant", operator_args='p = 2, block = 8, norms = "native"', values="auto"
)
STEP = 2e-3
CLIENTS = 5


def run(
    folder: Path,
    settings: Settings,
    *,
    rounds: int = 12,
    links: LinkSettings = FAST,
    clients: int = CLIENTS,
    dtype: str = "float64",
    each_round: Callable[[Kimad], None] | None = None,
    grid: InProcessGrid | None = None,
    problem: LeastSquares | None = None,
    step: float = STEP,
) -> tuple[Kimad, list[dict[str, Any]], Floats]:
    """Train from ones; (strategy, rows, x)."""
    rows: list[dict[str, Any]] = []

    def on_round(row: dict[str, Any], _: dict[str, Any]) -> None:
        rows.append(row)
        if each_round is not None:
            each_round(strategy)

    problem = problem or LeastSquares.make(clients)
    strategy = Kimad(settings, SimulatedNetwork(links), on_round=on_round)
    result = strategy.start(
        grid=grid or grid_of(least_squares_app(problem, step), clients, folder),
        initial_arrays=record(cut(np.ones(SIZE), dtype)),
        num_rounds=rounds,
    )
    return strategy, rows, join(read(result.arrays))


def descent(rounds: int, weights: Floats, momentum: float = 0.0) -> Floats:
    """Plain gradient descent of the same f."""
    problem = LeastSquares.make(CLIENTS)
    x: NDArray[Any] = np.ones(SIZE)
    v: NDArray[Any] = np.zeros(SIZE)
    for _ in range(rounds):
        g = np.average([problem.gradient(i, x) for i in range(CLIENTS)], axis=0, weights=weights)
        v = momentum * v + STEP * g
        x = x - v
    return x


# ---- degenerate cases ------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize(
    "more",
    [
        {"method": "ef21"},
        {"method": "ef21", "start": "full"},
        {"method": "ef21-sgdm", "eta": 1.0},
        {"method": "econtrol", "eta": 0.5},
        {"method": "ef-bv", "memory_rate": "0.5"},
        {"method": "diana"},
        {"method": "diana", "memory_rate": "0.25"},
        {"method": "diana", "memory_rate": "0.25", "start": "full"},
        {"method": "dcgd"},
    ],
    ids=str,
)
def test_without_compression_every_method_is_gradient_descent(
    tmp_path: Path, more: dict[str, Any], weights: str, momentum: float
) -> None:
    args = f"momentum = {momentum}" if momentum else ""
    settings = replace(BASE, operator="identity", weights=weights, server_optimizer_args=args, **more)
    _, _, x = run(tmp_path, settings, rounds=15)
    of: NDArray[Any] = np.ones(CLIENTS) if weights == "uniform" else 10.0 * np.arange(1, CLIENTS + 1)
    np.testing.assert_allclose(x, descent(15, of, momentum), rtol=1e-11)


TOPK = replace(BASE, operator="topk", ratio=0.2, fraction=0.6)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (replace(TERNARY, memory_rate="0"), replace(TERNARY, method="dcgd")),
        (replace(TOPK, method="ef-bv", memory_rate="1"), TOPK),
        (replace(TOPK, method="ef21-sgdm", eta=1.0), TOPK),
        (replace(TOPK, method="econtrol", eta=0.0), TOPK),
        (
            replace(TERNARY, method="dcgd", operator="terngrad", operator_args="block = 8"),
            replace(TERNARY, method="dcgd", operator="quant", operator_args="p = inf, block = 8"),
        ),
        (
            replace(TERNARY, method="dcgd", operator="one-bit-qsgd", operator_args="block = 8"),
            replace(TERNARY, method="dcgd", operator="qsgd", operator_args="levels = 1, block = 8"),
        ),
    ],
    ids=["diana at 0 is dcgd", "ef-bv at 1, 1", "sgdm at 1", "econtrol at 0", "terngrad", "one-bit qsgd"],
)
def test_pairs_that_are_the_same_method_give_the_same_bits(tmp_path: Path, one: Settings, other: Settings) -> None:
    _, rows, x = run(tmp_path / "a", one)
    _, others, y = run(tmp_path / "b", other)
    assert x.tobytes() == y.tobytes()
    assert [r["uplink_bytes"] for r in rows] == [r["uplink_bytes"] for r in others]


# ---- memories ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["absorb", "drop"])
@pytest.mark.parametrize(
    "settings",
    [
        TERNARY,
        replace(TERNARY, memory_rate="blocks", start="full"),
        replace(TERNARY, method="ef-bv"),
        replace(BASE, operator="topk", method="ef21-sgdm", allocation="hull"),
        replace(BASE, operator="topk", method="econtrol", start="full"),
    ],
    ids=["diana", "diana, full start", "ef-bv", "sgdm", "econtrol"],
)
def test_both_ends_stay_equal_with_late_and_absent_clients(tmp_path: Path, settings: Settings, late: str) -> None:
    """Client and mirror to the bit; the server's mean shift is the mean of all shifts (acceptance check 3)."""
    ulp, largest, number, delayed = 2.0**-52, np.zeros(SIZE), 0, 0

    def check(strategy: Kimad) -> None:
        nonlocal largest, number
        number += 1
        mirrors = strategy.memory.mirrors
        assert mirrors is not None
        total, bound = np.zeros(SIZE), np.zeros(SIZE)
        for client, settled in settled_memories(strategy, tmp_path).items():
            assert all(map(np.array_equal, settled.h, mirrors.read(client)))
            weight, h = strategy.memory.client(client).weight or 0.0, np.concatenate(settled.h)
            total, bound = total + weight * h, bound + weight * np.abs(h)
        largest = np.maximum(largest, bound)
        assert np.all(np.abs(np.concatenate(strategy.memory.sums) - total) <= 4 * number * ulp * largest)

    slow = replace(settings, late=late, fraction=0.5, deadline_s=1.1, initial_rate_bps=1000.0, server_lr=0.1)
    strategy, rows, _ = run(tmp_path, slow, rounds=25, links=SLOW, each_round=check, clients=8)
    delayed = sum(len(row["late"]) for row in rows)
    assert number == 25
    assert delayed > 0
    assert sum(np.abs(np.concatenate(strategy.memory.sums))) > 0


LAYOUT = Layout.of(cut(np.ones(SIZE), "float64"))


class Book(ServerMemory):
    """Keeps what was taken and what came of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rounds: list[tuple[list[Taken], Any]] = []

    def take(self, replies: Any) -> Any:
        g = super().take(replies)
        self.rounds.append((list(replies), g))
        return g


def test_the_estimate_is_the_written_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DIANA under partial participation with joining and late clients, beside the rule in plain arrays (section 3)."""
    monkeypatch.setattr("strategies.kimad.ServerMemory", Book)
    settings = replace(
        TERNARY, memory_rate="0.125", fraction=0.5, deadline_s=1.02, initial_rate_bps=1000.0, server_lr=0.1
    )
    strategy, _, _ = run(tmp_path, settings, rounds=30, links=SLOW, clients=8)
    assert isinstance(strategy.memory, Book)
    h = {str(i): np.zeros(SIZE) for i in range(8)}
    weight: dict[str, float] = {}
    joined = delayed = 0
    for replies, g in strategy.memory.rounds:
        old = set(weight)
        s = sum((weight[c] * h[c] for c in old), np.zeros(SIZE))
        of = {t.attempt.client: (t, _dense(t)) for t in replies}
        now = [c for c, (t, _) in of.items() if t.in_time]
        weight |= {c: t.weight for c, (t, _) in of.items() if t.in_time}
        asked = [c for c in now if c in old]
        if now:
            scale = len(old) / len(asked) if asked else 0.0
            expected = s + sum(((scale if c in old else 1.0) * weight[c] * of[c][1] for c in now), np.zeros(SIZE))
            np.testing.assert_allclose(np.concatenate(g), expected / sum(weight.values()), rtol=1e-9, atol=1e-12)
        else:
            assert g is None
        weight |= {c: t.weight for c, (t, _) in of.items()}
        joined += bool(old) and len(now) > len(asked)
        delayed += len(of) - len(now)
        for c, (_, m) in of.items():
            h[c] = h[c] + 0.125 * m
    assert joined > 0
    assert delayed > 0


def _dense(taken: Taken) -> Floats:
    m = np.zeros(SIZE)
    at = 0
    for layer, update in zip(
        (LAYOUT.layers[i] for i in LAYOUT.compressed), decode(LAYOUT, taken.payload).updates, strict=True
    ):
        if update is not None:
            m[at : at + layer.size][slice(None) if update.indices is None else update.indices] = update.values
        at += layer.size
    return m


def test_diana_reaches_the_optimum_and_plain_compression_does_not(tmp_path: Path) -> None:
    """Clients whose minimisers differ, 60 % of them a round: exact with memories, a ball around it without."""
    problem = LeastSquares.make(CLIENTS, rows=200, spread=0.2)
    of = 10.0 * np.arange(1, CLIENTS + 1)
    a = sum(w * m.T @ m / len(m) for w, m in zip(of, problem.a, strict=True))
    b = sum(w * m.T @ y / len(y) for w, m, y in zip(of, problem.a, problem.b, strict=True))
    best = np.linalg.solve(a, b)
    step = 0.5 / max(problem.smoothness(i) for i in range(CLIENTS))
    settings = replace(TERNARY, fraction=0.6, operator="qsgd", operator_args='levels = 8, block = 8, norms = "native"')
    far = []
    for method in ("diana", "dcgd"):
        _, _, x = run(tmp_path / method, replace(settings, method=method), rounds=200, problem=problem, step=step)
        far.append(float(np.sum((x - best) ** 2)))
    assert far[0] <= 1e-3 * far[1]


# ---- prox, momentum, steps -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "penalty"),
    [
        ("l2", "l2 = 0.3", lambda z: 0.15 * np.sum(z**2)),
        ("l1", "l1 = 0.2", lambda z: 0.2 * np.sum(np.abs(z))),
        ("elastic-net", "l1 = 0.2, l2 = 0.5", lambda z: 0.2 * np.sum(np.abs(z)) + 0.25 * np.sum(z**2)),
    ],
)
def test_a_proximal_step_is_the_least_of_its_definition(
    name: str, args: str, penalty: Callable[[Floats], float]
) -> None:
    """R(z) + ||z - x||^2/(2 gamma) is larger everywhere else: strictly convex, so a local check is a global one."""
    rng = np.random.default_rng(1)
    prox, gamma, x = make_prox(name, args), 0.7, rng.normal(size=6)
    assert prox is not None
    z = prox(x, gamma)

    def value(z: Floats) -> float:
        return penalty(z) + float(np.sum((z - x) ** 2)) / (2 * gamma)

    for _ in range(200):
        assert value(z + 1e-4 * rng.normal(size=6)) >= value(z)
    assert np.any(z != x)


def test_box_clips_and_none_is_none() -> None:
    box = make_prox("box", "low = -1.0, high = 0.5")
    assert box is not None
    assert box(np.array([-3.0, 0.2, 3.0]), 0.1).tolist() == [-1.0, 0.2, 0.5]
    assert make_prox("none", "") is None


def halved(x: Floats, gamma: float) -> Floats:
    return x / 2 + gamma


def test_a_callable_of_ones_own_is_a_proximal_step() -> None:
    own = make_prox("tests.strategies.test_methods:halved", "")
    assert own is not None
    assert own(np.array([2.0]), 0.25).tolist() == [1.25]


@pytest.mark.parametrize("momentum", [0.5, 0.95])
def test_the_heavy_ball_is_torchs_and_survives_a_restart(momentum: float) -> None:
    rng = np.random.default_rng(2)
    start, updates = rng.normal(size=4), rng.normal(size=(6, 4))
    parameter = torch.nn.Parameter(torch.tensor(start))
    reference = torch.optim.SGD([parameter], lr=0.1, momentum=momentum)
    ours = ServerOptimizer("SGD", 0.1, [start], {"momentum": momentum})
    x: FloatArray = start
    for number, g in enumerate(updates):
        if number == 3:
            again = ServerOptimizer("SGD", 0.1, [x], {"momentum": momentum})
            again.restore(*ours.state())
            ours = again
        (x,) = ours.step([g])
        parameter.grad = torch.tensor(g)
        reference.step()
    assert x.tobytes() == parameter.detach().numpy().tobytes()


@pytest.mark.parametrize(("scaling", "strength"), [("exact", 1.0), ("paper", 0.1)])
def test_momentum_ends_where_f_and_the_regulariser_are_least(scaling: str, strength: float) -> None:
    """f = ||x - b||^2/2 with R = l1/2: soft thresholding of b; as DIANA is printed, with (1 - beta) R instead."""
    b = np.array([2.0, -0.3, 0.04, 1.0])
    settings = Settings(
        server_optimizer_args="momentum = 0.9", server_lr=0.05, prox="l1", prox_args="l1 = 0.5", prox_scaling=scaling
    )
    optimizer = settings.optimizer([np.zeros(4)])
    x: Floats = np.zeros(4)
    for _ in range(2000):
        x = np.asarray(optimizer.step([x - b])[0], np.float64)
    np.testing.assert_allclose(x, np.sign(b) * np.maximum(np.abs(b) - 0.5 * strength, 0), atol=1e-12)


def test_the_proximal_step_follows_the_optimisers_in_a_run(tmp_path: Path) -> None:
    """x <- prox(x - gamma g), gamma = server_lr times the size of an update in gradients."""
    settings = replace(
        BASE, operator="identity", weights="uniform", prox="l1", prox_args="l1 = 100.0", update_scale=STEP
    )
    _, _, x = run(tmp_path, settings, rounds=10)
    problem, expected = LeastSquares.make(CLIENTS), np.ones(SIZE)
    for _ in range(10):
        expected -= STEP * np.mean([problem.gradient(i, expected) for i in range(CLIENTS)], axis=0)
        expected = np.sign(expected) * np.maximum(np.abs(expected) - STEP * 100.0, 0)
    np.testing.assert_allclose(x, expected, rtol=1e-11, atol=1e-15)
    assert np.any(x == 0)


def test_a_proximal_step_keeps_float32() -> None:
    optimizer = ServerOptimizer("SGD", 1.0, [np.ones(2, np.float32)], None, Proximal(lambda x, gamma: x / 3, 1.0))
    (x,) = optimizer.step([np.zeros(2)])
    assert x.dtype == np.float32
    assert x.tolist() == [np.float32(1 / 3)] * 2


# ---- numbers and refusals ----------------------------------------------------------------------------------


def test_rates_follow_the_operator() -> None:
    """Block 9 of the 2-norm: 1 + omega = 3."""
    layout = Layout.of({"w": np.zeros(30), "b": np.zeros(9)})
    quant = replace(TERNARY, operator_args='p = 2, block = 9, norms = "native"')
    auto = engine(quant, layout)
    assert auto.rate == pytest.approx(1 / 3)
    assert auto == Engine(auto.rate, 1.0, True, False)
    assert engine(replace(quant, memory_rate="theory"), layout).rate == pytest.approx(1 / 6)
    assert engine(replace(quant, memory_rate="blocks"), layout).rate == pytest.approx(1 / 3)
    assert engine(replace(quant, memory_rate="0.7"), layout).rate == 0.7
    assert engine(replace(quant, method="dcgd"), layout) == Engine(0.0, 1.0, True, False)
    assert engine(BASE, layout) == Engine()
    both = engine(replace(quant, method="ef-bv"), layout, 4)  # omega = 2: lambda 1/3, nu 1/(1 + 2/4)
    assert both.rate == pytest.approx(1 / 3)
    assert both.gain == pytest.approx(2 / 3)
    assert not both.scaled


def test_blocks_need_an_operator_that_has_some() -> None:
    with pytest.raises(ConfigError, match="has none: expected quant"):
        engine(replace(TERNARY, operator="randk", operator_args="", memory_rate="blocks"), LAYOUT)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"method": "dianna"}, "did you mean 'diana'"),
        ({"method": "diana"}, "biased|unbiased"),
        ({"memory_rate": "0.5"}, "method 'ef21' has the rate 1"),
        ({"method": "ef-bv", "memory_rate": "1.5"}, "number from 0 to 1"),
        ({"method": "ef-bv", "memory_rate": "blocks"}, "DIANA's advice"),
        ({"estimate_rate": 0.5}, "estimate-rate is for method ef-bv"),
        ({"eta": 0.5}, "has none; expected one of ef21-sgdm, econtrol"),
        ({"method": "ef21-sgdm", "eta": 0.0}, "expected above 0"),
        ({"method": "dcgd", "operator": "quant", "start": "full"}, "no memory to start"),
        ({"prox": "l3"}, "unknown prox"),
        ({"prox": "l1"}, "needs l1"),
        ({"prox": "l1", "prox_args": "l1 = -1.0"}, "at least 0"),
        ({"prox": "box", "prox_args": "low = 2, high = 1"}, "swap them"),
        ({"prox": "l1", "prox_args": "l1 = 0.1", "server_optimizer": "Adam"}, "belongs to a gradient step"),
        ({"prox": "none", "prox_args": "l1 = 0.1"}, "takes none"),
        ({"prox": "nowhere:prox"}, "cannot be imported"),
        ({"server_optimizer_args": "momentun = 0.9"}, "torch.optim.SGD says"),
        ({"server_optimizer_args": "momentum"}, "expected `name = value"),
        ({"server_step": "theory", "server_optimizer_args": "momentum = 0.9"}, "plain SGD"),
        ({"server_step": "theory", "weights": "uniform"}, "weights = examples"),
        ({"server_step": "hearsay"}, "unknown server-step"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_the_run(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**more)


class Known:
    """Constants of four equal clients."""

    L, L_tilde, L_max, mu, examples = 2.0, 2.0, 2.0, 0.5, (1, 1, 1, 1)


def test_steps_of_theory() -> None:
    """TopK 3 of 30 and 1 of 9; EF21: 1/(L (1 + sqrt(beta/theta))) = alpha/(L (1 + sqrt(1 - alpha)))."""
    layout = Layout.of({"w": np.zeros(30), "b": np.zeros(9)})
    topk = replace(BASE, operator="topk", server_step="theory", floors="w=3")
    assert theory_step(topk, layout, Known()) == pytest.approx(0.1 / (2 * (1 + 0.9**0.5)))
    quant = replace(TERNARY, operator_args='p = 2, block = 9, norms = "native"')
    assert theory_step(quant, layout, Known()) == pytest.approx(1 / (2 * (1 + 6 * 2 / 4)))
    assert theory_step(replace(quant, memory_rate="theory"), layout, Known()) == pytest.approx(
        min(1 / 6 / 0.5, 2 / (2.5 * (1 + 2 * 2 / 4)))
    )
    half = replace(quant, fraction=0.5)  # omega_pp = 2 * 4/2 + 4 * 2/(2 * 3)
    assert theory_step(half, layout, Known()) == pytest.approx(1 / (2 * (1 + 6 * (4 + 4 / 3) / 4)))
    assert theory_step(replace(BASE, method="dcgd", operator="identity"), layout, Known()) == 0.5
    for method in METHODS.keys() - {"ef21", "diana"}:
        operator = "quant" if METHODS[method].unbiased else "topk"
        with pytest.raises(ConfigError, match="there is none for method"):
            theory_step(replace(BASE, method=method, operator=operator, values="auto"), layout, Known())


def test_theory_without_constants_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not give its constants"):
        run(tmp_path, replace(BASE, operator="topk", server_step="theory"))


def test_another_method_cannot_go_on_with_a_run(tmp_path: Path) -> None:
    def start(settings: Settings, *, resume: bool) -> None:
        Kimad(
            settings, SimulatedNetwork(FAST), state_dir=tmp_path / "s", resume=resume, on_round=lambda *_: None
        ).start(
            grid=grid_of(least_squares_app(LeastSquares.make(2), STEP), 2, tmp_path / "c"),
            initial_arrays=record(cut(np.ones(SIZE), "float64")),
            num_rounds=4 if resume else 2,
        )

    start(TERNARY, resume=False)
    with pytest.raises(ConfigError, match="both ends' copies would part"):
        start(replace(TERNARY, memory_rate="theory"), resume=True)
    start(TERNARY, resume=True)
