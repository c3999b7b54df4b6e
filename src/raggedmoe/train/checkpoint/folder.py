"""What a place for checkpoints can do; a disk and an object store each have their own way of it."""

import re
from typing import Any, Protocol

import jax

from raggedmoe.train.checkpoint.manifest import Manifest

STEP = re.compile(r"step_(\d{8,})")  # the name of a complete checkpoint


class ArrayWriting(Protocol):
    """Arrays that are on the host, on their way into a checkpoint."""

    def finish(self) -> Any:
        """Write what is not written yet; return what `CheckpointFolder.commit` needs to know of it."""


class CheckpointFolder(Protocol):
    """A folder of checkpoints. Process 0 calls all but ``has_mark`` and ``start_writing``, which all processes call."""

    path: Any

    def prepare(self) -> None: ...

    def make_mark(self, name: str) -> None: ...

    def has_mark(self, name: str) -> bool: ...

    def remove_mark(self, name: str) -> None: ...

    def steps(self) -> list[int]: ...

    def begin(self, step: int) -> str: ...

    def start_writing(self, name: str, arrays: dict[str, jax.Array]) -> ArrayWriting: ...

    def commit(self, name: str, manifest: Manifest, result: Any) -> None: ...

    def discard(self, name: str) -> None: ...

    def delete(self, path: Any) -> None: ...

    def remove_leftovers(self) -> None: ...
