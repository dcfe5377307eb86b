"""Messages over any Flower grid: pushed at once, polled fast, sorted by kind.

Flower's own `send_and_receive` sleeps up to three seconds between polls. This one starts
at ten milliseconds and backs off to a quarter of a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from strategies.inprocess import InProcessGrid

FIRST_POLL_S = 0.01
LONGEST_POLL_S = 0.25


@dataclass(slots=True)
class Exchange:
    """Messages under way on a grid.

    Args:
        grid: any Flower grid.
        waiting: ids of messages pushed and not answered.
    """

    grid: Grid
    waiting: set[str] = field(default_factory=set)

    def push(self, messages: Iterable[Message]) -> set[str]:
        """Send messages; returns their ids. Replies come out of poll or collect."""
        ids = set(self.grid.push_messages(messages))
        self.waiting |= ids
        return ids

    def poll(self) -> list[Message]:
        """The replies that are there now, to whatever was sent."""
        if not self.waiting:
            return []
        replies = list(self.grid.pull_messages(self.waiting))
        self.waiting.difference_update(reply.metadata.reply_to_message_id for reply in replies)
        return replies

    def collect(self, ids: set[str], timeout_s: float) -> list[Message]:
        """Wait for the replies to these messages; replies to other ones that come meanwhile come out too.

        Messages of `ids` that stay unanswered are given up: their replies are never pulled.
        """
        until_s = time.monotonic() + timeout_s
        pause_s = FIRST_POLL_S
        replies: list[Message] = []
        while True:
            new = self.poll()
            replies.extend(new)
            left_s = until_s - time.monotonic()
            if not ids & self.waiting or left_s <= 0:
                self.waiting -= ids
                return replies
            pause_s = FIRST_POLL_S if new else min(1.5 * pause_s, LONGEST_POLL_S)
            time.sleep(min(pause_s, left_s))


def message_for(grid: Grid, content: RecordDict, message_type: str, node_id: int) -> Message:
    """A message to a node; Flower's constructor needs a Flower run, which InProcessGrid has not."""
    if isinstance(grid, InProcessGrid):
        return grid.create_message(content, message_type, node_id, group_id="")
    return Message(content, dst_node_id=node_id, message_type=message_type)
