"""What a client does to an update: every choice, checked together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

from compression import allocation as al
from compression.allocation import ALLOCATIONS
from compression.coded import Arguments, arguments_of
from compression.errors import ConfigError, unknown_name
from compression.layout import Layer, Layout
from compression.operators import NAMED, OPERATORS, Operator, biased
from compression.quantise import Ladder
from compression.values import VALUES, ValueCoding, coding_for

AUTO, NATIVE_NAME = "auto", "native"
UNITS = ("bytes", "coordinates")
CODECS = ("auto", "portable")
ERRORS = ("squared", "plain")
LADDER_ALLOCATIONS = (al.HULL.name, al.UNIFORM.name)
Floors = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a client does to an update.

    Args:
        operator: name in `OPERATORS`.
        allocation: name in `ALLOCATIONS`; used when there is a budget.
        values: name in `VALUES`, "native" (the layer's own width) or "auto": with topk, hull and a
            budget in bytes, the precision of each layer is chosen together with its K (1 to 6
            bits of fitted levels, or bf16); else bf16, and native for identity and for all that is
            unbiased. A layer never gets a wider coding than its own dtype.
        ratio: most that is kept of each layer, in (0, 1]; without a budget, exactly that.
        floor: least K of every non-empty layer (EF21 needs alpha > 0 in each).
        floors: of single layers, as (fnmatch pattern of names, value): a value of 1 or more is a
            count, below 1 a share of the layer. The first pattern that fits wins, else `floor`.
        errors: what knapsack adds up over the layers: "squared" errors, or "plain" norms.
        unit: what a budget counts: "bytes", or "coordinates".
        operator_args: arguments of a coded operator, such as `p = inf, block = 256` (compression/coded.py); a
            ladder of quant, such as `block = "auto"` or `levels = [1, 3, 7]`, lets a budget choose (ladder.py).
        codec: "auto": index streams go through zstd where that makes them smaller and zstandard is
            installed; "portable": the same bytes everywhere, and every peer can read them.
        contractive: an operator is used in its contractive form, as EF21 needs it: what is unbiased
            divided by 1 + omega, or without chance; False: in its unbiased form, as DIANA needs it. Then
            nothing that is chosen (K, rung) depends on the draw, and values are not rounded.

    Raises:
        ConfigError: all problems together.
    """

    operator: str = "topk"
    allocation: str = "hull"
    values: str = AUTO
    ratio: float | None = None
    floor: int = 1
    floors: Floors = ()
    errors: str = "squared"
    unit: str = "bytes"
    operator_args: str = ""
    codec: str = "auto"
    contractive: bool = True

    def __post_init__(self) -> None:
        problems: list[str] = []
        checks = (lambda: self.made, lambda: ALLOCATIONS[self.allocation], self._check_values, self._check_form)
        for check in checks:
            try:
                check()
            except ConfigError as error:
                problems += error.problems
        if self.ratio is not None and not 0 < self.ratio <= 1:
            problems.append(f"ratio {self.ratio} is outside (0, 1]; leave it out to spend the budget")
        if self.floor < 1:
            problems.append(f"floor {self.floor} is below 1; a layer that never sends anything never converges")
        problems += [problem for floor in self.floors if (problem := _floor_problem(*floor))]
        for name, valid in (("errors", ERRORS), ("unit", UNITS), ("codec", CODECS)):
            if getattr(self, name) not in valid:
                problems.append(unknown_name(name, getattr(self, name), valid))
        if problems:
            raise ConfigError(problems)

    @property
    def joint(self) -> bool:
        """Whether a budget decides the precision of values, too."""
        operator = self.what
        return (
            self.values == AUTO
            and self.unit == "bytes"
            and self.allocation == al.HULL.name
            and operator.adaptive
            and not operator.seeded
        )

    @property
    def what(self) -> Operator:
        """The operator; of a named case, the one that it is a configuration of."""
        return OPERATORS[NAMED.get(self.operator, (self.operator, ""))[0]]

    @property
    def made(self) -> Arguments:
        """Arguments of a coded operator."""
        name, given = NAMED.get(self.operator, (self.operator, ""))
        if name not in OPERATORS:
            raise ConfigError(unknown_name("operator", name, sorted([*(o.name for o in OPERATORS), *NAMED])))
        if OPERATORS[name].coded:
            return arguments_of(name, given, self.operator_args)
        if self.operator_args:
            raise ConfigError(f"operator-args = {self.operator_args!r}: operator {name!r} takes none")
        return None

    @property
    def ladder(self) -> Ladder | None:
        """The quantisers of which a budget chooses one for each layer; None: there is no such choice."""
        made = self.made
        return made if isinstance(made, Ladder) else None

    def floor_of(self, layer: Layer) -> int:
        """Least K of a layer."""
        for pattern, value in self.floors:
            if fnmatchcase(layer.name, pattern):
                return min(layer.size, max(1, math.ceil(value * layer.size) if value < 1 else int(value)))
        return min(layer.size, self.floor)

    def _check_values(self) -> None:
        if self.values not in (AUTO, NATIVE_NAME):
            VALUES[self.values]

    def _check_form(self) -> None:
        name = NAMED.get(self.operator, (self.operator, ""))[0]
        if name not in OPERATORS:
            return  # told already
        operator = OPERATORS[name]
        problems = []
        if not self.contractive:
            if not operator.unbiased:
                problems.append(biased(self.operator))
            elif not operator.coded and self.values in VALUES and VALUES[self.values].itemsize < 4:
                problems.append(_rounds(self.values))
        try:
            ladder = self.ladder
        except ConfigError:
            ladder = None  # told already
        if ladder is not None:
            what = f"operator-args = {self.operator_args!r}: a ladder"
            if self.contractive:
                problems.append(f"{what} needs the unbiased form (DIANA); give one number")
            if self.allocation in ALLOCATIONS and self.allocation not in LADDER_ALLOCATIONS:
                problems.append(f"{what} has no allocation {self.allocation!r}: expected hull or uniform")
            if self.unit == "coordinates":
                problems.append(f"{what} needs a budget in bytes, got unit = 'coordinates'")
        if problems:
            raise ConfigError(problems)

    def coding(self, layer: Layer) -> ValueCoding:
        """How values of this layer are written.

        Raises:
            ConfigError: the scheme is unbiased, and the coding narrower than the layer.
        """
        auto = self.what.values if self.contractive else NATIVE_NAME
        coding = coding_for(auto if self.values == AUTO else self.values, layer.dtype)
        if not self.contractive and not self.what.coded and coding.itemsize < layer.itemsize:
            raise ConfigError(f"{_rounds(self.values)}; layer {layer.name!r} is {layer.dtype}")
        return coding


