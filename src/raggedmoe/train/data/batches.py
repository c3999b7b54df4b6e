"""The data of a run: documents are split, cut into rows and shuffled in an order that a resumed run finds again."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from raggedmoe.storage import as_path
from raggedmoe.train.data import chat
from raggedmoe.train.data.corpus import Corpus, Document, read_standard_library, read_text_files
from raggedmoe.train.data.hf_files import read_hf_files
from raggedmoe.train.data.rows import (
    Batch,
    Rows,
    TokenRows,
    rows_between,
    synthetic_rows,
    token_rows,
    whole_document_rows,
)
from raggedmoe.train.data.token_files import TokenFile, open_tokens
from raggedmoe.train.data.tokenizer import BYTES, BYTES_THAT_END, NUM_BYTES, TextTokenizer, load_tokenizer
from raggedmoe.train.settings import sections
from raggedmoe.train.settings.sections import DataConfig

_log = logging.getLogger(__name__)
TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".go", ".rs", ".js", ".ts"),
)


@runtime_checkable
class Batches(Protocol):
    """An endless iterator of batches, whose state is a small JSON object, as of grain's iterators."""

    def __iter__(self) -> "Batches": ...

    def __next__(self) -> Batch: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run: the rows to train on, and those held out for evaluation."""

    config: DataConfig
    batch_size: int  # sequences of one step, all micro-batches together
    train: Rows
    held_out: Rows | None
    vocab_size: int  # one more than the largest token that can occur
    num_tokens: int | None  # to train on, in an epoch; None: endless
    num_documents: int | None  # to train on; None: endless
    fingerprint: str  # hash of the content and of every setting that the order depends on
    description: str
    tokenizer: TextTokenizer | None  # None: the tokens are no text

    def describe(self) -> str:
        """Describe the data in one line, for the screen."""
        return self.description

    def train_batches(self, positions: Sequence[int] | None = None) -> Batches:
        """Iterate over batches from the first on, every epoch in another order; `set_state` resumes at a `get_state`.

        A batch continues into the next epoch where one ends, so no row is left out, however few there are. All
        processes have the same batches; with ``positions`` a process makes only the rows at those positions of each.
        """
        import grain  # takes a second, which a command that only shows its options has not

        rows = grain.MapDataset.range(self.train.num_rows)
        shuffled = rows.shuffle(_hash_to_int("order", self.config.data_seed) % 2**32).repeat()

        def make_batch(rows_of_batch: Sequence[int]) -> Batch:
            return self.train.batch(
                rows_of_batch if positions is None else [rows_of_batch[position] for position in positions]
            )

        batches = shuffled.batch(self.batch_size, drop_remainder=True, batch_fn=make_batch)
        # One thread makes the next two batches while the step runs. A row's number costs grain about 10 us.
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))

    def held_out_batches(self, num: int, size: int | None = None) -> list[Batch]:
        """Make the batches for evaluation, with rows spread evenly over the held-out documents, the same in every run.

        A batch has ``size`` rows, by default as many as one to train on. There are fewer than ``num`` batches where
        there are not so many rows; the last one is then filled up with rows of padding.
        """
        if self.held_out is None:
            return []
        size = size or self.batch_size
        num_available = self.held_out.num_rows
        num_rows = min(num * size, num_available)
        row_numbers = [number * num_available // num_rows for number in range(num_rows)]
        return [
            pad_batch(self.held_out.batch(row_numbers[start : start + size]), size)
            for start in range(0, len(row_numbers), size)
        ]


def open_data(config: DataConfig, vocab_size: int, batch_size: int) -> Data:
    """Read the data for a model with that vocabulary, in batches of so many sequences.

    Data that cannot be trained on is an error here.
    """
    if config.dataset == "synthetic":
        return _open_synthetic(config, vocab_size, batch_size)
    if config.dataset == "tokens":
        return _open_tokens(config, vocab_size, batch_size)
    tokenizer = _open_tokenizer(config, vocab_size)
    corpus = _READERS[config.dataset](config, config.dataset_path, tokenizer)
    train, held_out = split_documents(corpus.documents, share=config.held_out, seed=config.data_seed)
    rows = _make_rows(config, train)
    _check_rows(config, batch_size, rows, tokenizer.unit)
    return Data(
        config=config,
        batch_size=batch_size,
        train=rows,
        held_out=_make_rows(config, held_out) if held_out else None,
        vocab_size=tokenizer.vocab_size,
        num_tokens=len(rows.tokens),
        num_documents=len(train),
        fingerprint=_fingerprint(config, batch_size, corpus),
        description=_description(config, corpus, train, held_out),
        tokenizer=tokenizer,
    )


def _read_texts(config: DataConfig, paths: Sequence[str], tokenizer: TextTokenizer) -> Corpus:
    return read_text_files(paths, config.dataset_suffixes or TEXT_SUFFIXES, tokenizer)


def _read_chats(config: DataConfig, paths: Sequence[str], tokenizer: TextTokenizer) -> Corpus:
    suffixes = config.dataset_suffixes or chat.SUFFIXES
    return chat.read_chat_files(paths, suffixes, tokenizer, config.sequence_length, config.chat_date)


# What reads the documents of a dataset, by its type.
_READERS: dict[str, Callable[[DataConfig, Sequence[str], TextTokenizer], Corpus]] = {
    "stdlib": lambda config, paths, tokenizer: read_standard_library(tokenizer),
    "text": _read_texts,
    "chat": _read_chats,
    "hf": read_hf_files,
}


def _open_tokenizer(config: DataConfig, vocab_size: int) -> TextTokenizer:
    """Return what makes the tokens of a model with that vocabulary."""
    if config.tokenizer_path is not None and config.tokenizer_path != sections.BYTES:
        tokenizer = load_tokenizer(as_path(config.tokenizer_path), vocab_size)
        return tokenizer.with_end(config.eos_token) if config.add_eos else replace(tokenizer, end=None)
    if vocab_size < NUM_BYTES:
        raise ValueError(
            f"expected a model with a vocabulary of {NUM_BYTES} or more for bytes, got {vocab_size}; use "
            f"vocab_size={NUM_BYTES}, or tokenizer_path=... for a tokenizer of its own"
        )
    return BYTES_THAT_END if config.add_eos else BYTES


def split_documents(
    documents: Sequence[Document], *, share: float, seed: int
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Split documents into those to train on and those held out, both in an order that the seed draws.

    Whole documents are held out, drawn by seed and name, until they have that share of the tokens. One that would take
    them above a quarter of all tokens (or above the share, if that is more) stays in training. Where no document is
    small enough, as with one or two files, the end of the longest is held out instead.
    """
    shuffled = sorted(documents, key=lambda document: _hash_to_int("split", seed, document.name))
    if not share:
        return shuffled, ()
    total = _num_tokens(shuffled)
    target, limit = share * total, max(share, 0.25) * total
    train, held_out, num_held_out = [], [], 0
    for document in shuffled:
        size = len(document.tokens)
        if num_held_out < target and num_held_out + size <= limit and size > 1:
            held_out.append(document)
            num_held_out += size
        else:
            train.append(document)
    if held_out:
        return train, held_out
    longest = max(shuffled, key=lambda document: len(document.tokens))
    cut = len(longest.tokens) - max(2, round(target))
    if cut < 2:
        raise ValueError(
            f"expected enough to hold out {share:.0%}, got {total} tokens in {len(shuffled)} documents; set "
            "held_out=0 or give more"
        )
    shortened = Document(name=longest.name, tokens=longest.tokens[:cut])
    return (
        [shortened if document is longest else document for document in shuffled],
        [Document(name=longest.name, tokens=longest.tokens[cut:])],
    )


