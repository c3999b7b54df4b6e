"""Reading the training corpus: the standard library's sources, or files of text, as bytes or through a tokenizer."""

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
from raggedmoe.storage import AnyPath, ObjectPath, as_path
from raggedmoe.storage.trees import list_files, map_files

_log = logging.getLogger(__name__)
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
# The tokenizer takes about 150 bytes of memory a character while it works, and one core a text: so long texts are split
# into parts of this many characters, and it gets parts of this many characters in a call.
_PART_CHARACTERS = 2**18
_CALL_CHARACTERS = 2**21
# Tokenizers cut here anyway, so a part's tokens are those that the whole text would have there.
_LINE_END = re.compile(r"(?<=[^\W_])(?=\n)")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The tokens of one file."""

    name: str  # relative, with slashes: the same on every machine
    tokens: Integer[np.ndarray, " N"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a dataset in the order of their names, none of them empty."""

    documents: tuple[Document, ...]
    unit: str  # "bytes" or "tokens"
    vocab_size: int  # one more than the largest token that can occur
    tokenizer_json: str


def read_standard_library() -> Corpus:
    """Read the sources of the running Python, without its tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [(_relative(path, root), path) for path in _walk(root, (".py",), _SKIPPED_FOLDERS)]
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


def read_text_files(paths: Sequence[str], suffixes: Sequence[str], tokenizer: str | None, vocab_size: int) -> Corpus:
    """Read files, and all files below folders, each as one document; any may be in an object store.

    Names below a folder that begin with a dot are left out, and so is a file that was found before.
    """
    encoder = None if tokenizer is None else _load_tokenizer(as_path(tokenizer), vocab_size)
    found = [file for root in map(as_path, paths) for file in _find_files(root, suffixes)]
    contents = _read_files(found)
    if not any(content for _, _, content in contents):
        raise ValueError(f"{', '.join(paths)}: expected text, got {len(contents)} empty files; name other paths")
    if encoder is None:
        return _byte_corpus([_byte_document(name, content) for name, _, content in contents if content])
    tokens = _tokenize(encoder, [_decode_utf8(path, content) for _, path, content in contents])
    documents = [
        Document(name=name, tokens=document_tokens)
        for (name, _, _), document_tokens in zip(contents, tokens)
        if len(document_tokens)
    ]
    if not documents:
        raise ValueError(f"{tokenizer}: expected tokens for the text of {len(contents)} files, got none")
    return Corpus(documents=tuple(documents), unit="tokens", vocab_size=encoder.vocab_size, tokenizer_json=encoder.text)


def _find_files(root: AnyPath, suffixes: Sequence[str]) -> list[tuple[str, AnyPath]]:
    """List a file, or the files below a folder, with their names relative to it."""
    if isinstance(root, ObjectPath):
        inside: list[AnyPath] = [root] if root.is_file() else _list_objects(root, suffixes)
        is_there = bool(inside) or root.is_dir()
    else:
        try:
            root.stat()
            is_there = True
        except FileNotFoundError:
            is_there = False
        except OSError as error:  # a link to itself, a folder that may not be entered
            raise _unreadable_error(error) from None
        inside = [*sorted(_walk(root, suffixes))] if root.is_dir() else [root]
    if not is_there:
        raise ValueError(f"{root}: expected a file or folder to read text from, found nothing there")
    if not inside:
        raise ValueError(
            f"{root}: expected files that end in {', '.join(suffixes)}, found none; set suffixes=... to "
            "others, or name the files themselves"
        )
    return [(_relative(path, root), path) for path in inside]


def _list_objects(root: ObjectPath, suffixes: Sequence[str]) -> list[AnyPath]:
    """List the objects below a folder that `_walk` would find if they were files."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    names = [name for name in list_files(root) if name.lower().endswith(endings)]
    return [root / name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def _read_files(found: Sequence[tuple[str, AnyPath]]) -> list[tuple[str, AnyPath, bytes]]:
    """Read files, and return them by their names in the order of those."""
    # A file that is read twice could be trained on and held out. A link to itself fails when it is read.
    files: dict[str, tuple[str, AnyPath]] = {}
    for name, path in found:
        files.setdefault(os.path.realpath(path) if isinstance(path, Path) else str(path), (name, path))
    inside = sorted(files.values(), key=lambda file: (file[0], str(file[1])))
    remote = next((path for _, path in inside if isinstance(path, ObjectPath)), None)
    contents = map_files(lambda file: _read_file(file[1]), inside, remote or Path())
    return [(name, path, content) for (name, path), content in zip(inside, contents)]


def byte_tokenizer_json() -> str:
    """Make a tokenizer.json whose tokens are the 256 bytes of UTF-8, without merges; a token's number is its byte."""
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
    """Iterate over the files below a folder, in no order. Links to folders are not followed, as they may lead back."""

    def refuse(error: OSError) -> None:
        raise _unreadable_error(error)

    endings = tuple(suffix.lower() for suffix in suffixes)
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in files:
            if name.lower().endswith(endings) and not name.startswith("."):
                yield Path(folder, name)


def _relative(path: Any, root: Any) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _read_file(path: AnyPath) -> bytes:
    if isinstance(path, ObjectPath):
        return path.read_bytes()
    # Whoever reads a pipe waits for a writer.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, got something else by that name; leave it out")
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable_error(error) from None


def _unreadable_error(error: OSError) -> ValueError:
    return ValueError(f"{error.filename}: expected to read it, got {error.strerror}; mend it or leave it out")


def _decode_utf8(path: AnyPath, content: bytes) -> str:
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
    """A tokenizer of the tokenizers package, and its file."""

    tokenizer: Any
    text: str  # the content of its file
    vocab_size: int  # one more than its largest token


def _load_tokenizer(path: AnyPath, vocab_size: int) -> _Encoder:
    """Load a tokenizer.json, and require that its tokens are in the model's vocabulary."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "reading a tokenizer.json needs the tokenizers package: pip install 'raggedmoe[text]'; or train on bytes "
            "(no tokenizer)"
        ) from None
    if not path.is_file():
        raise ValueError(f"{path}: expected a tokenizer.json, found no file there")
    text = _decode_utf8(path, _read_file(path))
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


def _tokenize(encoder: _Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """Tokenize texts, without the special tokens that a tokenizer would put around a prompt."""
    dtype = np.uint16 if encoder.vocab_size <= 2**16 else np.uint32
    text_arrays: list[list[np.ndarray]] = [[np.zeros(0, dtype)] for _ in texts]
    parts = [(number, part) for number, text in enumerate(texts) for part in _split_text(text)]
    with bytes_bar("tokenizing", sum(map(len, texts)), shown=True) as advance:
        for call in _batch_parts(parts):
            encodings = encoder.tokenizer.encode_batch_fast([part for _, part in call], add_special_tokens=False)
            for (number, _), encoding in zip(call, encodings):
                text_arrays[number].append(np.asarray(encoding.ids, dtype))
            advance(sum(len(part) for _, part in call))
    return [np.concatenate(arrays) for arrays in text_arrays]


def _split_text(text: str) -> Iterator[str]:
    """Split a long text at line ends."""
    start = 0
    while cut := _LINE_END.search(text, start + _PART_CHARACTERS):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _batch_parts(parts: Sequence[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group parts into batches, each long enough for one call of the tokenizer."""
    call, size = [], 0
    for number, part in parts:
        call.append((number, part))
        size += len(part)
        if size >= _CALL_CHARACTERS:
            yield call
            call, size = [], 0
    if call:
        yield call
