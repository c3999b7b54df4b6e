"""Reading the training corpus: the standard library's sources, or files of text, as bytes or through a tokenizer."""

import logging
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from raggedmoe.storage import AnyPath, ObjectPath, as_path
from raggedmoe.storage.trees import list_files, map_files
from raggedmoe.train.data.tokenizer import BYTES, TextTokenizer

_log = logging.getLogger(__name__)
Files = Sequence[tuple[str, AnyPath]]  # with their names
Select = Callable[[AnyPath, Files], Files]
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """The tokens of one file."""

    name: str  # relative, with slashes: the same on every machine
    tokens: Integer[np.ndarray, " N"]
    learned: Bool[np.ndarray, " N"] | None = None  # the tokens that are targets; None: all


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a dataset in the order of their names, none of them empty, and what made their tokens."""

    documents: tuple[Document, ...]
    tokenizer: TextTokenizer
    kind: str = "file"  # what a document is
    losses: str = ""  # what of the data is not learned from, and why


def read_standard_library(tokenizer: TextTokenizer = BYTES) -> Corpus:
    """Read the sources of the running Python, without its tests and without installed packages."""
    contents: list[tuple[str, AnyPath, bytes]] = []
    for name, path in list_standard_library():
        try:
            contents.append((name, path, path.read_bytes()))
        except OSError as error:
            _log.warning("left out of the standard library's sources: %s", error)
    if not any(content for _, _, content in contents):
        raise ValueError(
            f"{_standard_library()}: expected the standard library's sources, found no .py file to read; this Python "
            "came without them: use dataset='text' with paths of your own, or dataset='synthetic'"
        )
    return make_corpus(contents, tokenizer)


def list_standard_library() -> list[tuple[str, Path]]:
    """List the sources of the running Python by name, in the order of the names."""
    root = _standard_library()
    return sorted((_relative(path, root), path) for path in _walk(root, (".py",), _SKIPPED_FOLDERS))


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def read_text_files(paths: Sequence[str], suffixes: Sequence[str], tokenizer: TextTokenizer = BYTES) -> Corpus:
    """Read files, and all files below folders, each as one document; any may be in an object store.

    Names below a folder that begin with a dot are left out, and so is a file that was found before.
    """
    contents = read_files(paths, suffixes)
    if not any(content for _, _, content in contents):
        raise ValueError(f"{', '.join(paths)}: expected text, got {len(contents)} empty files; name other paths")
    return make_corpus(contents, tokenizer)


def read_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[tuple[str, AnyPath, bytes]]:
    """Read files, and all files below folders: the name, place and content of each, in the order of the names."""
    return _read_files([file for root in map(as_path, paths) for file in list_files_below(root, suffixes)])


def find_local_files(
    paths: Sequence[str], suffixes: Sequence[str], select: Select = lambda root, files: files
) -> list[tuple[str, Path]]:
    """List files, and all files below folders, by name in the order of the names; they must be on this machine.

    ``select`` chooses among those of each path.
    """
    places = [as_path(path) for path in paths]
    remote = [place for place in places if isinstance(place, ObjectPath)]
    if remote:
        raise ValueError(f"{remote[0]}: expected files on this machine, to read part by part; copy them here")
    files = [file for place in places for file in select(place, list_files_below(place, suffixes))]
    local = {real_place(path): (name, Path(str(path))) for name, path in reversed(files)}
    return sorted(local.values())


def make_corpus(contents: Sequence[tuple[str, AnyPath, bytes]], tokenizer: TextTokenizer, kind: str = "file") -> Corpus:
    """Make a document of each file, or row of one, that has a token."""
    tokens = tokenizer.encode([(path, content) for _, path, content in contents])
    documents = [
        Document(name=name, tokens=document_tokens)
        for (name, _, _), document_tokens in zip(contents, tokens)
        if len(document_tokens)
    ]
    if not documents:
        raise ValueError(f"{tokenizer.path}: expected tokens for the text of {len(contents)} {kind}s, got none")
    return Corpus(documents=tuple(documents), tokenizer=tokenizer, kind=kind)


def list_files_below(root: AnyPath, suffixes: Sequence[str]) -> list[tuple[str, AnyPath]]:
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


def real_place(path: AnyPath) -> str:
    """Return where a file is, by whatever paths and links it was found."""
    return os.path.realpath(path) if isinstance(path, Path) else str(path)


def _list_objects(root: ObjectPath, suffixes: Sequence[str]) -> list[AnyPath]:
    """List the objects below a folder that `_walk` would find if they were files."""
    endings = tuple(suffix.lower() for suffix in suffixes)
    names = [name for name in list_files(root) if name.lower().endswith(endings)]
    return [root / name for name in names if not any(part.startswith(".") for part in name.split("/"))]


def _read_files(named_paths: Sequence[tuple[str, AnyPath]]) -> list[tuple[str, AnyPath, bytes]]:
    """Read files, and return them by their names in the order of those."""
    # A file that is read twice could be trained on and held out. A link to itself fails when it is read.
    files: dict[str, tuple[str, AnyPath]] = {}
    for name, path in named_paths:
        files.setdefault(real_place(path), (name, path))
    inside = sorted(files.values(), key=lambda file: (file[0], str(file[1])))
    remote = next((path for _, path in inside if isinstance(path, ObjectPath)), None)
    contents = map_files(lambda file: _read_file(file[1]), inside, remote or Path())
    return [(name, path, content) for (name, path), content in zip(inside, contents)]


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
