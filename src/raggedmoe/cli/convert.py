"""`raggedmoe import` and `raggedmoe export`: checkpoints between Hugging Face's layout and ours."""

from pathlib import Path

import tyro

from raggedmoe import interop
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.models.count import count_params
from raggedmoe.models.module import Decoder
from raggedmoe.names import unknown


def import_(
    path: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    dtype: str | None = None,
) -> int:
    """Convert a Hugging Face folder to ours: safetensors with our names and layouts, which load without conversion.

    Every tensor is accounted for before anything is read, and OUT is whole or not there. A tokenizer goes along.

    Args:
        path: the folder with config.json and one or more safetensors files.
        out: the folder to make.
        dtype: of the weights, such as float32; by default that of the checkpoint.
    """
    model = _loaded(path, out, dtype)
    interop.save_native(model, out, companions=path, progress=True)
    return _report("imported", model, out)


def export(
    path: tyro.conf.Positional[Path],
    out: tyro.conf.Positional[Path],
    layout: str | None = None,
    dtype: str | None = None,
) -> int:
    """Convert a folder of ours (or a Hugging Face one, to change its layout or type) to a Hugging Face folder.

    Args:
        path: what `raggedmoe import` made, or a Hugging Face folder.
        out: the folder to make.
        layout: of the experts: per_expert (one tensor each) or fused; by default as the family publishes them.
        dtype: of the weights, such as bfloat16; by default that of PATH.
    """
    model = _loaded(path, out, None)
    if dtype is not None and dtype not in FLOATS:
        raise unknown("dtype", dtype, FLOATS)
    interop.save(model, out, layout=layout, dtype=dtype, companions=path, progress=True)
    return _report("exported", model, out)


def _loaded(path: Path, out: Path, dtype: str | None) -> Decoder:
    if dtype is not None and dtype not in FLOATS:
        raise unknown("dtype", dtype, FLOATS)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: expected a new or empty folder, got one with files; name another or remove it")
    return interop.load(path, param_dtype=dtype, progress=True)


def _report(done: str, model: Decoder, out: Path) -> int:
    count = count_params(model.config)
    print(
        f"{done} {model.config.family}, {(count.total + count.mtp) / 1e6:,.2f}M parameters, "
        f"{count.bytes / 1e6:,.1f} MB, to {out}"
    )
    return 0
