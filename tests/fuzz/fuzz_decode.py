"""Fuzz the decoder of messages: python -m tests.fuzz.fuzz_decode [SECONDS] [--write-corpus]

With atheris installed (pip install atheris) it is guided by coverage; without it bytes are changed at
random, from an explicit seed that is printed. With --write-corpus the legal messages that it starts from, and
what reached new code, go to tests/fuzz/corpus; the suite replays that folder (test_corpus.py).
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.fuzz.target import CORPUS, decode_anything, messages

CHECKSUM_BYTES = 4


def mutated(bodies: list[bytes], rng: np.random.Generator) -> bytes:
    """One body changed by one to four of: a bit, a byte, a cut, a repeat, a piece of another body."""
    body = bytearray(bodies[int(rng.integers(len(bodies)))])
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(len(body))) if body else 0
        kind = int(rng.integers(6))
        if not body or kind == 0:
            body[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 1:
            body[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            body[at] = int(rng.choice([0, 1, 127, 128, 255]))
        elif kind == 3:
            del body[at : at + int(rng.integers(1, 9))]
        elif kind == 4:
            other = bodies[int(rng.integers(len(bodies)))]
            begin = int(rng.integers(len(other)))
            body[at:] = other[begin:]
        else:
            body[at:at] = body[at : at + int(rng.integers(1, 17))]
    return bytes(body)


def at_random(seconds: float, seed: int) -> tuple[int, int]:
    """(bodies tried, of these legal) in so many seconds."""
    rng = np.random.Generator(np.random.Philox(seed))
    bodies = seeds()
    tried = legal = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        body = mutated(bodies, rng)
        try:
            legal += decode_anything(body)
        except BaseException:
            print(f"failed on {body.hex()}", file=sys.stderr)
            keep([body])
            raise
        tried += 1
    return tried, legal


def seeds() -> list[bytes]:
    """Legal bodies, and the corpus."""
    return [m[:-CHECKSUM_BYTES] for m in messages().values()] + [p.read_bytes() for p in sorted(CORPUS.glob("*.bin"))]


def keep(bodies: Iterable[bytes]) -> None:
    """Write bodies to the corpus, named by what they are."""
    CORPUS.mkdir(exist_ok=True)
    for body in bodies:
        (CORPUS / f"{hashlib.blake2b(body, digest_size=6).hexdigest()}.bin").write_bytes(body)


def main(arguments: list[str]) -> int:
    """Fuzz; the exit status is 0 when nothing but WireError was raised."""
    warnings.simplefilter("error")
    seconds = float(next((a for a in arguments if not a.startswith("-")), 600))
    if "--write-corpus" in arguments:
        keep(m[:-CHECKSUM_BYTES] for m in messages().values())
    try:
        import atheris
    except ImportError:
        tried, legal = at_random(seconds, seed=1)
        print(
            f"at random, seed 1: {tried} bodies in {seconds:g} s, {legal} of them legal, nothing but WireError raised"
        )
        return 0
    atheris.instrument_all()
    found = CORPUS if "--write-corpus" in arguments else Path(tempfile.mkdtemp(prefix="fuzz-"))
    print(f"new bodies go to {found}", flush=True)
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={int(seconds)}", "-max_len=4096", str(found), str(CORPUS)],
        lambda data: decode_anything(bytes(data)),
    )
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
