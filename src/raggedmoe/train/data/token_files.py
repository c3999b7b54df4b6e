"""Corpora larger than memory: `raggedmoe tokenize` writes their tokens to files, which a run maps into memory.

A folder of tokens has, for the part to train on and the part that is held out, the tokens one after the other and where
each document ends; the tokenizer with all that belongs to it; and tokens.json, which describes them.
"""

import array
import codecs
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from raggedmoe.interop.companions import write_companions
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.interop.writing import new_folder, write_json
from raggedmoe.models.companions import Companions
from raggedmoe.storage import AnyPath
from raggedmoe.train.data import hf_files
from raggedmoe.train.data.corpus import find_local_files
from raggedmoe.train.data.token_copy import copy_tokens
from raggedmoe.train.data.tokenizer import (
    BYTES_THAT_END,
    CALL_CHARACTERS,
    END_TEXT,
    TOKENIZER,
    TextTokenizer,
    load_tokenizer,
    text_parts,
)

DESCRIPTION, FORMAT = "tokens.json", 1
TRAIN, HELD_OUT = "train", "held-out"
BLOCK_BYTES = 2**22  # that are read at once
CALL_PIECES = 4096  # that the tokenizer gets in a call, at most
SAMPLE_BYTES = 2**27  # of text that a tokenizer is trained on, at most; it would keep each different word of all
JSON_LINES = ".jsonl"
ENDS_TYPE = np.dtype("<i8")


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One part of a folder of tokens, mapped into memory: what is not read takes none."""

    tokens: np.ndarray
    bounds: np.ndarray  # where each document begins, and at last the number of tokens
    digest: str  # hash of the tokens and of where documents end
    release: Callable[[], None]  # gives back the memory that was mapped as tokens were read


@dataclass(frozen=True, kw_only=True)
class TokenFolder:
    """A folder of tokens."""

    train: TokenFile
    held_out: TokenFile | None
    tokenizer: TextTokenizer
    fingerprint: str  # hash of all tokens and of where documents end


@dataclass(kw_only=True)
class _Part:
    """The two files of a part while they are written."""

    tokens: BinaryIO
    ends: array.array = field(default_factory=lambda: array.array("q"))
    num_tokens: int = 0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, tokens: np.ndarray) -> None:
        content = tokens.tobytes()
        self.tokens.write(content)
        self.digest.update(content)
        self.num_tokens += len(tokens)

    def end_document(self, end: int | None, dtype: np.dtype) -> None:
        if self.num_tokens == (self.ends[-1] if self.ends else 0):
            return  # nothing is no document
        if end is not None:
            self.add(np.asarray([end], dtype))
        self.ends.append(self.num_tokens)

    def close(self, path: Path) -> dict[str, Any]:
        ends = np.asarray(self.ends, ENDS_TYPE).tobytes()
        path.write_bytes(ends)
        self.digest.update(ends)
        return {"tokens": self.num_tokens, "documents": len(self.ends), "digest": self.digest.hexdigest()}


def write_tokens(
    paths: Sequence[str],
    folder: Path,
    tokenizer: TextTokenizer,
    *,
    suffixes: Sequence[str],
    held_out: float,
    seed: int = 0,
    split: str | None = None,
    column: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the tokens of files, and of all files below folders, and return the description.

    A file is a document; of jsonl, each line's "text" is one, and of parquet and arrow files, each row's ``column``. Of
    a dataset in such files its ``split`` is read. A document is held out by the hash of its name. What is in memory at
    once is some MB, however long a document is, if it has line ends.
    """
    files = _find(paths, suffixes, split)
    dtype = tokenizer.dtype
    with new_folder(folder) as partial, bytes_bar("tokenizing", _size(files), progress) as advance:
        handles = {name: (partial / f"{name}.tokens").open("wb") for name in (TRAIN, HELD_OUT)}
        parts = {name: _Part(tokens=handle) for name, handle in handles.items()}
        try:
            waiting: list[tuple[_Part, str | None]] = []
            num_characters = 0
            for name, piece in _pieces(files, advance, column):
                waiting.append((parts[HELD_OUT if _is_held_out(name, held_out, seed) else TRAIN], piece))
                num_characters += len(piece or "")
                if num_characters >= CALL_CHARACTERS or len(waiting) >= CALL_PIECES:
                    _write(waiting, tokenizer)
                    waiting, num_characters = [], 0
            _write(waiting, tokenizer)
        finally:
            for handle in handles.values():
                handle.close()
        described = {name: part.close(partial / f"{name}.ends") for name, part in parts.items()}
        if not described[TRAIN]["documents"]:
            raise ValueError(f"{', '.join(paths)}: expected text to train on, got none; name more, or hold out less")
        description = {
            "format": FORMAT,
            "type": dtype.name,
            "num_tokens": tokenizer.vocab_size,
            "end": tokenizer.end,
            **described,
        }
        write_companions(tokenizer.with_companions(Companions(), None), partial)
        write_json(partial / DESCRIPTION, description)
    return description


