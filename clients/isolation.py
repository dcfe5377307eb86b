"""Global random generators of Python, NumPy and torch, seeded for one call of the user's code and put back after.

An app that draws from them gives the same reply when it is asked again (run key isolate-rng): in
another process, after a crash, or after other clients in the same one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all of them, and restore them however the block ends.

    torch is left alone where nobody has imported it; what the block imports itself, it seeds itself.

    Args:
        seed: any non-negative number; NumPy takes its low 32 bits, torch its low 63.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the legacy generator is what is isolated
    torch: Any = sys.modules.get("torch")
    before = torch.random.get_rng_state() if torch is not None else None
    cuda = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if torch is not None:
        torch.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if torch is not None:
            torch.random.set_rng_state(before)
            if cuda is not None:
                torch.cuda.set_rng_state_all(cuda)
