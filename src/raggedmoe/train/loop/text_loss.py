"""The loss of a model on a text that was not learned: how much a change of its weights, such as quantisation, costs."""

import functools
from dataclasses import dataclass

import jax
import numpy as np

from raggedmoe.models.module import Decoder
from raggedmoe.train.data.batches import pad_batch
from raggedmoe.train.data.corpus import read_text_files
from raggedmoe.train.data.readers import TEXT_SUFFIXES
from raggedmoe.train.data.rows import TokenRows, token_rows
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.step.step import held_out_loss

BATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The mean cross-entropy of a text's tokens."""

    loss: float
    num_targets: int


def read_text_rows(path: str, tokenizer: TextTokenizer, sequence_length: int) -> TokenRows:
    """Cut a text, or the texts below a folder, into rows of tokens."""
    corpus = read_text_files([path], TEXT_SUFFIXES, tokenizer)
    rows = token_rows([document.tokens for document in corpus.documents], sequence_length=sequence_length, packing=True)
    if not rows.num_rows:
        raise ValueError(f"{path}: expected a text of two tokens or more, got {len(rows.tokens)}")
    return rows


def text_loss(model: Decoder, rows: TokenRows) -> TextLoss:
    """Compute the mean loss of all rows."""
    size = max(1, BATCH_TOKENS // rows.sequence_length)
    evaluate = jax.jit(functools.partial(held_out_loss, config=model.config, execution=model.execution))
    total = count = 0.0
    for start in range(0, rows.num_rows, size):
        numbers = np.arange(start, min(start + size, rows.num_rows))
        loss, weight = evaluate(model.params, pad_batch(rows.batch(numbers.tolist()), size))
        total, count = total + float(loss), count + float(weight)
    return TextLoss(loss=total / count, num_targets=int(count))
