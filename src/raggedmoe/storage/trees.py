"""Files and folders in any place: listed, hashed, replaced, copied, moved and removed."""

import fnmatch
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from raggedmoe import disk
from raggedmoe.storage.object_path import ObjectPath
from raggedmoe.storage.paths import AnyPath

logger = logging.getLogger("raggedmoe")
NUM_REQUESTS = 16  # requests for different objects that are under way at once

Item = TypeVar("Item")
Result = TypeVar("Result")


def replace_file(path: AnyPath, content: bytes) -> None:
    """Replace a file atomically: after a crash it has either the new content or the old one, never a part."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
    else:
        disk.replace_file(path, content)


def write_pieces(path: AnyPath, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a new file of pieces, and flush it to disk. An object is there when the last piece has come."""
    if isinstance(path, ObjectPath):
        path.bucket.write(path.key, pieces)
        return
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def file_size(path: AnyPath) -> int:
    """Return the size of a file in bytes."""
    if isinstance(path, Path):
        return path.stat().st_size
    info = path.bucket.info(path.key)
    if info is None:
        raise FileNotFoundError(f"{path}: expected a file, found none")
    return info.size


def read_into(path: AnyPath, start: int, buffer: memoryview) -> int:
    """Read a part of a file into a buffer, and return the number of its bytes, which are fewer where the file ends."""
    if isinstance(path, Path):
        with path.open("rb") as file:
            file.seek(start)
            return file.readinto(buffer)
    position = 0
    for part in path.bucket.read_range(path.key, start, len(buffer)) if len(buffer) else ():
        buffer[position : position + len(part)] = part
        position += len(part)
    return position


def make_folder(folder: AnyPath) -> None:
    """Make a folder, with those above it. In an object store there is nothing to make."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def list_files(folder: AnyPath) -> dict[str, int]:
    """List all files below a folder by their relative names, with their sizes."""
    if isinstance(folder, ObjectPath):
        sizes = {info.key.removeprefix(folder.prefix): info.size for info in folder.bucket.files(folder.prefix)}
    else:
        paths = [path for path in folder.rglob("*") if not path.is_dir()]
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    return dict(sorted(sizes.items()))


def find_files(folder: AnyPath, pattern: str) -> list[str]:
    """List the files of a folder, or of a named one in it (``notes/*.txt``), whose relative names fit a pattern."""
    inside, _, names = pattern.rpartition("/")
    place = folder / inside
    fitting = fnmatch.filter((path.name for path in place.iterdir()), names) if place.is_dir() else []
    return [f"{inside}/{name}" if inside else name for name in fitting if (place / name).is_file()]


def sha256(path: AnyPath) -> str:
    """Return the checksum of a file's content."""
    if isinstance(path, ObjectPath):
        digest = hashlib.sha256()
        for piece in path.bucket.stream(path.key):
            digest.update(piece)
        return digest.hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_files(function: Callable[[Item], Result], items: Iterable[Item], folder: AnyPath) -> list[Result]:
    """Apply a function to files of a folder: one after the other on a disk, several at once in an object store."""
    if isinstance(folder, Path):
        return [function(item) for item in items]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(function, items))


def copy(source: AnyPath, target: AnyPath) -> None:
    """Copy a file, or a folder with all that is below it, to a new name in the same place."""
    if isinstance(source, ObjectPath):
        assert isinstance(target, ObjectPath), "copied in one place"
        map_files(lambda pair: source.bucket.copy(*pair), _renamed_keys(source, target), source)
        return
    assert isinstance(target, Path), "copied in one place"
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def move(source: AnyPath, target: AnyPath) -> None:
    """Give a file or a folder another name in the same place.

    An object store knows no other names: all is copied first, then deleted. A kill in between leaves both.
    """
    if isinstance(source, ObjectPath):
        copy(source, target)
        remove(source)
    else:
        assert isinstance(target, Path), "moved in one place"
        source.rename(target)


def remove(path: AnyPath) -> None:
    """Delete a file, or a folder with all that is below it, if it is there.

    Of objects those nearest to the folder go first: a checkpoint's manifest before its arrays.
    """
    if isinstance(path, ObjectPath):
        keys = [key for key, _ in _renamed_keys(path, path)]
        for depth in sorted({key.count("/") for key in keys}):
            path.bucket.delete([key for key in keys if key.count("/") == depth])
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_or_warn(path: AnyPath) -> None:
    """Delete a folder, or an object; a warning names one that cannot be deleted, which does no harm."""
    if isinstance(path, Path):
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s could not be deleted; delete it by hand", path)
        return
    try:
        remove(path)
    except OSError as error:
        logger.warning("%s could not be deleted; delete it by hand: %s", path, error)


def _renamed_keys(source: ObjectPath, target: ObjectPath) -> list[tuple[str, str]]:
    """List the objects of a file or folder, with their keys under another name."""
    keys = [info.key for info in source.bucket.files(source.prefix)]
    pairs = [(key, f"{target.prefix}{key.removeprefix(source.prefix)}") for key in keys]
    return [*([(source.key, target.key)] if source.is_file() else []), *pairs]


def upload(folder: Path, target: ObjectPath) -> None:
    """Write all files of a folder of this machine below an object path."""
    names = list_files(folder)
    map_files(lambda name: target.bucket.write((target / name).key, folder / name), names, target)


def download(folder: ObjectPath, target: Path) -> None:
    """Write all objects below a path into a folder of this machine."""

    def fetch(name: str) -> None:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with (target / name).open("wb") as file:
            for piece in folder.bucket.stream((folder / name).key):
                file.write(piece)

    map_files(fetch, list_files(folder), folder)
