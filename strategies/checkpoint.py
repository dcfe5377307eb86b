"""Server checkpoints: everything that a run is, so that a killed one goes on as if nothing had happened.

    FOLDER/start.json                   experiment, incarnation: how often the server was started on this run
           kept.json                    the checkpoints that count, oldest first, each with its digest
           round-00000010.safetensors   one of them
           mirrors/                     mirrors.py

A checkpoint is written beside the others, and counts once kept.json names it; the last two are
kept. One that is not what was written is passed over for the older one, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from compression.errors import StateError
from protocol import Attempt
from protocol.filesystem import FileSystem

VERSION: Final = 1
KEPT: Final = 2
_log = logging.getLogger("flwr.kimad")
Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint.

    Args:
        round: the last round in it.
        plain: everything that is not an array (JSON).
        arrays: name to array.
    """

    round: int
    plain: Mapping[str, Any]
    arrays: Arrays


class Checkpoints:
    """The checkpoints of one run.

    Args:
        fs: the file system.
        folder: where they are.

    Raises:
        StateError: the folder cannot be made or read.
    """

    def __init__(self, fs: FileSystem, folder: Path) -> None:
        self.fs, self.folder = fs, folder
        try:
            fs.make_folder(folder, durable=True)
        except OSError as error:
            raise StateError(f"{folder}: cannot be made ({error}); choose another run-dir") from error
        self._kept: list[dict[str, Any]] = self._json("kept.json", [])

    # ---- starts --------------------------------------------------------------------------

    def begin(self, experiment: str, *, resume: bool) -> tuple[str, int]:
        """Count this start of the server, durably.

        Args:
            experiment: id of the run, unless it goes on.
            resume: whether it goes on where there is something to go on with.

        Returns:
            The run's experiment id, and this start's incarnation, which no start before had.

        Raises:
            StateError: there is a run here already and this is not to go on with it.
        """
        before = self._json("start.json", {})
        if before and not resume:
            raise StateError(f"{self.folder} holds a run already; set resume = true to go on, or choose another folder")
        found, number = str(before.get("experiment", experiment)), int(before.get("incarnation", 0)) + 1
        self._write("start.json", {"experiment": found, "incarnation": number, "version": VERSION})
        return found, number

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, horizon: Mapping[str, tuple[int, int]], mirrors: int) -> None:
        """Write a checkpoint and keep it and the one before.

        Args:
            checkpoint: what to write.
            horizon: (incarnation, round) of every client's last accepted attempt in it.
            mirrors: number of payloads accepted in it.

        Raises:
            StateError: it cannot be written; the ones before are intact.
        """
        plain = {**checkpoint.plain, "round": checkpoint.round, "version": VERSION}
        data = save(
            {name: np.asarray(array, order="C") for name, array in checkpoint.arrays.items()},
            metadata={"kimad": json.dumps(plain, sort_keys=True)},
        )
        name = f"round-{checkpoint.round:08}.safetensors"
        try:
            self.fs.replace(self.folder / name, [data], durable=True)
        except OSError as error:
            raise StateError(f"{self.folder / name}: cannot be written ({error}); the old ones are intact") from error
        item = {
            "name": name,
            "digest": hashlib.blake2b(data, digest_size=16).hexdigest(),
            "horizon": {client: list(order) for client, order in horizon.items()},
            "mirrors": mirrors,
        }
        kept = [*(k for k in self._kept if k["name"] != name), item][-KEPT:]
        self._write("kept.json", kept)
        self._kept = kept
        self._sweep()

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that is what was written; None if there is none. Newer ones count no more.

        Raises:
            StateError: it is of a newer version.
        """
        while self._kept:
            item = self._kept[-1]
            found = self._load(item)
            if found is not None:
                self._write("kept.json", self._kept)
                self._sweep()
                return found
            _log.warning("checkpoint %s is damaged; trying the one before it", self.folder / item["name"])
            self._kept.pop()
        return None

    def horizon(self, client: str) -> Attempt | None:
        """A client's last accepted attempt in the oldest checkpoint kept: nothing older is ever undone."""
        order = self._kept[0]["horizon"].get(client) if self._kept else None
        return None if order is None else Attempt(order[0], order[1], client)

    @property
    def oldest_mirrors(self) -> int:
        """Number of payloads accepted in the oldest checkpoint kept."""
        return int(self._kept[0]["mirrors"]) if self._kept else 0

    def _load(self, item: Mapping[str, Any]) -> Checkpoint | None:
        try:
            data = self.fs.read(self.folder / item["name"])
        except OSError:
            return None
        if hashlib.blake2b(data, digest_size=16).hexdigest() != item["digest"]:
            return None
        try:
            length = int.from_bytes(data[:8], "little")
            plain = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kimad"])
            arrays = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise StateError(f"{self.folder / item['name']}: no checkpoint of kimad-fl ({error})") from error
        if plain["version"] > VERSION:
            raise StateError(
                f"{self.folder / item['name']} is of version {plain['version']}, this program reads up to {VERSION}: "
                "upgrade kimad-fl"
            )
        return Checkpoint(plain["round"], plain, arrays)

    def _sweep(self) -> None:
        """Remove checkpoints that do not count."""
        names = {item["name"] for item in self._kept}
        for name in self.fs.names(self.folder):
            if name.startswith("round-") and name not in names:
                self.fs.remove(self.folder / name)

    def _json(self, name: str, default: Any) -> Any:
        if self.fs.size(self.folder / name) is None:
            return default
        try:
            return json.loads(self.fs.read(self.folder / name))
        except (OSError, ValueError) as error:
            raise StateError(f"{self.folder / name}: cannot be read ({error})") from error

    def _write(self, name: str, value: object) -> None:
        try:
            self.fs.replace(self.folder / name, [json.dumps(value, sort_keys=True).encode()], durable=True)
        except OSError as error:
            raise StateError(f"{self.folder / name}: cannot be written ({error}); free the disk") from error
