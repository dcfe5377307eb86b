"""Asking again, and being asked to stop: when, and how often."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final

from strategies.exchange import FIRST_POLL_S, LONGEST_POLL_S

LOOK_S: Final = 1.0  # seconds between looks at which nodes are there
FIRST_TRY_S: Final = 0.2
LONGEST_TRY_S: Final = 10.0
_log = logging.getLogger("flwr.kimad")


class Asking:
    """The pace of one round's questions, in real seconds.

    Args:
        until_s: when nobody is waited for any more, on time.monotonic's clock.
    """

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self._look_s = 0.0
        self._pause_s = FIRST_POLL_S
        self._next_s: dict[str, tuple[float, float]] = {}

    def is_time_to_look(self, now_s: float) -> bool:
        """Whether to look again at which nodes are there."""
        if now_s < self._look_s:
            return False
        self._look_s = now_s + LOOK_S
        return True

    def may_try(self, client: str, now_s: float) -> bool:
        """Whether to ask a client again now; each time it waits twice as long, so that a broken app is not hammered."""
        at_s, pause_s = self._next_s.get(client, (now_s + FIRST_TRY_S, FIRST_TRY_S))
        if now_s < at_s:
            self._next_s[client] = (at_s, pause_s)
            return False
        pause_s = min(2 * pause_s, LONGEST_TRY_S)
        self._next_s[client] = (now_s + pause_s, pause_s)
        return True

    def pause_s(self, answered: bool) -> float:
        """How long to wait before looking for answers again."""
        self._pause_s = FIRST_POLL_S if answered else min(1.5 * self._pause_s, LONGEST_POLL_S)
        return self._pause_s


class Stop:
    """Ctrl-C as a request: the round is given up or ended, everything is kept, and then the run stops.

    A second Ctrl-C stops at once. Only a main thread can hear it; elsewhere nothing changes.

    Args:
        wanted: whether there is anything to be kept; else Ctrl-C does what it always does.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self.asked = False

    def __enter__(self) -> Stop:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        _log.warning("stopping: what is done is kept first; Ctrl-C again stops at once")

    def now(self, number: int) -> None:
        """Stop if that was asked.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self.asked:
            raise KeyboardInterrupt(f"stopped after round {number}; resume = true with the same run-dir goes on")
