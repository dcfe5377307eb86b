"""Arguments by name: read from the text of a configuration, and checked against what is expected."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from compression.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parameter:
    """What an argument must be.

    Args:
        type: float (a whole number will do), int, bool, str or dict.
        default: its value when it is not given.
        ladder: whole numbers may be a list, from which one is chosen later, or "auto" for a list that is
            made later; checked, a list is a tuple in ascending order.
    """

    type: type
    default: object
    ladder: bool = False


_WANTED = {float: "a number", int: "a whole number", bool: "true or false", str: "a text in quotes", dict: "a table"}


def arguments(text: str, what: str) -> dict[str, object]:
    """The arguments in a text: the inside of a TOML inline table.

    Args:
        text: such as `amplitude = 0.95, period_s = 60`; empty for none.
        what: where the text stands, as error messages call it.

    Raises:
        ConfigError: not the inside of a TOML inline table.

    >>> arguments('period_s = 60, base = "constant"', "link-args")
    {'period_s': 60, 'base': 'constant'}
    """
    try:
        if "\n" in text or "\r" in text:
            raise ValueError("a line break")
        read = tomllib.loads(f"arguments = {{{text.strip()}}}")["arguments"]
    except ValueError as error:
        raise ConfigError(
            f"{what} = {text!r}: {error}: expected `name = value, name = value`, as between the braces of a TOML "
            "inline table, texts in quotes"
        ) from error
    assert isinstance(read, dict)  # one line that starts with `arguments = {` cannot give anything else
    return read


def checked(args: Mapping[str, object], parameters: Mapping[str, Parameter], what: str) -> dict[str, object]:
    """All parameters by name: the given arguments, whole numbers made floats where floats are due, and the defaults.

    Args:
        args: the arguments given.
        parameters: what is expected.
        what: whose parameters these are, as error messages call it.

    Raises:
        ConfigError: names that are not parameters, or values of another type; all of them together.
    """
    values = {name: parameter.default for name, parameter in parameters.items()}
    problems = []
    for name, got in args.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1, cutoff=0.5)
            valid = f"one of {', '.join(sorted(parameters))}" if parameters else "none: it has no parameters"
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"unknown parameter {name!r} of {what}: expected {valid}{hint}")
            continue
        want = parameters[name].type
        if parameters[name].ladder and not isinstance(got, int):
            rungs = _rungs(got)
            if rungs is None:
                problems.append(f'{name} = {got!r} of {what}: expected a whole number, a list of them, or "auto"')
            values[name] = rungs
            continue
        value = float(got) if want is float and isinstance(got, int) and not isinstance(got, bool) else got
        if not isinstance(value, want) or (isinstance(value, bool) and want is not bool):
            problems.append(f"{name} = {got!r} of {what}: expected {_WANTED[want]}")
        values[name] = value
    if problems:
        raise ConfigError(problems)
    return values


def _rungs(got: object) -> tuple[int, ...] | str | None:
    """A list of whole numbers, ascending and each once, or "auto"; None: neither."""
    if got == "auto":
        return "auto"
    if not isinstance(got, list) or not got or any(isinstance(v, bool) or not isinstance(v, int) for v in got):
        return None
    return tuple(sorted(set(got)))
