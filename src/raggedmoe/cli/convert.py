"""`raggedmoe import` and `raggedmoe export`, which convert checkpoints between Hugging Face's format and ours."""

from pathlib import Path

import tyro

from raggedmoe import interop
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.models.count import count_params
from raggedmoe.models.merge import merge_lora
from raggedmoe.models.module import Decoder
from raggedmoe.names import unknown
from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.train.loop.saved_run import find_model


def import_(
    path: tyro.conf.Positional[str],
    out: tyro.conf.Positional[str],
    dtype: str | None = None,
) -> int:
    """Convert a Hugging Face checkpoint to our format: safetensors files that load without a transposition.

    Every tensor is matched with a parameter before anything is read, and OUT is written completely or not at all. The
    tokenizer, chat template and generation settings go along, and so does config.json, of which `raggedmoe export`
    keeps every key that is no size.

    Args:
        path: the folder with config.json and one or more safetensors files; it may be in an object store (s3://…).
        out: the folder to write.
        dtype: type of the weights, such as float32; by default that of the checkpoint.
    """
    target = _check(out, dtype)
    model = interop.load(path, param_dtype=dtype, progress=True)
    interop.save_native(model, target, progress=True)
    return _print_result("imported", model, target)


def export(
    path: tyro.conf.Positional[str],
    out: tyro.conf.Positional[str],
    layout: str | None = None,
    dtype: str | None = None,
    merge: bool = False,
    adapters: bool = False,
) -> int:
    """Convert a checkpoint of ours to a Hugging Face folder, or change the layout or type of a Hugging Face one.

    Args:
        path: a folder that `raggedmoe import` or a run wrote, or a Hugging Face folder; the folder of a run, RUN, whose
            trained model is taken, or else its newest checkpoint; or one of its checkpoints, RUN@STEP. All of these may
            be in an object store (s3://bucket/folder).
        out: the folder to write.
        layout: layout of the experts: per_expert (one tensor each) or fused; by default as the family publishes them.
        dtype: type of the weights, such as bfloat16; by default that of PATH.
        merge: of a model with adapters, add them to its weights, and write those.
        adapters: of a model with adapters, write those alone, as PEFT reads them.
    """
    if adapters and (merge or layout is not None or dtype is not None):
        raise ValueError("expected --adapters alone, which are written in float32 as they are, got more")
    target = _check(out, dtype)
    saved = find_model(path)
    model = saved.load(progress=True)
    if adapters:
        interop.save_peft(model, target)
        return _print_result("exported the adapters of", model, target)
    model = merge_lora(model) if merge else model
    interop.save(model, target, layout=layout, dtype=dtype, progress=True)
    return _print_result("exported", model, target)


def _check(out: str, dtype: str | None) -> Path:
    """Refuse what could not be written, before anything is read. Return the folder to write."""
    if dtype is not None and dtype not in FLOATS:
        raise unknown("dtype", dtype, FLOATS)
    folder = as_path(out)
    if isinstance(folder, ObjectPath):
        raise ValueError(f"{out}: expected a folder of this machine; write there, and copy it to where it should be")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{out}: expected a new or empty folder, got one with files; name another or remove it")
    return folder


def _print_result(done: str, model: Decoder, out: Path) -> int:
    """Print what was converted."""
    count = count_params(model.config)
    print(
        f"{done} {model.config.family}, {(count.total + count.mtp) / 1e6:,.2f}M parameters, "
        f"{count.bytes / 1e6:,.1f} MB, to {out}"
    )
    return 0
