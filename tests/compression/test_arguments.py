"""Arguments by name: read from text, checked for name and type."""

from __future__ import annotations

import pytest

from bandwidth import arguments
from compression.arguments import Parameter, checked
from compression.errors import ConfigError

WANTED = {
    "width": Parameter(float, 1.5),
    "count": Parameter(int, 3),
    "name": Parameter(str, ""),
    "wide": Parameter(bool, False),
    "inner": Parameter(dict, {}),
}


def test_text() -> None:
    assert arguments("", "args") == arguments("  ", "args") == {}
    got = arguments('width = 2, name = "a, }b", wide = true, inner = { count = 1 }', "args")
    assert got == {"width": 2, "name": "a, }b", "wide": True, "inner": {"count": 1}}


@pytest.mark.parametrize(
    "text", ["width", "width = ", "width = 1, width = 2", "width = 1}\n[x", "width = 1\n", "name = plain", "} a = {"]
)
def test_bad_text(text: str) -> None:
    with pytest.raises(ConfigError, match="expected `name = value, name = value`") as caught:
        arguments(text, "links-args")
    assert str(caught.value).startswith("1 setting is wrong:\n  - links-args = ")


def test_defaults_and_whole_numbers() -> None:
    values = checked({"width": 2, "wide": True}, WANTED, "a thing")
    assert values == {"width": 2.0, "count": 3, "name": "", "wide": True, "inner": {}}
    assert isinstance(values["width"], float)


def test_problems_come_together() -> None:
    bad = {"width": "2", "count": 1.5, "name": 3, "wide": 1, "inner": [], "widht": 1, "zzz": 0}
    with pytest.raises(ConfigError) as caught:
        checked(bad, WANTED, "a thing")
    assert caught.value.problems == (
        "width = '2' of a thing: expected a number",
        "count = 1.5 of a thing: expected a whole number",
        "name = 3 of a thing: expected a text in quotes",
        "wide = 1 of a thing: expected true or false",
        "inner = [] of a thing: expected a table",
        "unknown parameter 'widht' of a thing: expected one of count, inner, name, wide, width; did you mean 'width'?",
        "unknown parameter 'zzz' of a thing: expected one of count, inner, name, wide, width",
    )
    for wrong in ({"width": True}, {"count": True}):
        with pytest.raises(ConfigError, match=r"True of a thing: expected a"):
            checked(wrong, WANTED, "a thing")
