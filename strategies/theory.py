"""Step sizes and memory rates that theory allows, from the constants of a problem; floats in, floats out.

docs/step-sizes.md says when each of them holds, and whose statement it is. Symbols: f = sum_m w_m f_m over n clients;
L, L_tilde and mu as in clients/tasks/smoothness.py; alpha contractive, E||C(x) - x||^2 <= (1 - alpha) ||x||^2; omega
unbiased, E||C(x) - x||^2 <= omega ||x||^2. Weights that are not equal: n becomes `effective_clients(weights)`.

All raise ConfigError, with every constant that is missing (None, NaN) or makes no sense.
"""

# ruff: noqa: N803, N806  (L is the theory's name)

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compression.errors import ConfigError

__all__ = [
    "Diana",
    "EfBv",
    "beta",
    "diana",
    "diana_bound",
    "diana_convex",
    "diana_quant",
    "ef21_step",
    "ef_bv",
    "effective_clients",
    "layerwise_step",
    "layerwise_steps",
    "omega_pp_bernoulli",
    "omega_pp_fixed",
    "theta",
]

Number = float | None
_POSITIVE: tuple[Callable[[float], bool], str] = (lambda v: v > 0, "a finite number above 0")
_NOT_NEGATIVE: tuple[Callable[[float], bool], str] = (lambda v: v >= 0, "a finite number, 0 or more")
_SHARE: tuple[Callable[[float], bool], str] = (lambda v: 0 < v <= 1, "a number in (0, 1]")
_COUNT: tuple[Callable[[float], bool], str] = (lambda v: v >= 1, "a finite number, 1 or more")
_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "L": _POSITIVE,
    "L_tilde": _POSITIVE,
    "L_layers": _POSITIVE,
    "mu": _NOT_NEGATIVE,
    "n": _COUNT,
    "s": _POSITIVE,
    "k": _NOT_NEGATIVE,
    "alpha": _SHARE,
    "alphas": _SHARE,
    "alpha_p": _SHARE,
    "share": _SHARE,
    "omega": _NOT_NEGATIVE,
    "omega_pp": _NOT_NEGATIVE,
    "eta": (lambda v: 0 <= v < 1, "a number in [0, 1)"),
    "weights": _NOT_NEGATIVE,
    "v0": _NOT_NEGATIVE,
    "sigma_sq": _NOT_NEGATIVE,
}


def _problem(name: str, what: str, value: Number) -> str:
    fits, expected = _RULES[name]
    if value is None or math.isnan(value):
        return f"{what} is missing, expected {expected}: give the constant, or the step itself"
    return "" if math.isfinite(value) and fits(value) else f"{what} is {value:g}, expected {expected}"


def _read(**given: Number) -> tuple[float, ...]:
    """The constants, as given, once all of them fit."""
    problems = [problem for name, value in given.items() if (problem := _problem(name, name, value))]
    values = {name: float(value) for name, value in given.items() if value is not None}
    if not problems:
        if "mu" in values and values["mu"] > values["L"]:
            problems.append(f"mu is {values['mu']:g}, expected at most L = {values['L']:g}")
        if "s" in values and values["s"] > values["n"]:
            problems.append(f"s is {values['s']:g}, expected at most n = {values['n']:g}")
    if problems:
        raise ConfigError(problems)
    return tuple(values.values())


