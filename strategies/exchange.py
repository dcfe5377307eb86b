"""Messages over any Flower grid: pushed at once, polled fast, and replies tied to what was asked.

Flower's own `send_and_receive` sleeps up to three seconds between polls. This one starts
at ten milliseconds and backs off to a quarter of a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from strategies.inprocess import InProcessGrid

FIRST_POLL_S = 0.01
LONGEST_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Asked:
    """A message that was pushed.

    Args:
        kind: of the request: "hello", "train", "evaluate" or "settle".
        node_id: the node it went to; a reply speaks for this node, whatever it says itself
            (error replies that Flower makes name another one).
    """

    kind: str
    node_id: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and the message it answers."""

    asked: Asked
    message: Message


class Exchange:
    """Messages under way on a grid.

    Args:
        grid: any Flower grid.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._waiting: dict[str, Asked] = {}

    def push(self, kind: str, messages: Iterable[Message]) -> set[str]:
        """Send messages of one kind; returns their ids. Replies come out of poll or collect."""
        batch = list(messages)
        taken = set(self.grid.push_messages(batch))
        sent = {m.metadata.message_id: Asked(kind, m.metadata.dst_node_id) for m in batch}
        self._waiting |= {i: asked for i, asked in sent.items() if i in taken}
        return {i for i in sent if i in taken}

    def unanswered(self, kind: str) -> frozenset[int]:
        """Nodes that a message of this kind was sent to and that have not replied; they are busy, or gone."""
        return frozenset(asked.node_id for asked in self._waiting.values() if asked.kind == kind)

    def poll(self) -> list[Answer]:
        """The replies that are there now, to whatever was sent, in the order of sending."""
        if not self._waiting:
            return []
        replies = {m.metadata.reply_to_message_id: m for m in self.grid.pull_messages(list(self._waiting))}
        answered = [i for i in self._waiting if i in replies]
        return [Answer(self._waiting.pop(i), replies[i]) for i in answered]

    def collect(self, ids: set[str], timeout_s: float) -> list[Answer]:
        """Wait for the replies to these messages; replies to other ones that come meanwhile come out too.

        A message that stays unanswered is still waited for afterwards: `unanswered` names its node.
        """
        until_s = time.monotonic() + timeout_s
        pause_s = FIRST_POLL_S
        answers: list[Answer] = []
        while True:
            new = self.poll()
            answers.extend(new)
            left_s = until_s - time.monotonic()
            if not ids & self._waiting.keys() or left_s <= 0:
                return answers
            pause_s = FIRST_POLL_S if new else min(1.5 * pause_s, LONGEST_POLL_S)
            time.sleep(min(pause_s, left_s))

    def waits_for(self, ids: set[str]) -> bool:
        """Whether any of these messages is unanswered."""
        return bool(ids & self._waiting.keys())

    def give_up(self, nodes: Sequence[int]) -> None:
        """Wait no longer for nodes that are gone."""
        gone = set(nodes)
        self._waiting = {i: asked for i, asked in self._waiting.items() if asked.node_id not in gone}


def message_for(grid: Grid, content: RecordDict, message_type: str, node_id: int) -> Message:
    """A message to a node; Flower's constructor needs a Flower run, which InProcessGrid has not."""
    if isinstance(grid, InProcessGrid):
        return grid.create_message(content, message_type, node_id, group_id="")
    return Message(content, dst_node_id=node_id, message_type=message_type)
