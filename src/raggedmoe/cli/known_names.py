"""The names that the console script knows before JAX is loaded: `python -m raggedmoe.cli.known_names --write`."""

import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tyro

import raggedmoe_command.answers
from raggedmoe.cli import bench, compile
from raggedmoe.cli.main import COMMANDS, SUMMARIES
from raggedmoe.hardware import HARDWARE
from raggedmoe.interop import maxtext
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.models.families.llama4 import LAYERS
from raggedmoe.models.presets import ALIASES, PRESETS
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.other_names import OTHER_NAMES
from raggedmoe_command.words import FLAG, MANY, ONE


def known_names() -> dict[str, Any]:
    """Return the names of commands, models and settings, as the package has them."""
    return {
        "commands": {name: SUMMARIES[name] for name in COMMANDS},
        "options": {name: dict(_options(command)) for name, command in COMMANDS.items()},
        "subjects": {
            "verify": list(OPERATIONS),
            "compile": [*OPERATIONS, *compile.WHOLES],
            "bench": list(bench.SUBJECTS),
        },
        "hardware": list(HARDWARE),
        "models": [*PRESETS, *ALIASES],
        "layers": [*PRESETS, *ALIASES, *LAYERS],
        "settings": list(SETTINGS),
        "other_names": OTHER_NAMES,
        "maxtext": sorted(set(maxtext.known_maxtext_names()) - SETTINGS.keys()),
    }


def _options(command: Callable[..., int]) -> Iterator[tuple[str, str]]:
    """Yield a command's options, and how many words belong to each."""
    hints = typing.get_type_hints(command, include_extras=True)
    for name in inspect.signature(command).parameters:
        marks = getattr(hints[name], "__metadata__", ())
        if tyro.conf.Positional not in marks:
            option = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
            yield option.replace("_", "-"), _words_of(hints[name])


def _words_of(annotation: Any) -> str:
    """Return how many words an option of that type takes."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return MANY
    return FLAG if bool in kinds else ONE


def write(path: Path) -> None:
    """Write the names to a file."""
    path.write_text(json.dumps(known_names(), indent=0) + "\n")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write(raggedmoe_command.answers.NAMES)
