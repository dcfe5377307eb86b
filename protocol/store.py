"""A node's state on disk: the memories of its clients, which move with the server's or not at all.

    ROOT/run-<experiment>/node-<name>/lock
                                      log-00000001     what happened, record by record (log.py)
                                      slots.bin        slot h of every client, mapped into memory

A reply is appended as pending BEFORE it is sent, with what h was where the reply will change
it. h moves only when the server's next message says that the reply was accepted (settle). So
losing a reply, dying before or after sending it, or settling it twice leaves h as the server
knows it, and everything accepted since the server's oldest checkpoint can be undone. All that
one message changes, for however many clients, is one append and one flush.

Two kinds of slots. h is journalled: changed in place, with the values it had in the log. The
others (the app's own Context.state) are generations: small blobs, whole in each pending reply.

h is mapped, so its pages reach the disk whenever the kernel likes. What makes that safe: each
row begins with the number of the last record that moved it, set to a mark of its own while it
moves, and with the machine's boot. Where they are not what the log says - a process died in
the middle, power failed - everything in the log since the last compaction is written once
more, absolute values, oldest first. Compaction syncs h before it drops a record.

Without flushes (durability = process) nothing is known of what a power cut has left: every
memory of a log that began under another boot is lost, and the server sends its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from compression import LayerUpdate, Layout, decode, move
from compression.errors import LayoutError, StateError
from protocol import chain
from protocol.filesystem import LOCAL, Bytes, FileSystem
from protocol.log import DamagedError, Log, Meta, Record, exists
from protocol.records import Attempt

VERSION: Final = 1
LOST: Final = bytes(8)  # digest of a memory that is not to be relied on
FloatArray: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
Updates: TypeAlias = Sequence[LayerUpdate | None]
_log = logging.getLogger("flwr.kimad")
_MARK: Final = 16  # bytes at a row's start: number of the last record that moved it, and the boot
_MOVING: Final = 2**64 - 1
_SMALLEST_LOG_BYTES: Final = 1 << 16
_META_BYTES: Final = 400  # about what a record takes beside its blob
_LEAST_MAPPED_BYTES: Final = 1 << 20
_GROWTH: Final = 4  # a log is rewritten when it is so many times longer than what is needed of it


@dataclass(frozen=True, slots=True)
class Pending:
    """A reply that was, or was about to be, sent and is not settled yet.

    Args:
        attempt: the attempt it answers.
        report: the numbers of its report, so that the same reply can be sent again.
        payload_bytes: length of its payload, the first part of its record's blob.
        slots: name to lengths of every other slot's generations, now and next: the blob's last parts.
        rate: of the memory's move: 1 for EF21.
        record: where it stands in the log.
    """

    attempt: Attempt
    report: Mapping[str, Any]
    payload_bytes: int
    slots: Mapping[str, Sequence[int]]
    rate: float
    record: Record


@dataclass(frozen=True, slots=True)
class Kept:
    """An accepted reply that can be undone.

    Args:
        reply: as it was pending.
        before: digest of h before it.
        since: the attempt accepted before it, or None.
    """

    reply: Pending
    before: bytes
    since: Attempt | None


@dataclass(slots=True)
class Entry:
    """One client's state, without its arrays.

    Args:
        client: client id.
        row: its row of slots.bin.
        digest: chain digest of h (chain.py), or LOST.
        accepted: the last attempt that moved h, or None.
        slots: generation of every other slot that holds now.
        kept: accepted replies that can be undone, oldest first.
        pending: the reply that is not settled, if there is one.
        estimators: stored rate estimators, name to plain values.
        last_sample_s: end time of the last upload sample taken in; samples are taken once.
        moved: number of the last record that moved h.
        base_moved: the same at the last compaction; above 0, the row says more than the log does.
        moves: what moved h since the last compaction, oldest first: ("forward" | "back" | "row", record).
    """

    client: str
    row: int
    digest: bytes
    accepted: Attempt | None = None
    slots: dict[str, bytes] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    pending: Pending | None = None
    estimators: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)
    last_sample_s: float = -1.0
    moved: int = 0
    base_moved: int = 0
    moves: list[tuple[str, Record, Pending | None]] = field(default_factory=list)


def default_root() -> Path:
    """Where client state lives unless the node's configuration says otherwise."""
    return Path(os.environ.get("KIMAD_STATE_DIR") or Path.home() / ".kimad" / "state")


