"""The settings of published models' config.json, read as their presets.

The files were written down by hand from what the makers publish, apart from the presets: where the two differ, one has
a slip.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from raggedmoe.interop.families.registry import family_by_model_type
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.models.presets import model_preset

FILES = sorted(Path(__file__).parent.glob("published/*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_configuration_is_read_as_its_preset(path):
    reader = ConfigReader(path, json.loads(path.read_text()))
    read, preset = (
        family_by_model_type(reader.get_required("model_type"), path).read_config(reader),
        model_preset(path.stem),
    )
    windows = [[config.kind(layer).window for layer in range(config.num_layers)] for config in (read, preset)]
    assert windows[0] == windows[1]
    # Spelled out for each layer in one, as a pattern in the other.
    assert dataclasses.replace(read, windows=preset.windows) == preset
