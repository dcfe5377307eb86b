"""The thin seam to the file system: everything that state on disk asks of it, in one place.

Two of them: the machine's own, and one in memory for runs without a folder. Tests put a third
beside them that loses, tears and reorders what was not synced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from compression.errors import StateError

Bytes = bytes | bytearray | memoryview
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class FileSystem(Protocol):
    """What a store asks of a file system. Failures are OSErrors; writers turn them into StateErrors."""

    def boot(self) -> str:
        """A name that changes whenever writes that were not synced may have been lost."""

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; none if it does not exist."""

    def make_folder(self, folder: Path, *, durable: bool) -> None:
        """Make a folder and its parents."""

    def size(self, path: Path) -> int | None:
        """Bytes of a file; None if there is none."""

    def read(self, path: Path, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file from an offset on; fewer at its end."""

    def append(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Append to a file, which is made if it is not there, by one write; durable: synced before this returns."""

    def replace(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Replace a file as a whole: after a crash there is the old one or the new one, never a part."""

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut a file to a length."""

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and everything in it; nothing happens if it is not there."""

    def array(self, path: Path, nbytes: int) -> NDArray[np.uint8]:
        """A file mapped into memory and writable, grown with zeros to at least nbytes; shape (its size,)."""

    def sync(self, path: Path) -> None:
        """Make a file durable, whether it was appended to or written through a mapping."""

    def lock(self, path: Path) -> Any:
        """A context within which no other process or thread holds this lock; StateError if one does."""


class LocalFileSystem:
    """The machine's own files."""

    def boot(self) -> str:
        """The kernel's boot id; "" where it has none, which counts as the same boot always."""
        return _boot_id()

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted."""
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def make_folder(self, folder: Path, *, durable: bool) -> None:
        """Make a folder and its parents, readable by their owner only."""
        if folder.is_dir():
            return
        missing = [folder]
        while not missing[-1].parent.exists():
            missing.append(missing[-1].parent)
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            if durable:
                self.sync(path.parent)

    def size(self, path: Path) -> int | None:
        """Bytes of a file."""
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def read(self, path: Path, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file from an offset on."""
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return file.readall() if nbytes is None else file.read(nbytes) or b""

    def append(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Append by one write."""
        new = durable and not path.exists()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _write_all(handle, data)
            if durable:
                os.fsync(handle)
        finally:
            os.close(handle)
        if new:
            self.sync(path.parent)

    def replace(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Write a file beside it and rename."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                _write_all(handle, data)
                if durable:
                    os.fsync(handle)
            finally:
                os.close(handle)
            beside.replace(path)
        except OSError:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise
        if durable:
            self.sync(path.parent)

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut a file to a length."""
        os.truncate(path, nbytes)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and everything in it."""
        if path.is_dir():
            for name in os.listdir(path):
                self.remove(path / name)
            with suppress(FileNotFoundError):
                path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def array(self, path: Path, nbytes: int) -> NDArray[np.uint8]:
        """A shared mapping; a grown file is sparse, so zeros take no room."""
        have = self.size(path)
        if have is None or have < nbytes:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(handle, nbytes)
            finally:
                os.close(handle)
        return np.memmap(path, dtype=np.uint8, mode="r+")

    def sync(self, path: Path) -> None:
        """Write a file to the disk; fsync takes pages written through mappings too."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """An advisory lock that the kernel gives back when its process dies, however it dies."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise StateError(
                    f"{path.parent} is in use by another process; one node runs one client at a time: stop the other, "
                    "or give each node its own state-dir or client-id"
                ) from error
            yield
        finally:
            os.close(handle)


class MemoryFileSystem:
    """Files in this process's memory, for a server without a folder: gone when it ends."""

    def __init__(self) -> None:
        self.files: dict[Path, bytearray] = {}
        self.arrays: dict[Path, NDArray[np.uint8]] = {}
        self._locks: set[Path] = set()
        self._guard = threading.Lock()
        self._boot = uuid.uuid4().hex

    def boot(self) -> str:
        """Nothing is lost as long as the process lives."""
        return self._boot

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted."""
        depth = len(folder.parts)
        inside = (p.parts[depth] for p in (*self.files, *self.arrays) if p.parts[:depth] == folder.parts != p.parts)
        return sorted(set(inside))

    def make_folder(self, folder: Path, *, durable: bool) -> None:
        """Folders are there when something is in them."""

    def size(self, path: Path) -> int | None:
        """Bytes of a file."""
        found = self.arrays[path] if path in self.arrays else self.files.get(path)
        return None if found is None else len(found)

    def read(self, path: Path, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of a file from an offset on."""
        if path in self.arrays:
            whole = self.arrays[path]
            return whole[offset : None if nbytes is None else offset + nbytes].tobytes()
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return bytes(self.files[path][offset : None if nbytes is None else offset + nbytes])

    def append(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Append to a file."""
        self.files.setdefault(path, bytearray()).extend(b"".join(data))

    def replace(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        """Replace a file as a whole."""
        self.files[path] = bytearray(b"".join(data))

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut a file to a length."""
        del self.files[path][nbytes:]

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder and everything in it."""
        for held in (self.files, self.arrays):
            for name in [p for p in held if p == path or path in p.parents]:
                del held[name]

    def array(self, path: Path, nbytes: int) -> NDArray[np.uint8]:
        """An array that is the file."""
        old = self.arrays.get(path)
        if old is None or len(old) < nbytes:
            self.arrays[path] = np.zeros(nbytes, np.uint8)
            if old is not None:
                self.arrays[path][: len(old)] = old
        return self.arrays[path]

    def sync(self, path: Path) -> None:
        """Nothing to do: memory is as durable as it gets here."""

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """One holder at a time."""
        with self._guard:
            if path in self._locks:
                raise StateError(f"{path.parent} is in use already; one node runs one client at a time")
            self._locks.add(path)
        try:
            yield
        finally:
            self._locks.discard(path)


LOCAL: Final = LocalFileSystem()


@cache
def _boot_id() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _write_all(handle: int, data: list[Bytes]) -> None:
    """Everything in as few calls as the kernel takes."""
    views = [memoryview(part).cast("B") for part in data if len(part)]
    while views:
        written = os.writev(handle, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
