"""Mirrors: the server's copy of every client's memory, as a log of what it accepted.

    FOLDER/log-00000001      accepted payloads, in the order of their acceptance (protocol/log.py)
           base-<client>     a client's memory up to some payload, dense

A mirror is its base moved by the payloads after it. When a client's payloads take more room
than a memory does, those that no checkpoint kept can want back are folded into its base. So the
disk holds at most min(bytes accepted, one model a client) and what was accepted since the oldest
checkpoint kept, and, until a log is rewritten, a quarter of that in payloads already folded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from compression import LayerUpdate, Layout, decode, move
from compression.errors import StateError
from protocol.filesystem import FileSystem
from protocol.log import Log, Record

FloatArray = NDArray[np.float32] | NDArray[np.float64]
_BASE: Final = "base-"
_DEAD_SHARE: Final = 0.25


class Mirrors:
    """Mirrors of all clients of a run.

    Args:
        fs: the file system.
        folder: their folder.
        layout: the agreed layout.

    Raises:
        StateError: they cannot be read.
    """

    def __init__(self, fs: FileSystem, folder: Path, layout: Layout) -> None:
        self.fs, self.folder, self.layout = fs, folder, layout
        self.dense_bytes = sum(layout.layers[i].nbytes for i in layout.compressed)
        fs.make_folder(folder, durable=True)
        self._log = Log(
            fs, folder, durable=False, cut_damage=True
        )  # synced at checkpoints, and `rewind` says if it is too short
        self._bases: dict[str, int] = {
            unquote(name[len(_BASE) :]): int(self._base_head(name)["number"])
            for name in fs.names(folder)
            if name.startswith(_BASE)
        }
        self._batch: list[tuple[dict[str, object], list[bytes]]] = []
        self._payloads: dict[str, list[Record]] = {}
        self.number = max(self._bases.values(), default=0)
        for record in self._log.records:
            self.number = max(self.number, record.meta["number"])
            if record.meta["number"] > self._bases.get(record.meta["client"], 0):
                self._payloads.setdefault(record.meta["client"], []).append(record)
        self._all = list(self._log.records)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._log.nbytes + len(self._bases) * (self.dense_bytes + 100)

    def accept(self, client: str, payload: bytes, rate: float = 1.0) -> None:
        """Take an accepted payload, which moves the memory at this rate; `flush` writes those of a round at once."""
        self.number += 1
        self._batch.append(({"client": client, "number": self.number, "rate": rate}, [payload]))

    def flush(self) -> None:
        """Append what was accepted.

        Raises:
            StateError: the disk refuses.
        """
        batch, self._batch = self._batch, []
        for record in self._log.append(batch):
            self._payloads.setdefault(record.meta["client"], []).append(record)
            self._all.append(record)

    def read(self, client: str) -> tuple[FloatArray, ...]:
        """A client's memory as the server knows it, one flat array a compressed layer; zeros if nothing was accepted.

        Raises:
            StateError: it cannot be read.
        """
        self.flush()
        return self._moved(client, self._payloads.get(client, ()))

    def checkpoint(self) -> int:
        """Make everything durable; the number to come back to by `rewind`."""
        self.flush()
        self._log.sync()
        return self.number

    def rewind(self, number: int) -> None:
        """Forget what was accepted after a checkpoint.

        Raises:
            StateError: more was folded than that checkpoint has, or less is there than it had.
        """
        folded = max(self._bases.values(), default=0)
        if folded > number or self.number < number:
            raise StateError(
                f"{self.folder}: mirrors reach from {folded} to {self.number} payloads, and the checkpoint has {number}"
            )
        self._batch = []
        self._all = [r for r in self._all if r.meta["number"] <= number]
        self._payloads = {c: [r for r in of if r.meta["number"] <= number] for c, of in self._payloads.items()}
        self._log.cut(self._all[-1] if self._all else None)
        self.number = number

    def fold(self, oldest: int) -> None:
        """Fold long logs, up to the number of the oldest checkpoint kept; rewrite the log when a quarter is dead."""
        self.flush()
        for client, records in self._payloads.items():
            passed = [r for r in records if r.meta["number"] <= oldest]
            if sum(r.nbytes for r in passed) <= self.dense_bytes:
                continue
            memory = self._moved(client, passed)
            self._write_base(client, passed[-1].meta["number"], memory)
            self._payloads[client] = records[len(passed) :]
        live = sum(r.nbytes for records in self._payloads.values() for r in records)
        if self._log.nbytes > (1 << 20) and sum(r.nbytes for r in self._all) > live / (1.0 - _DEAD_SHARE):
            wanted = sorted((r for of in self._payloads.values() for r in of), key=lambda r: r.meta["number"])
            self._all = self._log.rewrite(((r.meta, [self._log.read(r)]) for r in wanted), durable=True)
            self._payloads = {}
            for record in self._all:
                self._payloads.setdefault(record.meta["client"], []).append(record)

    def _moved(self, client: str, payloads: Sequence[Record]) -> tuple[FloatArray, ...]:
        memory = self._read_base(client)
        for record in payloads:
            move_all(memory, decode(self.layout, self._log.read(record)).updates, record.meta["rate"])
        return memory

    def _places(self) -> list[tuple[int, str]]:
        return [(self.layout.layers[i].nbytes, self.layout.layers[i].dtype) for i in self.layout.compressed]

    def _path(self, client: str) -> Path:
        return self.folder / f"{_BASE}{quote(client, safe='')}"

    def _base_head(self, name: str) -> Mapping[str, int]:
        head: Mapping[str, int] = json.loads(self.fs.read(self.folder / name, 0, 100))
        return head

    def _write_base(self, client: str, number: int, memory: Sequence[FloatArray]) -> None:
        data = b"".join(part.tobytes() for part in memory)
        head = json.dumps({"number": number, "crc": zlib.crc32(data), "version": 1}).encode().ljust(100)
        try:
            self.fs.replace(self._path(client), [head, data], durable=True)
        except OSError as error:
            raise StateError(f"{self._path(client)}: cannot be written ({error}); free the disk") from error
        self._bases[client] = number

    def _read_base(self, client: str) -> tuple[FloatArray, ...]:
        if client not in self._bases:
            return tuple(
                np.zeros(self.layout.layers[i].size, self.layout.layers[i].dtype) for i in self.layout.compressed
            )
        data = self.fs.read(self._path(client), 100)
        if zlib.crc32(data) != self._base_head(self._path(client).name)["crc"]:
            raise StateError(f"{self._path(client)} is damaged; its client can only start at zero again")
        parts, at = [], 0
        for nbytes, dtype in self._places():
            parts.append(np.frombuffer(data, dtype, nbytes // np.dtype(dtype).itemsize, at).copy())
            at += nbytes
        return tuple(parts)


def move_all(memory: Sequence[FloatArray], updates: Sequence[LayerUpdate | None], rate: float = 1.0) -> None:
    """Move a memory in place by a decoded message."""
    for h, update in zip(memory, updates, strict=True):
        if update is not None:
            move(h, update, rate)
