"""A registry is a dict that refuses duplicates; an unknown name lists the valid ones and the nearest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from compression.errors import ConfigError, unknown_name


class Entry(Protocol):
    """What can be registered: something with a name for users and a byte for the wire."""

    @property
    def name(self) -> str:
        """Name in a configuration."""

    @property
    def id(self) -> int:
        """Byte in a message; never reused once published."""


T = TypeVar("T", bound=Entry)


class Registry(Generic[T]):
    """Entries by name and by wire id.

    Args:
        what: noun for messages, e.g. "operator".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._by_name: dict[str, T] = {}
        self._by_id: dict[int, T] = {}

    def register(self, entry: T) -> T:
        """Add an entry and return it.

        Raises:
            ConfigError: its name or its id is taken.
        """
        for key, taken in ((entry.name, entry.name in self._by_name), (entry.id, entry.id in self._by_id)):
            if taken:
                raise ConfigError(f"{self.what} {key!r} is registered already")
        self._by_name[entry.name] = self._by_id[entry.id] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        """The entry with this name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self._by_name:
            raise ConfigError(unknown_name(self.what, name, self._by_name))
        return self._by_name[name]

    def by_id(self, number: int) -> T | None:
        """The entry with this wire id, or None."""
        return self._by_id.get(number)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[T]:
        return iter(self._by_name.values())