def _open_synthetic(config: DataConfig, vocab_size: int, batch_size: int) -> Data:
    """Make the synthetic data."""
    if vocab_size < 2:
        raise ValueError(f"expected a model with a vocabulary of 2 or more, got {vocab_size}")

    def rows(part: str) -> Rows:
        return synthetic_rows(
            vocab_size=vocab_size,
            sequence_length=config.sequence_length,
            seed=_hash_to_int("cycle", config.data_seed),
            key=_hash_to_int(part, config.data_seed),
        )

    settings = [
        config.dataset,
        config.data_seed,
        config.sequence_length,
        batch_size,
        vocab_size,
        config.held_out > 0,
    ]
    return Data(
        config=config,
        batch_size=batch_size,
        train=rows("train"),
        held_out=rows("held out") if config.held_out else None,
        vocab_size=vocab_size,
        num_tokens=None,
        num_documents=None,
        fingerprint=_digest(settings).hexdigest(),
        description=f"synthetic: endless rows, a vocabulary of {vocab_size:,}",
        tokenizer=None,
    )


def _open_tokens(config: DataConfig, vocab_size: int, batch_size: int) -> Data:
    """Open the files of a folder of tokens, which were split when they were written."""
    (place,) = config.dataset_path
    folder = open_tokens(as_path(place), vocab_size)

    def rows(part: TokenFile) -> TokenRows:
        length, packing = config.sequence_length, config.packing
        return rows_between(part.tokens, part.bounds, sequence_length=length, packing=packing)

    train, held_out = rows(folder.train), folder.held_out if config.held_out else None
    _check_rows(config, batch_size, train, folder.tokenizer.unit)
    settings = [config.dataset, config.data_seed, config.sequence_length, batch_size, config.packing]
    num, num_held_out = len(folder.train.bounds) - 1, 0 if held_out is None else len(held_out.bounds) - 1
    return Data(
        config=config,
        batch_size=batch_size,
        train=train,
        held_out=None if held_out is None else rows(held_out),
        vocab_size=folder.tokenizer.vocab_size,
        num_tokens=len(train.tokens),
        num_documents=num,
        fingerprint=_digest([*settings, held_out is not None, folder.fingerprint]).hexdigest(),
        description=f"tokens: {_short(len(train.tokens))} {folder.tokenizer.unit} of {num:,} documents to train on, "
        f"{num_held_out:,} documents held out",
        tokenizer=folder.tokenizer,
    )


