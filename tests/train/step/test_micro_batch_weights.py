"""What a micro-batch's means count for in the batch's, counted by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.train.data.rows import Batch
from raggedmoe.train.step.step import micro_batch_weights
from tests.train.step.small_step import WHOLE, with_losses

# Three micro-batches of two sequences of five tokens: documents' numbers, -1 at padding.
SEGMENTS = np.array(
    [
        [[0, 0, 0, 0, 0], [0, 0, 1, 1, -1]],
        [[0, 0, 0, -1, -1], [-1, -1, -1, -1, -1]],
        [[-1, -1, -1, -1, -1], [-1, -1, -1, -1, -1]],
    ],
    np.int32,
)


def same_document(ahead: int) -> np.ndarray:
    """Where the token so far ahead is of the same document."""
    found = np.zeros(SEGMENTS.shape, bool)
    found[:, :, : 5 - ahead] = (SEGMENTS[:, :, ahead:] == SEGMENTS[:, :, : 5 - ahead]) & (SEGMENTS[:, :, ahead:] >= 0)
    return found


def shares_of(config):
    batch = Batch(
        ids=SEGMENTS,
        targets=SEGMENTS,
        segments=SEGMENTS,
        positions=SEGMENTS,
        weights=same_document(1).astype("float32"),
    )
    return jax.jit(functools.partial(micro_batch_weights, config=config))(jax.tree.map(jnp.asarray, batch))


def test_shares_are_of_tokens_sequences_and_targets_of_the_whole_batch():
    config = with_losses(WHOLE, gradient_accumulation_steps=3)
    assert config.mtp_layers == 1
    shares = shares_of(config)
    # The model has 9 + 3 tokens, in 2 + 1 sequences; the module those that have a next one, 4 + 2 and 2.
    np.testing.assert_allclose(shares.of_tokens, [[9 / 12, 6 / 8], [3 / 12, 2 / 8], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(shares.of_sequences, [[2 / 3, 2 / 3], [1 / 3, 1 / 3], [0, 0]], rtol=1e-6)
    # Targets are the 4 + 2 and 2 next tokens; the module's are the 3 and 1 after them.
    assert (same_document(1).sum(), same_document(2).sum()) == (8, 4)
    np.testing.assert_allclose(shares.per_target, [[1 / 8, 1 / 4]] * 3, rtol=1e-6)


def test_a_target_of_any_module_counts_as_much_as_one_of_any_other():
    model = dataclasses.replace(WHOLE.model, mtp_layers=2)
    shares = shares_of(dataclasses.replace(with_losses(WHOLE, gradient_accumulation_steps=3), model=model))
    assert (same_document(2).sum(), same_document(3).sum()) == (4, 2)
    np.testing.assert_allclose(shares.per_target, [[1 / 8, 1 / 6, 1 / 6]] * 3, rtol=1e-6)
