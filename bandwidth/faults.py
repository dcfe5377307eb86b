"""Messages that go wrong, drawn by a seed: what a run over bad links costs, before it is deployed.

Each is a share of the train messages; a message meets one fate at most. Which ones is a function
of (seed, client, round, how often it was asked), so the same seed loses the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compression.arguments import Parameter, arguments, checked
from compression.errors import ConfigError
from compression.randomness import uniforms

FATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lose_request": "the client never sees the message",
        "lose_reply": "the client trains and stores its reply, which never arrives",
        "corrupt": "a bit of the reply's payload is flipped under way",
        "duplicate": "the reply arrives twice",
    }
)
WHAT: Final = "faults"


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Shares of messages that go wrong.

    Args:
        lose_request, lose_reply, corrupt, duplicate: as FATES says, each in [0, 1], together at most 1.

    Raises:
        ConfigError: they are not.
    """

    lose_request: float = 0.0
    lose_reply: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in FATES}
        problems = [f"{WHAT}: {n} is {s!r}: expected a share from 0 to 1" for n, s in shares.items() if not 0 <= s <= 1]
        if not problems and sum(shares.values()) > 1:
            problems.append(f"{WHAT}: the shares add up to {sum(shares.values()):g}: expected at most 1")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """A plan from a run key: "lose_reply = 0.05, corrupt = 0.01"; "" for none.

        Raises:
            ConfigError: all that is wrong with it.
        """
        known = {name: Parameter(float, 0.0) for name in FATES}
        values = checked(arguments(text, WHAT), known, WHAT)
        return cls(**values)  # type: ignore[arg-type]

    def fate(self, *, seed: int, client: str, round_: int, times: int) -> str | None:
        """What becomes of a message: a name in FATES, or None.

        Args:
            seed: of the run.
            client: the client asked.
            round_: the round.
            times: how often it was asked in this round before.
        """
        (drawn,) = uniforms(1, seed=seed, client=client, round_=round_, purpose=f"fault {times}")
        for name in FATES:
            if drawn < (share := getattr(self, name)):
                return name
            drawn -= share
        return None

    def bit(self, nbytes: int, *, seed: int, client: str, round_: int) -> int:
        """Which bit of a payload of so many bytes is flipped."""
        (drawn,) = uniforms(1, seed=seed, client=client, round_=round_, purpose="fault bit")
        return int(drawn * 8 * nbytes)
