"""Samples: the rate net of overhead, and what is not believed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bandwidth import Sample
from bandwidth.samples import MAX_RATE_BPS, TINY_S

GOOD = Sample("up", 125_000, 1.5, 0.5, 10.0, "kernel")


def test_rate_is_net_of_the_overhead() -> None:
    # 125,000 bytes = 1,000,000 bits in 1.5 - 0.5 = 1 s.
    assert GOOD.rate_bps == 1e6
    assert GOOD.valid


def test_rate_is_defined_when_the_overhead_took_all_the_time() -> None:
    assert replace(GOOD, overhead_s=1.5).rate_bps == 8 * 125_000 / TINY_S
    assert math.isnan(replace(GOOD, seconds=math.nan).rate_bps)


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "sideways"},
        {"source": "guess"},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 10**400},
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"overhead_s": -0.1},
        {"overhead_s": 1.5},
        {"overhead_s": 2.0},
        {"overhead_s": math.nan},
        {"at_s": math.nan},
        {"at_s": math.inf},
        {"nbytes": 10**18, "seconds": 8.5, "overhead_s": 0.5},  # 1e18 bit/s
        {"nbytes": 1, "seconds": 1e6, "overhead_s": 0.0},  # 8e-6 bit/s
    ],
)
def test_not_valid(change: dict[str, object]) -> None:
    assert not replace(GOOD, **change).valid  # type: ignore[arg-type]


def test_the_cap_itself_is_valid() -> None:
    assert replace(GOOD, nbytes=int(MAX_RATE_BPS / 8), seconds=1.0, overhead_s=0.0).valid
