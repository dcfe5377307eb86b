"""The examples train, in this process and through `flwr run`, and are fewer than ten lines away from plain Flower."""

from __future__ import annotations

import difflib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk

from strategies import InProcessGrid

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"quickstart-pytorch": "pytorchexample", "quickstart-sklearn": "sklearnexample"}
LEARNT = {"quickstart-pytorch": 0.5, "quickstart-sklearn": 0.85}  # accuracy after three rounds; a guess has 0.1
LARGEST_SHARE = {"quickstart-pytorch": 0.1, "quickstart-sklearn": 0.2}  # of the bytes of a dense run
CHANGED_LINES = 9

# Flower's build says it, of a package it uses.
bundling = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds its own processes in /proc")


def files(folder: Path) -> dict[str, list[str]]:
    """Text of an app's files, by path; caches left out."""
    found = (p for p in folder.rglob("*") if p.suffix in (".py", ".toml", ".md"))
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8").splitlines() for p in sorted(found)}


def printed_diff(example: str) -> list[str]:
    """`diff -r -U0 before after`, without the lines that say where in a file a change is."""
    before, after = (files(ROOT / "examples" / example / name) for name in ("before", "after"))
    lines: list[str] = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path, []), after.get(path, [])
        changes = difflib.unified_diff(old, new, f"before/{path}", f"after/{path}", lineterm="", n=0)
        lines += [line for line in changes if not line.startswith("@@")]
    return lines


def check(example: str, output: str) -> None:
    """What a run printed: it learnt, and its messages were a small part of dense ones."""
    lines = re.findall(r"round \d: [\d.]+ s, (\d+) of (\d+) bytes up, .*test_accuracy ([\d.]+)", output)
    assert len(lines) == 3, output[-3000:]
    assert float(lines[-1][2]) >= LEARNT[example]
    assert (
        0 < sum(int(sent) for sent, _, _ in lines) <= LARGEST_SHARE[example] * sum(int(dense) for _, dense, _ in lines)
    )
    assert "3: {'loss': " in output, "the app's own last line is missing"


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_differs_from_plain_flower_by_fewer_than_ten_lines(example: str) -> None:
    lines = printed_diff(example)
    changed = [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]
    assert len(changed) == CHANGED_LINES < 10
    text = (ROOT / "docs" / "existing-apps.md").read_text(encoding="utf-8")
    block = "```diff\n" + "\n".join(lines) + "\n```"
    assert block in text, f"docs/existing-apps.md does not hold this diff:\n{block}"


@pytest.fixture
def importable(request: pytest.FixtureRequest) -> Iterator[str]:
    """An example whose app can be imported, and is forgotten afterwards."""
    example: str = request.param
    folder = str(ROOT / "examples" / example / "after")
    sys.path.insert(0, folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a small network is no faster on more, and much slower where others use them
    yield example
    torch.set_num_threads(threads)
    sys.path.remove(folder)
    for name in [name for name in sys.modules if name.split(".")[0] == EXAMPLES[example]]:
        del sys.modules[name]


@pytest.mark.parametrize("importable", EXAMPLES, indirect=True)
def test_example_trains_in_this_process(
    importable: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    package = EXAMPLES[importable]
    text = (ROOT / "examples" / importable / "after" / "pyproject.toml").read_text(encoding="utf-8")
    config: dict[str, Any] = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    client_app = importlib.import_module(f"{package}.client_app").app
    server_app = importlib.import_module(f"{package}.server_app").app
    grid = InProcessGrid.of_partitions(client_app, 2, config, tmp_path)
    server_app(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    check(importable, caplog.text + capsys.readouterr().out)
    assert not list(tmp_path.rglob("*.npy")), "clients did not forget a finished run"


def flwr_run(app: Path, environment: dict[str, str], folder: Path) -> str:
    """What `flwr run` prints of an app on two nodes."""
    probe = [sys.executable, "-c", "import clients, strategies"]
    installed = subprocess.run(probe, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert installed.returncode == 0, f"kimad-fl must be installed: pip install -e .\n{installed.stderr[-1000:]}"
    command = ["flwr", "run", str(app), "--stream"]
    command += ["--federation-config", "num-supernodes=2 client-resources-num-cpus=1"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


@needs_proc
def test_examples_train_through_flwr_run(environment: dict[str, str], tmp_path: Path) -> None:
    for example in EXAMPLES:
        check(example, flwr_run(ROOT / "examples" / example / "after", environment, tmp_path))
    assert not list((tmp_path / "state").glob("*")), "clients did not forget a finished run"


@needs_proc
@pytest.mark.slow
def test_examples_train_through_flwr_run_without_us(environment: dict[str, str], tmp_path: Path) -> None:
    """What the examples are compared with is an app that works."""
    for example in EXAMPLES:
        output = flwr_run(ROOT / "examples" / example / "before", environment, tmp_path)
        (last,) = [line for line in output.splitlines() if line.startswith("Metrics of")]
        accuracies = re.findall(r"'accuracy': ([\d.]+)", last)
        assert float(accuracies[-1]) >= 0.3


@bundling
@pytest.mark.parametrize("name", ["before", "after"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_example_makes_a_bundle_of_its_own(example: str, name: str) -> None:
    assert 0 < len(build_fab_from_disk(ROOT / "examples" / example / name)) < 20_000


@bundling
def test_our_own_bundle_is_built_although_examples_hold_apps() -> None:
    assert len(build_fab_from_disk(ROOT)) < 5_000_000
