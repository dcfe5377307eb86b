"""Every error this project raises on purpose, drawn in one place.

    KimadError
    |-- ConfigError    a user's setting; all problems of one configuration together
    |-- LayoutError    arrays that do not form, or do not match, a layout
    |-- UpdateError    an update that must not enter a memory (NaN, Inf, wrong shape)
    |-- WireError      bytes from a peer that are not a legal message
    |-- ProtocolError  a legal message that does not belong here (foreign, stale, twice)
    `-- StateError     client or server state on disk that cannot be read or written

A message says what happened, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KimadError(Exception):
    """Base of all errors raised on purpose by this project."""


class ConfigError(KimadError):
    """One or more settings are wrong.

    Args:
        problems: one sentence for each problem, in the order found.
    """

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        head = "1 setting is wrong:" if len(self.problems) == 1 else f"{len(self.problems)} settings are wrong:"
        super().__init__("\n  - ".join((head, *self.problems)))


class LayoutError(KimadError):
    """Arrays that do not form a layout, or differ from the agreed one."""


class UpdateError(KimadError):
    """An update that must not enter a memory.

    Args:
        layer: name of the layer.
        index: flat position of the first offending element, or None.
        cause: what is wrong with it.
    """

    def __init__(self, layer: str, index: int | None, cause: str) -> None:
        self.layer, self.index, self.cause = layer, index, cause
        where = f"layer {layer!r}" if index is None else f"layer {layer!r}, element {index}"
        super().__init__(f"{where}: {cause}")


class WireError(KimadError):
    """Received bytes are not a legal message.

    Args:
        field: the field of the wire format that failed, as docs/wire.md names it.
        detail: what was found and what was expected.
    """

    def __init__(self, field: str, detail: str) -> None:
        self.field, self.detail = field, detail
        super().__init__(f"{field}: {detail}")


class ProtocolError(KimadError):
    """A legal message that does not belong here: foreign, stale, repeated.

    Args:
        kind: short name under which it is counted, e.g. "stale-attempt".
        detail: what was found and what was expected.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


class StateError(KimadError):
    """State on disk that cannot be read or written; the old state is intact."""


def unknown_name(what: str, got: str, valid: Iterable[str]) -> str:
    """Sentence for an unknown name: the valid ones and the nearest.

    >>> unknown_name("operator", "topkk", ["identity", "topk"])
    "unknown operator 'topkk': expected one of identity, topk; did you mean 'topk'?"
    """
    names = sorted(valid)
    plain = {name.lower(): name for name in names}
    near = difflib.get_close_matches(got.lower(), plain, n=1, cutoff=0.5)
    hint = f"; did you mean {plain[near[0]]!r}?" if near else ""
    return f"unknown {what} {got!r}: expected one of {', '.join(names)}{hint}"
