"""An exchange on which messages go wrong as a FaultPlan says: for simulations (run key faults)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

from flwr.app import Array, ArrayRecord, Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from bandwidth.faults import FaultPlan
from protocol import read_request
from protocol.records import PAYLOADS
from strategies.exchange import Answer, Asked, Exchange


class FaultyExchange(Exchange):
    """Messages under way on a grid, some of which go wrong.

    Args:
        grid: any Flower grid.
        plan: which.
        seed: of the run.
    """

    def __init__(self, grid: Grid, plan: FaultPlan, seed: int) -> None:
        super().__init__(grid)
        self.plan, self.seed = plan, seed
        self._numbers = itertools.count()
        self._times: Counter[tuple[str, int]] = Counter()
        self._fates: dict[str, tuple[str, str, int]] = {}
        self._failed: dict[str, Answer] = {}

    def push(self, kind: str, messages: Iterable[Message]) -> set[str]:
        """Send messages; those of training meet their fate here or on the way back."""
        if kind != "train":
            return super().push(kind, messages)
        ids: set[str] = set()
        for message in messages:
            (assignment,) = read_request(message.content).assignments
            key = (assignment.client, assignment.round)
            fate = self.plan.fate(seed=self.seed, client=key[0], round_=key[1], times=self._times[key])
            self._times[key] += 1
            if fate == "lose_request":
                message_id = f"lost-{next(self._numbers)}"
                message.metadata.__dict__["_message_id"] = message_id
                self._failed[message_id] = self._lost(Asked(kind, message.metadata.dst_node_id), message)
                ids.add(message_id)
                continue
            sent = super().push(kind, [message])
            if fate is not None:
                self._fates.update(dict.fromkeys(sent, (fate, *key)))
            ids |= sent
        return ids

    def poll(self) -> list[Answer]:
        """The replies that are there now, those of lost messages as errors."""
        failed, self._failed = self._failed, {}
        answers = list(failed.values())
        for answer in super().poll():
            fate, client, round_ = self._fates.pop(answer.message.metadata.reply_to_message_id, ("", "", 0))
            if fate == "lose_reply":
                answers.append(self._lost(answer.asked, answer.message))
                continue
            if fate == "corrupt" and not answer.message.has_error():
                self._flip(answer.message, client, round_)
            answers += [answer] * (2 if fate == "duplicate" else 1)
        return answers

    def waits_for(self, ids: set[str]) -> bool:
        """Whether any of these messages is unanswered."""
        return bool(ids & self._failed.keys()) or super().waits_for(ids)

    def _lost(self, asked: Asked, message: Message) -> Answer:
        lost = Message(Error(ErrorCode.NODE_UNAVAILABLE, "lost under way (run key faults)"), reply_to=message)
        return Answer(asked, lost)

    def _flip(self, message: Message, client: str, round_: int) -> None:
        record = message.content.array_records.get(PAYLOADS, ArrayRecord())
        for key, array in list(record.items()):
            data = bytearray(array.data)
            bit = self.plan.bit(len(data), seed=self.seed, client=client, round_=round_)
            data[bit // 8] ^= 1 << bit % 8
            record[key] = Array(array.dtype, array.shape, array.stype, bytes(data))
