"""Links as a run's settings name them: checked when they are made, read when the network is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bandwidth import ConstantLink, SinusoidLink, TraceLink
from compression.errors import ConfigError
from strategies.network import LinkSettings, SimulatedNetwork

CLIENTS = [("a", 0, 2), ("b", 1, 2)]


def problems(**settings: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        SimulatedNetwork(LinkSettings(**settings))  # type: ignore[arg-type]
    return caught.value.problems


def test_a_kind_with_parameters() -> None:
    settings = LinkSettings("sinusoid", args="amplitude = 0.95, period_s = 60")
    link = settings.plan().links("a", index=0, count=1).up
    assert isinstance(link, SinusoidLink)
    assert link.period_s == pytest.approx(60.0)
    network: SimulatedNetwork[None] = SimulatedNetwork(settings)
    network.register(CLIENTS)
    assert sorted(network.mean_up_bps(client) for client, _, _ in CLIENTS) == pytest.approx([1e5, 1e6])


def test_a_link_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("0 0\n1 8\n")
    (tmp_path / "links.toml").write_text(
        '[[link]]\nclients = "a"\nkind = "trace"\npath = "x"\n[default]\nkind = "constant"\nuplink_bps = 5\n'
    )
    # kind and uplinks are not used, not even when they are wrong
    settings = LinkSettings("no kind", -1.0, -2.0, 7.0, file=str(tmp_path / "links.toml"))
    a, b = (settings.plan().links(client, index=i, count=n) for client, i, n in CLIENTS)
    assert isinstance(a.up, TraceLink)
    assert b.up == ConstantLink(5.0)
    assert b.down == ConstantLink(35.0)
    network: SimulatedNetwork[None] = SimulatedNetwork(settings)
    network.register(CLIENTS)
    assert network.mean_up_bps("a") == pytest.approx(8e6)


def test_relative_paths_start_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("0 0\n1 8\n")
    settings = LinkSettings("trace", args='path = "x", scaled = false', folder=str(tmp_path))
    assert settings.plan().links("a", index=0, count=1).up.mean_bps == pytest.approx(8e6)


def test_all_that_is_wrong_is_told_when_the_settings_are_made() -> None:
    with pytest.raises(ConfigError) as caught:
        LinkSettings("sinusoid", -1.0, 1.0, 0.0, overhead_s=-1.0, compute_s=-1.0, args="amplitud = 1, period_s = true")
    assert caught.value.problems == (
        "unknown parameter 'amplitud' of link kind 'sinusoid': expected one of amplitude, period_s, phase, theta; did "
        "you mean 'amplitude'?",
        "period_s = True of link kind 'sinusoid': expected a number",
        "uplink_bps_min = -1.0: expected a finite rate > 0 (bit/s)",
        "downlink_factor = 0.0: expected a finite number > 0",
        "overhead_s = -1.0: expected a finite time >= 0 (s)",
        "compute_s = -1.0: expected a finite time >= 0 (s)",
    )
    assert problems(kind="celular", args="x") == (
        "args of the links = 'x': Expected '=' after a key in a key/value pair (at line 1, column 15): expected `name "
        "= value, name = value`, as between the braces of a TOML inline table, texts in quotes",
        "unknown link kind 'celular': expected one of cellular, constant, mobile, outages, sinusoid, stable, trace; "
        "did you mean 'cellular'?",
    )
    assert problems(file="f", args="a = 1", compute_s=-1.0) == (
        "args = 'a = 1' with a link file: expected parameters in the file's entries",
        "compute_s = -1.0: expected a finite time >= 0 (s)",
    )


def test_ranges_and_files_are_checked_when_the_network_is_made(tmp_path: Path) -> None:
    assert problems(kind="cellular", args="levels = 1, move = 2") == (
        "levels = 1: expected 2 to 64",
        "move = 2.0: expected a probability",
    )
    assert problems(kind="trace") == (
        "neither path nor up is given: expected path (a file, or a folder of them) or up (a file, with down if there "
        "is one)",
    )
    missing = tmp_path / "missing"
    assert problems(kind="trace", args=f'path = "{missing}"') == (
        f"{missing}: No such file or directory: expected a trace file that can be read",
    )
    assert problems(file=str(missing)) == (
        f"{missing}: No such file or directory: expected a link file that can be read",
    )