def _make_rows(config: DataConfig, documents: Sequence[Document]) -> TokenRows:
    tokens = [document.tokens for document in documents]
    learned = [document.learned for document in documents if document.learned is not None]
    if learned:
        return whole_document_rows(tokens, learned, sequence_length=config.sequence_length, packing=config.packing)
    return token_rows(tokens, sequence_length=config.sequence_length, packing=config.packing)


def _check_rows(config: DataConfig, batch_size: int, rows: TokenRows, unit: str) -> None:
    num_tokens = len(rows.tokens)
    if not rows.num_rows:
        raise ValueError(
            f"expected files of two {unit} or more, got {num_tokens} with one each: there is no next one to learn; "
            "join them, or give other paths"
        )
    if config.sequence_length > num_tokens and rows.is_target is None:  # a row of conversations need not be full
        raise ValueError(
            f"max_target_length={config.sequence_length} is more than the {num_tokens} {unit} to train on; use at "
            f"most {num_tokens}, or give more data"
        )
    if batch_size > rows.num_rows:
        _log.warning(
            "a batch of %d sequences is more than the %d rows that there are: it holds rows more than once",
            batch_size,
            rows.num_rows,
        )


def _fingerprint(config: DataConfig, batch_size: int, corpus: Corpus) -> str:
    """Hash the documents and the settings that the order depends on. Paths and suffixes count by what they found."""
    settings = [
        config.dataset,
        config.data_seed,
        config.sequence_length,
        batch_size,
        config.packing,
        config.held_out,
    ]
    digest = _digest([*settings, corpus.tokenizer.text])
    for document in corpus.documents:
        digest.update(json.dumps([document.name, len(document.tokens)]).encode())
        digest.update(document.tokens)
        if document.learned is not None:
            digest.update(document.learned)
    return digest.hexdigest()


def _description(config: DataConfig, corpus: Corpus, train: Sequence[Document], held_out: Sequence[Document]) -> str:
    num, unit = len(corpus.documents), corpus.tokenizer.unit
    size = f"{_short(_num_tokens(corpus.documents))} {unit}"
    read = f"{config.dataset}: {num:,} {corpus.kind}{'s' * (num != 1)}, {size}{corpus.losses}"
    if not held_out:
        return f"{read}; all to train on"
    if len(train) == num:
        return f"{read}; the last {_short(_num_tokens(held_out))} {unit} of {held_out[0].name} held out"
    return f"{read}; {len(train):,} to train on, {len(held_out):,} held out"


def _short(num: int) -> str:
    for unit, letter in ((10**9, "G"), (10**6, "M")):
        if num >= unit:
            return f"{num / unit:.1f}{letter}"
    return f"{num:,}"


def _num_tokens(documents: Sequence[Document]) -> int:
    return sum(len(document.tokens) for document in documents)


def _digest(values: Sequence[object]) -> Any:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16)


def _hash_to_int(*values: object) -> int:
    """Hash values to 63 bits, the same on every machine."""
    return int.from_bytes(_digest(values).digest()[:8]) >> 1


def pad_batch(batch: Batch, size: int) -> Batch:
    """Pad a batch with empty rows to ``size``, so that all batches have one shape and are compiled once."""
    missing = size - len(batch.ids)
    padding = jax.tree.map(lambda values: np.zeros((missing, *values.shape[1:]), values.dtype), batch)
    padding = Batch(**{**vars(padding), "segments": padding.segments - 1})
    return jax.tree.map(lambda rows, more: np.concatenate([rows, more]), batch, padding)
