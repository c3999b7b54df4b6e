"""Folders of tokens in an object store: copied to this machine once and checked, as files are what can be mapped."""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raggedmoe.disk import sync, sync_tree
from raggedmoe.storage import ObjectPath
from raggedmoe.storage.trees import download, list_files
from raggedmoe_command.compilation_cache import user_cache_folder

SETTING = "RAGGEDMOE_TOKENS"  # the folder of the copies
BLOCK_BYTES = 2**22  # that are read at once
_log = logging.getLogger(__name__)


def copy_tokens(folder: ObjectPath, description: Mapping[str, Any]) -> Path:
    """Return the copy of a folder with this tokens.json, which is made where there is none yet.

    It is named after the description, which has digests of all tokens: what has changed in the store is copied anew.
    """
    name = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16).hexdigest()
    target = copies_root() / name
    if target.is_dir():  # it got its name when it was whole
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{name}.lock")) as is_alone:
        if is_alone:
            _remove_leftovers(target)
        if not target.is_dir():  # otherwise another process of this machine was first
            _copy(folder, target, description)
    return target


def _copy(folder: ObjectPath, target: Path, description: Mapping[str, Any]) -> None:
    """Copy a folder, if there is room for it, and check the copy before it gets its name."""
    needed, free = sum(list_files(folder).values()), shutil.disk_usage(target.parent).free
    if needed > free:
        raise ValueError(
            f"{folder}: expected room for a copy of {needed:,} bytes in {target.parent}, got {free:,} free ones; set "
            f"{SETTING} to a folder on a larger disk"
        )
    # Without locks another process may copy the same at the same time: each writes under a name of its own.
    partial = target.with_name(_partial_names(target).replace("*", secrets.token_hex(8)))
    partial.mkdir()
    try:
        download(folder, partial)
        _check_digests(folder, partial, description)
        sync_tree(partial)
        _rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, target: Path) -> None:
    """Give a copy its name, unless another process has made the same one meanwhile."""
    try:
        partial.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    sync(target.parent)


def _partial_names(target: Path) -> str:
    """Return the pattern of the names under which this machine writes a copy; a home may be shared with others."""
    return f".{target.name}.{platform.node()}.*.partial"


def _remove_leftovers(target: Path) -> None:
    """Delete what killed processes of this machine left of a copy, whose lock is held."""
    for leftover in target.parent.glob(_partial_names(target)):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Wait for the lock of a file, which ends with its process, and hold it; yield whether there are locks at all."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError as error:
            _warn_without_locks(path.parent, str(error))
            is_locked = False
        yield is_locked


@functools.cache  # once for a folder
def _warn_without_locks(folder: Path, reason: str) -> None:
    _log.warning(
        "%s has no locks (%s): processes that begin at once may each copy the same tokens, and one copy is kept; set "
        "%s to a folder on a local disk to copy them once",
        folder,
        reason,
        SETTING,
    )


def copies_root() -> Path:
    """Return the folder in which copies are: the user's cache folder, unless `SETTING` names one."""
    folder = os.environ.get(SETTING)
    return Path(folder).absolute() if folder else user_cache_folder(os.environ) / "tokens"


def _check_digests(folder: ObjectPath, copy: Path, description: Mapping[str, Any]) -> None:
    """Require that the files are those which were written: of each part the digest of its tokens and ends."""
    for name, part in description.items():
        if not isinstance(part, dict):
            continue
        digest = hashlib.blake2b(digest_size=16)
        for path in (copy / f"{name}.tokens", copy / f"{name}.ends"):
            with path.open("rb") as file:
                while block := file.read(BLOCK_BYTES):
                    digest.update(block)
        if digest.hexdigest() != part["digest"]:
            raise ValueError(
                f"{folder}: expected the digest {part['digest']} of {name}, as tokens.json has it, got "
                f"{digest.hexdigest()}; upload the folder anew"
            )
