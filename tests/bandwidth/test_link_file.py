"""The link file: who gets which link, and every problem of a file reported together."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import bandwidth
from bandwidth import (
    LINK_KINDS,
    ConstantLink,
    DriftLink,
    Link,
    LinkFile,
    MarkovLink,
    OutageLink,
    TraceLink,
    read_link_file,
)
from compression.errors import ConfigError

DOCS = Path(bandwidth.__file__).parents[1] / "docs" / "links.md"


def read(tmp_path: Path, text: str, seed: int = 1) -> LinkFile:
    path = tmp_path / "links.toml"
    path.write_text(text)
    return read_link_file(path, seed=seed, downlink_factor=3.0, overhead_s=0.25)


def up(file: LinkFile, client: str, index: int = 0, count: int = 1) -> Link:
    return file.links(client, index=index, count=count).up


GOOD = """
[[link]]
clients = "van-*"
kind = "trace"
up = "traces/a.up"
down = "traces/a.down"
offset_s = 0.5

[[link]]
share = 0.3
kind = "mobile"
uplink_bps_min = 2e5
uplink_bps_max = 2e6
downlink_factor = 2
swing_sd = 0.1

[[link]]
share = 0.25
kind = "outages"
uplink_bps = 1e6
base = "cellular"

[[link]]
clients = ["lab-?", "LAB-[12]*"]
kind = "trace"
up = "traces/a.up"
uplink_bps = 8
overhead_s = 0

