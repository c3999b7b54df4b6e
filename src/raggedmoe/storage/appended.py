"""Files that grow line by line. No object can grow, so in an object store such a file is a folder of segments."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol

from raggedmoe.storage.lease import check_lease
from raggedmoe.storage.object_path import ObjectPath
from raggedmoe.storage.paths import AnyPath
from raggedmoe.storage.trees import map_files, remove, replace_file

# The last segment is written anew at every flush, until it has this size: what a flush costs is bounded.
SEGMENT_BYTES = 2**20
WATCH_SECONDS = 10.0  # between two flushes of a file in an object store while nobody asks for one


class AppendedFile(Protocol):
    """A file under way. What was appended is safe from the next ``flush`` on."""

    def append(self, content: bytes) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_appended(path: AnyPath) -> AppendedFile:
    """Open a file to append to it; it is made if it is not there."""
    return _SegmentedFile(path) if isinstance(path, ObjectPath) else _DiskFile(path)


def is_appended(path: AnyPath) -> bool:
    """Tell whether there is such a file, whole or in segments."""
    return path.is_file() or path.is_dir()


def read_appended(path: AnyPath) -> bytes:
    """Read such a file, which may also be a folder of segments that was copied from an object store."""
    if not path.is_dir():
        return path.read_bytes()
    return b"".join(map_files(lambda segment: segment.read_bytes(), _segments(path), path))


def rewrite_appended(path: AnyPath, rewrite: Callable[[bytes, AnyPath], bytes]) -> None:
    """Have a function, which may leave out lines, rewrite the content or, one after the other, that of all segments.

    The last segment is the first, and the function must take lines that it has already seen: a kill in between leaves
    whole lines, and all that the function would keep.
    """
    _adopt_copy(path)
    parts = reversed(_segments(path)) if isinstance(path, ObjectPath) else [path] if path.exists() else []
    for part in parts:
        before = part.read_bytes()
        after = rewrite(before, part)
        if after != before:
            if isinstance(part, ObjectPath):
                check_lease(part)
            replace_file(part, after)


def _adopt_copy(path: AnyPath) -> None:
    """Bring a file that was copied here from a place of the other kind into the form of this one."""
    if isinstance(path, ObjectPath):
        if path.is_file():
            if not path.is_dir():
                path.bucket.copy(path.key, (path / _segment_name(0)).key)
            path.bucket.delete([path.key])
    elif path.is_dir():
        whole, segments = (path.with_name(f"{path.name}.{suffix}") for suffix in ("whole", "segments"))
        replace_file(whole, read_appended(path))
        path.rename(segments)
        whole.rename(path)
        remove(segments)


def _segments(folder: AnyPath) -> list[AnyPath]:
    return sorted(folder.iterdir(), key=lambda path: path.name)


def _segment_name(number: int) -> str:
    return f"{number:08}"


class _DiskFile:
    """A file on a disk. Each line is handed to the operating system at once, for those who watch the file."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab")

    def append(self, content: bytes) -> None:
        self._file.write(content)
        self._file.flush()

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _SegmentedFile:
    """Objects ``00000000``, ``00000001``, … below the path, of which the last one grows until it is full."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        segments = _segments(path)
        self._number = max(len(segments) - 1, 0)
        self._content = bytearray(segments[-1].read_bytes() if segments else b"")
        self._is_written, self._flushed = True, time.monotonic()
        self._begin_next_if_full()

    def append(self, content: bytes) -> None:
        self._content += content
        self._is_written = False
        if time.monotonic() - self._flushed > WATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._is_written:
            return
        check_lease(self._path)
        (self._path / _segment_name(self._number)).write_bytes(bytes(self._content))
        self._is_written, self._flushed = True, time.monotonic()
        self._begin_next_if_full()

    def _begin_next_if_full(self) -> None:
        if len(self._content) >= SEGMENT_BYTES:
            self._number += 1
            self._content.clear()

    def close(self) -> None:
        self.flush()