def _rounds(values: str) -> str:
    return f"values = {values!r} rounds, which biases an unbiased operator: expected auto or native"


def _floor_problem(pattern: str, value: float) -> str:
    if pattern and (0 < value < 1 or (value >= 1 and value == int(value))):
        return ""
    return f"floors: {pattern}={value:g}: expected a pattern and a count of 1 or more, or a share between 0 and 1"


def parse_floors(text: str) -> Floors:
    """Floors as a configuration writes them.

    Raises:
        ConfigError: all pieces that cannot be read.

    >>> parse_floors("conv1*=10, fc*=0.01")
    (('conv1*', 10.0), ('fc*', 0.01))
    """
    found: list[tuple[str, float]] = []
    problems: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        pattern, equals, number = (part.strip() for part in piece.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not equals or math.isnan(value) or math.isinf(value) or _floor_problem(pattern, value):
            problems.append(
                f"floors: {piece!r}: expected PATTERN=COUNT or PATTERN=SHARE, such as conv1*=10 or fc*=0.01"
            )
        else:
            found.append((pattern, value))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def idle_floors(layout: Layout, scheme: Scheme) -> tuple[str, ...]:
    """Patterns of floors that fit no compressed layer: most likely misspelt."""
    names = [layout.layers[at].name for at in layout.compressed]
    return tuple(p for p, _ in scheme.floors if not any(fnmatchcase(name, p) for name in names))
