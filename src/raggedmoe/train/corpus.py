"""Reading documents: the standard library's sources, or files of text, as bytes or through a tokenizer."""

import json
import logging
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from raggedmoe.interop.progress import bytes_bar

_log = logging.getLogger(__name__)
_NO_SOURCES = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# The tokenizer takes about 150 bytes of memory a character while it works, and one core a text: so long texts go to it
# in parts, of which it gets this many characters in a call.
_PART_CHARACTERS = 2**18
_CALL_CHARACTERS = 2**21
# Where tokenizers cut anyway: a part's tokens are those that the whole text would have there.
_LINE_END = re.compile(r"(?<=[^\W_])(?=\n)")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file's tokens."""

    name: str  # relative, with slashes: the same on every machine
    tokens: Integer[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in the order of their names, none of them empty."""

    documents: tuple[Document, ...]
    unit: str  # "bytes" or "tokens"
    vocab_size: int  # one more than the largest token that can occur
    tokenizer_json: str


def standard_library() -> Corpus:
    """The sources of the running Python, without its tests and without what was installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(_relative(path, root), path) for path in _walk(root, (".py",), _NO_SOURCES)]
    documents = []
    for name, path in sorted(files):
        try:
            documents.append(_byte_document(name, path.read_bytes()))
        except OSError as error:
            _log.warning("left out of the standard library's sources: %s", error)
    documents = [document for document in documents if len(document.tokens)]
    if not documents:
        raise ValueError(
            f"{root}: expected the standard library's sources, found no .py file to read; this Python came without "
            "them: use dataset='text' with paths of your own, or dataset='synthetic'"
        )
    return _byte_corpus(documents)


def text_files(paths: Sequence[str], suffixes: Sequence[str], tokenizer: str | None, vocab_size: int) -> Corpus:
    """Files, and what folders hold below them, each file one document.

    Left out: what begins with a dot below a given folder, and a file that was found before.
    """
    encoder = None if tokenizer is None else _tokenizer(Path(tokenizer), vocab_size)
    contents = [(name, path, _content(path)) for name, path in _found(paths, suffixes)]
    if not any(content for _, _, content in contents):
        raise ValueError(f"{', '.join(paths)}: expected text, got {len(contents)} empty files; name other paths")
    if encoder is None:
        return _byte_corpus([_byte_document(name, content) for name, _, content in contents if content])
    tokens = _encoded(encoder, [_decoded(path, content) for _, path, content in contents])
    documents = [Document(name=name, tokens=own) for (name, _, _), own in zip(contents, tokens) if len(own)]
    if not documents:
        raise ValueError(f"{tokenizer}: expected tokens for the text of {len(contents)} files, got none")
    return Corpus(documents=tuple(documents), unit="tokens", vocab_size=encoder.vocab_size, tokenizer_json=encoder.text)


def _found(paths: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, Path]]:
    """The files by their names below what was given, in the order of those names."""
    found: dict[str, tuple[str, Path]] = {}
    for given in map(Path, paths):
        try:
            given.stat()
        except FileNotFoundError:
            raise ValueError(f"{given}: expected a file or folder to read text from, found nothing there") from None
        except OSError as error:  # a link to itself, a folder that may not be entered
            raise _unreadable(error) from None
        inside = sorted(_walk(given, suffixes)) if given.is_dir() else [given]
        if not inside:
            raise ValueError(
                f"{given}: expected files that end in {', '.join(suffixes)}, found none; set suffixes=... to "
                "others, or name the files themselves"
            )
        for path in inside:
            # The same file twice would be trained on and held out. A link that leads to itself fails when it is read.
            found.setdefault(os.path.realpath(path), (_relative(path, given), path))
    return sorted(found.values())


def byte_tokenizer_json() -> str:
    """A tokenizer.json whose tokens are the 256 bytes of UTF-8: no merges, and a token's number is its byte."""
    # The format writes a byte as a character that can be seen: itself where Latin-1 shows one, or else the next free
    # character from 256 on.
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    vocab = {chr(byte if byte in shown else next(stand_ins)): byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
        indent=1,
    )


def _walk(root: Path, suffixes: Sequence[str], left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below a folder, in no order. A link to a folder is not followed: it may lead back."""

    def refuse(error: OSError) -> None:
        raise _unreadable(error)

    endings = tuple(suffix.lower() for suffix in suffixes)
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in files:
            if name.lower().endswith(endings) and not name.startswith("."):
                yield Path(folder, name)


def _relative(path: Path, root: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _content(path: Path) -> bytes:
    # Whoever reads a pipe waits for a writer.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, got something else by that name; leave it out")
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from None


def _unreadable(error: OSError) -> ValueError:
    return ValueError(f"{error.filename}: expected to read it, got {error.strerror}; mend it or leave it out")


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, which a tokenizer needs, got {content[error.start]:#04x} at byte {error.start}; "
            "convert the file, leave it out, or train on bytes (no tokenizer)"
        ) from None


def _byte_document(name: str, content: bytes) -> Document:
    return Document(name=name, tokens=np.frombuffer(content, np.uint8))


def _byte_corpus(documents: Sequence[Document]) -> Corpus:
    return Corpus(documents=tuple(documents), unit="bytes", vocab_size=256, tokenizer_json=byte_tokenizer_json())


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    tokenizer: Any
    text: str  # of its file
    vocab_size: int  # one more than its largest token


def _tokenizer(path: Path, vocab_size: int) -> _Encoder:
    """The tokenizer of a file, for a model with that vocabulary."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "reading a tokenizer.json needs the tokenizers package: pip install 'raggedmoe[text]'; or train on bytes "
            "(no tokenizer)"
        ) from None
    if not path.is_file():
        raise ValueError(f"{path}: expected a tokenizer.json, found no file there")
    text = _decoded(path, _content(path))
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises the bare Exception for a file that it cannot read
        raise ValueError(f"{path}: expected a tokenizer of the tokenizers package, got {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise ValueError(f"{path}: expected a tokenizer with tokens, got an empty vocabulary")
    if largest >= vocab_size:
        raise ValueError(
            f"{path}: expected token numbers below the model's vocabulary of {vocab_size}, got one of {largest}; give "
            f"the model a vocabulary of {largest + 1} or more, or take the tokenizer that belongs to it"
        )
    # A file may ask for these; both would falsify the documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _Encoder(tokenizer=tokenizer, text=text, vocab_size=largest + 1)


def _encoded(encoder: _Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """Each text's tokens, without the special ones that the tokenizer would put around a prompt."""
    kind = np.uint16 if encoder.vocab_size <= 2**16 else np.uint32
    encoded: list[list[np.ndarray]] = [[np.zeros(0, kind)] for _ in texts]
    parts = [(number, part) for number, text in enumerate(texts) for part in _parts(text)]
    with bytes_bar("tokenizing", sum(map(len, texts)), shown=True) as advance:
        for call in _calls(parts):
            found = encoder.tokenizer.encode_batch_fast([part for _, part in call], add_special_tokens=False)
            for (number, _), one in zip(call, found):
                encoded[number].append(np.asarray(one.ids, kind))
            advance(sum(len(part) for _, part in call))
    return [np.concatenate(arrays) for arrays in encoded]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while found := _LINE_END.search(text, start + _PART_CHARACTERS):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _calls(parts: Sequence[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The parts in groups, each group long enough for one call."""
    call, size = [], 0
    for number, part in parts:
        call.append((number, part))
        size += len(part)
        if size >= _CALL_CHARACTERS:
            yield call
            call, size = [], 0
    if call:
        yield call
