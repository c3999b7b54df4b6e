"""The names that the console script knows before JAX is loaded: `python -m raggedmoe.cli.known_names --write`."""

import json
import sys
from pathlib import Path
from typing import Any

import raggedmoe_command.answers
from raggedmoe.cli.main import COMMANDS, SUMMARIES
from raggedmoe.interop import maxtext
from raggedmoe.models.presets import ALIASES, PRESETS
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.other_names import OTHER_NAMES


def known_names() -> dict[str, Any]:
    """Return the names of commands, models and settings, as the package has them."""
    return {
        "commands": {name: SUMMARIES[name] for name in COMMANDS},
        "models": [*PRESETS, *ALIASES],
        "settings": list(SETTINGS),
        "other_names": OTHER_NAMES,
        "maxtext": sorted(set(maxtext.known_names()) - SETTINGS.keys()),
    }


def write(path: Path) -> None:
    """Write the names to a file."""
    path.write_text(json.dumps(known_names(), indent=0) + "\n")


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write(raggedmoe_command.answers.NAMES)