def run_folder(root: Path, experiment: str) -> Path:
    """The folder of one experiment's state on this machine."""
    return root / f"run-{quote(experiment, safe='')}"


class Store:
    """The state of one node in one experiment; a context manager that holds the node's lock.

    Nothing is on disk before `commit`.

    Args:
        root: folder for all experiments of this machine.
        experiment: id of the run; another run never sees this one's state.
        node: name of the node, which is its client's id where it hosts one.
        durable: whether a commit is synced to the disk (durability = full); else a killed process
            loses nothing, and a power cut loses the memories, which the server then sends.
        fs: the file system.

    Raises:
        StateError: another process holds the node, or the state cannot be read or is of a newer version.
    """

    def __init__(
        self, root: Path, experiment: str, node: str, *, durable: bool = False, fs: FileSystem = LOCAL
    ) -> None:
        self.folder = run_folder(root, experiment) / f"node-{quote(node, safe='')}"
        self.experiment, self.durable, self.fs = experiment, durable, fs
        self.layout: Layout | None = None
        self.entries: dict[str, Entry] = {}
        self.damaged = False
        self._boot = int.from_bytes(hashlib.blake2b(fs.boot().encode(), digest_size=8).digest(), "little") or 1
        self._survives_power_cuts = True
        self._batch: list[tuple[Meta, list[Bytes]]] = []
        self._needed_then = 0
        self._mapped: NDArray[np.uint8] | None = None
        self._stack = ExitStack()

    # ---- opening and closing -----------------------------------------------------------

    def __enter__(self) -> Store:
        with ExitStack() as stack:
            try:
                self.fs.make_folder(self.folder, durable=self.durable)
                stack.enter_context(self.fs.lock(self.folder / "lock"))
            except OSError as error:
                raise StateError(
                    f"{self.folder}: cannot be made or written ({error.strerror or error}); choose another state-dir"
                ) from error
            self._open()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self) -> None:
        self.layout, self.entries, self.damaged, self._batch, self._mapped = None, {}, False, [], None
        self._log_boot = self._boot
        if not exists(self.fs, self.folder):
            self.fs.remove(self._slots_path)  # rows without their log say nothing
            self._log = Log(self.fs, self.folder, durable=self.durable)
            return
        try:
            self._log = Log(self.fs, self.folder, durable=self.durable)
            for record in self._log.records:
                self._fold(record.meta, record)
            self._check_rows()
            self._check_boot()
        except (DamagedError, AssertionError, KeyError, ValueError, TypeError, LayoutError) as error:
            _log.error("%s: %s; the memories there are given up, and the server sends its own", self.folder, error)
            self._begin_again()
        self._needed_then = self._needed_bytes()
        self._log.records.clear()

    def _check_rows(self) -> None:
        """Rows of which the log does not tell everything must be there."""
        rows = 1 + max((e.row for e in self.entries.values() if e.base_moved), default=-1)
        if rows and (self.fs.size(self._slots_path) or 0) < rows * self._stride:
            raise DamagedError(f"{self._slots_path}: shorter than the log says")

    def _check_boot(self) -> None:
        """What was not synced says nothing after a power cut."""
        if self.layout is None or self._survives_power_cuts or self._log_boot == self._boot:
            return
        for entry in self.entries.values():
            self._write(entry, {"kind": "lost"}, [])
            self._replaced(entry, LOST, None)
        self._batch.append(({"kind": "boot", "boot": self._boot}, []))

    def _begin_again(self) -> None:
        """A damaged state is given up as a whole: the server has a mirror of every memory."""
        self.layout, self.entries, self.damaged = None, {}, True
        self.fs.remove(self._slots_path)
        for name in self.fs.names(self.folder):
            if name.startswith("log-"):
                self.fs.remove(self.folder / name)
        self._log = Log(self.fs, self.folder, durable=self.durable)

    @property
    def _slots_path(self) -> Path:
        return self.folder / "slots.bin"

    # ---- the layout --------------------------------------------------------------------

    def use(self, layout: Layout) -> None:
        """Take the layout told at hello; state of another one in the same experiment is refused.

        Raises:
            StateError: there is state of another layout.
        """
        if self.layout is not None:
            if self.layout.digest != layout.digest:
                raise StateError(
                    f"{self.folder} holds state of another model under the same experiment {self.experiment!r}; choose "
                    "another experiment id, or remove that folder"
                )
            return
        self.layout, self._survives_power_cuts, self._log_boot = layout, self.durable, self._boot
        self._batch.append((self._head(), []))

    def _head(self) -> dict[str, Any]:
        """The log's first record."""
        return {
            "kind": "head",
            "version": VERSION,
            "layout": self._layout().to_json(),
            "damaged": self.damaged,
            "durable": self._survives_power_cuts,
            "boot": self._log_boot,
        }

    def _fold(self, meta: Meta, record: Record) -> None:
        """What a record of the log changes of the state without its arrays."""
        kind = meta["kind"]
        if kind == "head":
            if meta["version"] > VERSION:
                raise StateError(
                    f"{self.folder} is of store version {meta['version']}, this program reads up to {VERSION}: upgrade "
                    "kimad-fl here, or remove that folder"
                )
            self.layout, self.damaged = Layout.from_json(meta["layout"]), meta["damaged"]
            self._survives_power_cuts, self._log_boot = meta["durable"] and self.durable, meta["boot"]
            return
        if kind == "boot":
            self._log_boot = meta["boot"]
            return
        if kind == "client":
            self.entries[meta["client"]] = entry = Entry(
                client=meta["client"],
                row=meta["row"],
                digest=bytes.fromhex(meta["digest"]),
                accepted=_attempt(meta["client"], meta["accepted"]),
                estimators=meta["estimators"],
                last_sample_s=meta["last_sample_s"],
                moved=meta["moved"],
                base_moved=meta["moved"],
            )
            if meta["slots"]:
                entry.slots = _cut(self._log.read(record), meta["slots"])
            return
        entry = self.entries[meta["client"]]
        if kind == "pending":
            attempt = _attempt(entry.client, meta["attempt"])
            assert attempt is not None
            entry.pending = Pending(attempt, meta["report"], meta["payload_bytes"], meta["slots"], meta["rate"], record)
        elif kind == "dropped":
            entry.pending = None
        elif kind == "accepted":
            assert entry.pending is not None
            reply = entry.pending
            self._kept(entry, bytes.fromhex(meta["digest"]), self._next_slots(reply))
            entry.moves.append(("forward", reply.record, reply))
            entry.moved = entry.moved if meta.get("old") else record.seq
        elif kind == "undone":
            while len(entry.kept) > meta["left"]:
                reply = self._undone(entry)
                entry.moves.append(("back", reply.record, reply))
            entry.slots = _cut(self._log.read(record), meta["slots"]) if meta["slots"] else {}
            entry.moved = record.seq
        elif kind == "replaced":
            self._replaced(entry, bytes.fromhex(meta["digest"]), _attempt(entry.client, meta["accepted"]))
            entry.moves = [("row", record, None)]
            entry.moved = record.seq
        elif kind == "lost":
            self._replaced(entry, LOST, None)
        elif kind == "horizon":
            del entry.kept[: meta["passed"]]
        elif kind == "learned":
            entry.estimators, entry.last_sample_s = meta["estimators"], meta["last_sample_s"]

    # ---- what both folding and moving do -------------------------------------------------

    def _kept(self, entry: Entry, digest: bytes, slots: dict[str, bytes]) -> None:
        reply = entry.pending
        assert reply is not None
        entry.kept.append(Kept(reply, entry.digest, entry.accepted))
        entry.digest, entry.accepted, entry.pending = digest, reply.attempt, None
        entry.slots = entry.slots | slots

    def _undone(self, entry: Entry) -> Pending:
        last = entry.kept.pop()
        entry.digest, entry.accepted, entry.pending = last.before, last.since, None
        return last.reply

    def _replaced(self, entry: Entry, digest: bytes, accepted: Attempt | None) -> None:
        entry.digest, entry.accepted, entry.pending, entry.kept, entry.slots = digest, accepted, None, [], {}

    # ---- clients -----------------------------------------------------------------------

    def entry(self, client: str) -> Entry:
        """A client's state; a client never seen here starts at h = 0, or as lost where the node's state was damaged."""
        layout = self._layout()
        found = self.entries.get(client)
        if found is None:
            row = 1 + max((e.row for e in self.entries.values()), default=-1)
            digest = LOST if self.damaged else chain.start(self.experiment, layout.digest, client)
            found = self.entries[client] = Entry(client, row, digest)
            self._batch.append(_client_record(found))
            if (left := self._row(found)).any():  # by a client whose record never reached the disk
                left[:] = 0
        self._make_clean(found)
        return found

    def h(self, entry: Entry) -> tuple[FloatArray, ...]:
        """Slot h of a client, one flat array a compressed layer: views of the mapped file, to be read only."""
        row = self._row(entry)
        return tuple(row[at : at + nbytes].view(dtype) for at, nbytes, dtype in self._places)

    def payload(self, pending: Pending) -> bytes:
        """The bytes of a stored reply."""
        return self._blob(pending)[: pending.payload_bytes]

    def settle(self, entry: Entry, accepted: Attempt | None, digest: bytes | None) -> str:
        """Move, roll back or undo by what the server accepted.

        Args:
            entry: the client.
            accepted: the last attempt that the server accepted from it; None: nothing yet.
            digest: the server's digest of h after it; None: not compared (the client says of itself what it is).

        Returns:
            "accepted", "rolled-back", "undone", "nothing", "reset" (it was lost, and nothing was
            accepted yet), or "lost": the memory is not what the server knows and cannot become so;
            it is then left as it is. (design.md, "Exactly once")
        """
        reply = entry.pending
        if reply is not None and reply.attempt == accepted:
            payload = self.payload(reply)
            after = chain.extend(entry.digest, payload)
            if digest is None or digest == after:
                self._write(entry, {"kind": "accepted", "digest": after.hex()}, [])
                slots = self._next_slots(reply)
                self._move(entry, [("forward", reply.record, reply)])
                self._kept(entry, after, slots)
                return "accepted"
        if entry.digest != LOST and digest in (None, entry.digest):
            if reply is None:
                return "nothing"
            self._write(entry, {"kind": "dropped"}, [])
            entry.pending = None
            return "rolled-back"
        for at in reversed(range(len(entry.kept))):
            if entry.kept[at].before == digest and entry.kept[at].since == accepted:
                self._undo(entry, at)
                return "undone"
        if accepted is None and digest == chain.start(self.experiment, self._layout().digest, entry.client):
            self.replace(entry, None, digest, None)
            return "reset"
        return "lost"

    def _undo(self, entry: Entry, left: int) -> None:
        """Undo the newest accepted replies until `left` of the kept ones remain."""
        slots = self._slots_after(entry, left)
        lengths = {name: len(value) for name, value in slots.items()}
        self._write(entry, {"kind": "undone", "left": left, "slots": lengths}, list(slots.values()))
        moves: list[tuple[str, Record, Pending | None]] = []
        while len(entry.kept) > left:
            reply = self._undone(entry)
            moves.append(("back", reply.record, reply))
        self._move(entry, moves)
        entry.slots = slots

    def _slots_after(self, entry: Entry, left: int) -> dict[str, bytes]:
        """The other slots as they were when `left` of the kept replies had been accepted."""
        slots = dict(entry.slots)
        for kept in reversed(entry.kept[left:]):
            slots |= self._generations(kept.reply, 0)
        return {name: value for name, value in slots.items() if value}

    def replace(self, entry: Entry, h: Sequence[FloatArray] | None, digest: bytes, accepted: Attempt | None) -> None:
        """Put what the server has in the place of a lost memory; None: all zeros. It is on disk when this returns."""
        row = np.zeros(self._stride - _MARK, np.uint8)
        for (at, nbytes, dtype), part in zip(self._places, h or (), strict=False):
            row[at - _MARK : at - _MARK + nbytes].view(dtype)[:] = part
        meta = {"kind": "replaced", "digest": digest.hex(), "accepted": _triple(accepted)}
        self._write(entry, meta, [row.data])
        seq = self._log.seq + len(self._batch)
        record = self._flush()[-1]
        assert record.seq == seq
        self._move(entry, [("row", record, None)], seq=seq)
        self._replaced(entry, digest, accepted)

    def pass_horizon(self, entry: Entry, horizon: Attempt | None) -> None:
        """Keep no longer what the server can never undo: replies up to the horizon attempt; None: keep all."""
        if horizon is None:
            return
        passed = sum(_order(kept.reply.attempt) <= _order(horizon) for kept in entry.kept)
        if passed:
            self._write(entry, {"kind": "horizon", "passed": passed}, [])
            del entry.kept[:passed]

    def learn(
        self, entry: Entry, estimators: Mapping[str, Mapping[str, float | int | str]], last_sample_s: float
    ) -> None:
        """Keep the client's rate estimators; they do not move with replies."""
        plain = {name: dict(state) for name, state in estimators.items()}
        self._write(entry, {"kind": "learned", "estimators": plain, "last_sample_s": last_sample_s}, [])
        entry.estimators, entry.last_sample_s = plain, last_sample_s

    def pend(
        self,
        entry: Entry,
        attempt: Attempt,
        payload: bytes,
        updates: Updates,
        *,
        report: Mapping[str, Any],
        slots: Mapping[str, bytes] | None = None,
        rate: float = 1.0,
    ) -> None:
        """Make a reply pending, which `commit` stores before it is sent.

        Args:
            entry: the client.
            attempt: the attempt that it answers.
            payload: its bytes.
            updates: what they decode to, one a compressed layer.
            report: its report's numbers.
            slots: next generation of every other slot.
            rate: of the memory's move; 0: it does not move.
        """
        previous = [
            np.ascontiguousarray(h if u.indices is None else h[u.indices])
            for h, u in zip(self.h(entry), updates, strict=True)
            if u is not None and rate
        ]
        slots = dict(slots or {})
        now = {name: entry.slots.get(name, b"") for name in slots}
        lengths = {name: [len(now[name]), len(value)] for name, value in slots.items()}
        meta: dict[str, Any] = {
            "kind": "pending",
            "attempt": _triple(attempt),
            "report": dict(report),
            "payload_bytes": len(payload),
            "slots": lengths,
            "rate": rate,
        }
        blob: list[Bytes] = [payload, *(part.data.cast("B") for part in previous if part.size)]
        for name, value in slots.items():
            blob += [now[name], value]
        self._write(entry, meta, blob)
        record = Record(self._log.seq + len(self._batch), meta, -1, sum(memoryview(b).nbytes for b in blob), 0)
        entry.pending = Pending(attempt, dict(report), len(payload), lengths, rate, record)

    def forget(self) -> None:
        """Remove this node's state of this experiment, and the experiment's folder if it is empty."""
        self.layout, self.entries, self._batch = None, {}, []
        self.fs.remove(self.folder)
        if not self.fs.names(self.folder.parent):
            self.fs.remove(self.folder.parent)

    # ---- to disk -------------------------------------------------------------------------

    def commit(self) -> None:
        """Write all that changed by one append and, where durable, one flush.

        Raises:
            StateError: it cannot be written. What was there before is intact, and this store is to be
                opened anew.
        """
        self._flush()
        if self._log.nbytes > max(_SMALLEST_LOG_BYTES, _GROWTH * self._needed_then):
            self.compact()

    def _flush(self) -> list[Record]:
        batch, self._batch = self._batch, []
        written = self._log.append(batch)
        for record in written:  # replies that were pending in this batch now have a place
            entry = self.entries.get(record.meta.get("client", ""))
            if entry is not None and entry.pending is not None and entry.pending.record.seq == record.seq:
                p = entry.pending
                entry.pending = Pending(p.attempt, p.report, p.payload_bytes, p.slots, p.rate, record)
        return written

    def compact(self) -> None:
        """Rewrite the log with what is needed of it: opening takes time that does not grow with history."""
        for entry in self.entries.values():
            self._make_clean(entry)
        if self.durable and self.fs.size(self._slots_path) is not None:
            try:
                self.fs.sync(self._slots_path)
                self.fs.sync(self.folder)  # its name, too
            except OSError as error:
                raise StateError(f"{self._slots_path}: cannot be synced ({error}); the old state is intact") from error
        self._log.rewrite(list(self._needed()))
        self._open()

    def _needed(self) -> Iterator[tuple[Meta, list[Bytes]]]:
        yield self._head(), []
        for entry in self.entries.values():
            base = entry.kept[0] if entry.kept else None
            slots = self._slots_after(entry, 0)
            yield _client_record(entry, base, slots)
            for at, kept in enumerate(entry.kept):
                yield kept.reply.record.meta, [self._blob(kept.reply)]
                after = entry.kept[at + 1].before if at + 1 < len(entry.kept) else entry.digest
                yield {"kind": "accepted", "client": entry.client, "digest": after.hex(), "old": True}, []
            if entry.pending is not None:
                yield entry.pending.record.meta, [self._blob(entry.pending)]

    def _needed_bytes(self) -> int:
        replies = [k.reply for e in self.entries.values() for k in e.kept]
        replies += [e.pending for e in self.entries.values() if e.pending is not None]
        return sum(r.record.nbytes + _META_BYTES for r in replies) + _META_BYTES * len(self.entries)

    def _write(self, entry: Entry, meta: dict[str, Any], blob: list[Bytes]) -> None:
        meta["client"] = entry.client
        self._batch.append((meta, blob))

    # ---- rows ----------------------------------------------------------------------------

    def _layout(self) -> Layout:
        if self.layout is None:
            raise StateError(f"{self.folder}: no layout is known here; the server says hello first")
        return self.layout

    @property
    def _places(self) -> tuple[tuple[int, int, str], ...]:
        """(offset in a row, bytes, dtype) of each compressed layer."""
        return _places(self._layout())

    @property
    def _stride(self) -> int:
        last = self._places[-1] if self._places else (_MARK, 0, "")
        return -(-(last[0] + last[1]) // 64) * 64

    @property
    def _array(self) -> NDArray[np.uint8]:
        rows = 1 + max((e.row for e in self.entries.values()), default=-1)
        stride = self._stride
        if self._mapped is not None and len(self._mapped) >= rows * stride:
            return self._mapped
        chunk = max(1, _LEAST_MAPPED_BYTES // stride)
        try:
            self._mapped = np.asarray(self.fs.array(self._slots_path, -(-rows // chunk) * chunk * stride))
            return self._mapped
        except (OSError, ValueError) as error:
            raise StateError(f"{self._slots_path}: cannot be mapped ({error}); free the disk") from error

    def _row(self, entry: Entry) -> NDArray[np.uint8]:
        stride = self._stride
        return self._array[entry.row * stride : (entry.row + 1) * stride]

    def _make_clean(self, entry: Entry) -> None:
        """Bring a row to what the log says, where a crash may have left something else."""
        mark = self._row(entry)[:_MARK].view(np.uint64)
        if int(mark[0]) == entry.moved and int(mark[1]) == self._boot:
            return
        if entry.moved or entry.kept or entry.pending is not None or int(mark[0]):
            self._move(entry, entry.moves, seq=entry.moved)
            if entry.pending is not None:
                self._move(entry, [("back", entry.pending.record, entry.pending)], seq=entry.moved)
        mark[0], mark[1] = entry.moved, self._boot

    def _move(
        self, entry: Entry, moves: Sequence[tuple[str, Record, Pending | None]], *, seq: int | None = None
    ) -> None:
        """Write moves into a row, absolute values, oldest first."""
        row = self._row(entry)
        mark = row[:_MARK].view(np.uint64)
        mark[0] = _MOVING
        layers = tuple(row[at : at + nbytes].view(dtype) for at, nbytes, dtype in self._places)
        for kind, record, reply in moves:
            if reply is None:
                row[_MARK:] = np.frombuffer(self._log.read(record), np.uint8)
                continue
            if reply.rate == 0.0:
                continue
            blob = self._blob(reply)
            at = reply.payload_bytes
            for h, update in zip(layers, decode(self._layout(), blob[:at]).updates, strict=True):
                if update is None:
                    continue
                n = h.size if update.indices is None else len(update.indices)
                values = np.frombuffer(blob, h.dtype, n, at).copy()
                at += values.nbytes
                if kind == "forward":
                    move(values, LayerUpdate(None, update.values), reply.rate)
                if update.indices is None:
                    h[:] = values
                else:
                    h[update.indices] = values
        entry.moved = self._log.seq + len(self._batch) if seq is None else seq
        mark[0], mark[1] = entry.moved, self._boot

    def _blob(self, reply: Pending) -> bytes:
        if reply.record.offset < 0:
            meta_blob = next(b for m, b in reversed(self._batch) if m is reply.record.meta)
            return b"".join(meta_blob)
        return self._log.read(reply.record)

    def _next_slots(self, reply: Pending) -> dict[str, bytes]:
        return self._generations(reply, 1)

    def _generations(self, reply: Pending, which: int) -> dict[str, bytes]:
        if not reply.slots:
            return {}
        pairs = reply.slots
        total = sum(sum(pair) for pair in pairs.values())
        tail = self._blob(reply)[-total:] if total else b""
        found, at = {}, 0
        for name, (before, after) in pairs.items():
            found[name] = tail[at : at + before] if which == 0 else tail[at + before : at + before + after]
            at += before + after
        return found


def most_disk_bytes(layout: Layout, reply_bytes: int, kept: int) -> int:
    """About the most that a node with one client takes on disk, while its log is being rewritten.

    Args:
        layout: the agreed layout.
        reply_bytes: of a stored reply: its payload, and what the memory was where it changes it.
        kept: replies that are kept at a time: those that can be undone, and the pending one.
    """
    memory = sum(layout.layers[i].nbytes for i in layout.compressed)
    needed = kept * (reply_bytes + _META_BYTES) + _META_BYTES + len(layout.to_json())
    rows = max(memory + 64 * len(layout.compressed), _LEAST_MAPPED_BYTES)
    return rows + max(_SMALLEST_LOG_BYTES, _GROWTH * needed) + reply_bytes + needed


@lru_cache(maxsize=16)
def _places(layout: Layout) -> tuple[tuple[int, int, str], ...]:
    places, at = [], _MARK
    for layer in (layout.layers[i] for i in layout.compressed):
        places.append((at, layer.nbytes, layer.dtype))
        at += -(-layer.nbytes // 8) * 8
    return tuple(places)


def _cut(blob: bytes, lengths: Mapping[str, int]) -> dict[str, bytes]:
    found, at = {}, 0
    for name, nbytes in lengths.items():
        found[name] = blob[at : at + nbytes]
        at += nbytes
    return found


def _client_record(
    entry: Entry, base: Kept | None = None, slots: Mapping[str, bytes] | None = None
) -> tuple[Meta, list[Bytes]]:
    """A client as it was before everything that is kept."""
    slots = slots or {}
    meta = {
        "kind": "client",
        "client": entry.client,
        "row": entry.row,
        "digest": (base.before if base else entry.digest).hex(),
        "accepted": _triple(base.since if base else entry.accepted),
        "slots": {name: len(value) for name, value in slots.items()},
        "estimators": {name: dict(state) for name, state in entry.estimators.items()},
        "last_sample_s": entry.last_sample_s,
        "moved": entry.moved,
    }
    return meta, list(slots.values())


def _triple(attempt: Attempt | None) -> list[int] | None:
    return None if attempt is None else [attempt.incarnation, attempt.round, attempt.part]


def _attempt(client: str, triple: Sequence[int] | None) -> Attempt | None:
    return None if triple is None else Attempt(triple[0], triple[1], client, triple[2])


def _order(attempt: Attempt) -> tuple[int, int]:
    return attempt.incarnation, attempt.round
