"""The public surface, and what the package may import."""

from __future__ import annotations

import ast
import pathlib

import bandwidth


def test_all_names_exist_and_are_sorted_by_kind() -> None:
    assert all(hasattr(bandwidth, name) for name in bandwidth.__all__)
    assert len(set(bandwidth.__all__)) == len(bandwidth.__all__)


def test_imports_nothing_above_it() -> None:
    allowed = {"bandwidth", "compression.arguments", "compression.errors", "compression.randomness"}
    folder = pathlib.Path(bandwidth.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root not in {"flwr", "torch", "protocol", "strategies", "clients", "app"}, (path.name, name)
                assert root != "compression" or name in allowed, (path.name, name)
