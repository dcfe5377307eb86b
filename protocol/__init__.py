"""What both ends speak: records, attempts, acknowledgements, and the client's store."""

from protocol.records import (
    PROTOCOL_VERSION,
    Assignment,
    Attempt,
    NodeReply,
    NodeRequest,
    Report,
    Verdict,
    is_ours,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from protocol.store import ClientStore, Memory, Pending, Settled, fresh_memory, settle

__all__ = [
    "PROTOCOL_VERSION",
    "Assignment",
    "Attempt",
    "ClientStore",
    "Memory",
    "NodeReply",
    "NodeRequest",
    "Pending",
    "Report",
    "Settled",
    "Verdict",
    "fresh_memory",
    "is_ours",
    "read_reply",
    "read_request",
    "settle",
    "write_reply",
    "write_request",
]
