"""What the training methods must do, by algorithms that are written out here and know nothing of strategies.kimad.

Clients compress with the real operators, the server reads the payload's bytes and nothing else, all in float64.
Other checks of the same list stand elsewhere:

- moments of Quant_p and the table of alpha_p: tests/compression/test_quantise.py;
- layer-wise EF21 within drawn byte budgets, convex: tests/compression/test_theory.py;
- Kimad+ within its bound, and against uniform and global TopK: tests/compression/test_dual.py;
- budgets that grow with the rate: tests/bandwidth/test_budget.py, tests/strategies/test_rounds.py;
- both ends' memories after lost, late, repeated and damaged messages: tests/strategies/test_exactly_once.py;
- one round of every step rule in exact expectation: tests/strategies/test_theory.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from compression import Layout, Scheme, accumulate, compress, decode, move
from strategies import theory
from tests.compression.support import flat_layout, header_of

Vector = NDArray[np.float64]
Prox = Callable[[Vector], Vector]


def quant(p: str, block: int) -> Scheme:
    """Quant_p, unbiased, exact norms."""
    return Scheme(
        operator="quant", contractive=False, operator_args=f"p = {p}, block = {block}, norms = 'native'", values="fp64"
    )


# alpha_p of the largest block: 1/sqrt(20) and 2/(1 + sqrt(8))
DIANA = {"2": (quant("2.0", 20), 1 / math.sqrt(20)), "inf": (quant("inf", 8), 2 / (1 + math.sqrt(8)))}


class Exchange:
    """The memories of both ends, h_i of each client and sum_i w_i h_i of the server, and what moves them."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], rate: float, seed: int = 0) -> None:
        self.layout: Layout = flat_layout(sizes, "float64")
        self.cuts = np.cumsum(sizes)[:-1]
        self.weights, self.rate, self.seed = weights, rate, seed
        self.h = [[np.zeros(d) for d in sizes] for _ in weights]
        self.sums = [np.zeros(d) for d in sizes]
        self.round = 0

    @property
    def shift(self) -> Vector:
        return np.concatenate(self.sums)

    def memory(self, client: int) -> Vector:
        return np.concatenate(self.h[client])

    def mean_memory(self) -> Vector:
        """sum_i w_i h_i of what the clients hold."""
        return np.asarray(sum(w * self.memory(i) for i, w in enumerate(self.weights)))

    def __call__(
        self,
        gradients: Sequence[Vector],
        scheme: Scheme,
        who: Sequence[int] | None = None,
        scales: Sequence[float] | None = None,
        shift_scale: float = 1.0,
    ) -> Vector:
        """One round: those who answer send C(u_i - h_i) and move, the server moves by what it reads.

        Returns:
            sum_i w_i h_i before the round + sum over those of scales_i w_i C(u_i - h_i).
        """
        who = range(len(self.weights)) if who is None else who
        estimate = [total.copy() for total in self.sums]
        self.round += 1
        for i, scale in zip(who, scales or [1.0] * len(who), strict=True):
            delta = [u - h for u, h in zip(np.split(gradients[i], self.cuts), self.h[i], strict=True)]
            seed = (self.seed * 100_000 + self.round) * 100 + i
            sent = compress(self.layout, header_of(self.layout, round=self.round), delta, None, scheme, None, seed=seed)
            for at, (mine, theirs) in enumerate(
                zip(sent.updates, decode(self.layout, sent.payload).updates, strict=True)
            ):
                assert theirs is not None
                move(self.h[i][at], mine, self.rate)
                accumulate(estimate[at], theirs, scale * self.weights[i])
                accumulate(self.sums[at], theirs, shift_scale * self.rate * self.weights[i])
        return np.concatenate(estimate)


