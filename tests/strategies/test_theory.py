"""strategies/theory.py against degenerate cases, brute force and expectations over every outcome, none drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from compression.errors import ConfigError
from strategies import theory
from strategies.theory import Diana

Vector = NDArray[np.float64]
Outcomes = list[tuple[float, Vector]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "step-sizes.md"


# ---- EF21 -------------------------------------------------------------------------------------


@given(st.floats(1e-12, 1.0))
def test_theta_and_beta_are_their_definitions(alpha: float) -> None:
    theta, beta = theory.theta(alpha), theory.beta(alpha)
    assert theta == pytest.approx(1 - math.sqrt(1 - alpha), rel=1e-9, abs=1e-16)
    assert beta == pytest.approx((1 - alpha) / theta, rel=1e-12)
    gamma = theory.ef21_step(2.0, 3.0, alpha)
    assert 1 / gamma == pytest.approx(2.0 + 3.0 * math.sqrt(beta / theta), rel=1e-9)
    assert 1 / gamma <= 2.0 + 3.0 * (2 / alpha - 1) * (1 + 1e-12)


@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.9])
def test_no_split_of_the_error_allows_a_larger_step(alpha: float) -> None:
    """||a + b||^2 <= (1 + s) ||a||^2 + (1 + 1/s) ||b||^2 for any s: theta, beta are those of the best of them."""
    s = np.geomspace(1e-6, alpha / (1 - alpha), 200_001)[:-1]
    lost, gained = 1 - (1 - alpha) * (1 + s), (1 - alpha) * (1 + 1 / s)
    least = float(np.min(gained / lost))
    assert theory.beta(alpha) / theory.theta(alpha) == pytest.approx(least, rel=1e-6)


def test_ef21_without_compression_is_gradient_descent() -> None:
    assert theory.ef21_step(8.0, 100.0, 1.0) == 1 / 8
    assert theory.layerwise_step(8.0, [3.0, 100.0], [1.0, 1.0]) == 1 / 8
    assert theory.layerwise_steps(8.0, [3.0, 100.0], [1.0, 1.0]) == (1 / 8, 1 / 8)


def test_one_layer_is_ef21() -> None:
    assert theory.layerwise_step(2.0, [5.0], [0.1]) == pytest.approx(theory.ef21_step(2.0, 5.0, 0.1), rel=1e-15)
    (gamma,) = theory.layerwise_steps(2.0, [5.0], [0.1])
    b = 25.0 * theory.beta(0.1) / theory.theta(0.1)
    assert gamma == pytest.approx((math.sqrt(4.0 + 4 * b) - 2.0) / (2 * b), rel=1e-12)  # b g^2 + 2 g = 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_unequal_steps_are_the_feasible_ones_with_the_largest_product(count: int) -> None:
    rng = np.random.default_rng(count)
    lower = 0
    for _ in range(200):
        smooth = float(np.exp(rng.normal()))
        layers = np.exp(2 * rng.normal(size=count))
        alphas = rng.uniform(0.01, 1, count) if rng.random() < 0.8 else np.ones(count)
        costs = np.array([theory.beta(a) / theory.theta(a) for a in alphas]) * layers**2
        steps = np.array(theory.layerwise_steps(smooth, list(layers), list(alphas)))
        assert 1 / steps.max() == pytest.approx(smooth + steps @ costs, rel=1e-12)  # valid, and none is left over
        equal = theory.layerwise_step(smooth, list(layers), list(alphas))
        assert 1 / equal >= smooth + equal * costs.sum() - 1e-12 / equal
        assert np.log(steps).mean() >= math.log(equal) - 1e-12
        lower += int(steps.min() < 0.99 * steps.max())
        for size in (0.01, 0.3, 3.0):  # others, scaled until they are valid, too, and none is left over
            other = steps * np.exp(size * rng.normal(size=(50, count)))
            most = other.max(axis=1)
            a = most * (other @ costs)
            scale = 2 / (smooth * most + np.sqrt((smooth * most) ** 2 + 4 * a))
            assert np.all(np.log(other * scale[:, None]).sum(axis=1) <= np.log(steps).sum() + 1e-12)
    assert lower > 20 or count <= 2  # of two layers more than half, both, take the largest step


def test_unequal_steps_keep_the_order_of_the_layers() -> None:
    steps = theory.layerwise_steps(1.0, [1.0, 50.0, 1.0, 1.0], [0.5, 0.1, 0.5, 0.5])
    assert steps[0] == steps[2] == steps[3] > 10 * steps[1]


# ---- DIANA ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha_p", [1.0, 0.5, 1 / math.sqrt(400), 2 / (1 + math.sqrt(20)), 1e-4])
@pytest.mark.parametrize("mu", [0.0, 1e-3, 1.0, 10.0])
def test_the_general_form_with_one_over_alpha_p_is_that_of_quant_p(alpha_p: float, mu: float) -> None:
    quant, general = theory.diana_quant(10.0, mu, 5, alpha_p), theory.diana(10.0, mu, 5, 1 / alpha_p - 1)
    for name in ("alpha", "gamma", "factor", "noise", "c"):
        assert getattr(quant, name) == pytest.approx(getattr(general, name), rel=1e-9, abs=1e-12), name


def test_diana_by_hand() -> None:
    # alpha_p = 1/4: alpha = 1/8, c = 4 * 3/4 * 16/2 = 24, c alpha = 3; 2/((19 + 1) * 4) = 1/40 is below alpha/mu = 1/8
    assert theory.diana_quant(19.0, 1.0, 2, 0.25) == Diana(0.125, 0.025, 24.0, 0.975, 0.025**2 * 3.5)
    # well conditioned: the memories are what is slow, gamma = alpha/mu
    assert theory.diana_quant(2.0, 1.0, 1000, 0.25).gamma == 0.125
    # omega = 1, n = 4, half of the clients: 1/(2 (1 + 6 * 3/4)), c = 12/(4 * 1/2 * 1/2), noise (1 + 15)/4 gamma^2
    found = theory.diana_convex(2.0, 1.0, 4, 1.0, omega_pp=3.0, share=0.5)
    assert found == Diana(0.5, 1 / 11, 12.0, 10 / 11, 4 / 121)


def test_diana_without_compression_is_gradient_descent() -> None:
    assert theory.diana(10.0, 1.0, 1, 0.0).gamma == 2 / 11
    assert theory.diana(10.0, 0.0, 1, 0.0).gamma == 1 / 10
    assert theory.diana_convex(10.0, 1.0, 1, 0.0).gamma == 1 / 10
    # as good as without, for very many clients
    assert theory.diana(10.0, 1.0, 1e12, 3.0).gamma == pytest.approx(min(1 / 8, 2 / 11), rel=1e-9)


def test_the_bound_adds_up_the_noise_of_its_rounds() -> None:
    rates = theory.diana_quant(10.0, 1.0, 5, 0.25)
    v = 7.0
    for k in range(30):
        assert theory.diana_bound(rates, 7.0, k, 0.5) == pytest.approx(v, rel=1e-12)
        v = rates.factor * v + rates.noise * 0.5
    limit = rates.gamma / 1.0 * (1 + 5 * rates.c * rates.alpha) * 0.5 / 5  # (gamma/mu)(1 + n c alpha) sigma^2/n
    assert theory.diana_bound(rates, 7.0, 10_000, 0.5) == pytest.approx(limit, rel=1e-12)
    assert theory.diana_bound(rates, 7.0, 10_000) < 1e-100
    flat = theory.diana_quant(10.0, 0.0, 5, 0.25)
    assert theory.diana_bound(flat, 7.0, 10, 0.5) == pytest.approx(7.0 + 10 * flat.noise * 0.5, rel=1e-12)


def quant(v: Vector, p: float) -> Outcomes:
    """Every value of Quant_p(v) with its probability: ||v||_p sign(v_j) or 0."""
    norm = float(np.linalg.norm(v, p))
    if norm == 0:
        return [(1.0, v)]
    found = []
    for kept in itertools.product((0.0, 1.0), repeat=len(v)):
        xi, odds = np.array(kept), np.abs(v) / norm
        found.append((float(np.prod(np.where(xi == 1, odds, 1 - odds))), norm * np.sign(v) * xi))
    return found


def everyone(n: int) -> Iterator[tuple[float, tuple[int, ...], float]]:
    """(probability, who answers, what a sum over them is multiplied by)."""
    yield 1.0, tuple(range(n)), 1.0


def fixed(n: int, s: int) -> Iterator[tuple[float, tuple[int, ...], float]]:
    for who in itertools.combinations(range(n), s):
        yield 1 / math.comb(n, s), who, n / s


def bernoulli(n: int, s: float) -> Iterator[tuple[float, tuple[int, ...], float]]:
    for size in range(n + 1):
        for who in itertools.combinations(range(n), size):
            yield (s / n) ** size * (1 - s / n) ** (n - size), who, n / s


class Problem:
    """f_i(x) = (x - b_i)^T A_i (x - b_i)/2 in two dimensions, weights w_i; the state is drawn anew each time."""

    def __init__(self, rng: np.random.Generator, weights: Sequence[float], lowest: Sequence[float], top: float) -> None:
        self.rng, self.weights, n = rng, np.array(weights), len(weights)
        turns = np.linalg.qr(rng.normal(size=(n, 2, 2)))[0]
        values = np.stack([np.array(lowest), np.full(n, top)], axis=1)
        self.a = np.einsum("nij,nj,nkj->nik", turns, values, turns)
        b = rng.normal(size=(n, 2))
        mean = np.einsum("n,nij->ij", self.weights, self.a)
        self.mu = float(np.linalg.eigvalsh(mean)[0])
        self.b = b - np.linalg.solve(mean, np.einsum("n,nij,nj->i", self.weights, self.a, b))  # the minimum at 0
        self.h_star = self.gradients(np.zeros(2))
        assert np.abs(self.weights @ self.h_star).max() < 1e-12

    def gradients(self, x: Vector) -> Vector:
        return np.asarray(np.einsum("nij,nj->ni", self.a, x - self.b))

    def state(self) -> tuple[Vector, Vector]:
        """x and the memories, at random distances from where they belong."""
        far = np.exp(2 * self.rng.normal(size=2))
        return far[0] * self.rng.normal(size=2), self.h_star + far[1] * self.rng.normal(size=self.h_star.shape)

    def lyapunov(self, x: Vector, h: Vector, rates: Diana) -> float:
        lag = float(self.weights @ np.sum((h - self.h_star) ** 2, axis=1))
        return float(x @ x) + rates.c * rates.gamma**2 * lag

    def expected(self, x: Vector, h: Vector, rates: Diana, p: float, sampling: Any, noise: float) -> float:
        """E V after one round over who answers, all draws, and +-noise on the first coordinate of gradients."""
        total = 0.0
        exact = self.gradients(x)
        for odds, who, scale in sampling:
            for signs in itertools.product((-noise, noise) if noise else (0.0,), repeat=len(who)):
                drawn = [exact[i] + np.array([sign, 0.0]) for i, sign in zip(who, signs, strict=True)]
                share = odds / (2 ** len(who) if noise else 1)
                for outcome in itertools.product(*(quant(g - h[i], p) for i, g in zip(who, drawn, strict=True))):
                    after, estimate = h.copy(), self.weights @ h
                    for i, (_, m) in zip(who, outcome, strict=True):
                        after[i] = h[i] + rates.alpha * m
                        estimate = estimate + scale * self.weights[i] * m
                    chance = share * math.prod(part for part, _ in outcome)
                    total += chance * self.lyapunov(x - rates.gamma * estimate, after, rates)
        return total


OMEGA = {2.0: math.sqrt(2) - 1, math.inf: (math.sqrt(2) - 1) / 2}  # 1/alpha_p(2) - 1
WEIGHTS = {"equal": (1 / 3, 1 / 3, 1 / 3), "unequal": (0.6, 0.3, 0.1)}


@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("p", list(OMEGA))
def test_diana_contracts_in_exact_expectation(p: float, weights: str, noise: float) -> None:
    rng, shares = np.random.default_rng(3), WEIGHTS[weights]
    rates = theory.diana(5.0, 1.0, theory.effective_clients(shares), OMEGA[p])
    too_long = Diana(rates.alpha, 2.2 * rates.gamma, rates.c, 1 - 2.2 * rates.gamma, rates.noise)
    broken = 0
    for _ in range(15):
        problem = Problem(rng, shares, (1.0, 1.0, 1.0), 5.0)
        x, h = problem.state()
        bound = theory.diana_bound(rates, problem.lyapunov(x, h, rates), 1, noise**2)
        assert problem.expected(x, h, rates, p, everyone(3), noise) <= bound + 1e-12
        before = problem.lyapunov(x, h, too_long)
        broken += problem.expected(x, h, too_long, p, everyone(3), noise) > theory.diana_bound(
            too_long, before, 1, noise**2
        )
    assert broken  # the inequality is not an empty one


@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("sampling", ["everyone", "fixed", "bernoulli"])
def test_diana_for_convex_clients_contracts_in_exact_expectation(sampling: str, weights: str, noise: float) -> None:
    """No f_i but one is strongly convex; two of three answer, or each with probability a half."""
    rng, shares, p = np.random.default_rng(4), WEIGHTS[weights], 2.0
    omega, omega_pp, s = OMEGA[p], None, 3.0
    if sampling == "fixed":
        omega_pp, s = theory.omega_pp_fixed(omega, 3, 2), 2.0
    elif sampling == "bernoulli":
        omega_pp, s = theory.omega_pp_bernoulli(omega, 3, 1.5), 1.5
    draws = {"everyone": everyone(3), "fixed": fixed(3, 2), "bernoulli": bernoulli(3, 1.5)}
    who = list(draws[sampling])
    for _ in range(10):
        problem = Problem(rng, shares, (0.0, 0.0, 1.0), 5.0)
        rates = theory.diana_convex(
            5.0, problem.mu, theory.effective_clients(shares), omega, omega_pp=omega_pp, share=s / 3
        )
        x, h = problem.state()
        bound = theory.diana_bound(rates, problem.lyapunov(x, h, rates), 1, noise**2)
        assert problem.expected(x, h, rates, p, who, noise) <= bound + 1e-12


def test_without_strong_convexity_diana_falls_by_the_gradients() -> None:
    rng, shares = np.random.default_rng(5), WEIGHTS["equal"]
    rates = theory.diana(5.0, 0.0, 3, OMEGA[2.0])
    for _ in range(15):
        problem = Problem(rng, shares, (0.0, 0.0, 0.0), 5.0)
        x, h = problem.state()
        gained = rates.gamma / 5.0 * float(shares @ np.sum((problem.gradients(x) - problem.h_star) ** 2, axis=1))
        expected = problem.expected(x, h, rates, 2.0, everyone(3), 0.0)
        assert expected <= problem.lyapunov(x, h, rates) - gained + 1e-12


def error_of_the_mean(differences: Vector, sampling: Any) -> float:
    """E||(1/n) scale sum_S C(d_i) - mean d_i||^2 with C = RandK, K = 1 of two, times 2: E||C(d) - d||^2 = ||d||^2."""
    n, total = len(differences), 0.0
    for odds, who, scale in sampling:
        for kept in itertools.product((0, 1), repeat=len(who)):
            estimate = np.zeros(2)
            for i, j in zip(who, kept, strict=True):
                estimate[j] += scale * 2 * differences[i, j] / n
            total += odds / 2 ** len(who) * float(np.sum((estimate - differences.mean(axis=0)) ** 2))
    return total


@pytest.mark.parametrize(("n", "s"), [(2, 1), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_the_variance_of_partial_participation_over_every_outcome(n: int, s: int) -> None:
    rng = np.random.default_rng(n + 10 * s)
    differences = rng.normal(size=(n, 2))
    unit = float(np.mean(np.sum(differences**2, axis=1))) / n
    assert error_of_the_mean(differences, bernoulli(n, s)) == pytest.approx(
        theory.omega_pp_bernoulli(1.0, n, s) * unit, rel=1e-12
    )
    assert error_of_the_mean(differences, fixed(n, s)) <= theory.omega_pp_fixed(1.0, n, s) * unit + 1e-12
    differences -= differences.mean(axis=0)  # then the bound is met
    unit = float(np.mean(np.sum(differences**2, axis=1))) / n
    assert error_of_the_mean(differences, fixed(n, s)) == pytest.approx(
        theory.omega_pp_fixed(1.0, n, s) * unit, rel=1e-12
    )


@pytest.mark.parametrize("n", [1, 7])
def test_when_all_answer_participation_adds_nothing(n: int) -> None:
    assert theory.omega_pp_bernoulli(2.5, n, n) == 2.5
    assert theory.omega_pp_fixed(2.5, n, n) == 2.5


def test_effective_clients() -> None:
    assert theory.effective_clients([2.0] * 8) == 8
    assert theory.effective_clients([5.0, 0.0]) == 1
    assert theory.effective_clients([0.5, 0.3, 0.2]) == 2


# ---- EF-BV ------------------------------------------------------------------------------------


def test_ef_bv_at_its_ends() -> None:
    for omega in (0.0, 0.125, 3.0):  # unbiased: C/(1 + omega), alpha = 1/(1 + omega)
        rate, server_rate, r = theory.ef_bv(0.0, omega, 1)
        assert rate == server_rate == 1 / (1 + omega)
        assert r == pytest.approx(omega / (1 + omega), abs=1e-15)
    assert theory.ef_bv(0.6, 0.0, 9) == (1.0, 1.0, 0.36)  # deterministic: EF21, r = 1 - alpha
    assert theory.ef_bv(0.5, 0.125, 1) == (1.0, 1.0, 0.375)  # clipped: eta^2 + omega
    assert theory.ef_bv(0.0, 3.0, 1e12).server_rate == pytest.approx(1.0)  # DIANA's nu, in the limit


@given(st.floats(0.0, 0.999), st.floats(0.0, 100.0), st.floats(0.0, 1.0))
def test_no_other_rate_of_ef_bv_contracts_more(eta: float, omega: float, other: float) -> None:
    rate, server_rate, r = theory.ef_bv(eta, omega, 3)
    assert r <= (1 - other + other * eta) ** 2 + other**2 * omega + 1e-12
    assert r < 1
    if rate < 1:
        assert r == pytest.approx(omega / ((1 - eta) ** 2 + omega), rel=1e-9)
    assert rate <= server_rate <= 1


def test_ef_bv_contracts_what_it_is_for() -> None:
    """C(x) = Top-1 or RandK-1 times 2, even odds, in two dimensions: eta and omega over all of a circle."""
    turns = np.linspace(0, math.pi, 2001)
    eta_sq = omega = 0.0
    errors = []

    def outcomes(x: Vector) -> Outcomes:
        top = np.where(np.abs(x) == np.abs(x).max(), x, 0.0)
        return [(0.5, top), (0.25, np.array([2 * x[0], 0.0])), (0.25, np.array([0.0, 2 * x[1]]))]

    for turn in turns:
        x = np.array([math.cos(turn), math.sin(turn)])
        mean = np.asarray(sum(odds * c for odds, c in outcomes(x)))
        eta_sq = max(eta_sq, float(np.sum((mean - x) ** 2)))
        omega = max(omega, sum(odds * float(np.sum((c - mean) ** 2)) for odds, c in outcomes(x)))
    rate, _, r = theory.ef_bv(math.sqrt(eta_sq), omega, 1)
    for turn in turns:
        x = np.array([math.cos(turn), math.sin(turn)])
        errors.append(sum(odds * float(np.sum((x - rate * c) ** 2)) for odds, c in outcomes(x)))
    assert 0 < rate < 1
    assert max(errors) <= r + 1e-12


# ---- what is refused, what is said ------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.ef21_step(None, 1.0, 0.5), "L is missing, expected a finite number above 0: give the constant"),
        (lambda: theory.ef21_step(math.nan, 1.0, 0.5), "L is missing"),
        (lambda: theory.ef21_step(1.0, 0.0, 0.5), "L_tilde is 0, expected a finite number above 0"),
        (lambda: theory.ef21_step(1.0, 1.0, 0.0), "alpha is 0, expected a number in (0, 1]"),
        (lambda: theory.theta(1.5), "alpha is 1.5, expected a number in (0, 1]"),
        (lambda: theory.beta(-0.5), "alpha is -0.5, expected a number in (0, 1]"),
        (lambda: theory.layerwise_step(math.inf, [1.0], [1.0]), "L is inf, expected a finite number above 0"),
        (lambda: theory.layerwise_step(1.0, [1.0, None], [1.0, 0.5]), "L_layers[1] is missing"),
        (lambda: theory.layerwise_steps(1.0, [1.0], [0.0]), "alphas[0] is 0, expected a number in (0, 1]"),
        (lambda: theory.layerwise_steps(1.0, [1.0], [1.0, 1.0]), "L_layers has 1, alphas has 2 entries"),
        (lambda: theory.layerwise_steps(1.0, [], []), "expected one for each, and at least one"),
        (lambda: theory.diana(1.0, -1.0, 1, 0.0), "mu is -1, expected a finite number, 0 or more"),
        (lambda: theory.diana(1.0, 2.0, 1, 0.0), "mu is 2, expected at most L = 1"),
        (lambda: theory.diana(1.0, 0.0, 0.5, 0.0), "n is 0.5, expected a finite number, 1 or more"),
        (lambda: theory.diana(1.0, 0.0, 1, -0.1), "omega is -0.1, expected a finite number, 0 or more"),
        (lambda: theory.diana_quant(1.0, 0.0, 1, 2.0), "alpha_p is 2, expected a number in (0, 1]"),
        (lambda: theory.diana_convex(1.0, 0.0, 1, 1.0, share=0.0), "share is 0, expected a number in (0, 1]"),
        (lambda: theory.omega_pp_bernoulli(1.0, 2, 3), "s is 3, expected at most n = 2"),
        (lambda: theory.omega_pp_fixed(1.0, 2, 0), "s is 0, expected a finite number above 0"),
        (lambda: theory.omega_pp_fixed(1.0, 2, 1.5), "s of n clients is 1.5 of 2, expected whole numbers"),
        (lambda: theory.ef_bv(1.0, 1.0, 1), "eta is 1, expected a number in [0, 1)"),
        (lambda: theory.effective_clients([0.0, 0.0]), "weights are all 0, expected one above 0"),
        (lambda: theory.effective_clients([1.0, -1.0]), "weights[1] is -1, expected a finite number, 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert said in str(error.value)


def test_all_problems_are_told_together() -> None:
    with pytest.raises(ConfigError) as error:
        theory.diana(None, -1.0, 0, math.nan)
    assert [problem.split(" is ")[0] for problem in error.value.problems] == ["L", "mu", "n", "omega"]


def test_the_page_names_every_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    functions = [name for name in theory.__all__ if name[0].islower()]
    assert [name for name in functions if f"`{name}" not in text] == []