def _read_all(**given: Sequence[Number]) -> tuple[tuple[float, ...], ...]:
    """The same of sequences, which must be equally long."""
    problems = [
        problem
        for name, values in given.items()
        for at, value in enumerate(values)
        if (problem := _problem(name, f"{name}[{at}]", value))
    ]
    lengths = {name: len(values) for name, values in given.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        problems.insert(0, f"{found} entries, expected one for each, and at least one")
    if problems:
        raise ConfigError(problems)
    return tuple(tuple(float(value) for value in values if value is not None) for values in given.values())


def effective_clients(weights: Sequence[Number]) -> float:
    """1/max_i w_i of the weights scaled to sum 1: what stands for n where weights are not equal.

    Source: our statement.

    >>> effective_clients([1, 1, 2])
    2.0
    """
    (found,) = _read_all(weights=weights)
    if not max(found) > 0:
        raise ConfigError("weights are all 0, expected one above 0 at least")
    return math.fsum(found) / max(found)


# ---- EF21 -------------------------------------------------------------------------------------


def theta(alpha: Number) -> float:
    """1 - sqrt(1 - alpha): what EF21's memory error loses a round; without cancellation.

    Source: Richtarik, Sokolov, Fatkhullin, EF21 (2021).
    """
    (alpha,) = _read(alpha=alpha)
    return alpha / (1 + math.sqrt(1 - alpha))


def beta(alpha: Number) -> float:
    """(1 - alpha)/theta: what it gains for each ||grad f(x+) - grad f(x)||^2. Source: as `theta`."""
    (alpha,) = _read(alpha=alpha)
    return (1 - alpha) / theta(alpha)


def _lag(alpha: float) -> float:
    """sqrt(beta/theta) = (1 + sqrt(1 - alpha))/alpha - 1, 0 for alpha = 1."""
    root = math.sqrt(1 - alpha)
    return root * (1 + root) / alpha


def ef21_step(L: Number, L_tilde: Number, alpha: Number) -> float:
    """gamma = 1/(L + L_tilde sqrt(beta/theta)), EF21's largest step; L may be L_tilde, if unknown.

    Args:
        L: smoothness of f.
        L_tilde: sqrt(sum_i w_i L_i^2) of the clients.
        alpha: worst contraction of any message ever sent; times p, where a client answers with probability p.

    Source: Richtarik, Sokolov, Fatkhullin, EF21 (2021); alpha p is our statement.

    >>> ef21_step(1.0, 1.0, 0.19)  # sqrt(1 - alpha) = .9, theta = .1, beta = 8.1
    0.1
    """
    L, L_tilde, alpha = _read(L=L, L_tilde=L_tilde, alpha=alpha)
    return 1 / (L + L_tilde * _lag(alpha))


def layerwise_step(L: Number, L_layers: Sequence[Number], alphas: Sequence[Number]) -> float:
    """gamma = 1/(L + sqrt(sum_i (beta_i/theta_i) L_i^2)): one step for all layers, operators that change.

    Args:
        L: smoothness of f.
        L_layers: L_i with ||grad_i f(x) - grad_i f(y)|| <= L_i ||x - y|| for all x, y (whole vectors); of many
            clients sqrt(sum_m w_m L_mi^2).
        alphas: worst contraction of each layer in any round.

    Source: our statement.

    >>> layerwise_step(2.0, [3.0, 4.0], [0.75, 0.75])  # beta = theta
    0.14285714285714285
    """
    (L,) = _read(L=L)
    return 1 / (L + math.sqrt(math.fsum(_layer_costs(L_layers, alphas))))


def _layer_costs(L_layers: Sequence[Number], alphas: Sequence[Number]) -> list[float]:
    """b_i = (beta_i/theta_i) L_i^2."""
    smooth, contraction = _read_all(L_layers=L_layers, alphas=alphas)
    return [(one * _lag(alpha)) ** 2 for one, alpha in zip(smooth, contraction, strict=True)]


def layerwise_steps(L: Number, L_layers: Sequence[Number], alphas: Sequence[Number]) -> tuple[float, ...]:
    """A step for each layer: of all that keep 1/gamma_j >= L + sum_i gamma_i b_i for every j, the largest product.

    With b_i = (beta_i/theta_i) L_i^2 ascending, the first m layers take the largest step g, the others
    gamma_i = s/(g b_i), where s = (1 + g^2 B)/m, B = b_1 + ... + b_m, and g is the root of
    g L + (N/m)(1 + g^2 B) = 2. (The problem is convex in the logarithms; these are its KKT conditions. m is the one
    that they hold for, above N/2: most layers take g, and only those whose b_i is far above the others take less.)

    Args:
        L, L_layers, alphas: as for `layerwise_step`.

    Returns:
        gamma_i in the order given; their geometric mean is never below `layerwise_step`.

    Source: our statement.

    >>> layerwise_steps(1.0, [1.0, 1.0], [1.0, 1.0])
    (1.0, 1.0)
    """
    (L,) = _read(L=L)
    costs = _layer_costs(L_layers, alphas)
    count, ascending = len(costs), sorted(costs)
    largest, level = 0.0, math.inf
    for m in range(count, count // 2, -1):
        total = math.fsum(ascending[:m])
        room = 2 - count / m
        largest = 2 * room / (L + math.sqrt(L**2 + 4 * room * total * count / m))
        level = (1 + largest**2 * total) / m
        if largest**2 * ascending[m - 1] <= level:
            break
    return tuple(largest if largest**2 * b <= level else level / (largest * b) for b in costs)


# ---- DIANA ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diana:
    """Rates of DIANA and what they promise.

    V^k = ||x^k - x*||^2 + c gamma^2 sum_i w_i ||h_i^k - grad f_i(x*)||^2 obeys
    E V^(k+1) <= factor V^k + noise sigma^2, sigma^2 = sum_i w_i sigma_i^2 the variance of the clients' gradients.

    Args:
        alpha: rate of the memories.
        gamma: step size.
        c: weight of the memories in V.
        factor: 1 where there is no strong convexity.
        noise: a round; in the unit of x squared over a gradient squared.
    """

    alpha: float
    gamma: float
    c: float
    factor: float
    noise: float


def diana(L: Number, mu: Number, n: Number, omega: Number) -> Diana:
    """alpha = 1/(2 (1 + omega)), gamma = min{alpha/mu, 2/((L + mu)(1 + 2 omega/n))}, factor 1 - gamma mu.

    c = 4 omega (1 + omega)/n. With mu = 0, gamma is half of the limit, 1/(L (1 + 2 omega/n)): then
    E V^(k+1) <= V^k - (gamma/L) sum_i w_i ||grad f_i(x^k) - grad f_i(x*)||^2, while at 2/L gradient descent may go
    to and fro for ever.

    Args:
        L: of every f_i (L_max of a task).
        mu: strong convexity of every f_i, 0 for convex.
        n: clients, all of which answer.
        omega: variance of the unbiased operator.

    Source: form of gamma: Mishchenko et al., DIANA (2019), (17); alpha and c, weights and mu = 0: our statement.

    >>> diana(L=10.0, mu=1.0, n=4, omega=3.0).gamma  # min{1/8, 2/(11 * 2.5)}
    0.07272727272727272
    """
    L, mu, n, omega = _read(L=L, mu=mu, n=n, omega=omega)
    return _diana(L, mu, n, 1 / (2 * (1 + omega)), 4 * omega * (1 + omega) / n)


def diana_quant(L: Number, mu: Number, n: Number, alpha_p: Number) -> Diana:
    """`diana` for Quant_p: alpha = alpha_p/2, c = 4 (1 - alpha_p)/(n alpha_p^2), 1 + omega = 1/alpha_p.

    Args:
        L, mu, n: as for `diana`.
        alpha_p: alpha_p(d) of the largest block: 1/d, 1/sqrt(d), 2/(1 + sqrt(d)) for p = 1, 2, inf.

    Source: as `diana`; alpha_p: Mishchenko et al., DIANA (2019).
    """
    L, mu, n, alpha_p = _read(L=L, mu=mu, n=n, alpha_p=alpha_p)
    return _diana(L, mu, n, alpha_p / 2, 4 * (1 - alpha_p) / (n * alpha_p**2))


def _diana(L: float, mu: float, n: float, alpha: float, c: float) -> Diana:
    limit = 2 / ((L + mu) * (1 + c * alpha))
    gamma = min(alpha / mu, limit) if mu > 0 else limit / 2
    return Diana(alpha, gamma, c, 1 - gamma * mu, gamma**2 * (1 / n + c * alpha))


def diana_convex(
    L: Number, mu: Number, n: Number, omega: Number, *, omega_pp: Number = None, share: Number = 1.0
) -> Diana:
    """alpha = 1/(1 + omega), gamma = 1/(L (1 + 6 omega_pp/n)), factor max{1 - gamma mu, 1 - alpha share/2}.

    Asks less than `diana`, f_i need only be convex, and serves partial participation, where only gamma knows of it.
    c = 4 omega_pp/(n alpha share).

    Args:
        L: of every f_i, which are convex.
        mu: strong convexity of f alone; 0: factor 1.
        n: clients, whether they answer or not.
        omega: variance of the unbiased operator.
        omega_pp: `omega_pp_bernoulli` or `omega_pp_fixed`; None: all answer, omega.
        share: of the clients that answer, s/n; 1 where all do.

    Source: our statement (the authors' code has 4 for 6).

    >>> diana_convex(L=1.0, mu=0.5, n=2, omega=1.0).gamma
    0.25
    """
    L, mu, n, omega, omega_pp, share = _read(
        L=L, mu=mu, n=n, omega=omega, omega_pp=omega if omega_pp is None else omega_pp, share=share
    )
    alpha = 1 / (1 + omega)
    gamma = 1 / (L * (1 + 6 * omega_pp / n))
    factor = max(1 - gamma * mu, 1 - alpha * share / 2)
    return Diana(alpha, gamma, 4 * omega_pp / (n * alpha * share), factor, gamma**2 * (1 + 5 * omega_pp) / n)


def diana_bound(rates: Diana, v0: Number, k: Number, sigma_sq: Number = 0.0) -> float:
    """E V^k <= factor^k V^0 + noise sigma^2 (1 + factor + ... + factor^(k-1)).

    For `diana` the sum's limit is the bound (gamma/mu)(1 + n c alpha) sigma^2/n.

    Args:
        rates: of any of the functions above.
        v0: V^0.
        k: rounds, whole.
        sigma_sq: sum_i w_i sigma_i^2.
    """
    v0, k, sigma_sq = _read(v0=v0, k=k, sigma_sq=sigma_sq)
    left = math.pow(rates.factor, k)
    rounds = k if rates.factor == 1 else (1 - left) / (1 - rates.factor)
    return left * v0 + rates.noise * sigma_sq * rounds


def omega_pp_bernoulli(omega: Number, n: Number, s: Number) -> float:
    """(omega + 1) n/s - 1: each client answers by itself with probability s/n, sums are divided by s.

    E||(1/s) sum_S C(d_i) - mean d_i||^2 <= (omega_pp/n) mean ||d_i||^2.

    Args:
        omega: of the operator.
        n: clients.
        s: mean number of those that answer.

    Source: our statement.
    """
    omega, n, s = _read(omega=omega, n=n, s=s)
    return (omega + 1) * n / s - 1


def omega_pp_fixed(omega: Number, n: Number, s: Number) -> float:
    """omega n/s + n (n - s)/(s (n - 1)): s of n clients, drawn without replacement; bound and source as above."""
    omega, n, s = _read(omega=omega, n=n, s=s)
    if not (n.is_integer() and s.is_integer()):
        raise ConfigError(f"s of n clients is {s:g} of {n:g}, expected whole numbers")
    return omega * n / s + (n * (n - s) / (s * (n - 1)) if n > s else 0.0)


# ---- EF-BV ------------------------------------------------------------------------------------


class EfBv(NamedTuple):
    """Rates of EF-BV.

    Args:
        rate: lambda*, of the memories.
        server_rate: nu*, of the mean message in the server's gradient.
        r: contraction of a memory's squared error by rate * C, below 1.
    """

    rate: float
    server_rate: float
    r: float


def ef_bv(eta: Number, omega: Number, n: Number) -> EfBv:
    """lambda* = min((1 - eta)/((1 - eta)^2 + omega), 1), nu* the same with omega/n, and what lambda* makes of errors.

    r = (1 - lambda + lambda eta)^2 + lambda^2 omega; lambda* has the least.

    Args:
        eta: ||E C(x) - x|| <= eta ||x||; 0: unbiased.
        omega: E||C(x) - E C(x)||^2 <= omega ||x||^2; 0: deterministic.
        n: clients with independent operators; 1 where they are not.

    Source: Condat, Yi, Richtarik, EF-BV (2022), class C(eta, omega); formulas: our statement.

    >>> ef_bv(eta=0.0, omega=3.0, n=3)
    EfBv(rate=0.25, server_rate=0.5, r=0.75)
    """
    eta, omega, n = _read(eta=eta, omega=omega, n=n)
    rate = _ef_bv_rate(eta, omega)
    return EfBv(rate, _ef_bv_rate(eta, omega / n), (1 - rate + rate * eta) ** 2 + rate**2 * omega)


def _ef_bv_rate(eta: float, omega: float) -> float:
    return min((1 - eta) / ((1 - eta) ** 2 + omega), 1.0)