[default]
kind = "constant"
uplink_bps = 5000000
"""


@pytest.fixture
def good(tmp_path: Path) -> LinkFile:
    (tmp_path / "traces").mkdir()
    for name, rate in (("a.up", 100), ("a.down", 900)):
        (tmp_path / "traces" / name).write_text(f"0 0\n1 {rate}\n3 {rate / 2}\n")
    return read(tmp_path, GOOD)


def test_patterns(good: LinkFile) -> None:
    van = good.links("van-7", index=0, count=1)
    assert isinstance(van.up, TraceLink)
    assert van.up.offset_s == 0.5
    assert van.up.rate_bps(0.0) == 100e6  # its own rates
    assert van.down.rate_bps(0.0) == 900e6
    assert (van.overhead_up_s, van.overhead_down_s) == (0.25, 0.25)
    lab = good.links("lab-1", index=0, count=1)
    assert (lab.up.mean_bps, lab.down.mean_bps) == pytest.approx((8.0, 24.0))  # scaled: it has a mean uplink
    assert lab.overhead_up_s == 0.0
    assert isinstance(up(good, "LAB-1x"), TraceLink)
    assert not isinstance(up(good, "lab-11"), TraceLink)
    assert not isinstance(up(good, "VAN-1"), TraceLink)


def test_shares(good: LinkFile) -> None:
    fleet = [up(good, f"c{i}", i, 20) for i in range(20)]
    assert Counter(type(link) for link in fleet) == {DriftLink: 6, OutageLink: 5, ConstantLink: 9}
    mobile = next(link for link in fleet if isinstance(link, DriftLink))
    assert mobile.swing_sd == 0.1
    assert all(2e5 <= link.mean_bps <= 2e6 for link in fleet if isinstance(link, DriftLink))
    out = next(link for link in fleet if isinstance(link, OutageLink))
    assert isinstance(out.base, MarkovLink)
    assert out.mean_bps == pytest.approx(1e6)


def test_the_seed_draws_who_has_which_share(good: LinkFile) -> None:
    def kinds(seed: int) -> list[str]:
        file = read_link_file(good.path, seed=seed)
        return [type(up(file, f"c{i}", i, 20)).__name__ for i in range(20)]

    assert kinds(1) == kinds(1)
    assert kinds(1) != kinds(2)
    assert sorted(kinds(1)) == sorted(kinds(2))


def test_shares_of_everyone_need_no_default(tmp_path: Path) -> None:
    thirds = "".join(f'[[link]]\nshare = {1 / 3}\nkind = "constant"\nuplink_bps = {rate}\n' for rate in (1, 2, 3))
    file = read(tmp_path, thirds)
    for count in (1, 2, 3, 7, 30):
        means = Counter(up(file, f"c{i}", i, count).mean_bps for i in range(count))
        assert sum(means.values()) == count
        assert count < 3 or max(means.values()) - min(means.values()) <= 1


def test_a_client_that_no_entry_fits(tmp_path: Path) -> None:
    file = read(tmp_path, '[[link]]\nclients = "a*"\nkind = "constant"\nuplink_bps = 1\n')
    assert up(file, "abc").mean_bps == 1.0
    with pytest.raises(ConfigError) as caught:
        up(file, "b")
    assert caught.value.problems == (
        f"{file.path}: no entry fits client 'b': expected a pattern that matches it, shares that add up to 1, or a "
        "[default]; add one",
    )
    with pytest.raises(ConfigError, match="client index 3 of 2"):
        up(file, "abc", 3, 2)


def test_traces_with_outages_keep_their_rates(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("0 0\n1 8\n")
    entry = (
        '[default]\nkind = "outages"\nbase = "trace"\nbase_args = { path = "x" }\noutage_every_s = 30\noutage_s = 10\n'
    )
    link = up(read(tmp_path, entry), "c")
    assert isinstance(link, OutageLink)
    assert link.base.mean_bps == pytest.approx(8e6)
    assert up(read(tmp_path, entry + "uplink_bps = 3e6"), "c").mean_bps == pytest.approx(3e6)


def test_every_problem_is_told_with_its_entry(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(
            tmp_path,
            """
            surprise = 1
            [[link]]
            clients = ""
            kind = "constant"
            [[link]]
            share = 1.5
            kind = "cellulr"
            uplink_bps = "fast"
            [[link]]
            kind = "sinusoid"
            clients = "a"
            share = 0.6
            amplitude = 2
            uplink_bps = 3
            uplink_bps_max = 1
            [[link]]
            share = 0.7
            kind = "trace"
            path = "missing"
            overhead_s = -1
            [[link]]
            share = 0.7
            kind = "mobile"
            uplink_bps_min = 2
            uplink_bps_max = 1
            swingsd = 1
            [[link]]
            share = 0.7
            [[link]]
            clients = 3
            kind = 4
            [[link]]
            clients = "a"
            kind = "trace"
            path = "missing"
            scaled = true
            [default]
            clients = "x"
            """,
        )
    head = f"{tmp_path / 'links.toml'}: "
    assert all(problem.startswith(head) for problem in caught.value.problems)
    uplinks = "expected uplink_bps, or uplink_bps_min and uplink_bps_max (bit/s)"
    kinds = "expected one of cellular, constant, mobile, outages, sinusoid, stable, trace"
    missing = f"{tmp_path / 'missing'}: No such file or directory: expected a trace file that can be read"
    assert [problem.removeprefix(head) for problem in caught.value.problems] == [
        "unknown table or key 'surprise': expected [[link]] entries and at most one [default]",
        "entry 1: clients = ['']: expected a pattern in quotes, or a list of them",
        f"entry 1: no mean uplink: {uplinks}",
        "entry 2: share = 1.5: expected a number above 0, at most 1",
        "entry 2: uplink_bps = 'fast' of an entry: expected a number",
        f"entry 2: unknown link kind 'cellulr': {kinds}; did you mean 'cellular'?",
        "entry 3: expected one of clients (whom it is for, by id) and share (how many)",
        f"entry 3: uplink_bps and uplink_bps_max: {uplinks}",
        "entry 3: amplitude = 2.0: expected a number in [0, 1], 1 for a rate that falls to 0",
        f"entry 4: {missing}",
        "entry 4: overhead_s = -1.0: expected a finite time >= 0 (s)",
        "entry 5: unknown parameter 'swingsd' of link kind 'mobile': expected one of "
        f"{', '.join(sorted(LINK_KINDS['mobile'].parameters))}; did you mean 'swing_sd'?",
        "entry 5: uplink_bps_min = 2.0 is above uplink_bps_max = 1.0",
        f"entry 6: kind not given: {kinds}",
        "entry 7: clients = 3: expected a pattern in quotes, or a list of them",
        f"entry 7: kind = 4: {kinds}",
        f"entry 8: no mean uplink: {uplinks}",
        f"entry 8: {missing}",
        "default: clients or share given: expected neither; it is for all the others",
    ]


def test_files_that_say_nothing(tmp_path: Path) -> None:
    for text, said in (
        ("", "no entries: expected [[link]] entries, a [default], or both"),
        ("[link]\nshare = 1\n", "link: expected entries that begin with [[link]], in two brackets"),
        ("link = [1]", "link: expected entries that begin with [[link]], in two brackets"),
        ("default = 3", "default: expected a table that begins with [default]"),
        ("[default]\n", "default: kind not given: expected one of"),
        ("[[link]\n", "expected TOML with [[link]] entries"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            read(tmp_path, text)
    shares = '[[link]]\nshare = 0.6\nkind = "constant"\nuplink_bps = 1\n' * 2
    with pytest.raises(ConfigError, match=r"shares add up to 1\.2: expected 1 at most"):
        read(tmp_path, shares)
    with pytest.raises(ConfigError, match="No such file or directory: expected a link file that can be read"):
        read_link_file(tmp_path / "missing", seed=1)
    (tmp_path / "big").write_bytes(b"#" * 2**20 + b"#")
    with pytest.raises(ConfigError, match="expected a link file, not a trace"):
        read_link_file(tmp_path / "big", seed=1)
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="expected TOML"):
        read_link_file(tmp_path / "binary", seed=1)


def test_the_manual_has_every_kind_and_parameter() -> None:
    """Each parameter stands in the section of its kind, with its default."""
    sections = dict(re.findall(r"^## `(\w+)`[^\n]*\n(.*?)(?=^## )", DOCS.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    assert {*sections} == {*LINK_KINDS}
    for kind, made in LINK_KINDS.items():
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", sections[kind], re.MULTILINE))
        assert {*rows} == {*made.parameters}, kind
        for name, parameter in made.parameters.items():
            default = parameter.default
            if isinstance(default, bool):
                assert rows[name] == str(default).lower(), (kind, name)
            elif isinstance(default, int | float):
                assert float(rows[name]) == default, (kind, name)
            elif default:
                assert not isinstance(default, str) or rows[name] == f'"{default}"', (kind, name)


def test_the_manuals_example_is_a_link_file(tmp_path: Path) -> None:
    text = DOCS.read_text("utf-8")
    example = next(block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[[link]]" in block)
    for entry in tomllib.loads(example)["link"]:
        for name in ("path", "up", "down"):
            if name in entry:
                file = tmp_path / entry[name]
                file.parent.mkdir(exist_ok=True)
                file.write_text("0 0\n1 8\n")
    file = read(tmp_path, example)
    assert len({type(up(file, client, i, 40)) for i, client in enumerate(["van-1", *map(str, range(39))])}) >= 3
