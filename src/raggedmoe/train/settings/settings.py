"""From the words that a user typed to a value for every setting."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raggedmoe.interop import maxtext
from raggedmoe.interop.maxtext_defaults import is_same
from raggedmoe.moe.execution import canonical_backend
from raggedmoe.sharding.axes import AXES
from raggedmoe.train.settings.keys import BOOLS, KEYS, RECIPES

BASE = "base.yml"  # MaxText's defaults, which are known without the file
# At their defaults in a file these ask for nothing that would not be done anyway.
HARMLESS = ("megablox", "sparse_matmul", "attention", "use_ring_of_experts")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: a value for every key, and what the user should be told."""

    values: Mapping[str, Any]
    given: Mapping[str, str]  # the keys that were set, and the word that did
    typed: frozenset[str]  # those of them that a word on the command line set, and not a file
    notes: tuple[str, ...]  # settings that change nothing here, and why

    @property
    def num_devices(self) -> int:
        """The devices that the degrees ask for, at least: those that are left over count as one."""
        return math.prod(max(self.values[f"{axis}_parallelism"], 1) for axis in AXES)


@dataclass(frozen=True, kw_only=True)
class Word:
    """One assignment, and how an error calls it."""

    name: str
    text: str
    shown: str
    typed: bool = True  # on the command line; otherwise it is a file's, and gives way to what is typed


@dataclass(kw_only=True)
class _Reading:
    """What the words have set so far."""

    values: dict[str, Any] = field(default_factory=lambda: {key.name: key.default for key in KEYS.values()})
    given: dict[str, str] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)  # the keys that a word on the command line has set
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def set(self, name: str, text: str, word: Word) -> None:
        parsed = KEYS[name].parse(text)
        if name == "moe_backend":
            parsed = canonical_backend(parsed)
        if name in self.given and self.values[name] != parsed:
            if name in self.typed and not word.typed:
                return
            raise ValueError(
                f"{self.given[name]} and {word.shown} contradict each other: both set {name}; leave one out"
            )
        self.values[name], self.given[name] = parsed, word.shown
        if word.typed:
            self.typed.add(name)

    def take(self, meaning: maxtext.Translation, word: Word) -> None:
        for name, text in meaning.settings.items():
            self.set(name, text, word)
        if meaning.note is not None and (word.typed or not is_same(word.text, maxtext.defaults().get(word.name, ""))):
            self.notes.append(f"{word.shown}: {meaning.note}")


def parse_settings(words: Sequence[str]) -> Settings:
    """``[PRESET or FILE.yml] key=value …`` as values.

    Both our names and MaxText's are known. Two words of the command line that set a key differently are refused, and so
    is every word that cannot be taken, all in one error. A file's settings give way to those of the command line.
    """
    words = assignments(words)
    plain = [word for word in words if "=" not in word]
    files = [word for word in plain if word.endswith((".yml", ".yaml"))]
    presets = [word for word in plain if word not in files]
    if len(presets) > 1:
        raise ValueError(f"expected one model and settings as key=value, got {' and '.join(map(repr, presets))}")
    typed = [Word(name="model_name", text=presets[0], shown=presets[0])] if presets else []
    for shown in words:
        name, equals, text = shown.partition("=")
        typed += [Word(name=name, text=text, shown=shown)] if equals else []
    reading = _Reading()
    stored = _of_files(files, typed, reading)
    for group in (typed, stored):
        _read(group, stored, reading)
    if len(reading.refused) > 1:
        raise ValueError("\n  ".join([f"{len(reading.refused)} settings cannot be taken:", *reading.refused]))
    if reading.refused:
        raise ValueError(reading.refused[0])
    values, given = reading.values, reading.given
    brought = RECIPES.get(values["model_name"], {})
    values |= {name: value for name, value in brought.items() if name not in given}
    return Settings(
        values=values, given=given, typed=frozenset(reading.typed), notes=tuple(dict.fromkeys(reading.notes))
    )


def assignments(words: Iterable[str], *, options: Iterable[str] = ()) -> list[str]:
    """The words with ``--key=value`` and ``--key value`` as ``key=value``, and a lone ``--key`` as ``key=true``.

    ``options`` are names that a command has for itself; they, and names that are no setting's, stay as they are.
    """
    rest, settings_words = list(words), []
    option_names = {option.replace("-", "_") for option in options}
    while rest:
        word = rest.pop(0)
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("--") or name in option_names or not _is_known(name):
            settings_words.append(word)
        elif "=" in word:
            settings_words.append(f"{name}={word.partition('=')[2]}")
        elif rest and _is_value(name, rest[0]):
            settings_words.append(f"{name}={rest.pop(0)}")
        else:
            settings_words.append(f"{name}=true")
    return settings_words


