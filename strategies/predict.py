"""Step 2 of a round: what each client's uplink will carry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bandwidth import Sample, clip_report, make_estimator
from bandwidth.estimators import State, from_dict, to_dict


class Rates:
    """Uplink rates of all clients, from finished transfers.

    Args:
        estimator: a name in bandwidth.ESTIMATORS.
        initial_rate_bps: assumed of a client that was never measured and reports nothing, bit/s.
    """

    def __init__(self, estimator: str, initial_rate_bps: float) -> None:
        self._method = make_estimator(estimator)
        self._initial_bps = initial_rate_bps
        self._states: dict[str, State] = {}
        self._last: dict[str, Sample] = {}
        self.counts: Counter[str] = Counter()

    def measured(self, client: str, sample: Sample) -> None:
        """Take in one finished transfer of a client."""
        self._last[client] = sample
        self._states[client] = self._method.update(self._states.get(client, self._method.init()), sample)

    def last_sample(self, client: str) -> Sample | None:
        """A client's newest finished transfer."""
        return self._last.get(client)

    def state(self) -> dict[str, Any]:
        """All that was learned, as plain values."""
        return {
            "states": {client: to_dict(state) for client, state in self._states.items()},
            "last": {client: asdict(sample) for client, sample in self._last.items()},
            "counts": dict(self.counts),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state` was."""
        self._states = {client: from_dict(stored) for client, stored in state["states"].items()}
        self._last = {client: Sample(**sample) for client, sample in state["last"].items()}
        self.counts = Counter(state["counts"])

    def predict(self, client: str, reported_bps: float | None, now_s: float) -> float:
        """Uplink rate predicted for a client, bit/s.

        From what was measured; before the first measurement from the client's own report,
        within sane bounds; else the initial rate.
        """
        state = self._states.get(client)
        estimate = self._method.predict(state, now_s) if state is not None else None
        if estimate is not None:
            return estimate.rate_bps
        if reported_bps is not None:
            hint, clipped = clip_report(reported_bps, None)
            self.counts["clipped-report"] += clipped
            if hint is not None:
                return hint
        return self._initial_bps
