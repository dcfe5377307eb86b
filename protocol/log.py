"""An append-only log of records with checksums: the form in which both ends keep what they may not lose.

    FOLDER/log-00000001        records, one after another; only the newest such file counts

A record is a small JSON object and a blob. One `append` writes any number of records at once,
with one flush; whoever crashes in the middle of it leaves a torn tail, which opening cuts off.
`rewrite` starts the next file with the records that are still needed (compaction), so that a
log never grows with history; it is renamed into place as a whole, and the old file goes after.

    record = "KLR1"  crc32 of the rest of the header  seq u64  batch u64  meta length u32  meta crc32
             blob length u64  blob crc32 u32 (all little-endian)  meta  blob

`batch` is where its append began: what stands before that was flushed before, so damage there
is no torn tail.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from compression.errors import StateError
from protocol.filesystem import Bytes, FileSystem

MAGIC: Final = b"KLR1"
_HEAD: Final = struct.Struct("<4sI")
_REST: Final = struct.Struct("<QQIIQI")
HEADER_BYTES: Final = _HEAD.size + _REST.size
_READ_BYTES: Final = 1 << 16
_PREFIX: Final = "log-"
Meta = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """Where a record stands.

    Args:
        seq: its number; grows by one a record, over all files of the log.
        meta: its JSON object.
        offset: of its blob in the file.
        nbytes: of its blob.
        crc: crc32 of its blob.
    """

    seq: int
    meta: Meta
    offset: int
    nbytes: int
    crc: int


class DamagedError(StateError):
    """A record that is not what was written, with records after it: not a torn tail."""


class Log:
    """One log, opened.

    Args:
        fs: the file system.
        folder: its folder, which exists.
        durable: whether every append is synced to the disk.
        cut_damage: go on with what stands before a damaged record, whatever stands behind it. For a log that
            is synced now and then: what was not synced may reach the disk in any order.

    Raises:
        StateError: the log is of a newer version, or cannot be read or cut.
        DamagedError: a record is damaged and others follow it.
    """

    def __init__(self, fs: FileSystem, folder: Path, *, durable: bool, cut_damage: bool = False) -> None:
        self.fs, self.folder, self.durable, self._cut_damage = fs, folder, durable, cut_damage
        numbers = [int(n[len(_PREFIX) :]) for n in _names(fs, folder)]
        self._number = max(numbers, default=1)
        self._seq = 0
        self.nbytes = 0
        self.torn_bytes = 0
        self.records: list[Record] = []
        with _said(self.path, "read"):
            self._read()
            for old in numbers:
                if old != self._number:
                    fs.remove(folder / f"{_PREFIX}{old:08}")

    @property
    def path(self) -> Path:
        """The file that is appended to."""
        return self.folder / f"{_PREFIX}{self._number:08}"

    @property
    def seq(self) -> int:
        """Number of the last record."""
        return self._seq

    def append(self, records: Iterable[tuple[Meta, Sequence[Bytes]]]) -> list[Record]:
        """Append records by one write and, where the log is durable, one flush; they are there when this returns.

        Args:
            records: the JSON object and the blob of each, the blob in pieces.

        Raises:
            StateError: they cannot be written; the log is what it was.
        """
        data, added, end, seq = _encode(records, self._seq, self.nbytes)
        if not added:
            return []
        try:
            with _said(self.path, "written"):
                self.fs.append(self.path, data, durable=self.durable)
        except StateError:
            if (size := self.fs.size(self.path)) is not None and size > self.nbytes:
                with _said(self.path, "cut"):  # a full disk took a part of it
                    self.fs.truncate(self.path, self.nbytes)
            raise
        self._seq, self.nbytes = seq, end
        return added

    def read(self, record: Record) -> bytes:
        """A record's blob.

        Raises:
            DamagedError: it is not what was written.
        """
        with _said(self.path, "read"):
            blob = self.fs.read(self.path, record.offset, record.nbytes)
        if len(blob) != record.nbytes or zlib.crc32(blob) != record.crc:
            raise DamagedError(f"{self.path}: record {record.seq} is not what was written")
        return blob

    def rewrite(self, records: Iterable[tuple[Meta, Sequence[Bytes]]], *, durable: bool = False) -> list[Record]:
        """Go on in a new file that begins with these records; the old file is removed.

        Args:
            records: the JSON object and the blob of each, the blob in pieces.
            durable: whether it is synced before the old one goes, also where the log is not durable.

        Raises:
            StateError: it cannot be written; the log is what it was.
        """
        data, added, end, seq = _encode(records, self._seq, 0)
        path = self.folder / f"{_PREFIX}{self._number + 1:08}"
        with _said(path, "written"):
            self.fs.replace(path, data, durable=durable or self.durable)
        old, self._number, self._seq, self.nbytes = self.path, self._number + 1, seq, end
        with _said(old, "removed"):
            self.fs.remove(old)
        return added

    def sync(self) -> None:
        """Make everything appended so far durable.

        Raises:
            StateError: the disk refuses.
        """
        if self.nbytes:
            with _said(self.path, "synced"):
                self.fs.sync(self.path)
                self.fs.sync(self.folder)  # its name, too

    def cut(self, last: Record | None) -> None:
        """Forget everything after a record, or everything."""
        self.nbytes = 0 if last is None else last.offset + last.nbytes
        if (self.fs.size(self.path) or 0) > self.nbytes:
            with _said(self.path, "cut"):
                self.fs.truncate(self.path, self.nbytes)

    def _read(self) -> None:
        size = self.fs.size(self.path) or 0
        good = 0
        for record, end in scan(self.fs, self.path, size):
            self.records.append(record)
            good, self._seq = end, record.seq
        if self.records:  # a whole header does not say that what follows it is whole
            last = self.records[-1]
            if zlib.crc32(self.fs.read(self.path, last.offset, last.nbytes)) != last.crc:
                self.records.pop()
                good = last.offset - HEADER_BYTES - _meta_bytes(last.meta)
                self._seq = last.seq - 1
        if good < size:
            if not self._cut_damage and whole_records_follow(self.fs, self.path, good):
                raise DamagedError(f"{self.path}: damaged at byte {good}, and what was written after that is whole")
            self.torn_bytes = size - good
            self.fs.truncate(self.path, good)
        self.nbytes = good


def exists(fs: FileSystem, folder: Path) -> bool:
    """Whether there is a log in a folder."""
    return bool(_names(fs, folder))


def newest(fs: FileSystem, folder: Path) -> Path | None:
    """The log file that counts in a folder, or None."""
    numbers = [int(n[len(_PREFIX) :]) for n in _names(fs, folder)]
    return folder / f"{_PREFIX}{max(numbers):08}" if numbers else None


def _names(fs: FileSystem, folder: Path) -> list[str]:
    return [n for n in fs.names(folder) if n.startswith(_PREFIX) and n[len(_PREFIX) :].isdigit()]


def _encode_meta(meta: Meta) -> bytes:
    return json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()


def _meta_bytes(meta: Meta) -> int:
    return len(_encode_meta(meta))


def _encode(
    records: Iterable[tuple[Meta, Sequence[Bytes]]], seq: int, at: int
) -> tuple[list[Bytes], list[Record], int, int]:
    """Bytes of records, where each stands, where the file ends and the last number."""
    data: list[Bytes] = []
    added: list[Record] = []
    batch = at
    for meta, blob in records:
        seq += 1
        text = _encode_meta(meta)
        crc, nbytes = 0, 0
        for piece in blob:
            crc, nbytes = zlib.crc32(piece, crc), nbytes + memoryview(piece).nbytes
        rest = _REST.pack(seq, batch, len(text), zlib.crc32(text), nbytes, crc)
        data += [_HEAD.pack(MAGIC, zlib.crc32(rest)) + rest + text, *blob]
        at += HEADER_BYTES + len(text)
        added.append(Record(seq, meta, at, nbytes, crc))
        at += nbytes
    return data, added, at, seq


def _header(data: bytes) -> tuple[int, int, int, int, int, int] | None:
    """(seq, batch, meta length, meta crc, blob length, blob crc) of a whole header, or None."""
    if len(data) < HEADER_BYTES:
        return None
    magic, crc = _HEAD.unpack_from(data)
    rest = data[_HEAD.size : HEADER_BYTES]
    return _REST.unpack(rest) if magic == MAGIC and zlib.crc32(rest) == crc else None


def scan(fs: FileSystem, path: Path, size: int) -> Iterator[tuple[Record, int]]:
    """Records up to the first that is not whole, each with where it ends; blobs are not read."""
    at, window, window_at = 0, b"", 0

    def get(start: int, nbytes: int) -> bytes:
        nonlocal window, window_at
        if not (window_at <= start and start + nbytes <= window_at + len(window)):
            window, window_at = fs.read(path, start, max(nbytes, _READ_BYTES)), start
        return window[start - window_at : start - window_at + nbytes]

    while at + HEADER_BYTES <= size:
        head = _header(get(at, HEADER_BYTES))
        if head is None:
            return
        seq, _, meta_length, meta_crc, blob_length, blob_crc = head
        offset = at + HEADER_BYTES + meta_length
        if offset + blob_length > size:
            return
        text = get(at + HEADER_BYTES, meta_length)
        if zlib.crc32(text) != meta_crc:
            return
        yield Record(seq, json.loads(text), offset, blob_length, blob_crc), offset + blob_length
        at = offset + blob_length


def whole_records_follow(fs: FileSystem, path: Path, damaged: int) -> bool:
    """Whether a whole record of a later append stands behind a damaged place."""
    data = fs.read(path, damaged)
    at = data.find(MAGIC, 1)
    while at >= 0:
        if (head := _header(data[at : at + HEADER_BYTES])) is not None:
            _, batch, meta_length, meta_crc, blob_length, blob_crc = head
            text = data[at + HEADER_BYTES : at + HEADER_BYTES + meta_length]
            blob = data[at + HEADER_BYTES + meta_length :][:blob_length]
            whole = zlib.crc32(text) == meta_crc and len(blob) == blob_length and zlib.crc32(blob) == blob_crc
            if whole and batch > damaged:
                return True
        at = data.find(MAGIC, at + 1)
    return False


@contextmanager
def _said(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot be {what} ({error.strerror or error}); the old state is intact; free the disk, or choose "
            "another folder"
        ) from error
