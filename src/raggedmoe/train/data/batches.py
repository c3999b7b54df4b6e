"""The data of a run: documents are split, cut into rows and shuffled in an order that a resumed run finds again."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from raggedmoe.storage import as_path
from raggedmoe.train.data.corpus import Corpus, Document
from raggedmoe.train.data.named_sets import NamedSets, open_named_sets, read_named_sets, rows_of_file
from raggedmoe.train.data.readers import READERS, digest_of, make_rows, open_tokenizer, update_digest
from raggedmoe.train.data.rows import Batch, Rows, TokenRows, synthetic_rows
from raggedmoe.train.data.token_files import open_tokens
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.settings.sections import HELD_OUT, DataConfig

_log = logging.getLogger(__name__)


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
    evaluated: Mapping[str, Rows]  # the sets to evaluate on by name; the first decides which checkpoint is best
    vocab_size: int  # one more than the largest token that can occur
    num_tokens: int | None  # to train on, in an epoch; None: endless
    num_documents: int | None  # to train on; None: endless
    fingerprint: str  # hash of the content and of every setting that the order depends on
    description: str
    tokenizer: TextTokenizer | None  # None: the tokens are no text

    def describe(self) -> str:
        """Describe the data in one line, for the screen."""
        named = [name for name in self.evaluated if name != HELD_OUT]
        return f"{self.description}; evaluated on {', '.join(named)}" if named else self.description

    @property
    def held_out(self) -> Rows | None:
        """The share of the same documents that is not trained on."""
        return self.evaluated.get(HELD_OUT)

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

    def held_out_batches(self, num: int, size: int | None = None) -> dict[str, list[Batch]]:
        """Make the batches for evaluation of each set, with rows spread evenly over it, the same in every run.

        A batch has ``size`` rows, by default as many as one to train on. There are fewer than ``num`` batches where
        there are not so many rows; the last one is then filled up with rows of padding.
        """
        return {name: _spread(rows, num, size or self.batch_size) for name, rows in self.evaluated.items()}


def _spread(rows: Rows, num: int, size: int) -> list[Batch]:
    num_rows = min(num * size, rows.num_rows)
    row_numbers = [number * rows.num_rows // num_rows for number in range(num_rows)]
    return [pad_batch(rows.batch(row_numbers[start : start + size]), size) for start in range(0, num_rows, size)]


def open_data(config: DataConfig, vocab_size: int, batch_size: int) -> Data:
    """Read the data for a model with that vocabulary, in batches of so many sequences.

    Data that cannot be trained on is an error here.
    """
    if config.dataset == "synthetic":
        return _open_synthetic(config, vocab_size, batch_size)
    if config.dataset == "tokens":
        return _open_tokens(config, vocab_size, batch_size)
    tokenizer = open_tokenizer(config, vocab_size)
    corpus = READERS[config.dataset](config, config.dataset_path, tokenizer)
    train, held_out = split_documents(corpus.documents, share=config.held_out, seed=config.data_seed)
    rows = make_rows(config, train)
    _check_rows(config, batch_size, rows, tokenizer.unit)
    named = read_named_sets(config, tokenizer)
    return Data(
        config=config,
        batch_size=batch_size,
        train=rows,
        evaluated=_evaluated(make_rows(config, held_out) if held_out else None, named),
        vocab_size=tokenizer.vocab_size,
        num_tokens=len(rows.tokens),
        num_documents=len(train),
        fingerprint=_fingerprint(config, batch_size, corpus) + named.fingerprint,
        description=_description(config, corpus, train, held_out),
        tokenizer=tokenizer,
    )


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
    shortened, end = _part(longest, slice(cut)), _part(longest, slice(cut, None))
    train = [shortened if document is longest else document for document in shuffled]
    if not _has_targets(train) or not _has_targets([end]):
        raise ValueError(
            f"expected something to learn before and in the last {len(end.tokens)} tokens of {longest.name}, to hold "
            f"out {share:.0%}, got none on one side; set held_out=0 or give more"
        )
    return train, [end]


def _part(document: Document, where: slice) -> Document:
    """Cut a part out of a document, with what of it is learned."""
    learned = None if document.learned is None else document.learned[where]
    return Document(name=document.name, tokens=document.tokens[where], learned=learned)


def _has_targets(documents: Sequence[Document]) -> bool:
    """Tell whether a document has a token to learn; the first one of each has none before it."""
    return any(
        len(document.tokens) > 1 and (document.learned is None or bool(document.learned[1:].any()))
        for document in documents
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
        evaluated=_evaluated(rows("held out") if config.held_out else None, NamedSets()),
        vocab_size=vocab_size,
        num_tokens=None,
        num_documents=None,
        fingerprint=digest_of(settings).hexdigest(),
        description=f"synthetic: endless rows, a vocabulary of {vocab_size:,}",
        tokenizer=None,
    )


def _open_tokens(config: DataConfig, vocab_size: int, batch_size: int) -> Data:
    """Open the files of a folder of tokens, which were split when they were written."""
    (place,) = config.dataset_path
    folder = open_tokens(as_path(place), vocab_size)
    train, held_out = rows_of_file(config, folder.train), folder.held_out if config.held_out else None
    named = open_named_sets(config, folder, vocab_size)
    _check_rows(config, batch_size, train, folder.tokenizer.unit)
    settings = [config.dataset, config.data_seed, config.sequence_length, batch_size, config.packing]
    num, num_held_out = len(folder.train.bounds) - 1, 0 if held_out is None else len(held_out.bounds) - 1
    return Data(
        config=config,
        batch_size=batch_size,
        train=train,
        evaluated=_evaluated(None if held_out is None else rows_of_file(config, held_out), named),
        vocab_size=folder.tokenizer.vocab_size,
        num_tokens=len(train.tokens),
        num_documents=num,
        fingerprint=digest_of([*settings, held_out is not None, folder.fingerprint]).hexdigest() + named.fingerprint,
        description=f"tokens: {_short(len(train.tokens))} {folder.tokenizer.unit} of {num:,} documents to train on, "
        f"{num_held_out:,} documents held out",
        tokenizer=folder.tokenizer,
    )


def _evaluated(held_out: Rows | None, named: NamedSets) -> dict[str, Rows]:
    """Put the sets to evaluate on together, the share that is held out before those that have a name."""
    return {**({} if held_out is None else {HELD_OUT: held_out}), **named.rows}


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
    digest = digest_of([*settings, corpus.tokenizer.text])
    update_digest(digest, corpus.documents)
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


def _hash_to_int(*values: object) -> int:
    """Hash values to 63 bits, the same on every machine."""
    return int.from_bytes(digest_of(values).digest()[:8]) >> 1


def pad_batch(batch: Batch, size: int) -> Batch:
    """Pad a batch with empty rows to ``size``, so that all batches have one shape and are compiled once."""
    missing = size - len(batch.ids)
    padding = jax.tree.map(lambda values: np.zeros((missing, *values.shape[1:]), values.dtype), batch)
    padding = Batch(**{**vars(padding), "segments": padding.segments - 1})
    return jax.tree.map(lambda rows, more: np.concatenate([rows, more]), batch, padding)
