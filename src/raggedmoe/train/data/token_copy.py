"""Folders of tokens in an object store: copied to this machine once and checked, as files are what can be mapped."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raggedmoe.interop.writing import new_folder
from raggedmoe.storage import ObjectPath
from raggedmoe.storage.trees import download, list_files

SETTING = "RAGGEDMOE_TOKENS"  # the folder of the copies
BLOCK_BYTES = 2**22  # that are read at once


def copy_tokens(folder: ObjectPath, description: Mapping[str, Any]) -> Path:
    """Return the copy of a folder with this tokens.json, which is made where there is none yet.

    It is named after the description, which has digests of all tokens: what has changed in the store is copied anew.
    """
    name = hashlib.blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=16).hexdigest()
    target = copies_root() / name
    if target.is_dir():  # it got its name when it was whole
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{name}.lock")):
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
    with new_folder(target) as partial:
        download(folder, partial)
        _check_digests(folder, partial, description)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it. It ends with its process; some file systems have none."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copies_root() -> Path:
    """Return the folder in which copies are: the user's cache folder, unless `SETTING` names one."""
    folder = os.environ.get(SETTING)
    if folder:
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "raggedmoe" / "tokens"


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
