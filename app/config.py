"""Run keys, parsed once into one frozen object; all problems are reported together.

`[tool.flwr.app.config]` in pyproject.toml lists the same keys with the same defaults (a
test compares them); `flwr run . --run-config "key=value"` or one TOML file of conf/ changes
them. Flower checks neither types nor ranges: this module does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.rundir import Target
from clients.tasks import TASKS, TrainOptions
from compression.errors import ConfigError, unknown_name
from strategies.network import LinkSettings
from strategies.settings import Settings

TRACES = "KIMAD_TRACES"


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class RunConfig(BaseModel):
    """Every run key. Names are the keys with underscores; units are in docs/run-keys.md."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=_kebab, allow_inf_nan=False)

    task: str = Field("digits", description="built-in task (docs/tasks.md), or module:attr of your own")
    model: str = Field("", description='one of the task\'s models; "": its default')
    task_args: str = Field("", description='arguments of the task: "kappa = 101.0"')
    data_dir: str = Field("", description='its data, absolute or relative to $KIMAD_DATA; "": embedded or downloaded')
    partitioner: str = Field("dirichlet", description="how examples are cut into clients (docs/tasks.md)")
    partition_args: str = Field("", description='its arguments: "alpha = 0.1"')
    seed: int = Field(1, ge=0, lt=2**63, description="seed of every draw of the run")
    num_rounds: int = Field(200, ge=1, description="most rounds")
    target_accuracy: float = Field(0.95, ge=0, le=1, description="test accuracy at which the run stops; 0: none")
    target_loss: float = Field(0.0, ge=0, description="test loss at which the run stops, instead of accuracy; 0: none")
    stop_at_target: bool = Field(True, description="whether it stops there")
    run_dir: str = Field("", description='absolute folder for results; "": ~/.kimad/runs/<run id>')

    method: str = Field("ef21", description="ef21, ef21-sgdm, econtrol, ef-bv, diana or dcgd (docs/methods.md)")
    memory_rate: str = Field(
        "auto", description="how fast memories of diana and ef-bv follow: a number, auto, theory or blocks"
    )
    estimate_rate: float = Field(0.0, ge=0, le=1, description="nu of ef-bv beside a number as memory-rate; 0: 1")
    eta: float = Field(0.0, ge=0, le=1, description="eta of ef21-sgdm and econtrol; 0: 0.1")
    start: str = Field("zero", description="memories begin at zero, or full: with a client's first update, uncut")
    operator: str = Field("topk", description="what cuts a message: topk, randk, quant, ... (docs/operators.md)")
    codec: str = Field("auto", description="auto: zstd on index streams where smaller; portable: never")
    operator_args: str = Field("", description='arguments of quant, round, sign, lowrank: "bits = 4, block = 256"')
    allocation: str = Field(
        "hull", description="split over layers: hull, knapsack, global, uniform (docs/allocation.md)"
    )
    values: str = Field("auto", description="precision of sent values: auto, bf16, fp16, fp32, fp64")
    ratio: float = Field(0.0, ge=0, le=1, description="fixed share of values sent; 0: Kimad's budget from bandwidth")
    floor: int = Field(1, ge=1, description="fewest values sent of a layer")
    floors: str = Field("", description='floors of layers by pattern, counts or ratios: "conv1*=10, fc*=0.01"')
    errors: str = Field("squared", description="what knapsack adds up over the layers: squared or plain errors")
    unit: str = Field(
        "bytes", description="what is counted: bytes, or coordinates: values only, one a second for 8 bit/s"
    )
    time_budget: float = Field(1.6, gt=0, description="t: seconds of a round, compute and upload")
    deadline: float = Field(1.5, ge=0, description="a round waits no longer than this many time budgets; 0: for all")
    late: str = Field("absorb", description="replies after the deadline: absorb or drop")
    give_up_after: float = Field(3.0, gt=0, description="time budgets after which a silent client may be asked again")
    budget_rate: str = Field(
        "estimated", description="rate that budgets are made from: estimated, oracle or mean (docs/baselines.md)"
    )
    estimator: str = Field("last", description="uplink prediction: last or ewma")
    initial_rate_bps: float = Field(50_000.0, gt=0, description="uplink rate assumed before the first measurement")
    max_bytes_per_day: int = Field(0, ge=0, description="most bytes a client sends and receives in a day; 0: no cap")
    max_message_bytes: int = Field(0, ge=0, description="most bytes of one reply; 0: no cap")
    whole: str = Field("", description="comma-separated patterns of arrays that travel whole (running statistics)")
    whole_every: int = Field(1, ge=1, description="whole arrays travel every k rounds")

    sampling: str = Field("fraction", description="fraction: that share each round; poisson: each by itself")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients asked in a round")
    min_clients: int = Field(1, ge=1, description="clients that must be known before the first round")
    weights: str = Field("examples", description="clients weigh by examples or uniform")
    server_optimizer: str = Field("SGD", description="class of torch.optim")
    server_optimizer_args: str = Field("", description='its further arguments: "momentum = 0.9"')
    server_lr: float = Field(1.0, gt=0, description="its learning rate; SGD at 1.0 is FedAvg's step")
    server_step: str = Field(
        "given", description="given: server-lr; theory: what the method's theorem allows (docs/step-sizes.md)"
    )
    prox: str = Field("none", description="proximal step: none, l2, l1, elastic-net, box, or module:attr")
    prox_args: str = Field("", description='its arguments: "l1 = 0.01"')
    prox_scaling: str = Field("exact", description="its step under momentum: exact, or paper (DIANA as printed)")
    evaluate: str = Field("server", description="server, clients or none")
    evaluate_every: int = Field(1, ge=1, description="rounds between evaluations")
    on_failure: str = Field(
        "drop", description="a client that fails is left out of the round (drop), or asked the same again (retry)"
    )
    mirrors: bool = Field(True, description="the server keeps a copy of every memory, for clients that lose theirs")
    leave_after: int = Field(50, ge=0, description="rounds a client's node may be gone before it leaves; 0: any number")
    checkpoint_every: int = Field(10, ge=0, description="rounds between checkpoints in the run directory; 0: none")
    resume: bool = Field(False, description="go on from the newest checkpoint in run-dir, if there is one")
    durability: str = Field("process", description="client state survives a killed process, or (full) a power cut")
    faults: str = Field("", description='messages that go wrong: "lose_reply = 0.05, corrupt = 0.01" (docs/faults.md)')
    isolate_rng: bool = Field(False, description="seed Python's, NumPy's and torch's generators around clients' code")

    links: str = Field("cellular", description="kind of simulated links (docs/links.md)")
    link_args: str = Field("", description='its parameters: "amplitude = 0.95, period_s = 60.0"')
    link_file: str = Field("", description="file that says who has which link, absolute or relative to $KIMAD_TRACES")
    uplink_bps_min: float = Field(40_000.0, gt=0, description="mean uplink of the slowest client")
    uplink_bps_max: float = Field(120_000.0, gt=0, description="mean uplink of the fastest client")
    downlink_factor: float = Field(4.0, gt=0, description="downlink rate over uplink rate")
    overhead_s: float = Field(0.05, ge=0, description="fixed seconds of every transfer")
    compute_s: float = Field(1.0, ge=0, description="modelled compute seconds of a round")

    local_steps: int = Field(5, ge=1, description="local steps a round")
    batch_size: int = Field(32, ge=0, description="examples a step; 0: all of them")
    local_lr: float = Field(0.3, gt=0, description="local learning rate")

    dense_run: bool = Field(True, description="whether a dense run over the same links follows, for comparison")
    dense_local_lr: float = Field(0.5, gt=0, description="its local learning rate")
    dense_time_factor: float = Field(20.0, gt=0, description="it stops at this many times our run's time")

    @field_validator("memory_rate", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    def settings(self, experiment: str) -> Settings:
        """The strategy's settings of this run."""
        return Settings(
            experiment=experiment,
            seed=self.seed,
            time_budget_s=self.time_budget,
            deadline_s=self.deadline * self.time_budget or None,
            late=self.late,
            give_up_after=self.give_up_after,
            operator=self.operator,
            operator_args=self.operator_args,
            codec=self.codec,
            allocation=self.allocation,
            values=self.values,
            floor=self.floor,
            floors=self.floors,
            errors=self.errors,
            unit=self.unit,
            budget_rate=self.budget_rate,
            ratio=self.ratio or None,
            estimator=self.estimator,
            initial_rate_bps=self.initial_rate_bps,
            cap_bytes=self.max_message_bytes or None,
            max_bytes_per_day=self.max_bytes_per_day or None,
            sampling=self.sampling,
            fraction=self.fraction,
            min_clients=self.min_clients,
            weights=self.weights,
            whole=patterns(self.whole),
            whole_every=self.whole_every,
            method=self.method,
            memory_rate=self.memory_rate,
            estimate_rate=self.estimate_rate or None,
            eta=self.eta or None,
            start=self.start,
            server_optimizer=self.server_optimizer,
            server_optimizer_args=self.server_optimizer_args,
            server_lr=self.server_lr,
            server_step=self.server_step,
            prox=self.prox,
            prox_args=self.prox_args,
            prox_scaling=self.prox_scaling,
            update_scale=self.local_lr * self.local_steps,
            evaluate=self.evaluate,
            evaluate_every=self.evaluate_every,
            target_accuracy=None if self.target_loss else self.target_accuracy or None,
            target_loss=self.target_loss or None,
            stop_at_target=self.stop_at_target,
            durability=self.durability,
            faults=self.faults,
            isolate_rng=self.isolate_rng,
            on_failure=self.on_failure,
            mirrors=self.mirrors,
            leave_after=self.leave_after,
            checkpoint_every=self.checkpoint_every,
        )

    def target(self) -> Target:
        """What the run is to reach."""
        return Target(self.target_loss, loss=True) if self.target_loss else Target(self.target_accuracy)

    def link_settings(self) -> LinkSettings:
        """The simulated network's settings of this run. Relative paths start at $KIMAD_TRACES."""
        folder = os.environ.get(TRACES, "")
        return LinkSettings(
            kind=self.links,
            uplink_bps_min=self.uplink_bps_min,
            uplink_bps_max=self.uplink_bps_max,
            downlink_factor=self.downlink_factor,
            overhead_s=self.overhead_s,
            compute_s=self.compute_s,
            seed=self.seed,
            args=self.link_args,
            file=os.path.join(folder, os.path.expanduser(self.link_file)) if self.link_file else "",
            folder=folder,
        )

    def train_options(self) -> TrainOptions:
        """What a built-in task needs to know of this run."""
        return TrainOptions(
            seed=self.seed,
            local_steps=self.local_steps,
            batch_size=self.batch_size,
            local_lr=self.local_lr,
            model=self.model,
            data_dir=self.data_dir,
            partitioner=self.partitioner,
            partition_args=self.partition_args,
            task_args=self.task_args,
        )

    def as_dict(self) -> dict[str, Any]:
        """The effective configuration by run key."""
        return self.model_dump(by_alias=True)


def parse(run_config: Mapping[str, Any]) -> RunConfig:
    """Check a Flower run configuration.

    Raises:
        ConfigError: with every problem found: unknown keys, wrong types, values out of
            range, unknown names, and combinations that cannot work.
    """
    problems: list[str] = []
    wrong: set[str] = set()
    try:
        config = RunConfig.model_validate(dict(run_config))
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            wrong.add(key)
            if item["type"] == "extra_forbidden":
                problems.append(unknown_name("run key", key, keys()))
            else:
                problems.append(f"{key} is {item['input']!r}: {item['msg']}")
        rest = {key: value for key, value in run_config.items() if key not in wrong}
        try:
            config = RunConfig.model_validate(rest)
        except ValidationError:  # a rule over several keys
            raise ConfigError(problems) from None
    if ":" not in config.task and config.task not in TASKS:
        problems.append(unknown_name("task", config.task, TASKS) + " (or module:attr of your own)")
    if config.uplink_bps_min > config.uplink_bps_max:
        problems.append(
            f"uplink-bps-min is {config.uplink_bps_min:g}, above uplink-bps-max = {config.uplink_bps_max:g}: swap them"
        )
    else:
        try:
            config.link_settings()
        except ConfigError as error:
            problems.extend(error.problems)
    if config.link_file and not os.path.isabs(config.link_settings().file):
        problems.append(
            f"link-file is {config.link_file!r}: expected an absolute path, because Flower runs the app from a copy; "
            f"or set {TRACES} to the folder that it counts from"
        )
    if config.deadline and config.deadline < 1:
        problems.append(
            f"deadline is {config.deadline:g} time budgets: every message that uses its budget would be late; "
            "expected 1 or more, or 0 to wait for all"
        )
    if config.run_dir and not os.path.isabs(config.run_dir):
        problems.append(
            f"run-dir is {config.run_dir!r}: expected an absolute path, because Flower runs the app from a copy; "
            f"try {os.path.abspath(config.run_dir)!r}"
        )
    if config.server_step == "theory" and (config.local_steps != 1 or config.batch_size):
        problems.append(
            f"server-step is 'theory' with local-steps = {config.local_steps}, batch-size = {config.batch_size}: its "
            "theorems are for one full gradient a round; set local-steps = 1 and batch-size = 0, or server-step = given"
        )
    if config.resume and not config.run_dir:
        problems.append("resume is true without run-dir: name the folder of the run that is to go on")
    try:
        config.model_copy(update={"deadline": 0.0}).settings("check")
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return config


def patterns(text: str) -> tuple[str, ...]:
    """Comma-separated patterns."""
    return tuple(p.strip() for p in text.split(",") if p.strip())


def keys() -> tuple[str, ...]:
    """All run keys."""
    return tuple(_kebab(name) for name in RunConfig.model_fields)


def default_run_dir(run_id: int) -> Path:
    """Where results go when run-dir is not set."""
    return Path.home() / ".kimad" / "runs" / str(run_id)