def open_tokens(folder: AnyPath, vocab_size: int) -> TokenFolder:
    """Map the files of a folder of tokens into memory, for a model with that vocabulary."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{folder}: expected a folder that `raggedmoe tokenize` wrote, found no {DESCRIPTION} there")
    description = read_json_object(path)
    if description.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {description.get('format')!r}; tokenize anew")
    needed = description["num_tokens"]
    if needed > vocab_size:
        raise ValueError(
            f"{folder}: expected tokens below the model's vocabulary of {vocab_size}, got a tokenizer with "
            f"{needed}; use vocab_size={needed} for a model with new parameters, or tokenize with its own tokenizer"
        )
    if not isinstance(folder, Path):
        folder = copy_tokens(folder, description)
    dtype = np.dtype(description["type"])
    parts = {name: _open_part(folder, name, description[name], dtype) for name in (TRAIN, HELD_OUT)}
    train = parts[TRAIN]
    assert train is not None
    digests = "".join(description[name]["digest"] for name in parts)
    return TokenFolder(
        train=train,
        held_out=parts[HELD_OUT],
        tokenizer=replace(load_tokenizer(folder / TOKENIZER, vocab_size), end=description["end"]),
        fingerprint=digests,
    )


def _open_part(folder: Path, name: str, described: dict[str, Any], dtype: np.dtype) -> TokenFile | None:
    tokens, ends = folder / f"{name}.tokens", folder / f"{name}.ends"
    for path, expected in ((tokens, described["tokens"] * dtype.itemsize), (ends, described["documents"] * 8)):
        num_bytes = path.stat().st_size if path.is_file() else None
        if num_bytes != expected:
            raise ValueError(f"{path}: expected {expected} bytes, got {num_bytes}; is the copy complete?")
    if not described["documents"]:
        return None
    bounds = np.zeros(described["documents"] + 1, np.int64)
    bounds[1:] = np.memmap(ends, ENDS_TYPE, mode="r")
    with tokens.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return TokenFile(
        tokens=np.frombuffer(mapped, dtype),
        bounds=bounds,
        digest=described["digest"],
        release=lambda: mapped.madvise(mmap.MADV_DONTNEED),
    )


def _write(waiting: Sequence[tuple[_Part, str | None]], tokenizer: TextTokenizer) -> None:
    """Write the tokens of pieces of text in their order; None is the end of a document."""
    encoded = iter(tokenizer.encode_texts([piece for _, piece in waiting if piece is not None]))
    for part, piece in waiting:
        if piece is None:
            part.end_document(tokenizer.end, tokenizer.dtype)
        else:
            part.add(next(encoded))


def _find(paths: Sequence[str], suffixes: Sequence[str], split: str | None) -> list[tuple[str, Path]]:
    return find_local_files(paths, suffixes, lambda root, files: hf_files.select_tables(root, files, split))


def _pieces(
    files: Sequence[tuple[str, Path]], advance: Any, column: str | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield each document's name with its text in parts, and then with None."""
    for name, path in files:
        if name.lower().endswith(hf_files.SUFFIXES):
            for number, row in enumerate(hf_files.read_rows(path, column), 1):
                document = f"{name}:{number}"
                yield from ((document, part) for part in text_parts(_text_of_row(row, path, number)))
                yield document, None
            advance(os.path.getsize(path))
        elif name.lower().endswith(JSON_LINES):
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    advance(len(line))
                    if line.strip():
                        document = f"{name}:{number}"
                        yield from ((document, part) for part in text_parts(_text_of(line, path, number)))
                        yield document, None
        else:
            yield from ((name, part) for part in _read_parts(path, advance))
            yield name, None


