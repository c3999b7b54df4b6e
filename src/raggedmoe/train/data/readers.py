"""What reads the documents of each type of dataset, and makes tokens and rows of them."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raggedmoe.storage import as_path
from raggedmoe.train.data import chat
from raggedmoe.train.data.corpus import (
    Corpus,
    Document,
    list_files_below,
    list_standard_library,
    read_standard_library,
    read_text_files,
    real_place,
)
from raggedmoe.train.data.hf_files import find_tables, read_hf_files
from raggedmoe.train.data.rows import TokenRows, token_rows, whole_document_rows
from raggedmoe.train.data.tokenizer import BYTES, BYTES_THAT_END, NUM_BYTES, TextTokenizer, load_tokenizer
from raggedmoe.train.settings import sections
from raggedmoe.train.settings.sections import DataConfig

TEXT_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".go", ".rs", ".js", ".ts"),
)


SUFFIXES = {"text": TEXT_SUFFIXES, "chat": chat.SUFFIXES}  # of the files that are read in folders


def read_texts(config: DataConfig, paths: Sequence[str], tokenizer: TextTokenizer) -> Corpus:
    return read_text_files(paths, config.dataset_suffixes or SUFFIXES["text"], tokenizer)


def _read_chats(config: DataConfig, paths: Sequence[str], tokenizer: TextTokenizer) -> Corpus:
    suffixes = config.dataset_suffixes or SUFFIXES["chat"]
    return chat.read_chat_files(paths, suffixes, tokenizer, config.sequence_length, config.chat_date)


# What reads the documents of a dataset, by its type.
READERS: dict[str, Callable[[DataConfig, Sequence[str], TextTokenizer], Corpus]] = {
    "stdlib": lambda config, paths, tokenizer: read_standard_library(tokenizer),
    "text": read_texts,
    "chat": _read_chats,
    "hf": read_hf_files,
}


def list_places(config: DataConfig, dataset: str, paths: Sequence[str]) -> set[str]:
    """List where the files are that `READERS` of this type of dataset reads, by whatever paths and links."""
    if dataset == "hf":
        return set(find_tables(paths, config.dataset_split))
    if dataset == "stdlib":
        return {real_place(path) for _, path in list_standard_library()}
    suffixes = config.dataset_suffixes or SUFFIXES[dataset]
    return {real_place(path) for place in paths for _, path in list_files_below(as_path(place), suffixes)}


def open_tokenizer(config: DataConfig, vocab_size: int) -> TextTokenizer:
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


def make_rows(config: DataConfig, documents: Sequence[Document]) -> TokenRows:
    """Cut documents into rows, or put conversations into rows whole."""
    tokens = [document.tokens for document in documents]
    learned = [document.learned for document in documents if document.learned is not None]
    if learned:
        return whole_document_rows(tokens, learned, sequence_length=config.sequence_length, packing=config.packing)
    return token_rows(tokens, sequence_length=config.sequence_length, packing=config.packing)


def digest_of(values: Sequence[object]) -> Any:
    """Begin a hash with values, the same on every machine."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16)


def update_digest(digest: Any, documents: Sequence[Document]) -> None:
    """Add documents to a hash: their names, their tokens, and which of them are learned."""
    for document in documents:
        digest.update(json.dumps([document.name, len(document.tokens)]).encode())
        digest.update(document.tokens)
        if document.learned is not None:
            digest.update(document.learned)
