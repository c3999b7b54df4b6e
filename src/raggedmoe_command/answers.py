"""Answers that need no JAX: a page of help, and what was meant by a name that is mistyped.

The names are in `names.json`, which `python -m raggedmoe.cli.known_names --write` makes of the package's tables.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

NAMES = Path(__file__).parent / "names.json"
HELP = ("-h", "--help")
INTRODUCTION = """usage: raggedmoe COMMAND ...

Mixture-of-Experts for JAX: train models and convert their checkpoints;
see which kernel runs where and why, verify it and measure it.
"""
MORE = "`raggedmoe COMMAND --help` says more; `raggedmoe demo` is a good beginning."
ONLY_SETTINGS = ("train", "demo")  # commands that have no options of their own
OF_A_MODEL = ("train", "plan", "launch")  # commands whose first word is a model, if it is no setting
WITH_SETTINGS = ("train", "demo", "plan", "explain", "compile", "bench", "launch")
FILES = (".yml", ".yaml", ".toml", ".json")


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
    if command not in WITH_SETTINGS or set(HELP) & set(arguments):
        return None
    words = _own_words(command, arguments[1:])
    wrong = [unknown_setting(_name(word)) for word in words if _is_unknown_setting(word, names)]
    wrong += [_model_error(word, names) for word in _models(command, words) if word not in names["models"]]
    if not wrong:
        return None
    first = wrong[0] if len(wrong) == 1 else "\n  ".join([f"{len(wrong)} words cannot be taken:", *wrong])
    return Answer(text=f"raggedmoe: {first}", code=2)


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


def _own_words(command: str, words: Sequence[str]) -> Sequence[str]:
    """Return the words that are a model and settings: not options that the command has for itself, nor their values."""
    if command in ONLY_SETTINGS:
        return words
    if command == "launch":
        return words[list(words).index("--") + 2 :] if "--" in words else ()
    return words[: next((number for number, word in enumerate(words) if word.startswith("-")), len(words))]


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0]


def _is_unknown_setting(word: str, names: Mapping[str, Any]) -> bool:
    """Whether a word is a setting, `key=value` or `--key`, of a name that there is not."""
    is_setting = word.startswith("--") or "=" in word
    return is_setting and not {_name(word), _name(word).replace("-", "_")} & {*names["settings"], *names["maxtext"]}


def _models(command: str, words: Sequence[str]) -> list[str]:
    """Return the word that must be a model's name. A folder, a file of settings or an option's value is none."""
    first = words[0] if words and command in OF_A_MODEL else "-"
    is_other = first.startswith("-") or "=" in first or "/" in first or os.path.exists(first)
    return [] if is_other or first.endswith(FILES) else [first]


def _model_error(word: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(word.lower(), names["models"], n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(names["models"])
    return f"unknown model {word!r}: expected a folder with a model, or one of {known}{hint}"
