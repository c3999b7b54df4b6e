"""Checkpoints of a run, which may be killed at any moment.

One checkpoint is one folder, ``step_00000123``: the arrays are below ``state``, the manifest has all the rest and a
checksum of every file. On a disk orbax writes them to ``step_00000123.partial``, which is flushed and renamed; in an
object store the manifest is written last. So what has the final name, or a manifest there, is complete. A checkpoint
that is damaged later is recognised by its checksums; it is named in a warning, passed over and never deleted.

In a run of several processes each writes its own parts of the arrays, into a folder that all of them see. Process 0
does all the rest.
"""

import logging
import math
import secrets
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import jax

from raggedmoe.launch.processes import broadcast_from_first, wait_for_all
from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.trees import move
from raggedmoe.train.checkpoint.disk_folder import DiskFolder
from raggedmoe.train.checkpoint.folder import ArrayWriting, CheckpointFolder
from raggedmoe.train.checkpoint.manifest import (
    DamagedCheckpointError,
    Manifest,
    plain_json,
    read_manifest,
    verify_checkpoint,
)
from raggedmoe.train.checkpoint.object_folder import ObjectFolder
from raggedmoe.train.checkpoint.stored_arrays import describe_leaf, leaves_by_name, read_state
from raggedmoe.train.settings.sections import CheckpointConfig

logger = logging.getLogger("raggedmoe")

VISIBLE_SECONDS = 30.0  # until a folder that another host made is seen: some file systems take a while


@dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """A checkpoint that was restored: the state, and what was saved beside it."""

    step: int
    state: Any  # with the structure, shapes, types and shardings of the template
    extra: dict[str, Any]
    path: AnyPath


def checkpoint_folder(folder: AnyPath) -> CheckpointFolder:
    """Return what the place of a folder of checkpoints can do. Nothing is made or removed there."""
    return ObjectFolder(folder) if isinstance(folder, ObjectPath) else DiskFolder(folder)


def find_newest_good(folder: AnyPath, steps: list[int]) -> tuple[int | None, set[int]]:
    """Find the newest of these checkpoints that is not damaged, None if there are none, and the damaged newer ones.

    Damaged ones are named in a warning. It is an error if all are.
    """
    problems: dict[int, str] = {}
    for step in sorted(steps, reverse=True):
        path = folder / f"step_{step:08}"
        try:
            verify_checkpoint(path)
        except DamagedCheckpointError as damage:
            problems[step] = f"{path}: {damage}"
            logger.warning("%s is damaged; it stays there but is not used: %s", path, damage)
            continue
        return step, set(problems)
    if problems:
        raise ValueError(
            f"{folder}: expected a checkpoint to resume from, but all {len(problems)} are damaged; put a copy in their "
            "place, or name another folder to start anew:\n  " + "\n  ".join(problems.values())
        )
    return None, set()