def _is_value(name: str, word: str) -> bool:
    """Whether a word after ``--name`` is its value; a switch has none unless it is true or false."""
    return not word.startswith("--") and "=" not in word and (not _is_switch(name) or word.lower() in BOOLS)


def _is_known(name: str) -> bool:
    return name in KEYS or name in maxtext.known_names()


def _is_switch(name: str) -> bool:
    """Whether a name is that of a boolean, which may stand alone."""
    if name in KEYS:
        return KEYS[name].kind == "bool"
    return maxtext.defaults().get(name, "false") in BOOLS


def _read(words: list[Word], stored: list[Word], reading: _Reading) -> None:
    """Take the words' meanings, groups together; what cannot be taken is collected."""
    groups: dict[int, list[Word]] = {}
    for word in words:
        if word.name in maxtext.GROUP_OF:
            groups.setdefault(id(maxtext.GROUP_OF[word.name]), []).append(word)
            continue
        try:
            meaning = maxtext.translate(word.name, word.text)
            if meaning is not None:
                reading.take(meaning, word)
            elif word.name in KEYS:
                reading.set(word.name, word.text, word)
            else:
                raise ValueError(_no_setting(word.name))
        except ValueError as error:
            reading.refused.append(str(error))
    for members in groups.values():
        group = maxtext.GROUP_OF[members[0].name]
        # With a word on the command line, the file's are read beside it.
        beside = {word.name: word.text for word in stored if word.name in group.names} if members[0].typed else {}
        together = Word(
            name=members[0].name,
            text=members[0].text,
            shown=" ".join(word.shown for word in members),
            typed=members[0].typed,
        )
        try:
            _check_repeats(members)
            reading.take(group.translate(beside | {word.name: word.text for word in members}), together)
        except ValueError as error:
            reading.refused.append(str(error))


def _check_repeats(words: list[Word]) -> None:
    first: dict[str, Word] = {}
    for word in words:
        before = first.setdefault(word.name, word)
        if before.text.lower() != word.text.lower():
            raise ValueError(f"{before.shown} and {word.shown} contradict each other: leave one out")


def _no_setting(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), dict.fromkeys((*KEYS, *maxtext.known_names())), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is named like it."
    return f"unknown setting {name!r}: {hint} `raggedmoe train --help` lists them all"


def _of_files(files: list[str], typed: list[Word], reading: _Reading) -> list[Word]:
    """The settings of files in MaxText's form that nothing typed replaces.

    As there, a model that is named brings its own sizes, whatever the file has as their defaults.
    """
    values: dict[str, str] = {}
    for file in files:
        found = _read_file(Path(file))
        values |= found
        changed = sum(not is_same(text, maxtext.defaults().get(name, "")) for name, text in found.items())
        where = "" if Path(file).exists() else " (not here: as MaxText published it in August 2026)"
        reading.notes.append(f"{file}{where}: {len(found)} settings, of which {changed} differ from MaxText's defaults")
    names = {word.name for word in typed}
    named = "model_name" in names or not is_same(values.get("model_name", "default"), "default")
    kept = []
    for name, text in values.items():
        at_default = is_same(text, maxtext.defaults().get(name, ""))
        of_model = name in maxtext.NAMES_OF_A_SHAPE or name in ("decoder_block", "mlp_activations")
        if name in names or (at_default and (name in HARMLESS or (named and of_model))) or name == "base_config":
            continue
        if named and name == "decoder_block":
            continue
        kept.append(Word(name=name, text=text, shown=f"{name}={text} ({Path(files[-1]).name})", typed=False))
    return kept


def _read_file(path: Path) -> dict[str, str]:
    """The settings of a YAML file as words, after those of the file that it is based on."""
    if not path.exists():
        if path.name == BASE:
            return {name: text.split("|")[0] for name, text in maxtext.defaults().items() if text != "*"}
        raise ValueError(
            f"{path}: expected a file of settings in MaxText's form, found none; leave it out, or name one"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected YAML, as MaxText's base.yml is: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path}: expected lines of `name: value`, got {type(content).__name__}")
    base = content.get("base_config")
    below = _read_file(path.parent / str(base)) if base and path.name != BASE else {}
    return below | {name: _as_word(value) for name, value in content.items()}


def _as_word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) if value else "[]"
    return "none" if value is None else str(value)


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
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
    "epsilon_root": "adam_eps_root",
}


def in_keys(message: str) -> str:
    """An error's text with the names that the user types: where a name is assigned or compared, not in paths."""
    names = "|".join(SET_BY)
    return re.sub(rf"(?<![\w/.])({names})(?==| [<>])", lambda found: SET_BY[found[1]], message)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