# ---- DIANA ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quadratics:
    """f_i(x) = (x - b_i)^T A_i (x - b_i)/2, eigenvalues of every A_i from mu to L; clients have nothing in common."""

    a: Vector
    b: Vector
    weights: tuple[float, ...]

    @classmethod
    def draw(cls, seed: int, top: float = 10.0, weights: Sequence[float] = (0.2,) * 5, d: int = 20) -> Quadratics:
        rng, n = np.random.default_rng(seed), len(weights)
        turns = np.linalg.qr(rng.normal(size=(n, d, d)))[0]
        a = np.einsum("nij,j,nkj->nik", turns, np.linspace(1.0, top, d), turns)
        return cls(a, rng.normal(size=(n, d)), tuple(weights))

    def gradients(self, x: Vector) -> list[Vector]:
        return [a @ (x - b) for a, b in zip(self.a, self.b, strict=True)]

    def gradient(self, x: Vector) -> Vector:
        return np.asarray(sum(w * g for w, g in zip(self.weights, self.gradients(x), strict=True)))

    def minimiser(self) -> Vector:
        mean = sum(w * a for w, a in zip(self.weights, self.a, strict=True))
        return np.asarray(np.linalg.solve(mean, -self.gradient(np.zeros(self.b.shape[1]))))

    def exchange(self, rate: float, seed: int = 0) -> Exchange:
        return Exchange((self.b.shape[1],), self.weights, rate, seed)


def distance_sq(x: Vector, y: Vector) -> float:
    return float(np.sum((x - y) ** 2))


