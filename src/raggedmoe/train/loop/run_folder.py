"""The folder of a run, on a disk or in an object store: its lock, the results of earlier runs, run.json, the model.

``run.json`` describes the run, ``metrics.jsonl`` and ``load.jsonl`` its steps, ``checkpoints`` are to resume from,
``companions`` are the tokenizer and other files that belong to them. ``model`` is the trained model, ``profile`` a
trace, ``tensorboard`` events.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from raggedmoe.disk import sync
from raggedmoe.interop.companions import write_companions, write_kept_config
from raggedmoe.interop.folder import INDEX, SINGLE
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.native import save
from raggedmoe.interop.writing import remove_unnamed_objects
from raggedmoe.models.companions import Companions
from raggedmoe.models.module import Decoder
from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.lease import Lease
from raggedmoe.storage.trees import copy, file_size, list_files, make_folder, move, remove, replace_file
from raggedmoe.train.loop.metrics import LOAD, METRICS, TENSORBOARD, last_step
from raggedmoe.train.loop.record import REPORT, RUN
from raggedmoe.train.settings.words import read_values

MODEL, PROFILE, CHECKPOINTS = "model", "profile", "checkpoints"
COMPANIONS = "companions"  # the tokenizer, and all else that the trained model has beside its weights
NEW_MODEL, OLD_MODEL = f"{MODEL}.new", f"{MODEL}.old"  # while one replaces the other


@contextlib.contextmanager
def lock_folder(folder: AnyPath) -> Iterator[None]:
    """Make the folder if needed, and lock it against other runs. The lock ends with the process, a lease soon after.

    In a run of several processes the first holds the lock. A model that a killed run left half replaced is recovered.
    """
    if jax.process_index() != 0:
        yield
        return
    if isinstance(folder, ObjectPath):
        with _lease(folder):
            _recover_objects(folder / MODEL)
            yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise OSError(f"{folder}: expected a folder that can be written to, got: {error}; name another") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BlockingIOError(
                f"{folder}: another process trains into it; wait for it, or use another run_name"
            ) from None
        _recover_model(folder)
        yield


@contextlib.contextmanager
def _lease(folder: ObjectPath) -> Iterator[None]:
    try:
        lease = Lease(folder)
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(f"{folder}: expected a folder that can be written to, got: {error}; name another") from error
    try:
        yield
    finally:
        lease.release()


def read_description(folder: AnyPath) -> dict[str, Any] | None:
    """Read run.json, the description of an earlier run; None if there was none."""
    return read_json_object(folder / RUN) if (folder / RUN).is_file() else None


def write_description(folder: AnyPath, run: Mapping[str, Any]) -> None:
    """Write run.json, the description of the run, atomically."""
    replace_file(folder / RUN, (json.dumps(run, indent=1) + "\n").encode())


def write_companions_of_checkpoints(folder: AnyPath, companions: Companions) -> None:
    """Write the files that belong to the model, with which a checkpoint is as much a model as the trained one."""
    target = folder / COMPANIONS
    make_folder(target)
    write_companions(companions, target)
    write_kept_config(companions, target)


def set_aside(folder: AnyPath, *, checkpoints: bool) -> AnyPath | None:
    """Move an earlier run's files into a folder of their own, and return it; None if that run has no results.

    Checkpoints are moved first, so that a kill in between leaves none to resume without their description.
    """
    results = (PROFILE, REPORT, LOAD, MODEL, METRICS)
    names = (*((CHECKPOINTS,) if checkpoints else ()), RUN, COMPANIONS, TENSORBOARD, *results)
    present = {name: folder / name for name in names if _has_content(folder / name)}
    if not present.keys() & {CHECKPOINTS, *results}:
        return None
    aside = _new_folder_aside(folder)
    for path in present.values():
        move(path, aside / path.name)
    return aside


def set_aside_finished(folder: AnyPath, step: int) -> AnyPath | None:
    """Keep the results of a finished run that resumes from a checkpoint before its end, and return their folder.

    Files that the run continues are copied, and the model is moved. None if the run was not finished, or ends there.
    """
    if not (folder / MODEL).exists() or not (folder / METRICS).exists():
        return None
    earlier, last = read_description(folder) or {}, last_step(folder / METRICS)
    if last <= step or last != read_values(earlier.get("settings", {}), RUN).run.num_steps:
        return None
    aside = _new_folder_aside(folder)
    for path in (folder / name for name in (RUN, LOAD, METRICS)):
        if path.exists():
            copy(path, aside / path.name)
    for path in (folder / name for name in (REPORT, MODEL)):
        if path.exists():
            move(path, aside / path.name)
    return aside


def _has_content(path: AnyPath) -> bool:
    if isinstance(path, ObjectPath):
        return any(list_files(path).values()) or (path.is_file() and file_size(path) > 0)
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def _new_folder_aside(folder: AnyPath) -> AnyPath:
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    make_folder(aside)
    return aside


def save_model(folder: AnyPath, model: Decoder) -> AnyPath:
    """Write the trained model and its companions, as `raggedmoe generate` and `export` read it; replace an older one.

    If there was one on a disk, then at every moment one of the folders model, model.new and model.old is whole, and the
    next run begins with it in its place. In an object store it is whole in its place.
    """
    new = folder / (MODEL if isinstance(folder, ObjectPath) else NEW_MODEL)
    save(model, new)
    return new if isinstance(folder, ObjectPath) else _put_in_place(folder)


def _put_in_place(folder: Path) -> Path:
    """Give the new model, which is whole, its place."""
    target, new, old = (folder / name for name in (MODEL, NEW_MODEL, OLD_MODEL))
    if target.exists():
        target.rename(old)
    new.rename(target)
    sync(folder)
    remove(old)
    return target


def _recover_model(folder: Path) -> None:
    """Put the newest complete model in its place after a kill in `save_model`, and remove what is left of others."""
    target, new, old = (folder / name for name in (MODEL, NEW_MODEL, OLD_MODEL))
    for whole in (new, old):
        if whole.exists() and not target.exists():
            whole.rename(target)
    sync(folder)
    for leftover in (new, old, *folder.glob(f".{NEW_MODEL}.*.partial")):
        remove(leftover)


def _recover_objects(model: ObjectPath) -> None:
    """Remove what a kill in `save_model` left in an object store."""
    if any((model / name).is_file() for name in (INDEX, SINGLE)):
        remove_unnamed_objects(model)
    else:
        remove(model)
