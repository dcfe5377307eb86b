"""The last step of a round: its row, as plain values. Nothing in it depends on wall time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from compression import Decoded, Layout
from protocol import Assignment, NodeRequest
from strategies.network import RoundEnd
from strategies.receive import Reply


@dataclass(slots=True)
class Round:
    """What is gathered while a round goes on.

    Args:
        number: of the round, from 1.
        start_s: the run's clock at its start.
        asked: assignment of each client asked.
        true_up_bps: its uplink's rate at the start, where the network knows it.
        replies: what came back, lost and late ones included.
        refused: why nothing was accepted of a client.
        accepted: whose replies moved the sums, absorbed ones included.
        requests: what was sent to each client asked, to be sent again where it failed.
        failures: how often each client failed to answer.
        sent_bytes: bytes of the model, and of a memory, that went to each client asked.
        downlink_bytes: bytes of all models and memories sent, for training and evaluation.
        train_metrics: weighted means of what user code returned.
        evaluation: metrics of the evaluation, if there was one.
        end: how the network ended the round.
    """

    number: int
    start_s: float
    asked: dict[str, Assignment] = field(default_factory=dict)
    true_up_bps: dict[str, float] = field(default_factory=dict)
    replies: dict[str, Reply] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)
    requests: dict[str, NodeRequest] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    downlink_bytes: int = 0
    train_metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    end: RoundEnd[Reply] = RoundEnd((), (), (), 0.0)  # noqa: RUF009


def row(r: Round, layout: Layout, *, time_budget_s: float, dense_reply_bytes: int) -> dict[str, Any]:
    """One round as docs/run-directory.md describes it.

    Args:
        r: the round, ended.
        layout: the agreed layout.
        time_budget_s: t; a reply that takes longer is a deadline miss.
        dense_reply_bytes: what one reply would have taken uncompressed on the same wire.
    """
    reports = {client: reply.report for client, reply in sorted(r.replies.items())}
    sizes = {client: len(reply.payload) for client, reply in sorted(r.replies.items())}
    budgets = {client: report.budget_bytes for client, report in reports.items()}
    norm_sq = sum(report.norm_sq or 0.0 for report in reports.values())
    error_sq = sum(report.error_sq or 0.0 for report in reports.values())
    finish_s = [a.transfer.finish_s for a in (*r.end.on_time, *r.end.late)]
    return {
        "round": r.number,
        "virtual_s": r.end.end_s,
        "round_s": r.end.end_s - r.start_s,
        "participants": len(r.asked),
        "accepted": sorted(r.accepted),
        "late": sorted(a.client for a in r.end.late),
        "absorbed": sorted(a.client for a in r.end.from_before if a.client in r.accepted),
        "refused": dict(sorted(r.refused.items())),
        "uplink_bytes": sum(sizes.values()),
        "uplink_dense_bytes": dense_reply_bytes * len(sizes),
        "downlink_bytes": r.downlink_bytes,
        "uplink_bytes_by_client": sizes,
        "budget_bytes_by_client": budgets,
        "ratios_by_layer": _ratios(r, layout),
        "compression_error": _finite(error_sq / norm_sq) if norm_sq > 0 else 0.0,
        "train_loss": _finite(r.train_metrics.get("train_loss")),
        "test_loss": _finite(r.evaluation.get("loss")),
        "test_accuracy": _finite(r.evaluation.get("accuracy")),
        "predicted_up_bps": {c: a.rate_bps for c, a in sorted(r.asked.items()) if a.rate_bps is not None},
        "true_up_bps": dict(sorted(r.true_up_bps.items())),
        "deadline_misses": sum(t > r.start_s + time_budget_s for t in finish_s),
        "budget_misses": sum(b is not None and sizes[c] > b for c, b in budgets.items()),
    }


def line(values: dict[str, Any]) -> str:
    """A row in one line, for a log."""
    parts = [
        f"round {values['round']}: {values['virtual_s']:.1f} s",
        f"{values['uplink_bytes']} of {values['uplink_dense_bytes']} bytes up",
        f"{len(values['accepted'])} of {values['participants']} replies in",
    ]
    parts += [
        f"{key} {values[key]:.4g}" for key in ("train_loss", "test_loss", "test_accuracy") if values[key] is not None
    ]
    if values["refused"]:
        parts.append(f"refused: {values['refused']}")
    return ", ".join(parts)


def _finite(value: float | None) -> float | None:
    """A metric, or None when a diverged model gave NaN or infinity."""
    return value if value is not None and math.isfinite(value) else None


def _ratios(r: Round, layout: Layout) -> dict[str, float]:
    """Mean share of each layer's values sent by this round's repliers."""
    kept: dict[str, list[float]] = {}
    for reply in r.replies.values():
        if not isinstance(reply.content, Decoded):
            continue
        for position, update in zip(layout.compressed, reply.content.updates, strict=True):
            layer = layout.layers[position]
            sent = 0 if update is None else len(update.values)
            kept.setdefault(layer.name, []).append(sent / layer.size if layer.size else 1.0)
    return {name: sum(values) / len(values) for name, values in kept.items()}
