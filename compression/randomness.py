"""Counter-based randomness: every draw is a pure function of its key.

A draw is named by (run seed, client, round, purpose). No generator is stored, none is
global, and asking twice gives the same words, so a killed or repeated round draws the
same numbers. Words come from Philox-4x64 (Salmon et al., SC'11); the mapping from words
to numbers is ours, so it does not change with the NumPy version.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def _key(seed: int, client: str, round_: int, purpose: str) -> NDArray[np.uint64]:
    text = f"{seed}\x1f{client}\x1f{round_}\x1f{purpose}".encode()
    return np.frombuffer(hashlib.blake2b(text, digest_size=16).digest(), dtype="<u8").astype(np.uint64)


def words(n: int, *, seed: int, client: str = "", round_: int = 0, purpose: str) -> NDArray[np.uint64]:
    """The first n 64-bit words of the stream with this key; shape (n,)."""
    raw = np.random.Philox(key=_key(seed, client, round_, purpose)).random_raw(n)
    return np.asarray(raw, dtype=np.uint64)


def uniforms(n: int, *, seed: int, client: str = "", round_: int = 0, purpose: str) -> NDArray[np.float64]:
    """n numbers in [0, 1): the top 53 bits of each word; shape (n,)."""
    w = words(n, seed=seed, client=client, round_=round_, purpose=purpose)
    return (w >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(n: int, *, seed: int, client: str = "", round_: int = 0, purpose: str) -> NDArray[np.float64]:
    """n standard normal numbers, by Box and Muller from the uniform ones; shape (n,)."""
    half = (n + 1) // 2
    drawn = uniforms(2 * half, seed=seed, client=client, round_=round_, purpose=purpose)
    radius = np.sqrt(-2.0 * np.log1p(-drawn[:half]))
    turn = 2.0 * np.pi * drawn[half:]
    return np.concatenate((radius * np.cos(turn), radius * np.sin(turn)))[:n]


def permutation(n: int, *, seed: int, client: str = "", round_: int = 0, purpose: str) -> NDArray[np.int64]:
    """A permutation of range(n): the stable order of n words; shape (n,)."""
    drawn = words(n, seed=seed, client=client, round_=round_, purpose=purpose)
    return np.argsort(drawn, kind="stable").astype(np.int64)


def derived_seed(*, seed: int, client: str = "", round_: int = 0, purpose: str) -> int:
    """A seed in [0, 2**31) for a library that keeps a generator of its own (torch, Python)."""
    return int(words(1, seed=seed, client=client, round_=round_, purpose=purpose)[0] >> np.uint64(33))
