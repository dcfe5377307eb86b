"""The `kimad` command line; `python -m app` in a clone.

kimad run [KEY=VALUE ...] [--config FILE] [--clients N] [--run-dir DIR]
kimad plan [KEY=VALUE ...] [--config FILE] [--clients N] [--json]
kimad keys
kimad state ls|verify|prune [--state-dir DIR]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.config import RunConfig, keys, parse
from compression.errors import ConfigError, KimadError

RUN_KEYS_PAGE = """# Run keys

Written by `python -m app keys --markdown`. Set them with `flwr run . --run-config "key=value"` (strings
in quotes), or with one TOML file, `flwr run . --run-config conf/digits.toml`; Flower takes one or the
other, not both. All are checked before anything runs, and all problems are reported together.

| key | type | default | meaning |
|---|---|---|---|
{table}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0, 2 for a mistake that the message explains, 130 when stopped."""
    parser = argparse.ArgumentParser(prog="kimad", description="Federated training over slow, unequal links.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run one experiment in this process, without Flower's engine")
    run.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="run keys; `kimad keys` lists them")
    run.add_argument("--config", type=Path, help="a TOML file of run keys, as in conf/")
    run.add_argument("--clients", type=int, default=10, help="number of clients (default 10)")
    run.add_argument("--run-dir", type=Path, default=Path("runs/in-process"), help="where results go")
    plan = commands.add_parser("plan", help="what a run will cost: bytes, seconds and disk, without running it")
    plan.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="run keys; `kimad keys` lists them")
    plan.add_argument("--config", type=Path, help="a TOML file of run keys, as in conf/")
    plan.add_argument("--clients", type=int, default=10, help="number of clients (default 10)")
    plan.add_argument("--json", action="store_true", help="as one JSON object")
    listing = commands.add_parser("keys", help="list every run key, its default and meaning")
    listing.add_argument("--markdown", action="store_true", help="as docs/run-keys.md")
    state = commands.add_parser("state", help="what clients keep on this machine (docs/restarts.md)")
    state.add_argument("action", choices=("ls", "verify", "prune"), help="list, list and check every byte, or remove")
    state.add_argument("--state-dir", type=Path, help="the node's state-dir; else $KIMAD_STATE_DIR or ~/.kimad/state")
    state.add_argument("--older-than-days", type=float, metavar="D", help="prune: what was not written for D days")
    state.add_argument("--most-bytes", type=int, metavar="N", help="prune: the oldest, until what is left fits in N")
    state.add_argument("--dry-run", action="store_true", help="prune: only say what would go")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "state":
            return _state(arguments)
        if arguments.command == "keys":
            print(keys_page() if arguments.markdown else keys_text(), end="")
            return 0
        return _plan(arguments) if arguments.command == "plan" else _run(arguments)
    except KimadError as error:
        print(f"kimad: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(f"kimad: {error or 'stopped'}", file=sys.stderr)
        return 130


def read_settings(settings: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Run keys from a TOML file, and KEY=VALUE pairs over them (TOML values; a bare word is a string)."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            found.update(tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"--config {file}: {error}") from error
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} is no setting: expected KEY=VALUE, e.g. time-budget=2.5")
        try:
            found[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


def _count(arguments: argparse.Namespace) -> int:
    count: int = arguments.clients
    if count < 1:
        raise ConfigError(f"--clients is {count}: expected at least 1")
    return count


def _state(arguments: argparse.Namespace) -> int:
    from app.state import list_states, prune

    if arguments.action != "prune":
        return list_states(arguments.state_dir, verify=arguments.action == "verify")
    if arguments.older_than_days is None and arguments.most_bytes is None:
        raise ConfigError("state prune: expected --older-than-days D or --most-bytes N, or both; --dry-run shows it")
    return prune(
        arguments.state_dir,
        older_than_days=arguments.older_than_days,
        most_bytes=arguments.most_bytes,
        dry_run=arguments.dry_run,
    )


def _plan(arguments: argparse.Namespace) -> int:
    from app.plan import make_plan, plan_text
    from clients.tasks import make_task, whole_of

    count = _count(arguments)
    config = parse(read_settings(arguments.settings, arguments.config))
    task = make_task(config.task, config.train_options())  # not checked: a plan needs no data but what makes the model
    plan = make_plan(config, task.initial_arrays(), count, whole_of(task))
    print(json.dumps(plan.as_dict(), indent=2) + "\n" if arguments.json else plan_text(plan, unit=config.unit), end="")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from app.client_app import app as client_app
    from app.experiment import run_experiment
    from app.rundir import RunDir
    from strategies import InProcessGrid

    config = parse({**read_settings(arguments.settings, arguments.config), "run-dir": str(arguments.run_dir.resolve())})
    count = _count(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("flwr").propagate = False
    run_dir = RunDir(config.run_dir, resume=config.resume)
    grid = InProcessGrid.of_partitions(client_app, count, config.as_dict(), run_dir.path / "clients")
    run_experiment(config, grid, f"in-process-{config.seed}", run_dir)
    return 0


def _key_rows() -> list[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every run key."""
    rows = []
    for key, field in zip(keys(), RunConfig.model_fields.values(), strict=True):
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        default = str(field.default).lower() if kind == "bool" else json.dumps(field.default)
        rows.append((key, kind, default, field.description or ""))
    return rows


def keys_text() -> str:
    """Every run key on a line of its own."""
    return "".join(f"{key:20} {kind:6} {default:12} {text}\n" for key, kind, default, text in _key_rows())


def keys_page() -> str:
    """docs/run-keys.md."""
    table = "".join(f"| `{key}` | {kind} | `{default}` | {text} |\n" for key, kind, default, text in _key_rows())
    return RUN_KEYS_PAGE.format(table=table)
