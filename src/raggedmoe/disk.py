"""Writing files that survive a kill or a power cut: content is flushed to disk (fsync) before a file gets its name."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's content, or the list of names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder, and every file below it, to disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it has either the new content or the old one, never a part."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)  # the rename itself is in the folder
