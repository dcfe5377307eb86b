"""Every setting of the Kimad strategy, in one frozen object."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from bandwidth import ESTIMATORS
from bandwidth.faults import FaultPlan
from compression import Scheme, parse_floors
from compression.arguments import arguments
from compression.errors import ConfigError, unknown_name
from compression.operators import NAMED, OPERATORS
from strategies.methods import METHODS, RATE_RULES
from strategies.prox import make_prox
from strategies.step import FloatArray, Proximal, ServerOptimizer

LATE: Final = ("absorb", "drop")
EVALUATE: Final = ("server", "clients", "none")
WEIGHTS: Final = ("examples", "uniform")
SAMPLING: Final = ("fraction", "poisson")
BUDGET_RATES: Final = ("estimated", "oracle", "mean")
DURABILITY: Final = ("process", "full")
ON_FAILURE: Final = ("drop", "retry")
START: Final = ("zero", "full")
SERVER_STEPS: Final = ("given", "theory")
PROX_SCALING: Final = ("exact", "paper")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run; wrong ones raise ConfigError, all problems together.

    Args:
        experiment: id of the run; client state of another run is never touched. "": that of
            Flower's run, so that a run never meets what another has left.
        seed: seed of every draw of the run.
        time_budget_s: t, seconds a round may take each client from receipt to arrival.
        deadline_s: seconds after which a round no longer waits; None: it waits for all.
        late: whether a reply after the deadline is absorbed in a later round or dropped.
        give_up_after: time budgets after which a silent client may be asked again.
        on_failure: "drop": a client that fails is left out of the round, and its reply is undone;
            "retry": it is asked the same again until it answers, and sends the reply it has stored.
        mirrors: whether the server keeps a copy of every memory (strategies/mirrors.py); without,
            a client that leaves stays in the sums, and a lost memory takes no further part.
        leave_after: rounds that a client's node may be gone before its memory leaves the sums; 0: any number.
        checkpoint_every: rounds between checkpoints, where the strategy has a folder; 0: none.
        method: how memories and estimate are made (strategies/methods.py).
        memory_rate: lambda of diana and ef-bv: a number, or "auto", "theory" or "blocks".
        estimate_rate: nu of ef-bv where its memory_rate is a number; None: 1.
        eta: of ef21-sgdm and econtrol; None: 0.1.
        start: "zero": memories begin at zero; "full": with a client's first update, sent uncut.
        operator, allocation, values, floor: how messages are cut (compression.Scheme).
        codec: "auto" or "portable" (compression.Scheme): whether zstd may be used on index streams.
        operator_args: arguments of an operator with levels or factors, e.g. "bits = 4, block = 256".
        floors: floors of single layers, e.g. "conv1*=10, fc*=0.01" (compression.parse_floors).
        errors: what knapsack adds up over the layers: "squared" errors or "plain" ones.
        unit: what a budget counts and a link carries: "bytes", or "coordinates" as in the Kimad
            paper's toy, where one value takes as long as one byte and nothing else counts.
        ratio: a fixed ratio K/d instead of a byte budget; None: Kimad's budget.
        budget_rate: the rate a budget is made from: "estimated"; "oracle", what the link will
            really carry until the budget's end; "mean", the link's long-run mean, so that each
            client has a static budget. The last two need a network that knows its links.
        estimator: how the uplink rate is predicted (bandwidth.ESTIMATORS).
        initial_rate_bps: uplink rate assumed of a client that was never measured, bit/s.
        cap_bytes: most bytes of one reply; None: no cap.
        max_bytes_per_day: most bytes a client may send and receive in a day of the run's clock;
            None: no limit. A node's own configuration may set a lower one for its client.
        sampling: "fraction": that share of the clients in each round; "poisson": each client by
            itself with that probability, so that a round may have none.
        fraction: share of the known clients asked in a round.
        min_clients: how many clients must be known before the first round.
        weights: clients weigh by "examples" or "uniform".
        whole: fnmatch patterns of arrays that travel whole, outside the memories.
        whole_every: those and all arrays that are not floating point travel every k rounds.
        server_optimizer: class of torch.optim applied to the mean update.
        server_optimizer_args: further arguments of it, e.g. "momentum = 0.9".
        server_lr: its learning rate; SGD at 1.0 is FedAvg's step.
        server_step: "given": server_lr; "theory": the step of the method's theorem (docs/step-sizes.md),
            for which the strategy must be given the task's constants.
        prox, prox_args: the proximal step of a regulariser (strategies/prox.py), after SGD only.
        prox_scaling: "exact": its gamma grows with momentum as the steps do, by 1/(1 - momentum), so that
            the run ends where f + R is least; "paper": as DIANA's Algorithm 1 is printed, which ends where
            f + (1 - momentum) R is.
        update_scale: an update is about so many gradients: local learning rate times local steps.
        evaluate: on the server's test set, on the clients, or not at all.
        evaluate_every: rounds between evaluations.
        target_accuracy: accuracy at which the run may stop; None: none.
        target_loss: loss at which the run may stop; None: none.
        stop_at_target: whether it stops at either.
        stop_after_s: run-clock seconds after which the run stops; None: never.
        durability: "process" or "full": whether clients fsync their state.
        faults: shares of messages that go wrong, by a seed (bandwidth/faults.py); "": none.
        isolate_rng: whether global random generators are seeded around the user's code, and put back.
        forget: whether clients delete this run's state at its end.
    """

    experiment: str = ""
    seed: int = 1
    time_budget_s: float = 2.0
    deadline_s: float | None = None
    late: str = "absorb"
    give_up_after: float = 3.0
    on_failure: str = "drop"
    mirrors: bool = True
    leave_after: int = 50
    checkpoint_every: int = 10
    method: str = "ef21"
    memory_rate: str = "auto"
    estimate_rate: float | None = None
    eta: float | None = None
    start: str = "zero"
    operator: str = "topk"
    operator_args: str = ""
    codec: str = "auto"
    allocation: str = "hull"
    values: str = "auto"
    floor: int = 1
    floors: str = ""
    errors: str = "squared"
    unit: str = "bytes"
    ratio: float | None = None
    budget_rate: str = "estimated"
    estimator: str = "last"
    initial_rate_bps: float = 1e6
    cap_bytes: int | None = None
    max_bytes_per_day: int | None = None
    sampling: str = "fraction"
    fraction: float = 1.0
    min_clients: int = 1
    weights: str = "examples"
    whole: tuple[str, ...] = ()
    whole_every: int = 1
    server_optimizer: str = "SGD"
    server_optimizer_args: str = ""
    server_lr: float = 1.0
    server_step: str = "given"
    prox: str = "none"
    prox_args: str = ""
    prox_scaling: str = "exact"
    update_scale: float = 1.0
    evaluate: str = "server"
    evaluate_every: int = 1
    target_accuracy: float | None = None
    target_loss: float | None = None
    stop_at_target: bool = True
    stop_after_s: float | None = None
    durability: str = "process"
    faults: str = ""
    isolate_rng: bool = False
    forget: bool = True

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ConfigError(problems)

    @property
    def patience_s(self) -> float:
        """Seconds after which a silent client may be asked again."""
        return self.give_up_after * self.time_budget_s

    @property
    def unbiased(self) -> bool:
        """Whether the operator is used in its unbiased form."""
        if self.method == "ef-bv":
            name = NAMED.get(self.operator, (self.operator, ""))[0]
            return name in OPERATORS and OPERATORS[name].unbiased
        return self.method in METHODS and METHODS[self.method].unbiased

    def optimizer(self, parameters: list[FloatArray], lr: float | None = None) -> ServerOptimizer:
        """A fresh server optimiser, with the proximal step.

        Raises:
            ConfigError: arguments that it does not take.
        """
        args = arguments(self.server_optimizer_args, "server-optimizer-args")
        return ServerOptimizer(self.server_optimizer, lr or self.server_lr, parameters, args, self._proximal(args))

    def _proximal(self, args: dict[str, Any]) -> Proximal | None:
        prox = make_prox(self.prox, self.prox_args)
        if prox is None:
            return None
        if self.server_optimizer != "SGD":
            raise ConfigError(
                f"prox is {self.prox!r} and server-optimizer {self.server_optimizer!r}: a proximal step belongs to a "
                "gradient step; set server-optimizer = SGD, or prox = none"
            )
        still = (1.0 - args.get("dampening", 0.0)) / (1.0 - args.get("momentum", 0.0))
        return Proximal(prox, self.update_scale * (still if self.prox_scaling == "exact" else 1.0))

    def scheme(self) -> Scheme:
        """How messages are cut."""
        return Scheme(
            operator=self.operator,
            contractive=not self.unbiased,
            operator_args=self.operator_args,
            codec=self.codec,
            allocation=self.allocation,
            values=self.values,
            ratio=self.ratio,
            floor=self.floor,
            floors=parse_floors(self.floors),
            errors=self.errors,
            unit=self.unit,
        )

    def problems(self) -> list[str]:
        """One sentence for each wrong setting."""
        found: list[str] = []
        checks: list[Callable[[], object]] = [self.scheme, self.fault_plan, self._check_optimizer]
        for check in checks:
            try:
                check()
            except ConfigError as error:
                found.extend(error.problems)
        found.extend(self._method_problems())
        names = {
            "estimator": ESTIMATORS,
            "late": LATE,
            "evaluate": EVALUATE,
            "weights": WEIGHTS,
            "sampling": SAMPLING,
            "budget_rate": BUDGET_RATES,
            "durability": DURABILITY,
            "on_failure": ON_FAILURE,
            "method": METHODS,
            "start": START,
            "server_step": SERVER_STEPS,
            "prox_scaling": PROX_SCALING,
            "server_optimizer": optimizers(),
        }
        for name, valid in names.items():
            if (got := getattr(self, name)) not in valid:
                found.append(unknown_name(name.replace("_", "-"), got, valid))
        positive = ("time_budget_s", "deadline_s", "give_up_after", "initial_rate_bps", "server_lr", "stop_after_s")
        for name in (*positive, "target_loss", "update_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                found.append(f"{name} is {value!r}: expected a finite number above 0")
        if not 0 < self.fraction <= 1:
            found.append(f"fraction is {self.fraction!r}: expected above 0 and at most 1")
        if self.target_accuracy is not None and not 0 <= self.target_accuracy <= 1:
            found.append(f"target_accuracy is {self.target_accuracy!r}: expected between 0 and 1, e.g. 0.95")
        for name in ("min_clients", "whole_every", "evaluate_every", "cap_bytes", "max_bytes_per_day"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value!r}: expected at least 1")
        for name in ("leave_after", "checkpoint_every"):
            if (value := getattr(self, name)) < 0:
                found.append(f"{name} is {value!r}: expected at least 0")
        if self.leave_after and not self.mirrors:
            found.append(
                "leave_after needs mirrors: a client without one cannot leave; set mirrors, or leave_after = 0"
            )
        if self.deadline_s is not None and self.deadline_s < self.time_budget_s:
            found.append(
                f"deadline_s is {self.deadline_s!r}, below time_budget_s = {self.time_budget_s!r}: every message that "
                "uses its budget would be late; raise the deadline or lower the time budget"
            )
        return found

    def _check_optimizer(self) -> None:
        """Make one, as the run will.

        Raises:
            ConfigError: it cannot be made.
        """
        if self.server_optimizer not in optimizers():
            return  # said already
        try:
            self.optimizer([torch.zeros(1).numpy()])
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"server-optimizer-args is {self.server_optimizer_args!r}: torch.optim.{self.server_optimizer} says: "
                f"{error or type(error).__name__}"
            ) from error

    def _method_problems(self) -> list[str]:
        """One sentence for each setting that does not fit the method."""
        method = METHODS.get(self.method)
        if method is None:
            return []
        found: list[str] = []
        if self.memory_rate not in RATE_RULES:
            try:
                rate = float(self.memory_rate)
            except ValueError:
                rate = math.nan
            if not 0.0 <= rate <= 1.0:
                found.append(
                    f"memory-rate is {self.memory_rate!r}: expected a number from 0 to 1, or {', '.join(RATE_RULES)}"
                )
        rated = ", ".join(m.name for m in METHODS.values() if m.rated)
        if self.memory_rate != "auto" and not method.rated:
            found.append(
                f"memory-rate is {self.memory_rate!r}: method {self.method!r} has the rate {method.rate:g}; leave it "
                f"at auto, or choose one of {rated}"
            )
        if self.memory_rate == "blocks" and self.method == "ef-bv":
            found.append(
                "memory-rate is 'blocks', which is DIANA's advice: for ef-bv expected a number, auto or theory"
            )
        if self.estimate_rate is not None and (self.method != "ef-bv" or self.memory_rate in RATE_RULES):
            found.append("estimate-rate is for method ef-bv with a number as its memory-rate: leave it at 0")
        if self.estimate_rate is not None and not 0.0 < self.estimate_rate <= 1.0:
            found.append(f"estimate-rate is {self.estimate_rate!r}: expected above 0 and at most 1")
        if self.eta is not None and not method.slot:
            with_eta = ", ".join(m.name for m in METHODS.values() if m.slot)
            found.append(f"eta is {self.eta!r}: method {self.method!r} has none; expected one of {with_eta}")
        if self.eta is not None and not (0.0 < self.eta <= 1.0 or (self.eta == 0 and self.method == "econtrol")):
            found.append(f"eta is {self.eta!r}: expected above 0 and at most 1")
        if self.server_step == "theory":
            if "momentum" in self.server_optimizer_args or self.server_optimizer != "SGD":
                found.append(
                    "server-step is 'theory', whose theorems are for plain SGD: set server-optimizer = SGD without "
                    "arguments, or give server-lr and server-step = given"
                )
            if self.weights != "examples":
                found.append("server-step is 'theory' and weights 'uniform': its constants are for weights = examples")
        if self.start == "full" and method.rate == 0.0:
            found.append(f"start is 'full': method {self.method!r} has no memory to start; leave it at zero")
        return found

    def fault_plan(self) -> FaultPlan:
        """What goes wrong, as `faults` says.

        Raises:
            ConfigError: all that is wrong with it.
        """
        return FaultPlan.parse(self.faults)


def optimizers() -> tuple[str, ...]:
    """Names of torch.optim classes that can serve as server optimiser."""
    classes = vars(torch.optim).items()
    return tuple(
        sorted(n for n, c in classes if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and n not in _NOT)
    )


# abstract; needs a closure; needs matrices; needs sparse gradients
_NOT: Final = ("Optimizer", "LBFGS", "Muon", "SparseAdam")
