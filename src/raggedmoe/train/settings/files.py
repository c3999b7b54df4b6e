"""Files of settings: ours (`run.toml`, the `run.json` of an earlier run) and those in MaxText's form (`base.yml`)."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raggedmoe.interop import maxtext
from raggedmoe.interop.maxtext_defaults import is_same
from raggedmoe.storage import AnyPath, as_path
from raggedmoe.train.settings.config import SECTIONS, SETTINGS

BASE = "base.yml"  # MaxText's defaults, which are known without the file
# At their defaults in a file these ask for nothing that would not be done anyway.
HARMLESS = ("megablox", "sparse_matmul", "attention", "use_ring_of_experts")
YAML, OURS = (".yml", ".yaml"), (".toml", ".json")


@dataclass(frozen=True, kw_only=True)
class Word:
    """One assignment of the command line or a file, and how errors and notes call it."""

    name: str
    text: str
    place: str | None = None  # the file's name; None: it was typed on the command line
    ours: bool = False  # a setting of ours, also where MaxText has one of that name
    written: str | None = None  # as the user wrote it, if not as `name=text`

    @property
    def is_typed(self) -> bool:
        """Whether it is on the command line; otherwise it is a file's, and gives way to what is typed."""
        return self.place is None

    @property
    def full_name(self) -> str:
        """The name as the user wrote it, with the file where it stands."""
        return self.name if self.place is None else f"{self.name} ({self.place})"

    @property
    def assignment(self) -> str:
        """The whole assignment, with the file where it stands."""
        if self.written is not None:
            return self.written
        return f"{self.name}={self.text}" if self.place is None else f"{self.name}={self.text} ({self.place})"


def is_file(word: str) -> bool:
    """Tell whether a word of the command line names a file of settings."""
    return word.endswith((*YAML, *OURS))


def read_settings_files(files: list[str], typed: Iterable[str]) -> tuple[list[Word], list[str]]:
    """Return the settings of files that nothing typed replaces, and what the user should be told of the files."""
    stored = [word for file in files if file.endswith(OURS) for word in _read_ours(as_path(file), set(typed))]
    of_maxtext, notes = _read_maxtext([file for file in files if file.endswith(YAML)], set(typed))
    return [*stored, *of_maxtext], notes


def _read_ours(path: AnyPath, typed: set[str]) -> Iterator[Word]:
    """Read a file of ours: `key = value`, all or some of them in the tables of `TrainConfig`'s sections."""
    content = _parse(path)
    # `run.json` describes a run; what it was asked to do is one part of that.
    values = content.get("settings", content) if path.name.endswith(".json") else content
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of settings, got {type(values).__name__}")
    return (word for word in words_of(values, str(path)) if word.name not in typed)


def words_of(values: Mapping[str, Any], where: str) -> Iterator[Word]:
    """Return the settings of an object in a file of ours as assignments."""
    for name, value in _flatten(values, where):
        text = _as_word(value) if value != [] else "none"
        yield Word(name=name, text=text, place=Path(where).name, ours=name in SETTINGS)


def _parse(path: AnyPath) -> dict[str, Any]:
    kind = "TOML" if path.name.endswith(".toml") else "JSON"
    if not path.is_file():
        raise ValueError(f"{path}: expected a file of settings, found none; leave it out, or name one")
    try:
        text = path.read_text()
        content = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {kind}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected an object of settings, got {type(content).__name__}")
    return content


def _flatten(values: Mapping[str, Any], path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of tables by their names: a section's table has the names of its settings."""
    for name, value in values.items():
        if name == "model" and not prefix and isinstance(value, str):  # as in Python
            yield "model_name", value
        elif not isinstance(value, dict):
            yield prefix + name, value
        elif name in SECTIONS and not prefix:
            for inner, setting in _flatten(value, path):
                declared = SETTINGS.get(inner)
                if declared is not None and declared.section != name:
                    where = f"[{declared.section}]" if declared.section else "no table"
                    raise ValueError(f"{path}: {inner} stands in [{name}], expected it in {where}")
                yield inner, setting
        else:
            yield from _flatten(value, path, f"{prefix}{name}.")


def _read_maxtext(files: list[str], typed: set[str]) -> tuple[list[Word], list[str]]:
    """Read files in MaxText's form. As there, a model that is named brings its own sizes, whatever the file has."""
    values: dict[str, str] = {}
    notes = []
    for file in files:
        settings = _read_yaml(as_path(file))
        values |= settings
        changed = sum(not is_same(text, maxtext.defaults().get(name, "")) for name, text in settings.items())
        where = "" if as_path(file).is_file() else " (not here: as MaxText published it in August 2026)"
        notes.append(f"{file}{where}: {len(settings)} settings, of which {changed} differ from MaxText's defaults")
    named = "model_name" in typed or not is_same(values.get("model_name", "default"), "default")
    kept = []
    for name, text in values.items():
        at_default = is_same(text, maxtext.defaults().get(name, ""))
        of_model = name in maxtext.NAMES_OF_A_SHAPE or name in ("decoder_block", "mlp_activations")
        if name in typed or (at_default and (name in HARMLESS or (named and of_model))) or name == "base_config":
            continue
        if named and name == "decoder_block":
            continue
        kept.append(Word(name=name, text=text, place=Path(files[-1]).name))
    return kept, notes


def _read_yaml(path: AnyPath) -> dict[str, str]:
    """Return the settings of a YAML file as words, after those of the file that it is based on."""
    if not path.is_file():
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
    below = _read_yaml(path.parent / str(base)) if base and path.name != BASE else {}
    return below | {name: _as_word(value) for name, value in content.items()}


def _as_word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) if value else "[]"
    return "none" if value is None else str(value)
