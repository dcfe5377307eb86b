"""A client's state on disk, in its simplest true form.

    ROOT/run-<experiment>/client-<id>/layout.json         the agreed layout
                                      memory.safetensors    slot h, digest, last attempt accepted, estimators
                                      pending.safetensors   the last reply: attempt and payload bytes

The reply is stored as pending BEFORE it is sent, and slot h moves only when the server's
next message says that it was accepted (settle). So a reply changes both ends or neither:
losing it, dying before or after sending it, or settling it twice leaves h as the server
knows it. Every file is replaced atomically; `durable` adds an fsync of file and folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_safetensors

from compression import Layout, decode, move
from compression.errors import LayoutError, StateError, WireError
from protocol import chain
from protocol.files import sync_directory, write_atomic
from protocol.records import Attempt

STORE_VERSION = 1
FloatArray = NDArray[np.float32] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Memory:
    """What both ends agree on for one client.

    Args:
        h: slot h, one flat array for each compressed layer of the layout.
        digest: chain digest of h (chain.py).
        accepted: last attempt that moved h, or None at the start.
        estimators: stored rate estimators, name to plain values.
        last_sample_s: end time of the last upload sample taken in; samples are taken once.
    """

    h: tuple[FloatArray, ...]
    digest: bytes
    accepted: Attempt | None = None
    estimators: Mapping[str, Mapping[str, float | int | str]] = field(default_factory=dict)
    last_sample_s: float = -1.0


@dataclass(frozen=True, slots=True)
class Pending:
    """A reply that was, or was about to be, sent and is not settled yet.

    Args:
        attempt: the attempt it answers.
        payload: its bytes.
        report: the numbers of its report, so that the same reply can be sent again.
    """

    attempt: Attempt
    payload: bytes
    report: Mapping[str, float | int | None] = field(default_factory=dict)


def fresh_memory(layout: Layout, experiment: str, client: str) -> Memory:
    """The memory every client starts with: h = 0."""
    h = tuple(np.zeros(layer.size, dtype=layer.dtype) for layer in (layout.layers[i] for i in layout.compressed))
    return Memory(h=h, digest=chain.start(experiment, layout.digest, client))


@dataclass(frozen=True, slots=True)
class Settled:
    """Outcome of settling: the memory, and "accepted", "rolled-back", "nothing" or "lost"."""

    memory: Memory
    outcome: str


def settle(
    memory: Memory, pending: Pending | None, layout: Layout, accepted: Attempt | None, digest: bytes | None
) -> Settled:
    """Move or roll back the pending reply by what the server accepted.

    Args:
        memory: the client's memory.
        pending: its last reply, if any.
        layout: the agreed layout.
        accepted: the last attempt the server accepted from this client; None: nothing yet.
        digest: the server's digest of h after it; None skips the comparison.

    Returns:
        The settled memory. "lost" means that it is not what the server knows and cannot
        become so; it is then returned unchanged. (design.md, "Exactly once")
    """
    outcome = "nothing"
    if pending is not None and pending.attempt != memory.accepted:
        if pending.attempt == accepted:
            updates = decode(layout, pending.payload).updates
            h = tuple(part.copy() for part in memory.h)
            for part, update in zip(h, updates, strict=True):
                if update is not None:
                    move(part, update)
            memory = replace(memory, h=h, digest=chain.extend(memory.digest, pending.payload), accepted=accepted)
            outcome = "accepted"
        else:
            outcome = "rolled-back"
    if digest is not None and digest != memory.digest:
        return Settled(memory, "lost")
    return Settled(memory, outcome)


def default_root() -> Path:
    """Where client state lives unless the node's configuration says otherwise."""
    return Path(os.environ.get("KIMAD_STATE_DIR") or Path.home() / ".kimad" / "state")


