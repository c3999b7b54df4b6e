"""What the words of a command line are, as far as names tell: options, settings, models and subjects."""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

FLAG, ONE, MANY = "flag", "one", "many"  # how many words belong to an option
FILES = (".yml", ".yaml", ".toml", ".json")


@dataclass(frozen=True, kw_only=True)
class Words:
    """The words after a command's name, sorted.

    ``plain`` are those before the first option: a model, subjects, and settings. ``settings`` are all assignments,
    ``key=value``. ``options`` are the options with their value, if they have one of one word.
    """

    plain: tuple[str, ...]
    settings: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...]


def sort_words(words: Sequence[str], options: Mapping[str, str], settings: Collection[str]) -> Words:
    """Sort the words of a command that has these options, and takes these settings as ``--key value`` as well."""
    num_plain = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    rest, assigned, typed = list(words[num_plain:]), [word for word in words[:num_plain] if "=" in word], []
    while rest:
        word = rest.pop(0)
        if word == "--":
            break
        if not word.startswith("--"):
            assigned += [word] if "=" in word and not word.startswith("-") else []
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        kind = options.get(name.replace("_", "-"))
        if kind == ONE and not equals:
            value = rest.pop(0) if rest else ""
        elif kind == MANY:
            while rest and not rest[0].startswith("--"):
                rest.pop(0)
        elif kind is None and not equals and name.replace("-", "_") in settings and rest and _is_value(rest[0]):
            rest.pop(0)
        typed.append((name, value if kind == ONE else None))
    return Words(plain=tuple(words[:num_plain]), settings=tuple(assigned), options=tuple(typed))


def _is_value(word: str) -> bool:
    return not word.startswith("--") and "=" not in word


def models_among(command: str, plain: Sequence[str]) -> Iterator[str]:
    """Yield the words that must each be a model: its name, or a folder."""
    words = [word for word in plain if "=" not in word]
    if command == "models":
        yield from words
    elif command in ("train", "plan", "launch", "explain"):
        yield from words[:1]
    elif command == "compile" and plain[:1] in (("layer",), ("model",)):
        yield from words[1:2]


def subjects_among(command: str, plain: Sequence[str]) -> Iterator[str]:
    """Yield the words that must each be a subject of a command, if not a model that it takes instead."""
    words = [word for word in plain if "=" not in word]
    if command in ("verify", "bench"):
        yield from words
    elif command == "compile" and plain[:1] not in (("layer",), ("model",)):
        yield from words[:1]


def takes_models(command: str, plain: Sequence[str]) -> bool:
    """Tell whether a command takes a model where it takes a subject."""
    return command == "compile" or (command == "bench" and plain[:1] == ("layer",))


def may_be_model(word: str, known: Collection[str]) -> bool:
    """Tell whether a word may be a model: one of the known names, a folder that is there, or a file of settings."""
    return word in known or "/" in word or os.path.exists(word) or word.endswith(FILES)
