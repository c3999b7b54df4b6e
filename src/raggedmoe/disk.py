"""Files that survive a kill or a power cut: what is written is forced out of the system's memory before it is named."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Force a file's content, or a folder's names, out of the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force a folder, and all that is in it, out of the system's memory."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def replace_file(path: Path, content: bytes) -> None:
    """The file has the new content or, should the machine stop in between, the old one; never a part."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)  # the rename itself is in the folder