@pytest.mark.parametrize("p", DIANA)
def test_diana_converges_linearly_below_its_bound(p: str) -> None:
    """n = 5, d = 20, L = 10, mu = 1, full gradients: ||x - x*||^2 falls to 1e-24, mean V stays below the theory's."""
    scheme, alpha_p = DIANA[p]
    problem, runs = Quadratics.draw(1), 3
    best = problem.minimiser()
    h_star = problem.gradients(best)
    rates = theory.diana_quant(10.0, 1.0, 5, alpha_p)
    exchanges = [problem.exchange(rates.alpha, seed) for seed in range(runs)]
    xs = [np.zeros(20)] * runs

    def lyapunov(x: Vector, exchange: Exchange) -> float:
        lag = sum(distance_sq(exchange.memory(i), h) for i, h in enumerate(h_star)) / 5
        return distance_sq(x, best) + rates.c * rates.gamma**2 * lag

    v0 = lyapunov(xs[0], exchanges[0])
    rounds = 0
    while max(distance_sq(x, best) for x in xs) > 1e-24:
        rounds += 1
        assert rounds <= 1000
        xs = [x - rates.gamma * e(problem.gradients(x), scheme) for x, e in zip(xs, exchanges, strict=True)]
        mean = sum(lyapunov(x, e) for x, e in zip(xs, exchanges, strict=True)) / runs
        assert mean <= theory.diana_bound(rates, v0, rounds), rounds
    for exchange in exchanges:
        assert exchange.shift == pytest.approx(exchange.mean_memory(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("p", DIANA)
def test_without_memories_it_stalls(p: str) -> None:
    """alpha = 0, QSGD and TernGrad: the variance of compressed gradients never ends where clients differ."""
    scheme, alpha_p = DIANA[p]
    problem = Quadratics.draw(1)
    best, gamma = problem.minimiser(), theory.diana_quant(10.0, 1.0, 5, alpha_p).gamma
    exchange, x, nearest = problem.exchange(0.0), np.zeros(20), math.inf
    for k in range(400):
        x = x - gamma * exchange(problem.gradients(x), scheme)
        if k >= 200:
            nearest = min(nearest, distance_sq(x, best))
    assert nearest > 1e-2
    assert not exchange.shift.any()


def test_noisy_gradients_stay_below_the_bound() -> None:
    """Weights that are not equal, noise that is not, either: the mean of V over 60 runs."""
    weights, sigma, runs = (0.4, 0.3, 0.2, 0.1), np.array([0.1, 2.0, 0.5, 1.0]), 60
    problem = Quadratics.draw(2, top=4.0, weights=weights, d=6)
    best = problem.minimiser()
    h_star = problem.gradients(best)
    rates = theory.diana(4.0, 1.0, theory.effective_clients(weights), (math.sqrt(6) - 1) / 2)
    rng = np.random.default_rng(2)
    exchanges = [problem.exchange(rates.alpha, seed) for seed in range(runs)]
    xs = [best.copy() for _ in range(runs)]
    sigma_sq = float(np.dot(weights, sigma**2))

    def lyapunov(x: Vector, exchange: Exchange) -> float:
        lag = sum(w * distance_sq(exchange.memory(i), h) for i, (w, h) in enumerate(zip(weights, h_star, strict=True)))
        return distance_sq(x, best) + rates.c * rates.gamma**2 * lag

    v0 = lyapunov(xs[0], exchanges[0])
    for k in range(1, 31):
        for at, exchange in enumerate(exchanges):
            noise = rng.normal(size=(4, 6)) * sigma[:, None] / math.sqrt(6)
            noisy = [g + e for g, e in zip(problem.gradients(xs[at]), noise, strict=True)]
            xs[at] = xs[at] - rates.gamma * exchange(noisy, quant("inf", 6))
        mean = sum(lyapunov(x, e) for x, e in zip(xs, exchanges, strict=True)) / runs
        assert mean <= theory.diana_bound(rates, v0, k, sigma_sq), k
    assert mean > theory.diana_bound(rates, v0, 30)  # without the noise term it would not hold


def soft(level: float) -> Prox:
    """prox of level * ||x||_1."""
    return lambda u: np.sign(u) * np.maximum(np.abs(u) - level, 0.0)


def l1_minimiser(problem: Quadratics, strength: float) -> Vector:
    """argmin f + strength ||x||_1 by proximal gradient descent, checked by its subgradient."""
    x = np.zeros(20)
    for _ in range(3000):
        x = soft(0.1 * strength)(x - 0.1 * problem.gradient(x))
    gradient, on = problem.gradient(x), x != 0
    assert np.abs(gradient[on] + strength * np.sign(x[on])).max() < 1e-12
    assert np.all(np.abs(gradient[~on]) < strength)
    return x


@pytest.mark.parametrize("scaling", ["true", "paper"])
def test_momentum_and_a_regulariser(scaling: str) -> None:
    """v = beta v + ghat: the prox of gamma/(1 - beta) R reaches argmin f + R; of gamma R, argmin f + (1 - beta) R."""
    problem, momentum, strength = Quadratics.draw(1), 0.9, 1.0
    best, other = l1_minimiser(problem, strength), l1_minimiser(problem, (1 - momentum) * strength)
    assert 0 < np.count_nonzero(best) < 20
    scheme, alpha_p = DIANA["inf"]
    rates = theory.diana_quant(10.0, 1.0, 5, alpha_p)
    gamma = (1 - momentum) * rates.gamma
    prox = soft(strength * (rates.gamma if scaling == "true" else gamma))
    exchange, x, v = problem.exchange(rates.alpha), np.zeros(20), np.zeros(20)
    for _ in range(800):
        v = momentum * v + exchange(problem.gradients(x), scheme)
        x = prox(x - gamma * v)
    if scaling == "true":
        assert distance_sq(x, best) <= 1e-24
    else:
        assert distance_sq(x, best) > 1e-2
        assert distance_sq(x, other) <= 1e-24


# ---- partial participation, clients that join -------------------------------------------------

PARTIAL = quant("inf", 5)
PARTIAL_OMEGA = (math.sqrt(5) - 1) / 2


@pytest.mark.parametrize("variant", ["right", "participants' mean", "shift by 1/|S|"])
def test_diana_with_partial_participation(variant: str) -> None:
    """Two of five, drawn anew: ghat = h + (1/|S|) sum m_i, h += (alpha/n) sum m_i.

    The mean of the participants' h_i + m_i stalls; h += (alpha/|S|) sum m_i is n/|S| times the mean of all h_i, so
    that the estimate is biased until everything has converged.
    """
    problem = Quadratics.draw(3, top=5.0)
    best = problem.minimiser()
    omega_pp = theory.omega_pp_fixed(PARTIAL_OMEGA, 5, 2)
    rates = theory.diana_convex(5.0, 1.0, 5, PARTIAL_OMEGA, omega_pp=omega_pp, share=2 / 5)
    exchange, x, rng = problem.exchange(rates.alpha), np.zeros(20), np.random.default_rng(3)
    drift, nearest = 0.0, math.inf
    for k in range(1600):
        who = sorted(rng.choice(5, 2, replace=False).tolist())
        held = np.mean([exchange.memory(i) for i in who], axis=0)
        before = exchange.shift
        estimate = exchange(
            problem.gradients(x), PARTIAL, who, [5 / 2] * 2, shift_scale=5 / 2 if variant.startswith("shift") else 1.0
        )
        if variant == "participants' mean":
            estimate = held + (estimate - before)
        x = x - rates.gamma * estimate
        drift = max(drift, float(np.abs(exchange.shift - exchange.mean_memory()).max()))
        if k >= 1000:
            nearest = min(nearest, distance_sq(x, best))
    if variant == "right":
        assert drift < 1e-12
        assert nearest <= 1e-24
    else:
        assert (nearest > 1e-3) == (variant == "participants' mean")
        assert (drift > 1e-2) == (variant == "shift by 1/|S|")


def test_the_estimate_is_unbiased_while_clients_join() -> None:
    """Over all draws of two of three old clients; two new ones answer for the first time, one of them is heavy.

    ghat = (S + (n_old/|S_old|) sum over old ones drawn of w_i m_i + sum over new ones of w_i m_i)/W, W with the new.
    """
    weights, exact = (1.0, 2.0, 0.5, 4.0, 1.5), Scheme("identity", values="fp64")
    rng = np.random.default_rng(4)
    earlier, now = rng.normal(size=(2, 5, 20))
    mean = np.average(now, axis=0, weights=weights)
    right: list[Vector] = []
    plain: list[Vector] = []
    for drawn in itertools.combinations(range(3), 2):
        for scales, found in (([3 / 2] * 2 + [1.0] * 2, right), ([5 / 4] * 4, plain)):
            exchange = Exchange((20,), weights, 0.25)
            for _ in range(3):
                exchange(list(earlier), PARTIAL, range(3))
            found.append(exchange(list(now), exact, [*drawn, 3, 4], scales) / sum(weights))
    assert np.mean(right, axis=0) == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert np.abs(np.mean(plain, axis=0) - mean).max() > 1e-1


def test_diana_goes_on_to_the_minimum_of_all_when_clients_join() -> None:
    """Weighted; three clients, two of them drawn a round; the fourth joins in round 40, the fifth in round 80."""
    weights = (1.0, 2.0, 0.5, 1.5, 1.0)
    problem = Quadratics.draw(5, top=5.0, weights=weights)
    omega_pp = theory.omega_pp_fixed(PARTIAL_OMEGA, 5, 2)
    n = theory.effective_clients(weights)
    rates = theory.diana_convex(5.0, 1.0, n, PARTIAL_OMEGA, omega_pp=omega_pp, share=2 / 5)
    exchange, x, rng = problem.exchange(rates.alpha), np.zeros(20), np.random.default_rng(5)
    known, best = [0, 1, 2], problem.minimiser()
    for k in range(1, 2001):
        new = {40: [3], 80: [4]}.get(k, [])
        old = sorted(rng.choice(known, 2, replace=False).tolist())
        scales = [len(known) / 2] * 2 + [1.0] * len(new)
        estimate = exchange(problem.gradients(x), PARTIAL, old + new, scales)
        known += new
        total = sum(weights[i] for i in known)
        x = x - rates.gamma * estimate / total
        assert exchange.shift == pytest.approx(sum(weights[i] * exchange.memory(i) for i in known), rel=1e-9, abs=1e-12)
    assert distance_sq(x, best) <= 1e-24


# ---- EF21 -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Robust:
    """f_m(x) = mean_j phi(a_mj x - b_mj), phi(r) = log(1 + r^2/2), phi'' from -1/8 to 1: not convex; f = sum w f_m."""

    a: Vector
    b: Vector
    weights: tuple[float, ...]
    sizes: tuple[int, ...]

    @classmethod
    def draw(cls, seed: int, weights: Sequence[float], sizes: Sequence[int], scales: Sequence[float]) -> Robust:
        """Columns of a layer are as large as its scale says."""
        rng, n = np.random.default_rng(seed), len(weights)
        a = rng.standard_normal((n, 12, sum(sizes))) * np.repeat(scales, sizes)
        return cls(a, 3 * rng.standard_normal((n, 12)), tuple(weights), tuple(sizes))

    def loss(self, x: Vector) -> float:
        return float(np.dot(self.weights, np.mean(np.log1p((self.a @ x - self.b) ** 2 / 2), axis=1)))

    def gradients(self, x: Vector) -> list[Vector]:
        found = []
        for a, b in zip(self.a, self.b, strict=True):
            r = a @ x - b
            found.append(a.T @ (r / (1 + r**2 / 2)) / len(b))
        return found

    def gradient(self, x: Vector) -> Vector:
        return np.asarray(sum(w * g for w, g in zip(self.weights, self.gradients(x), strict=True)))

    def smoothness(self) -> tuple[float, float, list[float]]:
        """L, L_tilde, and L_i of the layers: ||A_i^T D A|| <= ||A_i|| ||A|| for every diagonal D in [-1, 1]."""
        rows = self.a.shape[1]
        mean = sum(w * a.T @ a / rows for w, a in zip(self.weights, self.a, strict=True))
        whole = np.array([np.linalg.norm(a, 2) / math.sqrt(rows) for a in self.a])
        parts = np.split(self.a, np.cumsum(self.sizes)[:-1], axis=2)
        layers = [[float(np.linalg.norm(a, 2)) / math.sqrt(rows) for a in part] for part in parts]
        squares = [np.dot(self.weights, (np.array(layer) * whole) ** 2) for layer in layers]
        return (
            float(np.linalg.norm(np.asarray(mean), 2)),
            math.sqrt(np.dot(self.weights, whole**4)),
            [math.sqrt(one) for one in squares],
        )


def test_its_constants_are_bounds_of_its_gradients() -> None:
    """The problem below is what it says it is: the loss's differences, and no pair of points beyond L, L_tilde, L_i."""
    problem = Robust.draw(0, (0.5, 0.3, 0.2), (6, 3), (1.0, 4.0))
    smooth, spread, layers = problem.smoothness()
    rng = np.random.default_rng(0)
    for _ in range(200):
        x, step = rng.standard_normal(9), np.exp(rng.normal()) * rng.standard_normal(9)
        gap = float(np.linalg.norm(step))
        change = problem.gradient(x + step) - problem.gradient(x)
        assert float(np.linalg.norm(change)) <= smooth * gap
        every = np.array(problem.gradients(x + step)) - problem.gradients(x)
        assert math.sqrt(np.dot(problem.weights, np.sum(every**2, axis=1))) <= spread * gap
        for part, one in zip(np.split(every, [6], axis=1), layers, strict=True):
            assert math.sqrt(np.dot(problem.weights, np.sum(part**2, axis=1))) <= one * gap
        near = 1e-5 * step / gap
        slope = (problem.loss(x + near) - problem.loss(x - near)) / 2
        assert slope == pytest.approx(float(problem.gradient(x) @ near), rel=1e-5, abs=1e-12)


def lyapunov(problem: Robust, exchange: Exchange, x: Vector, gammas: Sequence[float], thetas: Sequence[float]) -> float:
    """f + sum_i gamma_i/(2 theta_i) sum_m w_m ||h_mi - grad_i f_m||^2: one entry a layer."""
    found = problem.loss(x)
    for m, (w, g) in enumerate(zip(problem.weights, problem.gradients(x), strict=True)):
        for i, part in enumerate(np.split(g, exchange.cuts)):
            found += w * gammas[i] / (2 * thetas[i]) * distance_sq(exchange.h[m][i], part)
    return found


WEIGHTS = (0.35, 0.25, 0.2, 0.15, 0.05)


@pytest.mark.parametrize("ratio", [0.05, 0.25])
@pytest.mark.parametrize("stretch", [1, 60])
def test_ef21_descends_in_every_round(ratio: float, stretch: int) -> None:
    """TopK, full gradients, all clients, the theory's step; 60 times that and it does not."""
    problem = Robust.draw(6, WEIGHTS, (40,), (1.0,))
    alpha = math.floor(ratio * 40) / 40
    smooth, spread, _ = problem.smoothness()
    gamma, theta = stretch * theory.ef21_step(smooth, spread, alpha), theory.theta(alpha)
    scheme = Scheme(values="fp64", ratio=ratio)
    exchange, x = Exchange((40,), WEIGHTS, 1.0), np.zeros(40)
    exchange(problem.gradients(x), scheme)
    first = before = lyapunov(problem, exchange, x, [gamma], [theta])
    broken = 0
    for _ in range(150):
        least = before - gamma / 2 * float(np.sum(problem.gradient(x) ** 2))
        x = x - gamma * exchange.shift
        exchange(problem.gradients(x), scheme)
        before = lyapunov(problem, exchange, x, [gamma], [theta])
        broken += before > least + 1e-13 * first
    assert (broken > 0) == (stretch > 1)
    if stretch == 1:
        assert before < first
        assert exchange.shift == pytest.approx(exchange.mean_memory(), rel=1e-9, abs=1e-13)


def test_ef21_with_clients_that_answer_by_chance_descends_in_expectation() -> None:
    """Each answers with probability 1/2, and alpha/2 is what the step is made of: the mean over all 32 outcomes."""
    problem = Robust.draw(7, WEIGHTS, (40,), (1.0,))
    scheme, alpha = Scheme(values="fp64", ratio=0.25), 0.25 / 2
    smooth, spread, _ = problem.smoothness()
    gamma, theta = theory.ef21_step(smooth, spread, alpha), theory.theta(alpha)
    exchange, x, rng = Exchange((40,), WEIGHTS, 1.0), np.zeros(40), np.random.default_rng(7)
    exchange(problem.gradients(x), scheme)
    for _ in range(40):
        least = lyapunov(problem, exchange, x, [gamma], [theta]) - gamma / 2 * float(np.sum(problem.gradient(x) ** 2))
        x = x - gamma * exchange.shift
        gradients = problem.gradients(x)
        lags = [distance_sq(exchange.memory(i), g) for i, g in enumerate(gradients)]
        held = [exchange.memory(i) for i in range(5)]
        who = np.flatnonzero(rng.random(5) < 0.5).tolist()
        trial = Exchange((40,), WEIGHTS, 1.0)
        trial.h = [[h.copy()] for h in held]
        trial(gradients, scheme)
        after = [distance_sq(trial.memory(i), g) for i, g in enumerate(gradients)]
        mean = 0.0
        for answers in itertools.product((False, True), repeat=5):
            lag = sum(w * (b if answer else a) for w, a, b, answer in zip(WEIGHTS, lags, after, answers, strict=True))
            mean += (problem.loss(x) + gamma / (2 * theta) * lag) / 32
        assert mean <= least + 1e-13
        exchange(gradients, scheme, who)
        assert exchange.shift == pytest.approx(exchange.mean_memory(), rel=1e-9, abs=1e-13)


SIZES, LEAST, SCALES = (24, 9, 15, 6), (3, 2, 1, 6), (0.5, 1.0, 2.0, 0.2)


@pytest.mark.parametrize("stretch", [1, 300])
@pytest.mark.parametrize("steps", ["equal", "unequal"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_layerwise_ef21_descends_with_k_redrawn(steps: str, seed: int, stretch: int) -> None:
    """Each layer's K is drawn anew in every round, from its least to all; the step knows only the least."""
    problem = Robust.draw(seed, WEIGHTS, SIZES, SCALES)
    smooth, _, layers = problem.smoothness()
    alphas = [k / d for k, d in zip(LEAST, SIZES, strict=True)]
    equal = theory.layerwise_step(smooth, layers, alphas)
    gammas = (equal,) * 4 if steps == "equal" else theory.layerwise_steps(smooth, layers, alphas)
    assert (max(gammas) > 3 * min(gammas)) == (steps == "unequal")
    gammas = tuple(stretch * gamma for gamma in gammas)
    thetas, repeated = [theory.theta(alpha) for alpha in alphas], np.repeat(gammas, SIZES)
    exchange, x, rng = Exchange(SIZES, WEIGHTS, 1.0), np.zeros(sum(SIZES)), np.random.default_rng(seed)
    kept = set()

    def answer() -> None:
        drawn = [int(rng.integers(k, d + 1)) if rng.random() < 0.3 else k for k, d in zip(LEAST, SIZES, strict=True)]
        kept.add(tuple(drawn))
        floors = tuple((f"layer{i}", float(k)) for i, k in enumerate(drawn))
        exchange(problem.gradients(x), Scheme(values="fp64", ratio=1e-9, floors=floors))

    answer()
    first = before = lyapunov(problem, exchange, x, gammas, thetas)
    broken = 0
    for _ in range(100):
        least = before - float(np.sum(repeated / 2 * problem.gradient(x) ** 2))
        x = x - repeated * exchange.shift
        answer()
        before = lyapunov(problem, exchange, x, gammas, thetas)
        broken += before > least + 1e-13 * first
    assert (broken > 0) == (stretch > 1)
    assert len(kept) > 20
