"""A file system that dies at any operation and loses what was not synced: a worse disk than any that is sold."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from compression.errors import StateError
from protocol.filesystem import Bytes

PAGE = 64  # bytes that reach the disk together, or not


class DiedError(BaseException):
    """The process is killed; nothing of it runs any more."""


class File:
    """What a process sees of a file, and what is surely on the disk."""

    def __init__(self, live: bytes = b"", synced: bytes = b"") -> None:
        self.live: NDArray[np.uint8] = np.frombuffer(live, np.uint8).copy()
        self.synced = synced

    def sync(self) -> None:
        self.synced = self.live.tobytes()

    def after_power_cut(self, rng: random.Random) -> None:
        """Each page is the old one or the new one; so is the length, in pages."""
        old, new = self.synced, self.live.tobytes()
        length = rng.choice([len(old), len(new), rng.randint(*sorted((len(old), len(new))))])
        content = bytearray(length)
        for at in range(0, length, PAGE):
            end = min(at + PAGE, length)
            page = (new if rng.random() < 0.5 else old)[at:end]
            content[at : at + len(page)] = page
        for at in range(0, min(length, len(old), len(new)), 1):
            if old[at] == new[at]:
                content[at] = old[at]  # not written to, so not lost either
        self.live = np.frombuffer(bytes(content), np.uint8).copy()
        self.sync()


class LossyFileSystem:
    """One machine's disk.

    `die_in(n)` kills the process at its n-th operation from now; it stays dead until `restart`.
    `cut_power` loses an arbitrary part of what was not synced: of the pages of a file, of the
    entries of a folder.
    """

    def __init__(self) -> None:
        self.names_now: dict[Path, File] = {}
        self._names_synced: dict[Path, File] = {}
        self._unsynced: list[dict[Path, File | None]] = []
        self._locks: set[Path] = set()
        self._boots = 0
        self._fuse: int | None = None
        self.dead = False
        self.rng = random.Random(0)

    # ---- what tests do -------------------------------------------------------------------

    def die_in(self, operations: int) -> None:
        self._fuse = operations

    def tick(self) -> None:
        """One operation."""
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self.dead = True
        if self.dead:
            raise DiedError

    def restart(self) -> None:
        """A new process on the same machine."""
        self.dead, self._fuse = False, None
        self._locks.clear()

    def cut_power(self, rng: random.Random) -> None:
        """The machine goes off and on again."""
        self._boots += 1
        names = dict(self._names_synced)
        for change in self._unsynced:
            if rng.random() < 0.5:
                _apply(names, change)
        self.names_now, self._unsynced = names, []
        self._names_synced = dict(names)
        for file in names.values():
            file.after_power_cut(rng)
        self.restart()

    def copy(self) -> LossyFileSystem:
        """The same disk in another machine, which is switched on."""
        other = LossyFileSystem()
        other.names_now = {path: File(f.live.tobytes(), f.synced) for path, f in self.names_now.items()}
        other._names_synced = dict(other.names_now)
        other._boots = self._boots
        return other

    def damage(self, path: Path) -> None:
        """Half of a file is gone."""
        file = self.names_now[path]
        file.live = file.live[: len(file.live) // 2].copy()
        file.sync()

    # ---- FileSystem ----------------------------------------------------------------------

    def boot(self) -> str:
        self.tick()
        return f"boot {self._boots}"

    def names(self, folder: Path) -> list[str]:
        self.tick()
        depth = len(folder.parts)
        return sorted({p.parts[depth] for p in self.names_now if folder in p.parents})

    def make_folder(self, folder: Path, *, durable: bool) -> None:
        self.tick()

    def size(self, path: Path) -> int | None:
        self.tick()
        file = self.names_now.get(path)
        return None if file is None else len(file.live)

    def read(self, path: Path, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.tick()
        return self._file(path).live[offset : None if nbytes is None else offset + nbytes].tobytes()

    def append(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        new, joined = path not in self.names_now, b"".join(data)
        try:
            self.tick()
        except DiedError:
            if self._fuse == -1:  # just now: a part of it is written
                self._fuse = -2
                self._grow(path, joined[: self.rng.randint(0, len(joined))])
            raise
        self._grow(path, joined)
        if durable:
            self.tick()
            self._file(path).sync()
            if new:
                self._sync_names(path.parent)

    def replace(self, path: Path, data: list[Bytes], *, durable: bool) -> None:
        self.tick()
        joined = b"".join(data)
        file = File(joined, joined if durable else b"")
        self.tick()
        self._change({path: file})
        if durable:
            self.tick()
            self._sync_names(path.parent)

    def truncate(self, path: Path, nbytes: int) -> None:
        self.tick()
        file = self._file(path)
        file.live = file.live[:nbytes].copy()

    def remove(self, path: Path) -> None:
        for name in sorted(p for p in self.names_now if p == path or path in p.parents):
            self.tick()
            self._change({name: None})

    def array(self, path: Path, nbytes: int) -> NDArray[np.uint8]:
        self.tick()
        if path not in self.names_now:
            self._change({path: File()})
        file = self.names_now[path]
        if len(file.live) < nbytes:
            file.live = np.concatenate([file.live, np.zeros(nbytes - len(file.live), np.uint8)])
        return file.live

    def sync(self, path: Path) -> None:
        self.tick()
        if path in self.names_now:
            self.names_now[path].sync()
        else:
            self._sync_names(path)

    @contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        self.tick()
        if path in self._locks:
            raise StateError(f"{path.parent} is in use by another process")
        self._locks.add(path)
        try:
            yield
        finally:
            self._locks.discard(path)

    # ---- inside --------------------------------------------------------------------------

    def _file(self, path: Path) -> File:
        if path not in self.names_now:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return self.names_now[path]

    def _grow(self, path: Path, data: bytes) -> None:
        if path not in self.names_now:
            self._change({path: File()})
        file = self.names_now[path]
        file.live = np.concatenate([file.live, np.frombuffer(data, np.uint8)])

    def _change(self, change: dict[Path, File | None]) -> None:
        _apply(self.names_now, change)
        self._unsynced.append(change)

    def _sync_names(self, folder: Path) -> None:
        rest: list[dict[Path, File | None]] = []
        for change in self._unsynced:
            if any(path.parent == folder for path in change):
                _apply(self._names_synced, change)
            else:
                rest.append(change)
        self._unsynced = rest


def _apply(names: dict[Path, File], change: dict[Path, File | None]) -> None:
    for path, file in change.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file
