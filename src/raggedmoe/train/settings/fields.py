"""How a setting of a run is declared: once, at the field of the dataclass that holds it.

`setting` gives a field its default, one line of help and its limits. From that the checks of a section, the words of
the command line, `--help` and the tables of the docs are made.
"""

import dataclasses
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from raggedmoe.interop.maxtext import FALSE, TRUE
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.config_json import from_json
from raggedmoe.names import close_names
from raggedmoe.storage import ObjectPath

BOOLS = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}
TYPES = ("float32", "bfloat16")  # of numbers, that a setting may name
METADATA = "setting"  # where a field's metadata has the declaration


def _parse_bool(text: str) -> bool:
    return BOOLS[text.lower()]


def _parse_names(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise ValueError(text)
    return parts


def _parse_int(text: str) -> int:
    number = float(text.replace("_", ""))
    if not number.is_integer():
        raise ValueError(text)
    return int(text.replace("_", "")) if "." not in text and "e" not in text.lower() else int(number)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_word(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as Python's number."""
    return value.item() if isinstance(value, np.generic) else value


def _plain_text(value: Any) -> Any:
    """Return the path of a file or folder as its text."""
    return str(value) if isinstance(value, os.PathLike | ObjectPath) else value


def _plain_model(value: Any) -> Any:
    """Return a model's configuration from JSON's text as such, and a name or a path as text."""
    return _parse_model(value) if isinstance(value, str) and value.startswith("{") else _plain_text(value)


def _parse_model(text: str) -> str | ModelConfig:
    """Read the name of a model, or the JSON of a configuration that a Python program gave."""
    if not text.startswith("{"):
        return _parse_word(text)
    try:
        model = from_json(json.loads(text), "model_name")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model_name: expected the configuration of a model as JSON, got {error}") from None
    if not isinstance(model, ModelConfig):
        raise ValueError(f"model_name: expected the configuration of a model, got that of {type(model).__name__}")
    return model


def _plain_names(value: Any) -> Any:
    """Return names as a tuple: a list's, those in a text with commas, or the one of a path."""
    value = _plain_text(value)
    if isinstance(value, str) and value.strip(", "):
        return _parse_names(value)
    return tuple(map(_plain_text, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True, kw_only=True)
class ValueType:
    """The type of a setting's value: how a word is read, which objects are values, and how an error describes them."""

    name: str
    read: Callable[[str], Any]
    convert: Callable[[Any], Any]  # from what a Python program may have for a value; anything else stays as it is
    accepts: Callable[[object], bool]
    expected: str


VALUE_TYPES: dict[Any, ValueType] = {
    int: ValueType(name="int", read=_parse_int, convert=_plain, accepts=_is_int, expected="a whole number"),
    float: ValueType(name="float", read=_parse_float, convert=_plain, accepts=_is_float, expected="a finite number"),
    bool: ValueType(
        name="bool",
        read=_parse_bool,
        convert=_plain,
        accepts=lambda value: isinstance(value, bool),
        expected="true or false",
    ),
    str: ValueType(
        name="str",
        read=_parse_word,
        convert=_plain_text,
        accepts=lambda value: isinstance(value, str) and value != "",
        expected="a word",
    ),
    str | ModelConfig: ValueType(
        name="str",
        read=_parse_model,
        convert=_plain_model,
        accepts=lambda value: isinstance(value, ModelConfig) or (isinstance(value, str) and value != ""),
        expected="a name, a folder or a ModelConfig",
    ),
    tuple[str, ...]: ValueType(
        name="names",
        read=_parse_names,
        convert=_plain_names,
        accepts=_is_names,
        expected="names separated by commas",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The numbers that a setting may have."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def contain(self, value: float) -> bool:
        """Tell whether the value is within the limits."""
        return not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )

    def describe(self, name: str) -> str:
        """Write the limits as a comparison, `0 <= held_out <= 0.5` for example."""
        if self.at_most is None and self.below is None:
            return f"{name} > {self.above}" if self.above is not None else f"{name} >= {self.at_least}"
        low = (
            f"{self.above} < "
            if self.above is not None
            else f"{self.at_least} <= "
            if self.at_least is not None
            else ""
        )
        return f"{low}{name} " + (f"< {self.below}" if self.below is not None else f"<= {self.at_most}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run, as its field declares it."""

    name: str  # what a user types on the command line, and what errors call it
    section: str  # the attribute of `TrainConfig` that holds the section; "" if `TrainConfig` itself has the field
    field: str  # the field of the section
    type: ValueType
    optional: bool  # whether None is a value
    default: Any
    otherwise: Any  # what a default of None stands for where the model brings nothing else
    help: str
    choices: tuple[str, ...]
    limits: Limits
    may_change: bool  # whether a run can be resumed with another value, as earlier steps do not depend on it

    @property
    def usual(self) -> Any:
        """The value of a run whose model brings none: the default, or what a default of None stands for."""
        return self.otherwise if self.default is None else self.default

    def parse(self, text: str, *, called: str | None = None) -> Any:
        """Parse and check a value as a user typed it. ``called`` is the setting's name in errors, if it has another."""
        if self.optional and text.lower() in ("none", "null"):
            return None
        if self.default == () and text.lower() in ("none", "null"):
            return ()
        try:
            value = self.type.read(text)
        except (ValueError, KeyError):
            raise self._not_of_type(text, called) from None
        self.check(value, called=called)
        return value

    def check(self, value: Any, *, called: str | None = None) -> None:
        """Refuse a value of another type, one that is no choice, or one outside the limits."""
        if value is None and self.optional:
            return
        if not self.type.accepts(value):
            raise self._not_of_type(value, called)
        if self.choices and value not in self.choices:
            raise ValueError(f"{called or self.name}: expected one of {', '.join(self.choices)}, got {value!r}")
        if self.limits != Limits() and not self.limits.contain(value):
            raise ValueError(f"expected {self.limits.describe(called or self.name)}, got {value}")

    def _not_of_type(self, value: object, called: str | None) -> ValueError:
        return ValueError(f"{called or self.name}: expected {self.type.expected}, got {value!r}; {self.help}")


def setting(
    *,
    default: Any,
    otherwise: Any = None,
    help: str,
    name: str | None = None,
    choices: tuple[str, ...] = (),
    may_change: bool = False,
    **limits: float,
) -> Any:
    """Declare a setting as a field of a section. ``name`` is what a user types, if it is not the field's name.

    A default of None leaves the value to the model; ``otherwise`` is what it stands for where the model brings none.
    """
    declared = {"name": name, "otherwise": otherwise, "help": help, "choices": choices, "may_change": may_change}
    declared["limits"] = Limits(**limits)
    return dataclasses.field(default=default, metadata={METADATA: declared})


class Section:
    """A group of settings: a frozen dataclass of fields that `setting` declares, checked when it is made.

    Its values are all that there is: two sections that are equal mean the same, however they were made.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for entry in dataclasses.fields(cls):
            kind, value = entry.default_factory, getattr(self, entry.name)
            if isinstance(kind, type) and issubclass(kind, Section) and not isinstance(value, kind):
                raise ValueError(f"{entry.name}: expected {kind.__name__}(…), got {value!r}")
        for declared in section_settings(cls):
            value = declared.type.convert(getattr(self, declared.field))
            declared.check(value)
            object.__setattr__(self, declared.field, value)

    def value_of(self, field: str) -> Any:
        """Return the value of a field, or what None stands for there."""
        cls: Any = type(self)
        value = getattr(self, field)
        return otherwise_of(cls)[field] if value is None else value

    def __repr__(self) -> str:
        """Show the fields that do not have their default, as a user would write them."""
        cls: Any = type(self)
        shown = []
        for entry in dataclasses.fields(cls):
            value = getattr(self, entry.name)
            made = entry.default_factory
            default = entry.default if made is dataclasses.MISSING else made()
            if entry.repr and value != default:
                shown.append(f"{entry.name}={value!r}")
        return f"{cls.__name__}({', '.join(shown)})"


SomeSection = TypeVar("SomeSection", bound=Section)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting, dataclasses.field))
def section_class(cls: type[SomeSection]) -> type[SomeSection]:
    """Make a section a frozen dataclass, whose constructor says of another section's setting where it belongs."""
    made: Any = dataclass(frozen=True, kw_only=True, repr=False)(cls)
    _SECTION_CLASSES.append(made)
    construct, names = made.__init__, {entry.name for entry in dataclasses.fields(made)}

    @functools.wraps(construct)
    def init(self: SomeSection, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                raise TypeError(_no_field(made, name))
        construct(self, *args, **values)

    made.__init__ = init
    return made


_SECTION_CLASSES: list[Any] = []  # all that were made


def _no_field(cls: Any, name: str) -> str:
    """Say that a section has no such field, and which section has the setting of that name."""
    sections = {entry.name: entry.default_factory for entry in dataclasses.fields(cls)}
    for holder in _SECTION_CLASSES:
        for declared in section_settings(holder):
            if name not in (declared.field, declared.name):
                continue
            inside = [field for field, made in sections.items() if made is holder]
            usage = f"{holder.__name__}({declared.field}=…)"
            return f"{cls.__name__} has no {name}; use {f'{inside[0]}={usage}' if inside else usage}"
    near = close_names(name, [declared.field for made in _SECTION_CLASSES for declared in section_settings(made)])
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(sections)}"
    return f"{cls.__name__} has no {name}; {hint}"


@functools.cache
def section_settings(cls: type, attribute: str = "") -> tuple[Setting, ...]:
    """List the settings of a section, which `TrainConfig` holds as that attribute."""
    types_of_fields = typing.get_type_hints(cls)
    settings = []
    for entry in dataclasses.fields(cls):
        if METADATA not in entry.metadata:
            continue
        declared = dict(entry.metadata[METADATA])
        value_type, optional = _value_type(types_of_fields[entry.name])
        declared["name"] = declared["name"] or entry.name
        settings.append(
            Setting(
                section=attribute,
                field=entry.name,
                type=value_type,
                optional=optional,
                default=entry.default,
                **declared,
            )
        )
    return tuple(settings)


@functools.cache
def otherwise_of(cls: type) -> Mapping[str, Any]:
    """Return what None stands for in the fields of a section where the model brings nothing, where it is anything."""
    return {declared.field: declared.otherwise for declared in section_settings(cls) if declared.otherwise is not None}


def _value_type(annotation: Any) -> tuple[ValueType, bool]:
    """Return the type of a field's values, and whether None is one of them."""
    if isinstance(annotation, types.UnionType):
        options = [option for option in typing.get_args(annotation) if option is not types.NoneType]
        return VALUE_TYPES[functools.reduce(operator.or_, options)], True
    return VALUE_TYPES[annotation], False
