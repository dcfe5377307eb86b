"""Flower messages where Flower's own constructor cannot be used: the one place that says `metadata=`."""

from __future__ import annotations

import time
from typing import cast

from flwr.app import Message, Metadata, RecordDict


def with_content(message: Message, content: RecordDict) -> Message:
    """The same message with other content, as a mod hands it on to user code."""
    return cast(Message, Message(content, metadata=message.metadata))  # type: ignore[call-overload]


def outside_of_a_run(
    content: RecordDict, *, node_id: int, message_type: str, message_id: str = "", run_id: int = 0, group_id: str = ""
) -> Message:
    """A message to a node where there is no Flower run (in-process grid, tests)."""
    metadata = Metadata(
        run_id=run_id,
        message_id=message_id,
        src_node_id=0,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=group_id,
        created_at=time.time(),
        ttl=3600.0,
        message_type=message_type,
    )
    return cast(Message, Message(content, metadata=metadata))  # type: ignore[call-overload]
