"""EF21 as in algorithms.md section 3, through real messages, against its own theory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from compression import Scheme, accumulate, compress, decode, difference, guaranteed_alpha, move, smallest_bytes
from tests.compression.support import flat_layout, header_of

WORKERS = 5
SIZES = (24, 9, 15)
CUTS = np.cumsum(SIZES)[:-1]
Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LeastSquares:
    """f_m(x) = ||A_m x - b_m||^2 / (2 n), f their mean."""

    a: Vector
    b: Vector

    @classmethod
    def draw(cls, seed: int) -> LeastSquares:
        rng = np.random.default_rng(seed)
        d = sum(SIZES)
        scales = np.exp(rng.standard_normal(d))
        return cls(rng.standard_normal((WORKERS, 20, d)) * scales, rng.standard_normal((WORKERS, 20)))

    def loss(self, x: Vector) -> float:
        return float(np.mean((self.a @ x - self.b) ** 2) / 2)

    def gradients(self, x: Vector) -> list[Vector]:
        return [a.T @ (a @ x - b) / 20 for a, b in zip(self.a, self.b, strict=True)]

    def smoothness(self) -> tuple[float, list[float]]:
        """L of f, and for each layer L_i^2 = mean over workers of L_(m,i)^2."""
        hessians = [a.T @ a / 20 for a in self.a]
        rows = [[np.linalg.norm(part, 2) ** 2 for part in np.split(h, CUTS)] for h in hessians]
        return float(np.linalg.norm(np.mean(hessians, axis=0), 2)), [float(v) for v in np.mean(rows, axis=0)]

    def minimum(self) -> float:
        x, *_ = np.linalg.lstsq(self.a.reshape(-1, sum(SIZES)), self.b.reshape(-1), rcond=None)
        return self.loss(np.asarray(x))


@pytest.mark.parametrize("allocation", ["uniform", "hull"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ef21_descends_its_lyapunov_function_every_round(seed: int, allocation: str) -> None:
    problem = LeastSquares.draw(seed)
    layout = flat_layout(SIZES, "float64")
    scheme = Scheme(allocation=allocation, values="fp64", floor=2)
    assert guaranteed_alpha(layout, scheme) == 2 / max(SIZES)
    smooth, smooth_sq = problem.smoothness()
    theta = [1 - np.sqrt(1 - 2 / d) for d in SIZES]
    beta = [(1 - 2 / d) / t for d, t in zip(SIZES, theta, strict=True)]
    gamma = 1 / (smooth + np.sqrt(sum(b * s / t for b, s, t in zip(beta, smooth_sq, theta, strict=True))))
    floor, rng = problem.minimum(), np.random.default_rng(seed)
    x = np.zeros(sum(SIZES))
    memories = [[np.zeros(d) for d in SIZES] for _ in range(WORKERS)]
    mirrors = [[np.zeros(d) for d in SIZES] for _ in range(WORKERS)]
    sums = [np.zeros(d) for d in SIZES]

    def lyapunov() -> float:
        lag = 0.0
        for gradient, memory in zip(problem.gradients(x), memories, strict=True):
            for t, g, h in zip(theta, np.split(gradient, CUTS), memory, strict=True):
                lag += gamma / (2 * t) * float(np.sum((h - g) ** 2)) / WORKERS
        return problem.loss(x) - floor + lag

    def exchange() -> None:
        """Every worker sends C(gradient - memory) in one message; both ends move."""
        for worker, gradient in enumerate(problem.gradients(x)):
            delta = [difference(g, h) for g, h in zip(np.split(gradient, CUTS), memories[worker], strict=True)]
            header = header_of(layout, round=step)
            least = smallest_bytes(layout, header, Scheme(values="fp64", floor=2))
            sent = compress(layout, header, delta, None, scheme, int(rng.integers(least, least + 120)))
            assert not sent.miss
            assert sent.alpha >= 2 / max(SIZES)
            for at, (mine, theirs) in enumerate(zip(sent.updates, decode(layout, sent.payload).updates, strict=True)):
                assert theirs is not None
                move(memories[worker][at], mine)
                move(mirrors[worker][at], theirs)
                accumulate(sums[at], theirs, 1 / WORKERS)
                assert memories[worker][at].tobytes() == mirrors[worker][at].tobytes()

    step = 0
    exchange()
    start = before = lyapunov()
    for step in range(1, 150):
        norm_sq = float(np.sum(np.mean(problem.gradients(x), axis=0) ** 2))
        x = x - gamma * np.concatenate(sums)
        exchange()
        after = lyapunov()
        assert after <= before - gamma / 2 * norm_sq + 1e-12 * start, step
        before = after
    assert before < 0.8 * start
    for at in range(len(SIZES)):
        assert sums[at] == pytest.approx(np.mean([m[at] for m in mirrors], axis=0), rel=1e-9, abs=1e-12)


def test_ef21_with_identity_is_gradient_descent() -> None:
    problem = LeastSquares.draw(7)
    layout = flat_layout(SIZES, "float64")
    gamma = 1 / problem.smoothness()[0]
    x = plain = np.zeros(sum(SIZES))
    memories = [[np.zeros(d) for d in SIZES] for _ in range(WORKERS)]
    sums = [np.zeros(d) for d in SIZES]
    for step in range(100):
        for gradient, memory in zip(problem.gradients(x), memories, strict=True):
            delta = [difference(g, h) for g, h in zip(np.split(gradient, CUTS), memory, strict=True)]
            sent = compress(layout, header_of(layout, round=step), delta, None, Scheme("identity"), None)
            for at, update in enumerate(decode(layout, sent.payload).updates):
                assert update is not None
                move(memory[at], update)
                accumulate(sums[at], update, 1 / WORKERS)
        x = x - gamma * np.concatenate(sums)
        plain = plain - gamma * np.mean(problem.gradients(plain), axis=0)
        assert x == pytest.approx(plain, rel=1e-9, abs=1e-12)


def test_a_step_far_beyond_theory_does_not_descend() -> None:
    """The descent above is not vacuous: the same loop with 2.5 / L and dense messages climbs."""
    problem = LeastSquares.draw(0)
    gamma = 2.5 / problem.smoothness()[0]
    x = np.zeros(sum(SIZES))
    losses = []
    for _ in range(30):
        x = x - gamma * np.mean(problem.gradients(x), axis=0)
        losses.append(problem.loss(x))
    assert losses[-1] > losses[0]
