"""Lost replies cost a little time where both ends settle, and everything where nobody does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.loss import ARMS, Job, run_one


def test_lost_replies_under_error_feedback() -> None:
    root = os.environ.get("KIMAD_DATA")
    if root is None or not (Path(root) / "libsvm" / "mushrooms.bz2").exists():
        pytest.skip("KIMAD_DATA names no folder with libsvm/mushrooms.bz2")
    lossless, exactly_once, unsettled = (run_one(Job("logistic", arm, 1, 100)) for arm in ARMS)
    assert lossless.lost == 0
    assert exactly_once.lost == unsettled.lost > 0.02 * exactly_once.sent
    assert exactly_once.figure < 2 * lossless.figure
    assert unsettled.figure > 5 * lossless.figure
