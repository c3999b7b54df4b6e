"""The layer that a command is asked about, by a model or by a shape."""

import pytest

from raggedmoe.cli.layer_choice import parse_layer, parse_shape


def test_a_shape_is_read_and_a_model_and_a_shape_together_are_refused():
    assert parse_shape("T=1,D=2,F=3,E=4,K=2") == {"T": 1, "D": 2, "F": 3, "E": 4, "K": 2}
    with pytest.raises(ValueError, match="not both"):
        parse_layer("deepseek-v3", "T=1,D=2,F=3,E=4,K=2")
