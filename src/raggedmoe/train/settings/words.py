"""From the words that a user typed, and the files that they name, to the configuration of a run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raggedmoe.interop import maxtext
from raggedmoe.interop.maxtext_defaults import is_same
from raggedmoe.moe.execution import OLDER_BACKENDS
from raggedmoe.names import close_names
from raggedmoe.train.settings.config import SETTINGS, Source, TrainConfig, config_of
from raggedmoe.train.settings.fields import BOOLS
from raggedmoe.train.settings.files import Word, is_file, read_settings_files, words_of
from raggedmoe.train.settings.other_names import OTHER_NAMES


@dataclass(kw_only=True)
class _Reading:
    """What the words have set so far."""

    values: dict[str, Any] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    typed: set[str] = field(default_factory=set)  # the settings that a word on the command line has set
    translated: set[str] = field(default_factory=set)  # those that a word of another name has set
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def set(self, name: str, text: str, word: Word) -> None:
        # A word of MaxText's, or of a file, is called what it is there.
        parsed = SETTINGS[name].parse(
            text, called=word.full_name if text == word.text else f"{word.assignment}: {name}"
        )
        if name == "moe_backend":
            parsed = OLDER_BACKENDS.get(parsed, parsed)
        if name in self.values and self.values[name] != parsed:
            if name in self.typed and not word.is_typed:
                return
            raise ValueError(
                f"{self.words[name]} and {word.assignment} contradict each other: both set {name}; leave one out"
            )
        self.values[name], self.words[name] = parsed, word.assignment
        (self.translated.discard if word.name == name else self.translated.add)(name)
        if word.is_typed:
            self.typed.add(name)

    def leave_out_balance_of_file(self) -> None:
        """Leave out a file's balance loss in MaxText's words where ours was typed, which says another."""
        theirs = "load_balance_loss_weight"
        if self.typed & {"aux_loss", "aux_loss_weight"} and theirs in self.values and theirs not in self.typed:
            del self.values[theirs], self.words[theirs]

    def take(self, meaning: maxtext.Translation, word: Word) -> None:
        for name, text in meaning.settings.items():
            self.set(name, text, word)
        if meaning.note is not None and (
            word.is_typed or not is_same(word.text, maxtext.defaults().get(word.name, ""))
        ):
            self.notes.append(f"{word.assignment}: {meaning.note}")


def read_words(words: Sequence[str]) -> TrainConfig:
    """Make a configuration of ``[MODEL or FILE] key=value …``.

    Both our names and MaxText's are known. Two words of the command line that set a key differently are refused, and so
    is every word that cannot be taken, all in one error. A file's settings give way to those of the command line.
    """
    words = assignments(words)
    plain = [word for word in words if "=" not in word]
    files = [word for word in plain if is_file(word)]
    presets = [word for word in plain if word not in files]
    if len(presets) > 1:
        raise ValueError(f"expected one model and settings as key=value, got {' and '.join(map(repr, presets))}")
    typed = [Word(name="model_name", text=presets[0], written=presets[0])] if presets else []
    for written in words:
        name, equals, text = written.partition("=")
        typed += [Word(name=name, text=text, written=written)] if equals else []
    stored, notes = read_settings_files(files, {word.name for word in typed})
    return _read_all(typed, stored, notes)


def read_values(values: Mapping[str, Any], where: str) -> TrainConfig:
    """Make a configuration of the settings of a run that was written down, as `TrainConfig.values` gave them then."""
    return _read_all([], list(words_of(values, where)), [])


def _read_all(typed: list[Word], stored: list[Word], notes: list[str]) -> TrainConfig:
    reading = _Reading(notes=list(notes))
    for group in (typed, stored):
        _read(group, stored, reading)
    if len(reading.refused) > 1:
        raise ValueError("\n  ".join([f"{len(reading.refused)} settings cannot be taken:", *reading.refused]))
    if reading.refused:
        raise ValueError(reading.refused[0])
    reading.leave_out_balance_of_file()
    source = Source(
        words=reading.words,
        typed=frozenset(reading.typed),
        translated=frozenset(reading.translated),
        notes=tuple(dict.fromkeys(reading.notes)),
    )
    return config_of(reading.values, source)


def assignments(words: Iterable[str], *, options: Iterable[str] = ()) -> list[str]:
    """Return the words with ``--key=value`` and ``--key value`` as ``key=value``, and a lone ``--key`` as ``key=true``.

    ``options`` are names that a command has for itself; they, and names that are no setting's, stay as they are.
    """
    rest, settings_words = list(words), []
    option_names = {option.replace("-", "_") for option in options}
    while rest:
        word = rest.pop(0)
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if "=" in word and not word.startswith("-") and not _is_known(word.partition("=")[0]) and _is_known(name):
            settings_words.append(f"{name}={word.partition('=')[2]}")
        elif not word.startswith("--") or name in option_names or not _is_known(name):
            settings_words.append(word)
        elif "=" in word:
            settings_words.append(f"{name}={word.partition('=')[2]}")
        elif rest and _is_value(name, rest[0]):
            settings_words.append(f"{name}={rest.pop(0)}")
        else:
            settings_words.append(f"{name}=true")
    return settings_words


def settings_first(words: Sequence[str]) -> list[str]:
    """Return the words with settings before the options that stand before them, as a parser of options needs it."""
    if "--" in words:  # of another command
        return list(words)
    num = next((number for number, word in enumerate(words) if word.startswith("-")), len(words))
    moved = [word for word in words[num:] if "=" in word and _is_known(word.partition("=")[0])]
    return [*words[:num], *moved, *(word for word in words[num:] if word not in moved)]


def _is_value(name: str, word: str) -> bool:
    """Tell whether a word after ``--name`` is its value; a switch has none unless it is true or false."""
    return not word.startswith("--") and "=" not in word and (not _is_switch(name) or word.lower() in BOOLS)


def _is_known(name: str) -> bool:
    return name in SETTINGS or name in maxtext.known_maxtext_names()


def _is_switch(name: str) -> bool:
    """Tell whether a name is that of a boolean, which may stand alone."""
    if name in SETTINGS:
        return SETTINGS[name].type.name == "bool"
    return maxtext.defaults().get(name, "false") in BOOLS


def _read(words: list[Word], stored: list[Word], reading: _Reading) -> None:
    """Take the words' meanings, groups together; what cannot be taken is collected."""
    groups: dict[int, list[Word]] = {}
    for word in words:
        if word.name in maxtext.GROUP_OF and not word.ours:
            groups.setdefault(id(maxtext.GROUP_OF[word.name]), []).append(word)
            continue
        try:
            meaning = None if word.ours else maxtext.translate(word.name, word.text)
            if meaning is not None:
                reading.take(meaning, word)
            elif word.name in SETTINGS:
                reading.set(word.name, word.text, word)
            else:
                raise ValueError(_no_setting(word))
        except ValueError as error:
            reading.refused.append(str(error))
    for members in groups.values():
        group = maxtext.GROUP_OF[members[0].name]
        # With a word on the command line, the file's are read beside it.
        beside = {word.name: word.text for word in stored if word.name in group.names} if members[0].is_typed else {}
        together = replace(members[0], written=" ".join(word.assignment for word in members))
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
            raise ValueError(f"{before.assignment} and {word.assignment} contradict each other: leave one out")


def _no_setting(word: Word) -> str:
    """Say that there is no setting of that name, and which of ours, or else of MaxText's, may have been meant."""
    plain = word.name.lower().replace("-", "_")
    near = [OTHER_NAMES[plain]] if plain in OTHER_NAMES else close_names(plain, SETTINGS)
    near = near or close_names(plain, maxtext.known_maxtext_names())
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is named like it."
    where = "" if word.place is None else f" ({word.place})"
    return f"unknown setting {word.name!r}{where}: {hint} `raggedmoe train --help` lists them all"
