"""Digests that both ends of a memory can keep without hashing it.

A memory is decided by the payloads accepted into it, because the arithmetic is pinned. So
the digest of slot h is a hash chain over them: eight bytes, O(payload) a message.
"""

from __future__ import annotations

import hashlib


def start(experiment: str, layout_digest: bytes, client: str) -> bytes:
    """Digest of a client's memory before anything was accepted (all zeros); 8 bytes."""
    text = b"\x1f".join((b"kimad.h", experiment.encode(), layout_digest, client.encode()))
    return hashlib.blake2b(text, digest_size=8).digest()


def extend(digest: bytes, payload: bytes) -> bytes:
    """Digest after this payload was accepted; 8 bytes."""
    return hashlib.blake2b(payload, digest_size=8, key=digest).digest()
