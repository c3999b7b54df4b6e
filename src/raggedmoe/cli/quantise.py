"""`raggedmoe quantise`, which writes a checkpoint with its matrices in 8 bits, and says what that costs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from raggedmoe import interop
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.quantise import ERRORS, FORMATS, TensorError
from raggedmoe.interop.writing import write_json
from raggedmoe.names import check_known
from raggedmoe.storage import as_path
from raggedmoe.train.data.tokenizer import TOKENIZER, load_tokenizer
from raggedmoe.train.loop.text_loss import TextLoss, read_text_rows, text_loss


def quantise(
    path: tyro.conf.Positional[str],
    out: tyro.conf.Positional[str],
    to: str,
    text: str | None = None,
    sequence_length: int = 512,
) -> int:
    """Write a Hugging Face checkpoint with its matrices in 8 bits, as transformers reads them.

    Experts, attention and dense MLPs are quantised, as DeepSeek and Qwen publish them; embedding, head, routers, norms
    and biases stay as they are. One piece of a matrix is in memory at a time. The error of every tensor is written to
    OUT/quantisation.json, and printed in groups. `raggedmoe generate OUT --keep-quantised` runs what was written.

      raggedmoe quantise Qwen3-30B-A3B Qwen3-30B-A3B-fp8 --to fp8 --text held_out.txt

    Args:
        path: the folder with config.json and safetensors files, not quantised; it may be in an object store (s3://…).
        out: the folder to write.
        to: fp8 (e4m3 with a scale for each block of 128 × 128) or int8 (with a scale for each row, in the format of
            the compressed-tensors package).
        text: a file of text, or a folder with some: the loss of the model on it is printed before and after. The model
            is loaded for that, one after the other.
        sequence_length: tokens of the text that are read in a sequence.
    """
    check_known("format", to, FORMATS)
    if sequence_length < 2:
        raise ValueError(f"expected a sequence_length of 2 or more, got {sequence_length}")
    if text is not None and not (as_path(path) / TOKENIZER).is_file():
        raise ValueError(f"{path}: expected the model's {TOKENIZER} to read --text, found none; put it there")
    before = None if text is None else _loss(path, text, sequence_length, keep_quantised=False)
    errors = interop.quantise(path, out, to, progress=True)
    after = None if text is None else _loss(out, text, sequence_length, keep_quantised=True)
    _print_table(errors)
    if before is not None and after is not None:
        file = as_path(out) / ERRORS
        losses = {"before": before.loss, "after": after.loss, "tokens": before.num_targets}
        write_json(file, {**read_json_object(file), "loss": losses})
        print(
            f"loss on {text}, {before.num_targets:,} tokens: {before.loss:.4f} before, {after.loss:.4f} after "
            f"({(after.loss / before.loss - 1):+.2%})"
        )
    saved = sum(error.bytes_before for error in errors) / sum(error.bytes_after for error in errors)
    print(f"quantised {len(errors)} matrices to {to}, {saved:.2f} times smaller, to {out}; the error of each: {ERRORS}")
    return 0


def _loss(folder: str, text: str, sequence_length: int, *, keep_quantised: bool) -> TextLoss:
    """Load a model, and compute its loss on a text."""
    model = interop.load(folder, keep_quantised=keep_quantised, progress=True)
    tokenizer = load_tokenizer(as_path(folder) / TOKENIZER, model.config.vocab_size)
    return text_loss(model, read_text_rows(text, tokenizer, min(sequence_length, model.config.max_length)))


def _print_table(errors: Sequence[TensorError]) -> None:
    """Print the errors of what is the same in all layers and experts in one line."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("matrices", "number", "rms error", "largest rms", "largest error", "in"):
        table.add_column(title, justify="right" if title in ("number", "rms error") else "left", overflow="fold")
    for param in dict.fromkeys(error.param for error in errors):
        group = [error for error in errors if error.param == param]
        worst = max(group, key=lambda error: error.relative)
        mean = math.sqrt(float(np.mean([error.relative**2 for error in group])))
        table.add_row(
            param,
            str(len(group)),
            _percent(mean),
            _percent(worst.relative),
            _percent(max(error.largest for error in group)),
            worst.name,
        )
    Console().print(table)
    print(
        "rms error: root mean square of the differences, by that of the weights; largest rms: of the matrix in the "
        "last column; largest error: the largest difference, by the largest weight of its matrix."
    )


def _percent(value: Any) -> str:
    return f"{value:.3%}"
