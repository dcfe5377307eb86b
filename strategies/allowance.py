"""Bytes a client may send and receive in a day, on a link that is paid by the byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

DAY_S: Final = 86_400.0


class Allowance:
    """Bytes of each client in the current day of the run's clock; day 0 begins at 0 s.

    Nothing is carried over: a client never passes its limit within a day, and may use up a new
    one at midnight.

    Args:
        max_bytes_per_day: limit of every client, both directions together; None: no limit.
    """

    def __init__(self, max_bytes_per_day: int | None) -> None:
        self._limit = max_bytes_per_day
        self._own: dict[str, int] = {}
        self._used: dict[str, tuple[int, int]] = {}

    def limit(self, client: str, max_bytes_per_day: int | None) -> None:
        """Give a client its own limit; the lower of both holds."""
        if max_bytes_per_day is not None:
            self._own[client] = max_bytes_per_day

    def spend(self, client: str, nbytes: int, now_s: float) -> None:
        """Count bytes that a client sent or received at a time."""
        day = int(now_s // DAY_S)
        since, used = self._used.get(client, (day, 0))
        self._used[client] = (day, used + nbytes if since == day else nbytes)

    def left(self, client: str, now_s: float) -> int | None:
        """Bytes that a client may still use in this day; None: any number."""
        limits = [x for x in (self._limit, self._own.get(client)) if x is not None]
        if not limits:
            return None
        day, used = self._used.get(client, (0, 0))
        return max(0, min(limits) - (used if day == int(now_s // DAY_S) else 0))

    def state(self) -> dict[str, Any]:
        """What was spent, as plain values; limits are told anew at a start."""
        return {client: list(spent) for client, spent in self._used.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was."""
        self._used = {client: (int(day), int(used)) for client, (day, used) in state.items()}

    @staticmethod
    def next_day_s(now_s: float) -> float:
        """When the next day begins, on the run's clock."""
        return (now_s // DAY_S + 1.0) * DAY_S
