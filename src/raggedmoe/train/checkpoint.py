"""Checkpoints of a run that may die at any moment.

One checkpoint is one folder, ``step_00000123``: orbax writes the arrays to ``state``, the manifest has all the rest and
a checksum of every file. It is written as ``step_00000123.partial``, forced to the disk and renamed, so that a folder
with the final name is whole. What is damaged afterwards is seen by its checksums, named, passed over and never deleted.

Of several processes each writes its own parts of the arrays, into a folder that all of them see; what is done once, all
but the writing, process 0 does.
"""

import logging
import math
import re
import secrets
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from raggedmoe.disk import sync, sync_tree
from raggedmoe.parallel.processes import as_first_says, wait_for_all
from raggedmoe.train.manifest import (
    STATE,
    Damaged,
    Manifest,
    plain_json,
    read_manifest,
    stored_files,
    verified_manifest,
    write_manifest,
)
from raggedmoe.train.stored_arrays import described, named_leaves, read_state, start_writing

logger = logging.getLogger("raggedmoe")

VISIBLE_SECONDS = 30.0  # until a folder that another host made is seen: some file systems take a while
_PARTIAL = re.compile(r"step_\d{8,}\.partial")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are, and which of them stay."""

    folder: Path
    keep_last: int = 2  # the newest ones
    keep_best: bool = True  # and the one with the lowest metric
    asynchronous: bool = True  # write while the next steps run

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(
                f"keep_last={self.keep_last}: expected at least 1; there is nothing to resume from without"
            )


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint that was read."""

    step: int
    state: Any  # as the template: structure, shapes, types, places
    extra: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run. Only one run may write to the folder at a time, with all its processes.

    Use it in a ``with``, or call ``wait`` at the end: orbax cannot finish a save while Python shuts down.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._folder = config.folder.absolute()  # orbax wants it so
        self._damaged: set[int] = set()  # found so, and still at their place
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_first = jax.process_index() == 0
        if self._is_first:
            self._make_folder()
        self._check_all_see_it()

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise OSError(
                f"{self._folder}: expected a folder for checkpoints that can be written, got: {error}; name another"
            ) from error
        self._remove_leftovers()

    def _check_all_see_it(self) -> None:
        """Each process writes its own parts: a folder on a disk of its own would have some only."""
        if jax.process_count() == 1:
            return
        mark = self._folder / f"step_{secrets.randbelow(10**12):012}.partial"
        if self._is_first:
            mark.mkdir()
        mark = mark.with_name(as_first_says(mark.name))
        until = time.monotonic() + VISIBLE_SECONDS
        while not mark.is_dir():
            if time.monotonic() > until:
                raise OSError(
                    f"{self._folder}: expected a folder that all processes see, but {mark.name}, which process 0 made "
                    f"there, is not seen by process {jax.process_index()}; name one on shared storage"
                )
            time.sleep(0.05)
        wait_for_all("checkpoint folder")
        if self._is_first:
            _remove(mark)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):  # which waits for nothing: the save stays partial, or ends
            self._join()
            if self._failure is not None and self._failure is not error:  # the error that is under way counts
                logger.error("a checkpoint was not saved: %s", self._failure)

    def save(self, step: int, state: Any, extra: dict[str, Any], *, metric: float | None = None) -> None:
        """Save a state. When this returns it is out of the caller's hands: its buffers may be donated.

        Waits for an earlier save first, and raises what went wrong there. All processes must call it.

        Args:
          step: its number, greater than that of every good checkpoint in the folder.
          state: a pytree of JAX arrays, typed random keys among them.
          extra: what JSON can say: the position in the data, counters.
          metric: the lower the better; without one, or if it is not finite, this checkpoint cannot be the best.
        """
        self.wait()
        if self._is_first:
            self._check_is_next(step)
        wait_for_all("save")  # process 0 may have waited for long
        leaves = named_leaves(state)
        manifest = Manifest(
            step=step,
            metric=None if metric is None else float(metric),
            extra=plain_json(extra),
            leaves={name: described(name, leaf) for name, leaf in leaves.items()},
            files={},
        )
        partial = self._path(step).with_name(f"{self._path(step).name}.partial")
        if self._is_first:
            self._remove_leftovers()  # orbax may go on writing for a moment after it has failed
            partial.mkdir()
        try:
            writing = start_writing(partial / STATE, leaves)  # where the others wait for process 0's folder
        except BaseException:
            self._discard(partial)
            raise
        if self._config.asynchronous:
            self._thread = threading.Thread(
                target=self._finish_in_background, args=(partial, manifest, writing), name="raggedmoe-checkpoint"
            )
            self._thread.start()
        else:
            self._finish(partial, manifest, writing)

    def wait(self) -> None:
        """Until nothing is being written. What went wrong in the background is raised here."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def restore(self, template: Any) -> Restored | None:
        """The newest checkpoint that is as it was written; None if there are none at all.

        Damaged ones are named in a warning and stay where they are. If all are damaged that is an error, and so is a
        state that is not the template's: nobody should start anew, or from something older, without having been told.

        Args:
          template: the state's structure: arrays, or ``jax.ShapeDtypeStruct``. Each array goes to the devices of its
            template; where that is not committed to any, neither is the array.
        """
        self.wait()
        step = as_first_says(self._newest_good() if self._is_first else None)  # after it has read all of it
        if step is None:
            return None
        path = self._path(step)
        manifest = read_manifest(path)
        state = read_state(path / STATE, template, manifest.leaves)
        return Restored(step=step, state=state, extra=manifest.extra, path=path)

    def _newest_good(self) -> int | None:
        """The step of the newest checkpoint that is as it was written; None if there are none at all."""
        problems = []
        for step in reversed(self._steps_on_disk()):
            path = self._path(step)
            try:
                verified_manifest(path)
            except Damaged as damage:
                self._damaged.add(step)
                problems.append(f"{path}: {damage}")
                logger.warning("%s is damaged; it stays there but is not used: %s", path, damage)
                continue
            self._damaged.discard(step)
            return step
        if problems:
            raise ValueError(
                f"{self._folder}: expected a checkpoint to resume from, but all {len(problems)} are damaged; put a "
                "copy in their place, or name another folder to start anew:\n  " + "\n  ".join(problems)
            )
        return None

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, ascending, without those that were found damaged."""
        return [step for step in self._steps_on_disk() if step not in self._damaged]

    def _steps_on_disk(self) -> list[int]:
        numbers = (path.name.removeprefix("step_") for path in self._folder.glob("step_*"))
        steps = {int(number) for number in numbers if number.isdecimal()}
        return sorted(step for step in steps if self._path(step).is_dir())

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step:08}"

    def _check_is_next(self, step: int) -> None:
        newest = max(self.steps(), default=-1)
        if step <= newest:
            raise ValueError(
                f"step={step}: expected one after {newest}, the newest checkpoint in {self._folder}; "
                "resume from that, or name another folder"
            )

    def _remove_leftovers(self) -> None:
        """Remove what killed runs left, in a save or in the deletion of an old checkpoint."""
        for leftover in self._folder.iterdir():
            if _PARTIAL.fullmatch(leftover.name):
                _remove(leftover)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish_in_background(self, partial: Path, manifest: Manifest, writing: ocp.AsyncCheckpointer | None) -> None:
        try:
            self._finish(partial, manifest, writing)
        except BaseException as error:
            self._failure = error  # the next call raises it

    def _finish(self, partial: Path, manifest: Manifest, writing: ocp.AsyncCheckpointer | None) -> None:
        """Everything after the copy to the host: the rename is what makes it a checkpoint."""
        path = self._path(manifest.step)
        try:
            if writing is not None:
                with writing:
                    writing.wait_until_finished()  # for all processes' parts
            if not self._is_first:
                return
            write_manifest(partial, replace(manifest, files=stored_files(partial / STATE)))
            sync_tree(partial)
            if path.exists():
                self._set_aside(manifest.step)
            partial.rename(path)
            sync(self._folder)
        except ValueError as error:  # what orbax's storage says when it cannot write
            self._discard(partial)
            raise OSError(f"{path}: could not be saved: {error}") from error
        except BaseException as error:
            self._discard(partial)
            error.add_note(f"raggedmoe was saving {path}")
            raise
        self._prune()

    def _discard(self, partial: Path) -> None:
        if self._is_first:
            _remove(partial)

    def _set_aside(self, step: int) -> None:
        """Make room at the place of a damaged checkpoint, and keep it."""
        path = self._path(step)
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.damaged.{number}")
        path.rename(aside)
        self._damaged.discard(step)
        logger.warning("%s is damaged and its step is saved again: it is now %s", path, aside)

    def _prune(self) -> None:
        """Delete all but the newest and the best. Damaged ones neither count nor go."""
        metrics = {}
        for step in self.steps():
            try:
                metrics[step] = read_manifest(self._path(step)).metric
            except Damaged as damage:
                self._damaged.add(step)
                logger.warning("%s is damaged; it stays there but is not used: %s", self._path(step), damage)
        kept = set(sorted(metrics)[-self._config.keep_last :])
        ranked = [(metric, step) for step, metric in metrics.items() if metric is not None and math.isfinite(metric)]
        if self._config.keep_best and ranked:
            kept.add(min(ranked)[1])  # of equal ones the earlier
        for step in metrics.keys() - kept:
            path = self._path(step)
            _remove(path.rename(path.with_name(f"{path.name}.partial")))


def _remove(partial: Path) -> None:
    """Delete a folder that no longer has, or never had, the name of a checkpoint. What resists is left to the next."""
    shutil.rmtree(partial, ignore_errors=True)
    if partial.exists():
        logger.warning("%s could not be deleted; delete it by hand", partial)
