from __future__ import annotations

import subprocess
import sys

import compression


def test_all_is_sorted_complete_and_real() -> None:
    names = compression.__all__
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if name[0].isupper() and not name.isupper()]
    functions = [name for name in names if name[0].islower()]
    assert names == sorted(constants) + sorted(classes) + sorted(functions)
    assert all(getattr(compression, name).__doc__ for name in classes + functions)


def test_numpy_is_all_it_imports() -> None:
    code = "import sys, compression; print(*{'torch', 'flwr', 'numba', 'zstandard', 'pickle'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    bare = "import sys, numpy; print(*{'torch', 'flwr', 'numba', 'zstandard', 'pickle'} & set(sys.modules))"
    numpy_alone = subprocess.run(
        [sys.executable, "-c", bare], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(found) <= set(numpy_alone)
