"""The worked example of docs/wire.md is a real message."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from compression import UP, Header, Layout, Scheme, Slot, compress, decode, tag4

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"


def test_the_worked_example_is_what_compress_makes() -> None:
    block = PAGE.read_text(encoding="utf-8").split("## Worked example")[1].split("```")[1]
    said = "".join(re.sub(r"\s{2,}.*", "", line).replace(" ", "") for line in block.strip().splitlines())
    layout = Layout.of({"w": np.zeros((20, 15), np.float32), "b": np.zeros(2, np.float32)})
    header = Header(UP, layout.digest, tag4("demo"), tag4("7"), 1, 3, slots=((Slot.H, bytes(8)),))
    w = np.zeros(300, np.float32)
    w[[1, 2, 9, 100, 200]] = [1, -2, 0.5, 0.25, 0.01]
    made = compress(layout, header, [w, np.array([0.5, 0.125], np.float32)], None, Scheme(), 60)
    assert made.payload.hex() == said
    assert len(made.payload) == 57
    first, second = decode(layout, made.payload).updates
    assert first is not None
    assert first.indices is not None
    assert first.indices.tolist() == [1, 2, 9]
    assert second is not None
    assert second.values.tolist() == [0.5, 0.125]
