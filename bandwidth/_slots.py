"""Links of one-second slots: rates drawn block by block, integrals from sums over slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

from bandwidth.links import HORIZON_S, check_span, check_time, check_transfer

BLOCK_SLOTS = 256
_KEPT_BLOCKS = 4

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Block:
    """Rates of 256 slots, bit/s; bits_before[i] = bits passed from the block's start to slot i's."""

    rates: array[float]
    bits_before: array[float]


@dataclass(frozen=True, slots=True)
class SlottedLink(ABC, Generic[S]):
    """A link that is constant within each second of its clock, and a chain from second to second.

    A subclass says how the chain starts and how a block goes on from the state that the block before it ended in; S is
    the type of that state, immutable. States and sums of all blocks up to the latest asked are kept, the rates of the
    last few: a block that is asked again is drawn again.

    Args:
        mean_bps: long-run mean rate, bit/s.
        seed: the run's seed.
        client: the client's stable id.
        direction: "up" or "down".
    """

    mean_bps: float
    seed: int
    client: str
    direction: str
    _blocks: dict[int, _Block] = field(init=False, repr=False, compare=False, default_factory=dict)
    _ends: dict[int, tuple[S, float]] = field(init=False, repr=False, compare=False, default_factory=dict)

    @abstractmethod
    def _first_state(self) -> S:
        """State before slot 0, from the stationary law."""

    @abstractmethod
    def _draw(self, index: int, state: S) -> tuple[Iterable[float], S]:
        """Rates of block `index` (bit/s), drawn from its own words and the state before it; the state after it."""

    def rate_bps(self, time_s: float) -> float:
        """Rate of the slot that holds time_s, bit/s."""
        check_time(time_s)
        index, slot = divmod(int(time_s), BLOCK_SLOTS)
        return self._block(index).rates[slot]

    def bits_between(self, start_s: float, end_s: float) -> float:
        """Bits that pass: sums of whole slots, linear within the first and the last."""
        check_span(start_s, end_s)
        first, last = int(start_s), int(end_s)
        index, slot = divmod(first, BLOCK_SLOTS)
        block = self._block(index)
        if first == last:
            return block.rates[slot] * (end_s - start_s)
        passed = -(block.bits_before[slot] + block.rates[slot] * (start_s - first))
        end_index, end_slot = divmod(last, BLOCK_SLOTS)
        for between in range(index, end_index):
            passed += self._total_bits(between)
        block = self._block(end_index)
        return max(passed + block.bits_before[end_slot] + block.rates[end_slot] * (end_s - last), 0.0)

    def finish_s(self, start_s: float, nbytes: float) -> float:
        """When nbytes begun at start_s have passed: sums of whole slots, linear within the first and the last."""
        check_transfer(start_s, nbytes)
        if nbytes == 0:
            return start_s
        whole = int(start_s)
        index, slot = divmod(whole, BLOCK_SLOTS)
        block = self._block(index)
        target = block.bits_before[slot] + block.rates[slot] * (start_s - whole) + 8.0 * nbytes
        while target > self._total_bits(index):
            target -= self._total_bits(index)
            index += 1
        block = self._block(index)
        slot = max(bisect_left(block.bits_before, target) - 1, 0)
        within_s = (target - block.bits_before[slot]) / block.rates[slot]
        return max(start_s, index * BLOCK_SLOTS + slot + within_s)

    def _total_bits(self, index: int) -> float:
        if index not in self._ends:
            self._block(index)
        return self._ends[index][1]

    def _block(self, index: int) -> _Block:
        """Block `index`, drawn once more if it is no longer kept.

        Two threads may draw the same block: both get the same one.
        """
        found = self._blocks.get(index)
        if found is not None:
            return found
        if index * BLOCK_SLOTS > HORIZON_S:
            raise ValueError(f"time {index * BLOCK_SLOTS} s: expected at most {HORIZON_S:g} s on a varying link")
        known = index
        while known > 0 and known - 1 not in self._ends:
            known -= 1
        for i in range(known, index + 1):
            rates, state = self._draw(i, self._ends[i - 1][0] if i > 0 else self._first_state())
            found = _Block(array("d", rates), array("d"))
            found.bits_before.extend(accumulate(found.rates, initial=0.0))
            self._ends[i] = (state, found.bits_before[-1])
        assert found is not None  # the loop ran at least once: index >= known
        self._blocks[index] = found
        while len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.pop(tuple(self._blocks)[0], None)  # noqa: RUF015 (a copy: threads)
        return found
