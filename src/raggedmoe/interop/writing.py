"""Writing a model's folder: everything beside it first, then one rename, so that a folder is whole or not there."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raggedmoe.interop.folder import INDEX, SINGLE
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.interop.safetensors_file import NewTensor, write_file

SHARD_BYTES = 5 * 10**9
GENERATION = "generation_config.json"
# What goes along with a model from folder to folder.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    GENERATION,
    "chat_template.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes ``folder`` if all goes well and vanishes if not."""
    folder = folder.resolve()  # "." has no name to put the partial folder beside
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or empty folder, got one with files; name another or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            folder.rmdir()
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tensors(
    folder: Path, tensors: list[NewTensor], *, metadata: dict[str, str], shard_bytes: int, progress: bool
) -> None:
    """One file, or several of about ``shard_bytes`` with their index."""
    shards: list[list[NewTensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + tensor.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    total = sum(tensor.num_bytes for tensor in tensors)
    weight_map = {}
    with bytes_bar("writing", total, progress) as advance:
        for number, shard in enumerate(shards, start=1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            weight_map.update({tensor.name: name for tensor in shard})
            for num_bytes in write_file(folder / name, shard, metadata):
                advance(num_bytes)
    if len(shards) > 1:
        index = {
            "metadata": {
                "total_size": total,
                "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
            },
            "weight_map": weight_map,
        }
        write_json(folder / INDEX, index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def copy_companions(source: Path, target: Path) -> None:
    """The tokenizer and what else belongs to it."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if not (target / GENERATION).is_file() and (source / "config.json").is_file():
        # Where a text ends is also said in config.json, which does not go along.
        settings = read_json_object(source / "config.json")
        ends = {key: settings[key] for key in ("bos_token_id", "eos_token_id") if settings.get(key) is not None}
        if ends:
            write_json(target / GENERATION, ends)