class Checkpoints:
    """The checkpoints of one run. Only one run may write to the folder at a time, with all its processes.

    Use it in a ``with``, or call ``wait`` at the end: orbax cannot finish a save while Python shuts down.
    """

    def __init__(self, folder: AnyPath, config: CheckpointConfig | None = None) -> None:
        """Open the folder, whose newest and best checkpoints are kept as ``config`` says."""
        self._config = CheckpointConfig() if config is None else config
        self._place = checkpoint_folder(folder)
        self._folder: AnyPath = self._place.path
        self._damaged: set[int] = set()  # steps of damaged checkpoints that still have their name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_first = jax.process_index() == 0
        if self._is_first:
            self._make_folder()
        self._check_all_see_it()

    def _make_folder(self) -> None:
        try:
            self._place.prepare()
        except OSError as error:
            raise OSError(
                f"{self._folder}: expected a folder for checkpoints that can be written, got: {error}; name another"
            ) from error

    def _check_all_see_it(self) -> None:
        """Require that all processes see one folder: on disks of their own, each would have a part of a checkpoint."""
        if jax.process_count() == 1:
            return
        mark = f"step_{secrets.randbelow(10**12):012}.partial"
        if self._is_first:
            self._place.make_mark(mark)
        mark = broadcast_from_first(mark)
        until = time.monotonic() + VISIBLE_SECONDS
        while not self._place.has_mark(mark):
            if time.monotonic() > until:
                raise OSError(
                    f"{self._folder}: expected a folder that all processes see, but {mark}, which process 0 made "
                    f"there, is not seen by process {jax.process_index()}; name one on shared storage"
                )
            time.sleep(0.05)
        wait_for_all("checkpoint folder")
        if self._is_first:
            self._place.remove_mark(mark)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):  # which waits for nothing: the save stays partial, or ends
            self.abandon(error)

    def save(self, step: int, state: Any, extra: dict[str, Any], *, metric: float | None = None) -> None:
        """Save a state. When this returns, the state has been copied and its buffers may be donated.

        It waits for an earlier save first, and raises what went wrong there. All processes must call it.

        Args:
          step: the number of the step, greater than that of every good checkpoint in the folder.
          state: a pytree of JAX arrays, which may include typed random keys.
          extra: a JSON object, such as the position in the data and counters.
          metric: the metric of `keep_best`, the lower the better; without one, or if it is not finite, this checkpoint
            cannot be the best.
        """
        self.wait()
        if self._is_first:
            self._check_is_next(step)
            if step in self._damaged:
                self._set_aside(step)
        wait_for_all("save")  # process 0 may have waited for long
        leaves = leaves_by_name(state)
        manifest = Manifest(
            step=step,
            metric=None if metric is None else float(metric),
            extra=plain_json(extra),
            leaves={name: describe_leaf(name, leaf) for name, leaf in leaves.items()},
            files={},
        )
        name = broadcast_from_first(self._place.begin(step) if self._is_first else None)
        try:
            writing = self._place.start_writing(name, leaves)
        except BaseException:
            self._discard(name)
            raise
        if self._config.async_checkpointing:
            self._thread = threading.Thread(
                target=self._finish_in_background, args=(name, manifest, writing), name="raggedmoe-checkpoint"
            )
            self._thread.start()
        else:
            self._finish(name, manifest, writing)

    def wait(self) -> None:
        """Wait until nothing is being written, and raise what went wrong in the background."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def abandon(self, error: BaseException) -> None:
        """Wait until nothing is being written, when an error ends the run; another one of a save is only logged."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None and failure is not error:
            logger.error("a checkpoint was not saved: %s", failure)

    def restore(self, template: Any) -> RestoredCheckpoint | None:
        """Restore the newest checkpoint that is not damaged; None if there are no checkpoints.

        Damaged ones are named in a warning and stay where they are. It is an error if all are damaged, or if the state
        does not have the template's shapes: nobody should start anew, or from an older step, without having been told.

        Args:
          template: the state's structure: arrays, or ``jax.ShapeDtypeStruct``. Each array goes to the devices of its
            template; where that is not committed to any, neither is the array.
        """
        self.wait()
        step = broadcast_from_first(self._newest_good() if self._is_first else None)  # after it has read all of it
        if step is None:
            return None
        path = self._path(step)
        manifest = read_manifest(path)
        state = read_state(path / manifest.state, template, manifest.leaves)
        return RestoredCheckpoint(step=step, state=state, extra=manifest.extra, path=path)

    def _newest_good(self) -> int | None:
        """Find the step of the newest checkpoint that is not damaged; None if there are no checkpoints."""
        step, damaged = find_newest_good(self._folder, self._place.steps())
        self._damaged = (self._damaged - {step}) | damaged
        return step

    def steps(self) -> list[int]:
        """List the steps of complete checkpoints, ascending, without those known to be damaged."""
        return [step for step in self._place.steps() if step not in self._damaged]

    def _path(self, step: int) -> AnyPath:
        return self._folder / f"step_{step:08}"

    def _check_is_next(self, step: int) -> None:
        newest = max(self.steps(), default=-1)
        if step <= newest:
            raise ValueError(
                f"step={step}: expected one after {newest}, the newest checkpoint in {self._folder}; "
                "resume from that, or name another folder"
            )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _finish_in_background(self, name: str, manifest: Manifest, writing: ArrayWriting) -> None:
        try:
            self._finish(name, manifest, writing)
        except BaseException as error:
            self._failure = error  # the next call raises it

    def _finish(self, name: str, manifest: Manifest, writing: ArrayWriting) -> None:
        """Do all that follows the copy to the host; the commit at the end makes it a checkpoint."""
        path = self._path(manifest.step)
        try:
            written = writing.finish()  # on a disk, all processes' parts
            if not self._is_first:
                return
            self._place.commit(name, manifest, written)
        except ValueError as error:  # what orbax's storage says when it cannot write
            self._discard(name)
            raise OSError(f"{path}: could not be saved: {error}") from error
        except BaseException as error:
            self._discard(name)
            error.add_note(f"raggedmoe was saving {path}")
            raise
        self._prune()

    def _discard(self, name: str) -> None:
        if self._is_first:
            self._place.discard(name)

    def _set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint whose step is saved again, so that it is kept."""
        path = self._path(step)
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.damaged.{number}")
        move(path, aside)
        self._damaged.discard(step)
        logger.warning("%s is damaged and its step is saved again: it is now %s", path, aside)

    def _prune(self) -> None:
        """Delete all checkpoints but the newest and the best. Damaged ones neither count nor are deleted."""
        metrics = {}
        for step in self.steps():
            try:
                metrics[step] = read_manifest(self._path(step)).metric
            except DamagedCheckpointError as damage:
                self._damaged.add(step)
                logger.warning("%s is damaged; it stays there but is not used: %s", self._path(step), damage)
        keep = set(sorted(metrics)[-self._config.keep_last :])
        by_metric = [(metric, step) for step, metric in metrics.items() if metric is not None and math.isfinite(metric)]
        if self._config.keep_best and by_metric:
            keep.add(min(by_metric)[1])  # the earliest, if several are equal
        for step in metrics.keys() - keep:
            self._place.delete(self._path(step))
