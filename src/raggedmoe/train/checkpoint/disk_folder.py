"""Checkpoints on a disk: written under another name by orbax, flushed and renamed."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from raggedmoe.disk import sync, sync_tree
from raggedmoe.storage.trees import remove_or_warn
from raggedmoe.train.checkpoint.folder import STEP
from raggedmoe.train.checkpoint.manifest import STATE, Manifest, hash_files, write_manifest
from raggedmoe.train.checkpoint.stored_arrays import OrbaxWriter

_PARTIAL = re.compile(r"step_\d{8,}\.partial")


class DiskFolder:
    """A folder of a file system, which all processes of a run see."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # orbax wants it so

    def prepare(self) -> None:
        """Make the folder, and require that it can be written to."""
        self.path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=self.path).close()
        self.remove_leftovers()

    def make_mark(self, name: str) -> None:
        """Make what the other processes look for."""
        (self.path / name).mkdir()

    def has_mark(self, name: str) -> bool:
        """Tell whether this process sees the mark."""
        return (self.path / name).is_dir()

    def remove_mark(self, name: str) -> None:
        """Remove the mark."""
        remove_or_warn(self.path / name)

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints, ascending."""
        names = (path.name for path in self.path.glob("step_*") if path.is_dir())
        return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)

    def begin(self, step: int) -> str:
        """Make room for a checkpoint, and return the name of its new folder."""
        partial = self.path / f"step_{step:08}.partial"
        self.remove_leftovers()  # orbax may go on writing for a moment after it has failed
        partial.mkdir()
        return partial.name

    def start_writing(self, name: str, arrays: dict[str, jax.Array]) -> OrbaxWriter:
        """Copy the arrays to the host, and begin to write them. The other processes wait here for the folder."""
        return OrbaxWriter(self.path / name / STATE, arrays)

    def commit(self, name: str, manifest: Manifest, result: None) -> None:
        """Make what was written a checkpoint: the rename at the end does."""
        partial = self.path / name
        write_manifest(partial, replace(manifest, files=hash_files(partial / STATE)))
        sync_tree(partial)
        partial.rename(self.path / name.removesuffix(".partial"))
        sync(self.path)

    def discard(self, name: str) -> None:
        """Delete what was written of a checkpoint that failed."""
        remove_or_warn(self.path / name)

    def delete(self, path: Any) -> None:
        """Delete a checkpoint. It loses its name before its files."""
        remove_or_warn(path.rename(path.with_name(f"{path.name}.partial")))

    def remove_leftovers(self) -> None:
        """Remove partial folders that killed runs left while they saved or deleted a checkpoint."""
        for leftover in self.path.iterdir():
            if _PARTIAL.fullmatch(leftover.name):
                remove_or_warn(leftover)