def _text_of(line: bytes, path: Path, number: int) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: expected JSON, got {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise ValueError(f'{path}, line {number}: expected {{"text": "…"}}, got {value!s:.80}')
    return value["text"]


def _text_of_row(row: dict[str, Any], path: Path, number: int) -> str:
    if hf_files.TEXT not in row:
        raise ValueError(
            f"{path}, row {number}: expected text, got {' and '.join(row)}; conversations are trained on with "
            "dataset_type=hf; or name a column of text with --column"
        )
    return row[hf_files.TEXT] or ""


def _read_parts(path: Path, advance: Any) -> Iterator[str]:
    """Read a file's text in parts that a tokenizer treats as it treats the whole."""
    decoder, rest, enough = codecs.getincrementaldecoder("utf-8")(), "", 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            advance(len(block))
            try:
                rest += decoder.decode(block)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: expected UTF-8, got {error.object[error.start]:#04x}; convert it") from None
            if len(rest) < enough:
                continue
            *parts, rest = text_parts(rest)
            yield from parts
            enough = 2 * len(rest)  # text without a place to cut is not searched again for every block
        try:
            rest += decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise ValueError(f"{path}: expected UTF-8, got half a character at the end; convert it") from None
    yield rest


def _size(files: Sequence[tuple[str, Path]]) -> int:
    return sum(os.path.getsize(path) for _, path in files)


def _is_held_out(name: str, share: float, seed: int) -> bool:
    return _fraction("split", seed, name) < share


def _is_drawn(number: int, share: float) -> bool:
    return _fraction("sample", number) < share


def _fraction(*values: object) -> float:
    """Hash values to a number from 0 to 1, the same on every machine."""
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def bytes_or_tokenizer(path: Path | None, vocab_size: int = 2**31) -> TextTokenizer:
    """Return the tokenizer of a tokenizer.json or of a model's folder, with its end of a text; None: bytes."""
    if path is None:
        return BYTES_THAT_END
    return load_tokenizer(path / TOKENIZER if path.is_dir() else path, vocab_size).with_end(None)


def train_tokenizer(
    paths: Sequence[str],
    suffixes: Sequence[str],
    vocab_size: int,
    *,
    split: str | None = None,
    column: str | None = None,
) -> TextTokenizer:
    """Train a tokenizer on files: byte-pair encoding of bytes, so that it can write any text, and an end of a text.

    Of many files a sample is taken, of `SAMPLE_BYTES` in pieces of all of them, the same every time.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("training a tokenizer needs the tokenizers package: pip install 'raggedmoe[text]'") from None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(f"expected a vocabulary of {len(alphabet) + 1} or more, bytes and an end, got {vocab_size}")
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    files = _find(paths, suffixes, split)
    share = SAMPLE_BYTES / max(_size(files), 1)
    pieces = ((number, piece) for number, (_, piece) in enumerate(_pieces(files, lambda size: None, column)) if piece)
    library.train_from_iterator((piece for number, piece in pieces if share >= 1 or _is_drawn(number, share)), trainer)
    return TextTokenizer(
        text=library.to_str(), vocab_size=library.get_vocab_size(), library=library, end=library.token_to_id(END_TEXT)
    )
