"""`raggedmoe tokenize`, which writes the tokens of a corpus for runs that map them into memory."""

from pathlib import Path
from typing import Annotated

import tyro

from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.train.data.token_files import (
    DESCRIPTION,
    HELD_OUT,
    TRAIN,
    bytes_or_tokenizer,
    train_tokenizer,
    write_tokens,
)

SUFFIXES = (".jsonl", ".parquet", ".arrow", ".txt", ".text", ".md", ".rst", ".tex", ".py")


def tokenize_(
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH ... OUT")],
    tokenizer: Path | None = None,
    train_vocab_size: int | None = None,
    held_out: float = 0.01,
    suffixes: tuple[str, ...] = SUFFIXES,
    split: str | None = None,
    column: str | None = None,
    seed: int = 0,
) -> int:
    """Write the tokens of files to a folder, of which a run reads only what it needs: dataset_type=tokens.

      raggedmoe tokenize books/ more.jsonl tokens --tokenizer path/to/hf-folder
      raggedmoe train path/to/hf-folder dataset_type=tokens dataset_path=tokens

    A file is a document, of jsonl each line's "text" is one, and of parquet and arrow files the text of each row. Each
    ends with the tokenizer's end of a text.

    Args:
        paths: files and folders of text, and at last the folder to write, which must be new.
        tokenizer: a tokenizer.json, or a model's folder; by default tokens are bytes.
        train_vocab_size: train a tokenizer with so many tokens (BPE of bytes) on 128 MB of the files, and use that.
        held_out: share of the documents that is held out for evaluation.
        suffixes: suffixes of the files to read in folders.
        split: split of a dataset of Hugging Face, such as test; by default train, or all if there is none of that name.
        column: column of parquet and arrow files that has the text; by default "text".
        seed: seed of which documents are held out.
    """
    if len(paths) < 2:
        raise ValueError(f"expected files or folders, and then the folder to write; got {' '.join(paths) or 'nothing'}")
    if tokenizer is not None and train_vocab_size is not None:
        raise ValueError("expected --tokenizer or --train-vocab-size, got both")
    if not 0 <= held_out <= 0.5:
        raise ValueError(f"expected 0 <= --held-out <= 0.5, got {held_out}")
    *sources, out = paths
    folder = as_path(out)
    if isinstance(folder, ObjectPath):
        raise ValueError(f"{out}: expected a folder of this machine, as tokens are read part by part")
    made = bytes_or_tokenizer(tokenizer)
    if train_vocab_size is not None:
        made = train_tokenizer(sources, suffixes, train_vocab_size, split=split, column=column)
    description = write_tokens(
        sources, folder, made, suffixes=suffixes, held_out=held_out, seed=seed, split=split, column=column
    )
    train, rest = description[TRAIN], description[HELD_OUT]
    print(
        f"wrote {train['tokens']:,} {made.unit} of {train['documents']:,} documents to train on, and "
        f"{rest['tokens']:,} of {rest['documents']:,} held out; {folder / DESCRIPTION} describes them"
    )
    return 0
