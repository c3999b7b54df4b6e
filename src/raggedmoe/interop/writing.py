"""Writing a model's folder atomically: it is written under another name, flushed to disk and renamed.

In an object store, which renames nothing, the tensors get names that no other object has, and the index that names them
is written last: with it the model is there, or has replaced another.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raggedmoe.disk import sync, sync_tree
from raggedmoe.interop.folder import INDEX, SINGLE, read_index
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.interop.safetensors_file import NewTensor, write_file
from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.lease import check_lease
from raggedmoe.storage.trees import remove_or_warn

SHARD_BYTES = 5 * 10**9


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, which is renamed to ``folder`` on success and removed otherwise."""
    folder = folder.resolve()  # "." has no name to put the partial folder beside
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder, got one with files; name another or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir()
    with _try_lock(partial):
        try:
            yield partial
            sync_tree(partial)
            partial.replace(folder)  # also of an empty one
            sync(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary folders that killed writers of ``folder`` left, but not one that is being written."""
    partials = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.partial")
    for leftover in folder.parent.iterdir():
        if partials.fullmatch(leftover.name):
            with _try_lock(leftover) as is_ours:
                if is_ours:
                    shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Try to lock a folder, and yield whether it worked. A lock ends with its process; some file systems have none."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # it has just become a model, or was removed
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_objects(folder: ObjectPath) -> Iterator[ObjectPath]:
    """Yield a folder of an object store to write a model to. Before and after, what belongs to no model is removed.

    There is a model, the one before or the new one, whenever there was one; `write_tensors` must come last.
    """
    remove_unnamed_objects(folder)
    try:
        yield folder
    finally:
        remove_unnamed_objects(folder)


def remove_unnamed_objects(folder: ObjectPath) -> None:
    """Remove the tensors that a killed writer left, or that were replaced: without an index that names them, all."""
    names = {path.name for path in folder.iterdir()}
    named = {*read_index(folder / INDEX).values()} if INDEX in names else {SINGLE}
    for name in sorted(names - named):
        if name.endswith(".safetensors"):
            remove_or_warn(folder / name)


def write_tensors(
    folder: AnyPath, tensors: list[NewTensor], *, metadata: dict[str, str], shard_bytes: int, progress: bool
) -> None:
    """Write tensors to one file, or to several of about ``shard_bytes`` with an index; in an object store always so."""
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    total = sum(tensor.num_bytes for tensor in tensors)
    weight_map = {}
    are_objects = isinstance(folder, ObjectPath)
    stem = f"model-{secrets.token_hex(8)}" if are_objects else "model"
    with bytes_bar("writing", total, progress) as advance:
        for number, shard in enumerate(shards, start=1):
            is_single = len(shards) == 1 and not are_objects
            name = SINGLE if is_single else f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
            weight_map.update({tensor.name: name for tensor in shard})
            write_file(folder / name, shard, metadata, advance)
    if isinstance(folder, ObjectPath):
        check_lease(folder)
    if len(shards) > 1 or are_objects:
        index = {
            "metadata": {
                "total_size": total,
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            },
            "weight_map": weight_map,
        }
        write_json(folder / INDEX, index)


def write_json(path: AnyPath, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_bytes(f"{json.dumps(value, indent=2)}\n".encode())
