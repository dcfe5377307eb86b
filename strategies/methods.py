"""What the server steps along, and how fast memories follow: EF21, DIANA and their relatives in one engine.

    client: d_i = C(u_i - h_i), h_i += rate d_i        server: g = h + gain mean d_i, h += rate mean d_i

| method    | operator    | rate (lambda)        | gain (nu) | also                                              |
|-----------|-------------|----------------------|-----------|---------------------------------------------------|
| ef21      | contractive | 1                    | 1         |                                                   |
| ef21-sgdm | contractive | 1                    | 1         | v = (1 - eta) v + eta u; d = C(v - h)             |
| econtrol  | contractive | 1                    | 1         | d = C(eta e + u - h); e += u - h - d              |
| ef-bv     | any         | given, or lambda*    | or nu*    |                                                   |
| diana     | unbiased    | 1/(1 + omega), ...   | 1         |                                                   |
| dcgd      | unbiased    | 0                    | 1         | no memory: QSGD, TernGrad, DQGD by their operator |

Clients that are not asked keep h_i. With contractive operators g is the mean of all memories, and an
absent client counts with its old one; with unbiased ones the mean d_i is over those that answered
in time, so that g is unbiased (docs/methods.md). Sources: EF21 and its variants, Richtarik et al. 2021 and
Fatkhullin et al. 2021, 2023; EControl, Gao et al. 2023; EF-BV, Condat et al. 2022; DIANA, Mishchenko et al.
2019; QSGD, Alistarh et al. 2017; TernGrad, Wen et al. 2017; DQGD, Khirirat et al. 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from compression import Layout, guaranteed_alpha, worst_omega
from compression.errors import ConfigError
from compression.quantise import Quantiser
from strategies import theory

if TYPE_CHECKING:
    from strategies.settings import Settings

DEFAULT_ETA: Final = 0.1
RATE_RULES: Final = ("auto", "theory", "blocks")


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table above.

    Args:
        name: in a configuration.
        unbiased: it needs an unbiased operator, and scales by those who answered.
        rated: whether its rate can be chosen; else it is `rate`.
        rate: lambda where it cannot be chosen.
        slot: a model-sized piece of client state beside h, "v" or "e"; "": none.
    """

    name: str
    unbiased: bool = False
    rated: bool = False
    rate: float = 1.0
    slot: str = ""


METHODS: Final = {
    method.name: method
    for method in (
        Method("ef21"),
        Method("ef21-sgdm", slot="v"),
        Method("econtrol", slot="e"),
        Method("ef-bv", rated=True),
        Method("diana", unbiased=True, rated=True),
        Method("dcgd", unbiased=True, rate=0.0),
    )
}


@dataclass(frozen=True, slots=True)
class Engine:
    """The numbers of a run's method; both ends' memories stay equal only while they stay the same.

    Args:
        rate: lambda, of the memories.
        gain: nu, of the estimate.
        scaled: whether the estimate is made of those who answered in time, scaled up to all.
        full_start: a client's first reply moves its memory by all of it, whatever the rate.
    """

    rate: float = 1.0
    gain: float = 1.0
    scaled: bool = False
    full_start: bool = False

    @property
    def is_mean(self) -> bool:
        """Whether the estimate is just the memories' mean after they moved."""
        return not self.scaled and self.rate == self.gain

    def rate_of(self, first: bool) -> float:
        """Rate of a client's reply, by whether it is the first that is accepted."""
        return 1.0 if first and self.full_start else self.rate


class Constants(Protocol):
    """What theory needs to know of f = sum_i w_i f_i, w_i the clients' shares of the examples."""

    @property
    def L(self) -> float:  # noqa: N802
        """Smoothness of f."""

    @property
    def L_tilde(self) -> float:  # noqa: N802
        """sqrt(sum_i w_i L_i^2)."""

    @property
    def L_max(self) -> float:  # noqa: N802
        """The largest L_i."""

    @property
    def mu(self) -> float:
        """Strong convexity of every f_i; 0: none."""

    @property
    def examples(self) -> tuple[int, ...]:
        """Of each client."""


