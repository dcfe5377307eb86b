"""`kimad plan`: what a run will cost, before it is run.

From a task's layout, the links and the time budget: bytes a message, share of the values sent, seconds a round, rounds
and bytes a day, disk and memory. Messages are made, not guessed: a random update of the layout is compressed to each
client's budget at its link's mean rate.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from app.config import RunConfig, patterns
from app.table import human_bytes, human_seconds
from bandwidth import uplink_budget_bytes
from compression import DOWN, UP, Header, Layout, Slot, compress, dense_bytes_on_wire, tag4
from compression.randomness import normals
from protocol.store import most_disk_bytes
from strategies.allowance import DAY_S
from strategies.network import SimulatedNetwork

SHOWN: Final = 8  # clients in the table: the slowest, the fastest, and evenly between


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """What one client's rounds will be at its link's mean rate.

    Args:
        client: its number among the clients.
        up_bps: mean uplink, bit/s.
        budget_bytes: its byte budget; None where nothing is cut by a budget.
        message_bytes: what a message of a random update takes.
        share: share of the update's values in it.
        miss: the smallest legal message is longer than the budget.
        reply_s: seconds from the request to the reply's arrival, the download not counted.
        dense_reply_s: the same for an uncompressed reply.
        rounds_per_day: rounds that it takes part in, in a day.
        up_bytes_per_day, down_bytes_per_day: bytes of those.
    """

    client: int
    up_bps: float
    budget_bytes: int | None
    message_bytes: int
    share: float
    miss: bool
    reply_s: float
    dense_reply_s: float
    rounds_per_day: float
    up_bytes_per_day: float
    down_bytes_per_day: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Args:
        clients: a plan for each client shown, the slowest first.
        count: clients of the run.
        arrays, values: size of the model.
        model_bytes: one download of it; dense_reply_bytes: one uncompressed reply.
        round_s: a round's seconds; dense_round_s: an uncompressed round's, when all are waited for.
        rounds_per_day: of the run.
        client_disk_bytes: about the most that a client's state takes: its memory, and the replies that can be undone.
        server_memory_bytes: the model, the sums and one download.
        limit_bytes_per_day: max-bytes-per-day; None: no limit.
    """

    clients: tuple[ClientPlan, ...]
    count: int
    arrays: int
    values: int
    model_bytes: int
    dense_reply_bytes: int
    round_s: float
    dense_round_s: float
    rounds_per_day: float
    client_disk_bytes: int
    server_memory_bytes: int
    limit_bytes_per_day: int | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def make_plan(config: RunConfig, arrays: Mapping[str, NDArray[np.generic]], count: int, whole: str = "") -> Plan:
    """Plan a run.

    Args:
        config: the run's configuration.
        arrays: the model at the start.
        count: number of clients.
        whole: patterns of arrays that travel whole with the task's model, when the configuration names none.

    Raises:
        ConfigError, LayoutError: as the run itself would.
    """
    settings = config.settings("plan")
    scheme = settings.scheme()
    layout = Layout.of(arrays, settings.whole or patterns(whole))
    network: SimulatedNetwork[None] = SimulatedNetwork(config.link_settings())
    network.register([(str(i), i, count) for i in range(count)])
    rates = {i: network.mean_up_bps(str(i)) for i in range(count)}
    ordered = sorted(rates, key=lambda i: (rates[i], i))
    shown = sorted({round(x) for x in np.linspace(0, count - 1, min(count, SHOWN))})

    header = Header(
        kind=UP,
        layout_digest=layout.digest,
        experiment=tag4("plan"),
        client=tag4(""),
        incarnation=1,
        round=1,
        slots=((Slot.H, bytes(8)),),
    )
    _, travels_whole = layout.split(arrays)
    update = [
        normals(layout.layers[i].size, seed=0, round_=i, purpose="plan").astype(layout.layers[i].dtype)
        for i in layout.compressed
    ]
    dense_bytes = dense_bytes_on_wire(layout, header)
    down_header = Header(
        kind=DOWN, layout_digest=layout.digest, experiment=tag4("plan"), client=tag4(""), incarnation=1, round=1
    )
    model_bytes = dense_bytes_on_wire(layout, down_header)
    compute_s, adaptive = config.compute_s, scheme.operator != "identity" and scheme.ratio is None

    def reply_s(client: int, nbytes: int) -> float:
        return compute_s + network.overhead_up_s(str(client)) + 8.0 * nbytes / rates[client]

    made: dict[int | None, tuple[int, float, bool]] = {}

    def message(client: int) -> tuple[int | None, int, float, bool]:
        overhead_s = network.overhead_up_s(str(client))
        budget: int | None = config.max_message_bytes or None
        if adaptive:
            budget = uplink_budget_bytes(rates[client], config.time_budget, compute_s, overhead_s, budget)
        if budget not in made:
            done = compress(layout, header, update, travels_whole, scheme, budget)
            share = sum(done.kept) / max(1, layout.compressed_size)
            made[budget] = (len(done.payload) if config.unit == "bytes" else sum(done.kept), share, done.miss)
        return budget, *made[budget]

    messages = {client: message(client) for client in (ordered[at] for at in shown)}
    limit_s = settings.deadline_s
    slowest_s = max(reply_s(client, sent) for client, (_, sent, _, _) in messages.items())
    round_s = min(slowest_s, limit_s) if limit_s is not None else slowest_s
    per_day = DAY_S / round_s
    limit = config.max_bytes_per_day or None
    clients = []
    for client, (budget, sent, share, miss) in messages.items():
        rounds = per_day * config.fraction
        if limit is not None:
            rounds = min(rounds, limit // (sent + model_bytes))
        clients.append(
            ClientPlan(
                client=client,
                up_bps=rates[client],
                budget_bytes=budget,
                message_bytes=sent,
                share=share,
                miss=miss,
                reply_s=reply_s(client, sent),
                dense_reply_s=reply_s(client, dense_bytes if config.unit == "bytes" else layout.compressed_size),
                rounds_per_day=rounds,
                up_bytes_per_day=rounds * sent,
                down_bytes_per_day=rounds * model_bytes,
            )
        )
    memory_bytes = sum(layout.layers[i].nbytes for i in layout.compressed)
    reply_bytes = max(c.message_bytes + int(c.share * memory_bytes) for c in clients)
    kept = 2 * config.checkpoint_every + 2  # since the older of two checkpoints, and what is under way
    return Plan(
        clients=tuple(clients),
        count=count,
        arrays=len(layout.layers),
        values=sum(layer.size for layer in layout.layers),
        model_bytes=model_bytes,
        dense_reply_bytes=dense_bytes,
        round_s=round_s,
        dense_round_s=max(c.dense_reply_s for c in clients),
        rounds_per_day=per_day,
        client_disk_bytes=most_disk_bytes(layout, reply_bytes, kept),
        server_memory_bytes=8 * layout.compressed_size + 2 * model_bytes,
        limit_bytes_per_day=limit,
    )


def plan_text(plan: Plan, *, unit: str = "bytes", width: int = 120) -> str:
    """A plan for a person to read."""
    size = human_bytes if unit == "bytes" else lambda n: f"{n:.0f} values"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "client",
        "uplink",
        "message",
        "values sent",
        "reply",
        "dense reply",
        "rounds/day",
        "up/day",
        "down/day",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for c in plan.clients:
        table.add_row(
            str(c.client),
            f"{c.up_bps / 1e3:.4g} kbit/s",
            size(c.message_bytes) + (" !" if c.miss else ""),
            f"{100 * c.share:.2f} %",
            human_seconds(c.reply_s),
            human_seconds(c.dense_reply_s),
            f"{c.rounds_per_day:.0f}",
            size(c.up_bytes_per_day),
            human_bytes(c.down_bytes_per_day),
        )
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    lines += [
        f"model: {plan.arrays} arrays, {plan.values} values; {human_bytes(plan.model_bytes)} a download, "
        f"{human_bytes(plan.dense_reply_bytes)} an uncompressed reply",
        f"round: {human_seconds(plan.round_s)} at the links' mean rates, {human_seconds(plan.dense_round_s)} "
        f"uncompressed; {plan.rounds_per_day:.0f} rounds a day",
        f"disk: at most {human_bytes(plan.client_disk_bytes)} a client; server memory about "
        f"{human_bytes(plan.server_memory_bytes)}",
        "time is compute and uplink; the downlink is not compressed yet and its time is not counted",
    ]
    if plan.count > len(plan.clients):
        lines.append(f"shown are {len(plan.clients)} of {plan.count} clients, from the slowest to the fastest")
    if unit == "coordinates":
        lines.append("unit = coordinates: messages and up/day count values sent; headers and indices are not counted")
    if any(c.miss for c in plan.clients):
        lines.append("! the smallest legal message is longer than this client's budget: raise time-budget")
    if plan.limit_bytes_per_day is not None:
        least = min(c.rounds_per_day for c in plan.clients)
        lines.append(
            f"max-bytes-per-day {human_bytes(plan.limit_bytes_per_day)}: a client takes part in at least {least:.0f} "
            f"rounds a day of {plan.rounds_per_day:.0f}, and in no more until the next day"
        )
    return "\n".join(lines) + "\n"
