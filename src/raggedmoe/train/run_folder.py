"""A run's folder: who writes to it, what was in it before, and the description that `raggedmoe report` reads.

``run.json`` describes the run, ``metrics.jsonl`` and ``load.jsonl`` its steps, ``checkpoints`` are to resume from,
``model`` is the trained model, ``profile`` a trace, ``tensorboard`` events.
"""

import contextlib
import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.native import save
from raggedmoe.models.module import Decoder
from raggedmoe.train.metrics import LOAD, METRICS, TENSORBOARD, replace_file
from raggedmoe.train.record import REPORT, RUN

MODEL, PROFILE, CHECKPOINTS = "model", "profile", "checkpoints"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder if needed, and keeps other runs from training into it. The lock ends with the process.

    Of the processes of one run the first holds it.
    """
    if jax.process_index() != 0:
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
        yield


def described(folder: Path) -> dict[str, Any] | None:
    """What run.json says of the run that was here; None: there was none."""
    return read_json_object(folder / RUN) if (folder / RUN).is_file() else None


def describe(folder: Path, run: Mapping[str, Any]) -> None:
    """Write run.json, whole or not at all."""
    replace_file(folder / RUN, (json.dumps(run, indent=1) + "\n").encode())


def set_aside(folder: Path, *, checkpoints: bool) -> Path | None:
    """Move an earlier run's files into a folder of their own, and say where; None: there are none.

    Its checkpoints first, so that a kill in between leaves none to resume without their description.
    """
    names = (*((CHECKPOINTS,) if checkpoints else ()), METRICS, LOAD, TENSORBOARD, MODEL, PROFILE, REPORT, RUN)
    present = [folder / name for name in names if (folder / name).exists()]
    present = [path for path in present if path.is_file() or any(path.iterdir())]
    if not present:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for path in present:
        path.rename(aside / path.name)
    return aside


def save_model(folder: Path, model: Decoder, tokenizer: str | None) -> Path:
    """The trained model, with its tokenizer, as `raggedmoe generate` and `export` read it; replaces an older one."""
    target, fresh, old = folder / MODEL, folder / f"{MODEL}.new", folder / f"{MODEL}.old"
    for leftover in (fresh, old):
        _remove(leftover)
    with tempfile.TemporaryDirectory(prefix="raggedmoe-") as companions:
        if tokenizer is not None:
            (Path(companions) / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        save(model, fresh, companions=Path(companions))
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    _remove(old)
    return target


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
