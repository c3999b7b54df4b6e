"""Errors for names that are not known, or that belong elsewhere."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config", bound=type)


def unknown(what: str, name: object, known: Iterable[str]) -> ValueError:
    """Make the error for an unknown name; it lists the known ones and suggests the nearest."""
    known = list(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}{hint}")


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the known names that are spelled like a name, the likeliest first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)


def check_known(what: str, name: object, known: Collection[str]) -> None:
    """Require that a name is one of the known ones."""
    if name not in known:
        raise unknown(what, name, known)


def check_words(config: Any) -> None:
    """Require of each field of a configuration whose type is a `Literal` that it is one of its words."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            check_known(name, getattr(config, name), get_args(hint))


def refuse_conflicts(settings: Mapping[str, object], conflicts: Iterable[tuple[object, str, str, str]]) -> None:
    """Refuse settings that cannot be used together: each conflict says whether it is there, which two, and why."""
    shown = {
        name: f"{name}={value!r}" for name, value in settings.items() if isinstance(value, str | int | float | None)
    }
    for is_there, first, second, reason in conflicts:
        if is_there:
            names = f"{shown.get(first, first)} cannot be used with {shown.get(second, second)}"
            raise ValueError(f"{names}: {reason}; change one of them")


def refuse_keywords_of(execution: type, usage: str) -> Callable[[Config], Config]:
    """Have a configuration's constructor say where the keywords of an execution go, which it does not take.

    ``usage`` is the call that takes them, with ``{keywords}`` for those that were given.
    """
    moved = {entry.name for entry in dataclasses.fields(execution)}

    def decorate(config: Config) -> Config:
        construct = config.__init__  # type: ignore[misc]
        names = moved - {entry.name for entry in dataclasses.fields(config)}

        @functools.wraps(construct)
        def init(self: Any, *args: Any, **keywords: Any) -> None:
            elsewhere = {name: value for name, value in keywords.items() if name in names}
            if elsewhere:
                text = ", ".join(f"{name}={value!r}" for name, value in elsewhere.items())
                raise TypeError(
                    f"{config.__name__} says what a model is and has no {', '.join(elsewhere)}; {execution.__name__} "
                    f"says how it runs: {usage.format(keywords=text)}"
                )
            construct(self, *args, **keywords)

        config.__init__ = init  # type: ignore[misc]
        return config

    return decorate
