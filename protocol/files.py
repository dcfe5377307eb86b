"""Writing files so that a crash at any instant leaves the old one or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path

from compression.errors import StateError


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file as a whole.

    Args:
        path: the file; its folder exists.
        data: its bytes.
        durable: whether to fsync file and folder, so that a power cut loses nothing either.

    Raises:
        StateError: the file cannot be written; what was there before is intact.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StateError(
            f"{path}: cannot be written ({error}); the old state is intact; free the disk or choose another folder"
        ) from error


def sync_directory(path: Path) -> None:
    """Make a folder's entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