def theory_step(settings: Settings, layout: Layout, constants: Constants) -> float:
    """Gamma, the step along a gradient that the method's theorem allows (theory.py has them and their sources).

    Args:
        settings: checked.
        layout: the agreed layout.
        constants: of the task with the clients there are.

    Raises:
        ConfigError: there is no theorem for these settings, or the constants are of no use.
    """
    s, scheme = settings, settings.scheme()
    n = theory.effective_clients(constants.examples)
    if s.method == "ef21":
        return theory.ef21_step(constants.L, constants.L_tilde, guaranteed_alpha(layout, scheme) * s.fraction)
    omega = worst_omega(layout, scheme) if s.unbiased else 0.0
    if s.method == "diana" and s.memory_rate == "theory" and s.fraction == 1:
        return theory.diana(constants.L_max, constants.mu, n, omega).gamma
    if s.method == "diana" and s.memory_rate == "auto":
        clients = len(constants.examples)
        some = max(1, round(s.fraction * clients))
        of = theory.omega_pp_bernoulli if s.sampling == "poisson" else theory.omega_pp_fixed
        omega_pp = of(omega, clients, some) if s.fraction < 1 else omega
        return theory.diana_convex(constants.L_max, constants.mu, n, omega, omega_pp=omega_pp, share=s.fraction).gamma
    if s.method == "dcgd" and s.operator == "identity" and s.fraction == 1:
        return 1.0 / constants.L
    raise ConfigError(
        f"server-step is 'theory': there is none for method {s.method!r} with operator {s.operator!r}, memory-rate "
        f"{s.memory_rate!r} and fraction {s.fraction:g}; expected ef21, diana with memory-rate auto or (fraction 1) "
        "theory, or dcgd with identity; or give server-lr and server-step = given"
    )


def engine(settings: Settings, layout: Layout, clients: int = 1) -> Engine:
    """The numbers that a run's settings stand for.

    Args:
        settings: checked.
        layout: the agreed layout; omega depends on it.
        clients: their number, for nu*.

    Raises:
        ConfigError: a rule that does not fit the operator.
    """
    method, full = METHODS[settings.method], settings.start == "full"
    if not method.rated:
        return Engine(method.rate, 1.0, method.unbiased, full)
    rule = settings.memory_rate
    if method.unbiased:
        return Engine(_diana_rate(settings, layout), 1.0, True, full)
    if rule in RATE_RULES:
        return Engine(*_ef_bv_rates(settings, layout, clients), False, full)
    return Engine(float(rule), settings.estimate_rate or 1.0, False, full)


def _diana_rate(settings: Settings, layout: Layout) -> float:
    """Alpha of DIANA: as given, 1/(1 + omega), half of that (Corollary 4.5), or the least 1/sqrt(d_l) (its advice)."""
    rule, scheme = settings.memory_rate, settings.scheme()
    if rule == "auto":
        return 1.0 / (1.0 + worst_omega(layout, scheme))
    if rule == "theory":
        return 0.5 / (1.0 + worst_omega(layout, scheme))
    if rule != "blocks":
        return float(rule)
    if not isinstance(scheme.made, Quantiser):
        raise ConfigError(
            f"memory-rate is 'blocks', and operator {settings.operator!r} has none: expected quant, terngrad, qsgd or "
            "one-bit-qsgd; or memory-rate = auto"
        )
    sizes = [min(scheme.made.block, layout.layers[at].size) for at in layout.compressed]
    return 1.0 / math.sqrt(max([*sizes, 1]))


def _ef_bv_rates(settings: Settings, layout: Layout, clients: int) -> tuple[float, float]:
    """lambda*, nu* of EF-BV for the operator's class C(eta, omega)."""
    scheme = settings.scheme()
    if scheme.contractive:
        return theory.ef_bv(math.sqrt(1.0 - guaranteed_alpha(layout, scheme)), 0.0, clients)[:2]
    return theory.ef_bv(0.0, worst_omega(layout, scheme), clients)[:2]