class ClientStore:
    """The files of one client in one experiment.

    Args:
        root: folder for all experiments of this machine.
        experiment: id of the run; another run never sees this one's state.
        client: client id.
        durable: whether to fsync (durability = full).
    """

    def __init__(self, root: Path, experiment: str, client: str, *, durable: bool = False) -> None:
        self.folder = root / f"run-{quote(experiment, safe='')}" / f"client-{quote(client, safe='')}"
        self.experiment, self.client, self.durable = experiment, client, durable

    def load_layout(self) -> Layout | None:
        """The layout told at hello, or None."""
        try:
            text = (self.folder / "layout.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            return Layout.from_json(text)
        except (LayoutError, WireError) as error:
            raise StateError(f"{self.folder / 'layout.json'} is damaged: {error}") from error

    def save_layout(self, layout: Layout) -> None:
        """Keep the layout told at hello."""
        self._replace("layout.json", layout.to_json().encode())

    def load_memory(self, layout: Layout) -> Memory:
        """The client's memory; a fresh one when nothing was stored.

        Raises:
            StateError: the file is damaged, of a newer version or of another layout.
        """
        loaded = self._load("memory.safetensors")
        if loaded is None:
            return fresh_memory(layout, self.experiment, self.client)
        arrays, meta = loaded
        if meta.get("layout") != layout.digest.hex():
            raise StateError(
                f"{self.folder} holds the memory of another layout; settle or remove that experiment first"
            )
        with _damage(self.folder / "memory.safetensors"):
            return Memory(
                h=tuple(arrays[str(i)].astype(layout.layers[i].dtype, copy=False) for i in layout.compressed),
                digest=bytes.fromhex(meta["digest"]),
                accepted=Attempt(**meta["accepted"]) if meta["accepted"] else None,
                estimators=meta["estimators"],
                last_sample_s=meta["last_sample_s"],
            )

    def save_memory(self, layout: Layout, memory: Memory) -> None:
        """Replace the stored memory."""
        arrays = {str(i): part for i, part in zip(layout.compressed, memory.h, strict=True)}
        meta = {
            "layout": layout.digest.hex(),
            "digest": memory.digest.hex(),
            "accepted": _attempt_dict(memory.accepted) if memory.accepted else None,
            "estimators": {name: dict(state) for name, state in memory.estimators.items()},
            "last_sample_s": memory.last_sample_s,
        }
        self._save("memory.safetensors", arrays, meta)

    def load_pending(self) -> Pending | None:
        """The stored reply, or None."""
        loaded = self._load("pending.safetensors")
        if loaded is None:
            return None
        arrays, meta = loaded
        with _damage(self.folder / "pending.safetensors"):
            return Pending(Attempt(**meta["attempt"]), arrays["payload"].tobytes(), meta["report"])

    def save_pending(self, pending: Pending) -> None:
        """Store a reply before it is sent."""
        payload = np.frombuffer(pending.payload, dtype=np.uint8)
        meta = {"attempt": _attempt_dict(pending.attempt), "report": dict(pending.report)}
        self._save("pending.safetensors", {"payload": payload}, meta)

    def drop_pending(self) -> None:
        """Remove the stored reply; it is settled."""
        (self.folder / "pending.safetensors").unlink(missing_ok=True)
        if self.durable and self.folder.exists():
            sync_directory(self.folder)

    def forget(self) -> None:
        """Remove this client's state of this experiment, and the experiment's folder if empty."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.parent.rmdir()
        except OSError:
            return  # other clients still have state here, or it is gone already

    def _save(self, name: str, arrays: Mapping[str, NDArray[np.generic]], meta: Mapping[str, object]) -> None:
        text = json.dumps({"version": STORE_VERSION, **meta}, sort_keys=True)
        self._replace(name, save_safetensors(dict(arrays), metadata={"kimad": text}))

    def _load(self, name: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        path = self.folder / name
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                meta = json.loads((file.metadata() or {}).get("kimad", "null"))
                arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise StateError(
                f"{path} is damaged: {error}; remove it, and the server will say the memory is lost"
            ) from error
        if not isinstance(meta, dict) or meta.get("version") != STORE_VERSION:
            got = meta.get("version") if isinstance(meta, dict) else None
            raise StateError(f"{path} is of store version {got!r}, this program reads {STORE_VERSION}")
        return arrays, meta

    def _replace(self, name: str, data: bytes) -> None:
        try:
            if not self.folder.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                for parent in (self.folder.parent, self.folder.parent.parent) if self.durable else ():
                    sync_directory(parent)
        except OSError as error:
            raise StateError(f"{self.folder}: cannot be made ({error}); the old state is intact") from error
        write_atomic(self.folder / name, data, durable=self.durable)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn what a file with wrong contents raises into a StateError that names it."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path} is damaged: {error!r}; remove {path.parent} to start afresh") from error


def _attempt_dict(attempt: Attempt) -> dict[str, object]:
    return {
        "incarnation": attempt.incarnation,
        "round": attempt.round,
        "client": attempt.client,
        "part": attempt.part,
    }
