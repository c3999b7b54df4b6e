"""From the words that a user typed to a value for every setting."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raggedmoe.interop.maxtext import MAXTEXT
from raggedmoe.train.keys import KEYS, RECIPES


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: a value for every key, and what the user should be told."""

    values: Mapping[str, Any]
    given: Mapping[str, str]  # the keys that were set, and the word that did
    notes: tuple[str, ...]  # settings that change nothing here, and why


def parse_settings(words: Sequence[str]) -> Settings:
    """``[PRESET] key=value …`` as values. Both our names and MaxText's are known; a later word never overrides."""
    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise ValueError(f"expected one model and settings as key=value, got {' and '.join(map(repr, presets))}")
    values: dict[str, Any] = {key.name: key.default for key in KEYS.values()}
    given: dict[str, str] = {}
    notes: list[str] = []
    assigned = [(f"model_name={presets[0]}", presets[0])] if presets else []
    assigned += [(word, word) for word in words if "=" in word]
    for assignment, word in assigned:
        typed, _, text = assignment.partition("=")
        typed = typed.lstrip("-")
        for name, value, note in _meanings(typed, text):
            if note is not None:
                notes.append(f"{word}: {note}")
            if name is None:
                continue
            parsed = KEYS[name].parse(value)
            if name in given and values[name] != parsed:
                raise ValueError(f"{given[name]} and {word} contradict each other: both set {name}; leave one out")
            values[name], given[name] = parsed, word
    brought = RECIPES.get(values["model_name"], {})
    values |= {name: value for name, value in brought.items() if name not in given}
    return Settings(values=values, given=given, notes=tuple(notes))


def _meanings(typed: str, text: str) -> list[tuple[str | None, str, str | None]]:
    """Our settings, as words, that a word stands for, with a note; a name of None: only the note."""
    if typed in MAXTEXT:
        meaning = MAXTEXT[typed](text)
        found: list[tuple[str | None, str, str | None]] = [
            (name, word, None) for name, word in meaning.settings.items()
        ]
        return found + ([(None, "", meaning.note)] if meaning.note else [])
    if typed in KEYS:
        return [(typed, text, None)]
    near = difflib.get_close_matches(typed.lower(), [*KEYS, *MAXTEXT], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is named like it."
    raise ValueError(f"unknown setting {typed!r}: {hint} `raggedmoe train --help` lists them all")


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings of a run, as JSON holds them, that differ and that a resumed run must not change."""
    return [
        f"{name}={old[name]} is now {new.get(name)}"
        for name in KEYS
        if not KEYS[name].may_change and name in old and old[name] != new.get(name)
    ]


# What a configuration calls a value, and the key that sets it.
SET_BY = {
    "sequence_length": "max_target_length",
    "batch_size": "per_device_batch_size",
    "micro_batches": "gradient_accumulation_steps",
    "dataset": "dataset_type",
    "tokenizer": "tokenizer_path",
    "paths": "dataset_path",
    "suffixes": "dataset_suffixes",
    "clip_norm": "gradient_clipping_threshold",
    "b1": "adam_b1",
    "b2": "adam_b2",
    "epsilon": "adam_eps",
}


def in_keys(message: str) -> str:
    """An error's text with the names that the user types: where a name is assigned or compared, not in paths."""
    names = "|".join(SET_BY)
    return re.sub(rf"(?<![\w/.])({names})(?==| [<>])", lambda found: SET_BY[found[1]], message)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
