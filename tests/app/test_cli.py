"""The command line: what it prints, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import keys_page, main, read_settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_run_keys_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "run-keys.md").read_text(encoding="utf-8") == keys_page()


def test_settings_are_toml_values_and_bare_words(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('task = "digits"\ntime-budget = 1.0\n')
    got = read_settings(["time-budget=2", "late=drop", 'run-dir="/x"', "dense-run=false"], file)
    assert got == {"task": "digits", "time-budget": 2, "late": "drop", "run-dir": "/x", "dense-run": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["time-budget"], "expected KEY=VALUE"),
        (["operator=topkk", "late=x"], "2 settings are wrong"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--clients", "0"], "expected at least 1"),
    ],
)
def test_a_mistake_ends_with_status_2_and_a_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
