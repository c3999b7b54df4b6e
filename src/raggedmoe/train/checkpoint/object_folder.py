"""Checkpoints in an object store: arrays under a name that nobody else has, and a manifest that commits them.

``step_00000123/manifest.json`` is the last object of a checkpoint that is written, at once and only if there is none:
with it the checkpoint is complete, without it there is none. The arrays are below ``step_00000123/state-TOKEN``, which
the manifest names: so two runs that save the same step, one of which has lost the folder, do not mix what they write.
"""

import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from raggedmoe.storage import ObjectPath
from raggedmoe.storage.lease import check_lease
from raggedmoe.storage.trees import list_files, map_files, remove_or_warn
from raggedmoe.train.checkpoint.folder import STEP
from raggedmoe.train.checkpoint.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    StoredFile,
    encode_manifest,
    read_manifest,
)
from raggedmoe.train.checkpoint.stored_arrays import non_empty
from raggedmoe.train.checkpoint.zarr_arrays import ArrayWriter

WAIT_SECONDS = 600.0  # for what the other processes wrote, after process 0 has written its own
WRITTEN = "written-"  # the folder of the records of what each process wrote


@dataclass(frozen=True)
class _Written:
    """What this process has written: its objects, and the shape of each array's."""

    files: dict[str, StoredFile]
    chunks: dict[str, tuple[int, ...]]


class _Writing:
    """This process's arrays on their way; the others tell process 0 by an object each what they have written."""

    def __init__(self, folder: ObjectPath, token: str, arrays: dict[str, jax.Array]) -> None:
        self._folder, self._token = folder, token
        self._writer = ArrayWriter(folder / f"state-{token}", non_empty(arrays))
        self._process = jax.process_index()

    def finish(self) -> _Written:
        files = self._writer.write()
        if self._process != 0:
            record = {name: asdict(file) for name, file in files.items()}
            (self._folder / f"{WRITTEN}{self._token}/{self._process}").write_bytes(json.dumps(record).encode())
        return _Written(files, self._writer.chunks)


class ObjectFolder:
    """A folder of an object store."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path

    def prepare(self) -> None:
        """Require that the folder can be written to."""
        mark = self.path / f"step_{secrets.randbelow(10**12):012}.partial"
        mark.write_bytes(b"")
        self.remove_leftovers()

    def make_mark(self, name: str) -> None:
        """Make what the other processes look for."""
        (self.path / name).write_bytes(b"")

    def has_mark(self, name: str) -> bool:
        """Tell whether this process sees the mark."""
        return (self.path / name).is_file()

    def remove_mark(self, name: str) -> None:
        """Remove the mark."""
        remove_or_warn(self.path / name)

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints, ascending: those that have a manifest."""
        folders = [path for path in self.path.iterdir() if STEP.fullmatch(path.name)]
        complete = map_files(lambda path: (path / MANIFEST).is_file(), folders, self.path)
        return sorted(int(path.name.removeprefix("step_")) for path, is_one in zip(folders, complete) if is_one)

    def begin(self, step: int) -> str:
        """Draw the name under which a checkpoint's arrays are written, and return it with that of the checkpoint."""
        self.remove_leftovers()
        return f"step_{step:08}/{secrets.token_hex(8)}"

    def start_writing(self, name: str, arrays: dict[str, jax.Array]) -> _Writing:
        """Copy the arrays of this process to the host."""
        step, _, token = name.partition("/")
        return _Writing(self.path / step, token, arrays)

    def commit(self, name: str, manifest: Manifest, result: _Written) -> None:
        """Write the manifest, if this run still has the folder and when all processes have written their parts."""
        step, _, token = name.partition("/")
        folder = self.path / step
        files = dict(result.files)
        for process in range(1, jax.process_count()):
            files |= self._wait_for_record(folder / f"{WRITTEN}{token}/{process}")
        check_lease(folder)
        leaves = {name: replace(leaf, chunks=result.chunks.get(name)) for name, leaf in manifest.leaves.items()}
        committed = replace(manifest, leaves=leaves, files=dict(sorted(files.items())), state=f"state-{token}")
        folder.bucket.create((folder / MANIFEST).key, encode_manifest(committed))

    def _wait_for_record(self, record: ObjectPath) -> dict[str, StoredFile]:
        until = time.monotonic() + WAIT_SECONDS
        while not record.is_file():
            if time.monotonic() > until:
                raise OSError(
                    f"{record}: expected what that process wrote of the checkpoint within {WAIT_SECONDS:.0f} s, got "
                    "nothing"
                )
            time.sleep(0.2)
        return {name: StoredFile(**file) for name, file in json.loads(record.read_bytes()).items()}

    def discard(self, name: str) -> None:
        """Delete what was written of a checkpoint that failed, unless it is complete: its answer may have been lost."""
        step, _, token = name.partition("/")
        try:
            complete = (self.path / step / MANIFEST).is_file()
        except OSError:
            complete = True  # nobody knows; the next run removes what is not
        if not complete:
            for what in ("state-", WRITTEN):
                remove_or_warn(self.path / step / f"{what}{token}")

    def delete(self, path: Any) -> None:
        """Delete a checkpoint, its manifest first."""
        remove_or_warn(path)

    def remove_leftovers(self) -> None:
        """Remove what runs left that were killed while they saved or deleted a checkpoint."""
        for path in self.path.iterdir():
            if STEP.fullmatch(path.name):
                self._remove_leftovers_of(path)
            elif STEP.fullmatch(path.name.removesuffix(".partial")):
                remove_or_warn(path)

    def _remove_leftovers_of(self, folder: ObjectPath) -> None:
        names = {name.partition("/")[0] for name in list_files(folder)}
        kept = {MANIFEST}
        if MANIFEST in names:
            try:
                kept.add(read_manifest(folder).state)
            except DamagedCheckpointError:  # what belongs to it is not known
                return
        for name in sorted(names - kept):
            remove_or_warn(folder / name)
