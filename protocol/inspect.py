"""What lies in a folder of client state, without changing it: for `kimad state`."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from compression.errors import StateError
from protocol.filesystem import LOCAL
from protocol.log import newest, scan, whole_records_follow
from protocol.store import VERSION


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node's state of one run.

    Args:
        folder: where it is.
        experiment: id of the run.
        node: name of the node.
        clients: clients it hosts.
        nbytes: on disk.
        age_s: seconds since it was last written.
        in_use: whether a process holds it.
        problem: what is wrong with it, or None.
    """

    folder: Path
    experiment: str
    node: str
    clients: int
    nbytes: int
    age_s: float
    in_use: bool
    problem: str | None


def node_states(root: Path, *, verify: bool = False) -> Iterator[NodeState]:
    """The state of every node of every run below a folder.

    Args:
        root: a node's state-dir.
        verify: also read every stored value and compare its checksum.
    """
    for run in sorted(root.glob("run-*")):
        for folder in sorted(run.glob("node-*")):
            if folder.is_dir():
                yield inspect(folder, verify=verify)


def inspect(folder: Path, *, verify: bool = False) -> NodeState:
    """One node's state; nothing is changed.

    Args:
        folder: its folder, STATE-DIR/run-EXPERIMENT/node-NAME.
        verify: also read every stored value and compare its checksum.
    """
    files = [folder / name for name in LOCAL.names(folder)]
    nbytes = sum(LOCAL.size(path) or 0 for path in files)
    clients: set[str] = set()
    problem: str | None = None
    path = newest(LOCAL, folder)
    try:
        in_use = False
        with LOCAL.lock(folder / "lock"):
            problem = "no log: nothing was ever committed" if path is None else _check(path, clients, verify=verify)
    except StateError:
        in_use = True
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
    written = max((p.stat().st_mtime for p in files if p.name != "lock" and p.exists()), default=folder.stat().st_mtime)
    return NodeState(
        folder,
        unquote(folder.parent.name.removeprefix("run-")),
        unquote(folder.name.removeprefix("node-")),
        len(clients),
        nbytes,
        max(0.0, time.time() - written),
        in_use,
        problem,
    )


def remove(state: NodeState) -> bool:
    """Remove a node's state, and its run's folder if nothing else is in it; whether nobody was using it."""
    try:
        with LOCAL.lock(state.folder / "lock"):
            LOCAL.remove(state.folder)
    except StateError:
        return False
    if not LOCAL.names(state.folder.parent):
        LOCAL.remove(state.folder.parent)
    return True


def _check(path: Path, clients: set[str], *, verify: bool) -> str | None:
    size, good = LOCAL.size(path) or 0, 0
    for record, end in scan(LOCAL, path, size):
        good = end
        if record.meta.get("kind") == "head" and record.meta["version"] > VERSION:
            return f"of version {record.meta['version']}, this program reads up to {VERSION}: upgrade kimad-fl"
        if "client" in record.meta:
            clients.add(record.meta["client"])
        if verify and zlib.crc32(LOCAL.read(path, record.offset, record.nbytes)) != record.crc:
            return f"record {record.seq} is not what was written: the server will send these memories anew"
    if good < size and whole_records_follow(LOCAL, path, good):
        return f"damaged at byte {good}: the server will send these memories anew"
    if good < size:
        return f"a torn tail of {size - good} bytes, which the next start cuts off"
    return None
