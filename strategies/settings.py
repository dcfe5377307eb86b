"""Every setting of the Kimad strategy, in one frozen object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from bandwidth import ESTIMATORS
from bandwidth.faults import FaultPlan
from compression import Scheme, parse_floors
from compression.errors import ConfigError, unknown_name

LATE: Final = ("absorb", "drop")
EVALUATE: Final = ("server", "clients", "none")
WEIGHTS: Final = ("examples", "uniform")
SAMPLING: Final = ("fraction", "poisson")
BUDGET_RATES: Final = ("estimated", "oracle", "mean")
DURABILITY: Final = ("process", "full")
ON_FAILURE: Final = ("drop", "retry")


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
        server_lr: its learning rate; SGD at 1.0 is FedAvg's step.
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
    server_lr: float = 1.0
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

    def scheme(self) -> Scheme:
        """How messages are cut."""
        return Scheme(
            operator=self.operator,
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
        try:
            self.scheme()
        except ConfigError as error:
            found.extend(error.problems)
        try:
            self.fault_plan()
        except ConfigError as error:
            found.extend(error.problems)
        names = {
            "estimator": ESTIMATORS,
            "late": LATE,
            "evaluate": EVALUATE,
            "weights": WEIGHTS,
            "sampling": SAMPLING,
            "budget_rate": BUDGET_RATES,
            "durability": DURABILITY,
            "on_failure": ON_FAILURE,
            "server_optimizer": optimizers(),
        }
        for name, valid in names.items():
            if (got := getattr(self, name)) not in valid:
                found.append(unknown_name(name.replace("_", "-"), got, valid))
        positive = ("time_budget_s", "deadline_s", "give_up_after", "initial_rate_bps", "server_lr", "stop_after_s")
        for name in (*positive, "target_loss"):
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
