"""A checkpoint of another run, of which all or a part is read. Its folder is left as it is."""

from dataclasses import dataclass
from typing import Any

import jax

from raggedmoe.launch.processes import broadcast_from_first
from raggedmoe.storage import AnyPath
from raggedmoe.train.checkpoint.checkpoints import checkpoint_folder, find_newest_good
from raggedmoe.train.checkpoint.manifest import DamagedCheckpointError, Manifest, read_manifest, verify_checkpoint
from raggedmoe.train.checkpoint.stored_arrays import read_state


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint whose files are as they were written."""

    path: AnyPath
    manifest: Manifest

    @property
    def step(self) -> int:
        """The number of steps that had been done."""
        return self.manifest.step

    def read(self, template: Any) -> Any:
        """Read the arrays of a template, which may be a part of the state, to where the template has them."""
        return read_state(self.path / self.manifest.state, template, self.manifest.leaves, of_another_run=True)


def open_checkpoint(folder: AnyPath, step: int | None = None) -> StoredCheckpoint:
    """Open the checkpoint of a step in a folder of checkpoints, by default the newest that is not damaged.

    All files are compared with their checksums, by process 0. All processes must call it.
    """
    if jax.process_index() == 0:
        step = _find(folder, step)
    path = checkpoint_folder(folder).path / f"step_{broadcast_from_first(step):08}"
    return StoredCheckpoint(path=path, manifest=read_manifest(path))


def _find(folder: AnyPath, step: int | None) -> int:
    steps = checkpoint_folder(folder).steps() if folder.is_dir() else []
    if step is None:
        newest, _ = find_newest_good(folder, steps)
        if newest is None:
            raise ValueError(f"{folder}: expected a checkpoint, found none; the run has saved nothing yet")
        return newest
    if step not in steps:
        there = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
        raise ValueError(
            f"{folder}: expected a checkpoint of step {step}, found {there}; a run keeps its keep_last newest and the "
            "best"
        )
    path = folder / f"step_{step:08}"
    try:
        verify_checkpoint(path)
    except DamagedCheckpointError as damage:
        raise ValueError(f"{path} is damaged: {damage}; name another step") from None
    return step
