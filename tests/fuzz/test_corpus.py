"""The corpus of the fuzzer, replayed; and a short run of the fuzzer itself."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.fuzz_decode import CHECKSUM_BYTES, mutated, seeds
from tests.fuzz.target import CORPUS, LAYOUT, SCHEMES, decode_anything, messages

FILES = sorted(CORPUS.glob("*.bin"))


def test_there_is_a_corpus_and_it_is_small() -> None:
    assert len(FILES) >= len(SCHEMES)
    assert sum(file.stat().st_size for file in FILES) < 200_000


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_corpus(file: Path) -> None:
    decode_anything(file.read_bytes())


@pytest.mark.parametrize("name", SCHEMES)
def test_every_byte_of_a_message_changed_or_cut(name: str) -> None:
    body = messages()[name][:-CHECKSUM_BYTES]
    assert decode_anything(body)
    rng = np.random.default_rng(5)
    for at in range(len(body)):
        decode_anything(body[:at])
        decode_anything(body[:at] + bytes((body[at] ^ int(rng.integers(1, 256)),)) + body[at + 1 :])


def test_a_thousand_mutants_stay_within_the_memory_of_a_layout() -> None:
    rng = np.random.Generator(np.random.Philox(7))
    bodies = seeds()
    tracemalloc.start()
    try:
        legal = sum(decode_anything(mutated(bodies, rng)) for _ in range(1000))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < legal < 1000
    assert peak < 200 * LAYOUT.dense_bytes + 2_000_000
