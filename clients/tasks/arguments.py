"""Arguments in a run key: the inside of a TOML inline table, such as `alpha = 0.5, shuffle = true`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from compression.errors import ConfigError, unknown_name


class Arguments(BaseModel):
    """Base of a task's arguments: names, types and ranges are the fields'; nothing else is accepted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_by_name=False)


A = TypeVar("A", bound=Arguments)


def table(key: str, text: str) -> dict[str, Any]:
    """The arguments that a run key holds, by name.

    >>> table("partition-args", "alpha = 0.5, min_partition_size = 10")
    {'alpha': 0.5, 'min_partition_size': 10}

    Args:
        key: the run key, for the message.
        text: its value.

    Raises:
        ConfigError: the text is not the inside of one inline table.
    """
    try:
        document = tomllib.loads(f"arguments = {{{text}}}")
    except tomllib.TOMLDecodeError as error:
        document, why = {}, str(error).partition(" (at ")[0]
    else:
        why = "more than one table"
    if set(document) != {"arguments"}:
        raise ConfigError(
            f"{key} is {text!r}: {why}; expected the inside of a TOML inline table, NAME = VALUE, NAME = VALUE, on "
            'one line, with text in "quotes"'
        )
    arguments: dict[str, Any] = document["arguments"]
    return arguments


def read(key: str, text: str, kind: type[A]) -> A:
    """The checked arguments of a run key.

    Raises:
        ConfigError: with every problem: not a table, unknown names, wrong types, values out of range.
    """
    values = table(key, text)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        names = [field.alias or name for name, field in kind.model_fields.items()]
        problems = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden" and not names:
                problems.append(f"{key} has {name}, but there are no arguments here: leave it empty")
            elif item["type"] == "extra_forbidden":
                problems.append(unknown_name(f"argument in {key}", name, names))
            elif name:
                problems.append(f"{name} in {key} is {item['input']!r}: {item['msg']}")
            else:
                problems.append(f"{key} is {text!r}: {item['msg'].removeprefix('Value error, ')}")
        raise ConfigError(problems) from error


def require(*steps: Callable[[], object]) -> None:
    """Take all steps of a check, also after one that fails.

    Raises:
        ConfigError: with the problems of all steps, each once.
    """
    problems: list[str] = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))


class NoArguments(Arguments):
    """Of a task that has none."""
