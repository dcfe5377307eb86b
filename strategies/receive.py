"""Step 5 of a round: what comes back is read, checked against what was asked, and accepted.

A peer's fault costs that message only: it is counted by kind and logged, and no memory moves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import Message

from compression import UP, Decoded, Expect, Header, Layout, Slot, decode, tag4, too_large
from compression.errors import ProtocolError, WireError
from compression.wire import largest_bytes
from protocol import Assignment, Attempt, NodeReply, Report, read_reply
from strategies.memory import ServerMemory, Taken, plain_attempt, read_attempt

Metrics = Mapping[str, int | float | list[int] | list[float]]
_MOST_TEXT: Final = 2000  # characters of a peer's text in the log
_log = logging.getLogger("flwr.kimad")


@dataclass(frozen=True, slots=True)
class Reply:
    """One client's reply, as it goes through the network.

    Args:
        report: what the client says of it.
        payload: its bytes.
        metrics: what the user's code returned.
        content: what the payload decodes to, or why it does not.
    """

    report: Report
    payload: bytes
    metrics: Metrics
    content: Decoded | WireError


class Receiver:
    """Reads replies, and accepts those that answer an open attempt.

    Args:
        experiment: id of the run.
        layout: the agreed layout.
        memory: moved by accepted replies.
        weights: "examples" or "uniform".
    """

    def __init__(self, experiment: str, layout: Layout, memory: ServerMemory, weights: str) -> None:
        self.experiment, self.layout, self.memory, self.weights = experiment, layout, memory, weights
        self.most_bytes = largest_bytes(layout)
        self.counts: Counter[str] = Counter()
        self._open: dict[str, Attempt] = {}

    def fault(self, kind: str, text: str) -> None:
        """Count and log one fault of a peer; what it says itself may be of any length and hold anything."""
        self.counts[kind] += 1
        _log.warning("%s: %s", kind, readable(text))

    def open(self, attempt: Attempt) -> None:
        """Open an attempt; the client's earlier one is closed by it."""
        self._open[attempt.client] = attempt

    def close(self, client: str) -> None:
        """Close a client's attempt: no reply to it is accepted any more."""
        self._open.pop(client, None)

    def state(self) -> dict[str, Any]:
        """Open attempts and counts, as plain values."""
        opened = {client: plain_attempt(attempt) for client, attempt in self._open.items()}
        return {"open": opened, "counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was."""
        attempts = ((client, read_attempt(client, plain)) for client, plain in state["open"].items())
        self._open = {client: attempt for client, attempt in attempts if attempt is not None}
        self.counts = Counter(state["counts"])

    def reply_of(self, report: Report, payload: bytes, metrics: Metrics) -> Reply:
        """A reply with what its payload decodes to."""
        return Reply(report, payload, metrics, self._decode(payload))

    def read(self, message: Message, expected: Collection[str] | None = None) -> NodeReply:
        """A node's reply.

        Args:
            message: as it came.
            expected: clients that live on the node that was asked; None: any (a hello).

        Raises:
            ProtocolError: an error reply, a malformed one, one of another experiment, one that
                speaks of a client twice or of a client of another node.
        """
        if message.has_error():
            raise ProtocolError("client-error", f"{message.error.reason or message.error.code}")
        reply = read_reply(message.content)
        if reply.experiment != self.experiment:
            raise ProtocolError("foreign", f"reply of experiment {reply.experiment!r}, expected {self.experiment!r}")
        clients = [report.client for report in reply.reports]
        if len(set(clients)) < len(clients):
            raise ProtocolError("bad-record", "a client stands in the reply more than once, expected once")
        if expected is not None and (foreign := set(clients) - set(expected)):
            raise ProtocolError("foreign", f"the reply speaks of {sorted(foreign)!r}, which are not on that node")
        return reply

    def take(self, reply: NodeReply, asked: Mapping[str, Assignment]) -> tuple[dict[str, Reply], dict[str, str]]:
        """Sort a node's reports: (updates with their payloads, reasons of refusal), by client.

        Raises:
            ProtocolError: a report that answers nothing that was asked; nothing is taken then.
        """
        for report in reply.reports:
            assignment = asked.get(report.client)
            if assignment is None or report.attempt != assignment.attempt:
                raise ProtocolError("stale-attempt", f"an answer to {report.attempt}, which was not asked for")
        updates: dict[str, Reply] = {}
        refusals: dict[str, str] = {}
        for report in reply.reports:
            payload = reply.payloads.get((report.client, report.part))
            if report.status != "update":
                refusals[report.client] = (
                    readable(report.detail or "") or f"answered {report.status!r}, expected 'update'"
                )
            elif payload is None:
                refusals[report.client] = f"an update without its payload {report.part}/{report.client}"
            elif len(payload) > self.most_bytes:
                refusals[report.client] = f"a payload of {len(payload)} bytes, expected at most {self.most_bytes}"
            else:
                metrics = reply.metrics.get(report.client, {})
                updates[report.client] = self.reply_of(report, payload, metrics)
        for client in refusals:
            self.close(client)
        return updates, refusals

    def accept(self, reply: Reply, *, in_time: bool = True) -> Taken:
        """Check one arrived reply; after this its attempt is closed, and the memories are to be moved by it.

        Raises:
            WireError: its payload is not a legal message.
            ProtocolError: its attempt is closed, or its payload belongs elsewhere.
        """
        attempt = reply.report.attempt
        if self._open.get(attempt.client) != attempt:
            raise ProtocolError("stale-attempt", f"{attempt} is closed")
        self.close(attempt.client)
        if isinstance(reply.content, WireError):
            raise reply.content
        self._check(reply.content.header, attempt)
        if any(update is not None and too_large(update) for update in reply.content.updates):
            raise ProtocolError("enormous", "the payload has values so large that sums with them would overflow")
        return Taken(attempt, reply.payload, reply.content, self._weight(reply.report), in_time)

    def _weight(self, report: Report) -> float:
        """A client's weight; it matters at its first accepted reply only."""
        if self.weights == "uniform":
            return 1.0
        if report.examples is None:
            if self.memory.client(report.client).weight is None:
                text = "reports no num-examples among its metrics and weighs 1; return it, or set weights = uniform"
                self.fault("no-examples", f"client {report.client!r} {text}")
            return 1.0
        return float(report.examples)

    def _decode(self, payload: bytes) -> Decoded | WireError:
        try:
            return decode(self.layout, payload)
        except WireError as error:
            return error

    def _check(self, header: Header, attempt: Attempt) -> None:
        """The payload must be of this client's attempt, made from the memory known here."""
        whose = Expect(kind=UP, experiment=tag4(self.experiment), client=tag4(attempt.client))
        which = Expect(incarnation=attempt.incarnation, round=attempt.round, part=attempt.part)
        for fault, expect in (("foreign", whose), ("stale-attempt", which)):
            try:
                expect.check(header)
            except WireError as error:
                raise ProtocolError(fault, f"the payload's {error}") from error
        if dict(header.slots).get(Slot.H) != self.memory.client(attempt.client).digest:
            raise ProtocolError("lost-memory", "the payload was made from another memory than the one known here")


def readable(text: str) -> str:
    """A peer's text as it may stand in a log: one line, no control characters, its middle left out if it is long."""
    if len(text) > _MOST_TEXT:
        text = f"{text[: _MOST_TEXT // 4]} ... {text[-_MOST_TEXT * 3 // 4 :]}"  # a traceback says most at its end
    return "".join(c if c.isprintable() else " | " if c == "\n" else repr(c)[1:-1] for c in text)


def coordinates(content: Decoded, *, everything: bool) -> int:
    """How many values a message carries, as the Kimad paper's toy counts them: no headers, no indices.

    Args:
        content: the message.
        everything: nothing was left out; else a value of zero in a dense record was.
    """
    updates = [update for update in content.updates if update is not None]
    whole = sum(array.size for array in content.whole.values())
    return whole + sum(u.values.size if everything else int(np.count_nonzero(u.values)) for u in updates)
