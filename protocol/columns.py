"""Frozen dataclasses to Flower ConfigRecords and back, one column a field.

A node's message may speak of many clients, so each field becomes one list with an entry a
client. A field whose every entry is None is left out; a single None travels as NaN, -1, ""
or b"" by its type. Nothing received is trusted: a missing column, a wrong type or columns
of unequal length raise ProtocolError.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from flwr.app import ConfigRecord

from compression.errors import ProtocolError

T = TypeVar("T")
_ABSENT: dict[type, Any] = {float: math.nan, int: -1, str: "", bytes: b"", bool: False}
_KNOWN: dict[type, tuple[tuple[str, type, bool, Any], ...]] = {}


def _columns(cls: type) -> tuple[tuple[str, type, bool, Any], ...]:
    """(name, scalar type, optional?, default) of each field of a record class."""
    if (known := _KNOWN.get(cls)) is not None:
        return known
    hints = typing.get_type_hints(cls)
    out: list[tuple[str, type, bool, Any]] = []
    for f in fields(cls):
        hint = hints[f.name]
        optional = isinstance(hint, types.UnionType)
        scalar = next(a for a in typing.get_args(hint) if a is not type(None)) if optional else hint
        if scalar not in _ABSENT:
            raise TypeError(f"{cls.__name__}.{f.name}: {scalar!r} cannot be a column")
        out.append((f.name, scalar, optional, f.default))
    return _KNOWN.setdefault(cls, tuple(out))


def _is_absent(value: Any, scalar: type) -> bool:
    return math.isnan(value) if scalar is float else bool(value == _ABSENT[scalar])


def pack(items: Sequence[Any]) -> ConfigRecord:
    """One list a field; items are instances of one record class, at least one."""
    record = ConfigRecord()
    for name, scalar, optional, default in _columns(type(items[0])):
        values = [getattr(item, name) for item in items]
        if optional:
            if all(v is None for v in values):
                continue
            values = [_ABSENT[scalar] if v is None else v for v in values]
        elif default is not MISSING and all(v == default for v in values):
            continue  # the reader fills the default in
        record[name] = [scalar(v) for v in values]
    record["n"] = len(items)
    return record


def unpack(cls: type[T], record: ConfigRecord, *, most: int = 1_000_000) -> tuple[T, ...]:
    """The items packed in a record.

    Raises:
        ProtocolError: a column is missing, of a wrong type or of a wrong length.
    """
    name_of = cls.__name__
    n = record.get("n")
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= most:
        raise ProtocolError("bad-record", f"{name_of}.n is {n!r}, expected 1 to {most}")
    columns: dict[str, list[Any]] = {}
    for name, scalar, optional, default in _columns(cls):
        raw = record.get(name)
        if raw is None:
            if optional:
                columns[name] = [None] * n
            elif default is not MISSING:
                columns[name] = [default] * n
            else:
                raise ProtocolError("bad-record", f"{name_of}.{name} is missing")
            continue
        if not isinstance(raw, list) or len(raw) != n:
            raise ProtocolError("bad-record", f"{name_of}.{name} is not a list of {n}")
        if any(type(v) is not scalar and not (scalar is float and type(v) is int) for v in raw):
            raise ProtocolError("bad-record", f"{name_of}.{name} is not {scalar.__name__}")
        columns[name] = [None if optional and _is_absent(v, scalar) else v for v in raw]
    return tuple(cls(**{name: column[i] for name, column in columns.items()}) for i in range(n))
