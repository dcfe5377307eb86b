"""The worked example of docs/wire.md is a real message."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from compression import UP, Header, Layout, Scheme, Slot, compress, decode, tag4
from compression.wire import header_bytes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "wire.md"


SECTION = PAGE.read_text(encoding="utf-8").split("## Worked example")[1].split("```")
W = np.zeros(300, np.float32)
W[[1, 2, 9, 100, 200]] = [1, -2, 0.5, 0.25, 0.01]
B = np.array([0.5, 0.125], np.float32)
LAYOUT = Layout.of({"w": W.reshape(20, 15), "b": B})
HEADER = Header(UP, LAYOUT.digest, tag4("demo"), tag4("7"), 1, 3, slots=((Slot.H, bytes(8)),))


def written(block: str) -> str:
    """The hex digits of a block, without what it says beside them."""
    return "".join(re.sub(r"\s{2,}.*", "", line).replace(" ", "") for line in block.strip().splitlines())


def test_the_worked_example_is_what_compress_makes() -> None:
    made = compress(LAYOUT, HEADER, [W, B], None, Scheme(values="bf16"), 60)
    assert made.payload.hex() == written(SECTION[1])
    assert len(made.payload) == 57
    first, second = decode(LAYOUT, made.payload).updates
    assert first is not None
    assert first.indices is not None
    assert first.indices.tolist() == [1, 2, 9]
    assert second is not None
    assert second.values.tolist() == [0.5, 0.125]


def test_the_example_of_fitted_levels_is_what_compress_makes() -> None:
    made = compress(LAYOUT, HEADER, [W, B], None, Scheme(values="2bit", ratio=0.014), None)
    # header_bytes counts the checksum at the end, too
    assert made.payload.hex()[2 * (header_bytes(HEADER) - 4) :] == written(SECTION[3])
    first, second = decode(LAYOUT, made.payload).updates
    assert first is not None
    assert first.values.tolist() == [1.5, -1.5, 0.375, 0.375]
    assert second is not None
    assert second.values.tolist() == [0.5, 0.125]
