"""Answers that need no JAX: a page of help, and what was meant by a name that is mistyped.

The names are in `names.json`, which `python -m raggedmoe.cli.known_names --write` makes of the package's tables.
"""

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from raggedmoe_command.words import may_be_model, models_among, sort_words, subjects_among, takes_models

NAMES = Path(__file__).parent / "names.json"
HELP = ("-h", "--help")
INTRODUCTION = """usage: raggedmoe COMMAND ...

Mixture-of-Experts for JAX: train models and convert their checkpoints;
see which kernel runs where and why, verify it and measure it.
"""
MORE = "`raggedmoe COMMAND --help` says more; `raggedmoe demo` is a good beginning."
ONLY_SETTINGS = ("train", "demo")  # commands that have no options of their own
WITH_SETTINGS = ("train", "demo", "plan", "explain", "compile", "bench", "launch")
CHIP = "hardware"  # the option whose value is the name of a chip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is printed instead of running a command, and the exit code."""

    text: str
    code: int


def answer(arguments: Sequence[str]) -> Answer | None:
    """Return the answer to a command line, if it needs no more than names. None: the command has to run."""
    if not arguments or arguments[0] in HELP:
        return Answer(text=help_text(), code=0)
    names, command = read_names(), arguments[0]
    if command not in names["commands"]:
        hint = close_names(command, names["commands"])
        also = f"; did you mean {hint[0]!r}?" if hint else ";"
        return Answer(text=f"raggedmoe: unknown command {command!r}{also} `raggedmoe --help` lists them all", code=2)
    if set(HELP) & set(arguments):
        return None
    wrong = list(_mistakes(command, arguments[1:], names))
    if not wrong:
        return None
    first = wrong[0] if len(wrong) == 1 else "\n  ".join([f"{len(wrong)} words cannot be taken:", *wrong])
    return Answer(text=f"raggedmoe: {first}", code=2)


def _mistakes(command: str, arguments: Sequence[str], names: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each name that there is not."""
    settings = {*names["settings"], *names["maxtext"]} if command in WITH_SETTINGS else set()
    options = {} if command in ONLY_SETTINGS else names["options"][command]
    if command == "launch" and "--" in arguments:  # what each process runs
        start = list(arguments).index("--")
        yield from _mistakes("train", arguments[start + 2 :], names)
        arguments, settings = arguments[:start], set()
    words = sort_words(arguments, options, settings)
    for name, value in words.options:
        plain = name.replace("_", "-").removeprefix("no-")
        if plain not in options and name not in settings and name.replace("-", "_") not in settings:
            yield _unknown_option(command, name, options, bool(settings))
        if plain == "model" and value and not may_be_model(value, names["layers"]):
            yield unknown("model", value, names["layers"])
        if plain == CHIP and value and value not in names[CHIP]:
            yield unknown(CHIP, value, names[CHIP])
    for word in words.settings if settings else ():
        name = word.partition("=")[0]
        if not {name, name.replace("-", "_")} & settings:
            yield unknown_setting(name)
    known = names["layers"] if command == "compile" and words.plain[:1] == ("layer",) else names["models"]
    for word in models_among(command, words.plain):
        if not may_be_model(word, known):
            yield unknown("model", word, known, "a folder with a model, or one of")
    takes_model = takes_models(command, words.plain)
    for word in subjects_among(command, words.plain):
        subjects = names["subjects"][command]
        if word not in subjects and not (takes_model and may_be_model(word, known)):
            yield unknown("subject", word, (*subjects, *(known if takes_model else ())))


@cache
def read_names() -> dict[str, Any]:
    """Read the names of commands, settings and models."""
    return json.loads(NAMES.read_text())


def help_text() -> str:
    """Return a page with all commands, which fits a screen of 24 lines of 80 characters."""
    commands = read_names()["commands"]
    width = max(map(len, commands))
    return "\n".join([INTRODUCTION, *(f"  {name:<{width}}  {line}" for name, line in commands.items()), "", MORE])


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the known names that are spelled like a name, as `raggedmoe.names` does."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)


def unknown_setting(name: str) -> str:
    """Say that there is no setting of that name, and which of ours, or else of MaxText's, may have been meant."""
    names, plain = read_names(), name.lower().replace("-", "_")
    other = names["other_names"].get(plain)
    near = [other] if other else close_names(plain, names["settings"]) or close_names(plain, names["maxtext"])
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is named like it."
    return f"unknown setting {name!r}: {hint} `raggedmoe train --help` lists them all"


def unknown(what: str, name: str, known: Iterable[str], expected: str = "one of") -> str:
    """Say that there is no such name, as `raggedmoe.names` does: all that there are, and the nearest."""
    names = list(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}: expected {expected} {', '.join(names)}{hint}"


def _unknown_option(command: str, name: str, options: Iterable[str], takes_settings: bool) -> str:
    """Say that a command has no such option, and which of its own, or else which setting, may have been meant."""
    near = close_names(name.replace("_", "-"), options)
    if takes_settings and not near:
        return unknown_setting(name)
    hint = f"did you mean {' or '.join(f'--{option}' for option in near)}?" if near else "nothing is named like it."
    return f"unknown option '--{name}': {hint} `raggedmoe {command} --help` lists them all"
