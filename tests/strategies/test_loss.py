"""Lost replies cost a little work where both ends settle, nothing where they are asked again, else everything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.loss import ARMS, LOSSLESS, ONCE, RETRY, UNSETTLED, Job, run_one, verdicts


def test_lost_replies_under_error_feedback() -> None:
    root = os.environ.get("KIMAD_DATA")
    if root is None or not (Path(root) / "libsvm" / "mushrooms.bz2").exists():
        pytest.skip("KIMAD_DATA names no folder with libsvm/mushrooms.bz2")
    found = {arm: run_one(Job("logistic", arm, 1, 100)) for arm in ARMS}
    lossless, once, retry, unsettled = (found[arm] for arm in (LOSSLESS, ONCE, RETRY, UNSETTLED))
    assert lossless.lost == 0
    assert lossless.sent == once.sent == unsettled.sent == 600
    assert once.lost == unsettled.lost > 0.02 * once.sent
    assert once.figure < 2 * lossless.figure
    assert once.model != lossless.model
    assert retry.lost >= once.lost
    assert retry.sent == lossless.sent + retry.lost
    assert (retry.model, retry.figure) == (lossless.model, lossless.figure)
    assert unsettled.figure > 5 * lossless.figure


def test_a_target_is_met_by_the_whole_interval() -> None:
    same = (1.0, 1.0, 1.0)
    assert list(verdicts({ONCE: (1.5, 1.0, 2.1), RETRY: same, UNSETTLED: same}, gaps=True).values()) == [False, True]
    arms = {ONCE: (-0.006, -0.0103, -0.003), RETRY: (0.0, 0.0, 0.0), UNSETTLED: (-0.2, -0.3, -0.11)}
    assert list(verdicts(arms, gaps=False).values()) == [False, True, True]
