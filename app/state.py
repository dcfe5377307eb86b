"""`kimad state`: what clients keep on this machine, whether it is whole, and how it is thrown away."""

from __future__ import annotations

from pathlib import Path

from protocol.inspect import node_states, remove
from protocol.store import default_root

DAY_S = 86400.0


def list_states(root: Path | None, *, verify: bool) -> int:
    """Print a line a node and run.

    Args:
        root: the state-dir; None: the default.
        verify: read everything and compare checksums.

    Returns:
        1 if something is damaged, else 0.
    """
    root = root or default_root()
    states = list(node_states(root, verify=verify))
    if not states:
        print(f"no client state in {root}")
        return 0
    print(f"{'run':28} {'node':16} {'clients':>7} {'bytes':>12} {'days old':>8}  state")
    for s in states:
        how = "in use" if s.in_use else s.problem or ("whole" if verify else "ok")
        print(f"{s.experiment:28} {s.node:16} {s.clients:>7} {s.nbytes:>12} {s.age_s / DAY_S:>8.1f}  {how}")
    print(f"{len(states)} in {root}, {sum(s.nbytes for s in states)} bytes")
    return int(any(s.problem is not None for s in states))


def prune(root: Path | None, *, older_than_days: float | None, most_bytes: int | None, dry_run: bool) -> int:
    """Remove state that nobody uses: what is older than so many days, then the oldest until the rest fits.

    Args:
        root: the state-dir; None: the default.
        older_than_days: age since the last write; None: no age is too old.
        most_bytes: quota for what is left; None: none.
        dry_run: only say what would go.

    Returns:
        0.
    """
    root = root or default_root()
    left = sorted(node_states(root), key=lambda s: -s.age_s)
    going = [s for s in left if older_than_days is not None and s.age_s > older_than_days * DAY_S and not s.in_use]
    kept_bytes = sum(s.nbytes for s in left) - sum(s.nbytes for s in going)
    for s in left:
        if most_bytes is not None and kept_bytes > most_bytes and s not in going and not s.in_use:
            going.append(s)
            kept_bytes -= s.nbytes
    for s in going:
        gone = dry_run or remove(s)
        verb = ("would remove" if dry_run else "removed") if gone else "in use, kept"
        print(f"{verb}: run {s.experiment}, node {s.node}, {s.nbytes} bytes, {s.age_s / DAY_S:.1f} days old")
    print(f"{len(going)} of {len(left)}; {kept_bytes} bytes are left in {root}")
    return 0
