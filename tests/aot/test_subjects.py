"""What is compiled for a device that is not here, traced."""

import jax
import pytest

from raggedmoe.aot.subjects import layer_on_devices
from raggedmoe.train.settings.words import read_words


@pytest.mark.parametrize("word", ["capacity_factor=2", "load_balance_loss_weight=0.1"])
def test_a_layer_that_counts_in_sequences_has_one_on_each_device(word):
    words = ["mixtral-tiny", "expert_parallelism=2", word]
    program = layer_on_devices(read_words(words), jax.devices()[:2], tokens=8, dtype="float32", forward=True)
    assert jax.eval_shape(program.function, *program.args).shape == (16, 64)
