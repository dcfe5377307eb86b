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
from protocol.store import LOST, Entry, Pending, Store

__all__ = [
    "LOST",
    "PROTOCOL_VERSION",
    "Assignment",
    "Attempt",
    "Entry",
    "NodeReply",
    "NodeRequest",
    "Pending",
    "Report",
    "Store",
    "Verdict",
    "is_ours",
    "read_reply",
    "read_request",
    "write_reply",
    "write_request",
]
