"""A registry: a dict that refuses duplicates and answers an unknown name with the known ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from compression.errors import ConfigError, unknown_name

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to values, filled at import.

    Args:
        what: what the names stand for, as error messages call it.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> None:
        """Enter a value; ValueError when the name is taken."""
        if name in self._values:
            raise ValueError(f"{self._what} {name!r} is registered already")
        self._values[name] = value

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise ConfigError(unknown_name(self._what, name, self._values))
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
