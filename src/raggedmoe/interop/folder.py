"""Reading a folder of safetensors files: one file, or several with an index."""

import fnmatch
import os
from pathlib import Path, PurePosixPath

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.safetensors_file import BrokenFileError, StoredTensor, read_header
from raggedmoe.storage import AnyPath

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def has_tensors(folder: AnyPath) -> bool:
    """Tell whether a folder has weights that can be read."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_tensor_headers(folder: AnyPath) -> dict[str, StoredTensor]:
    """List every tensor in a model's folder by name. Only the files' headers are read."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder with a model's config.json and safetensors files, found none")
    index = folder / INDEX
    if index.is_file():
        return _read_sharded(folder, index)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)[0]
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in PICKLES)]
    if pickles:
        raise ValueError(
            f"{folder}: expected safetensors files, got {', '.join(pickles[:3])}: opening a pickle runs the code of "
            "whoever made it, so it is refused; get the safetensors version, or convert it where you trust it"
        )
    raise ValueError(f"{folder}: expected {SINGLE}, or {INDEX} and the files it names; found neither")


def _read_sharded(folder: AnyPath, index: AnyPath) -> dict[str, StoredTensor]:
    """List the tensors of several files, and require that they are those of the index."""
    file_of = read_index(index)
    files = sorted(set(file_of.values()))
    for file in files:
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or "\\" in file or not file.endswith(".safetensors"):
            tensor_name = next(name for name, where in file_of.items() if where == file)
            raise BrokenFileError(
                f"{index}: {tensor_name} is said to be in {file!r}; "
                "expected the name of a safetensors file in the folder"
            )
    missing = {file for file in files if not _is_file(folder / file)}
    if missing:
        lost = [name for name, where in file_of.items() if where in missing]
        raise BrokenFileError(
            f"{folder}: {_shorten(sorted(missing))} named by {INDEX} not found, which hold(s) {_shorten(lost)}; "
            "is the download complete?"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(folder / file)[0].items():
            if name in tensors:
                raise BrokenFileError(f"{folder}: {name} is in two files, {tensors[name].path.name} and {file}")
            tensors[name] = tensor
    absent = [name for name, file in file_of.items() if name not in tensors or tensors[name].path != folder / file]
    unlisted = [name for name in tensors if name not in file_of]
    if absent or unlisted:
        raise BrokenFileError(
            f"{index}: the files do not hold what it says; not where they should be: {_shorten(absent)}; "
            f"not in the index: {_shorten(unlisted)}"
        )
    return tensors


def read_index(index: AnyPath) -> dict[str, str]:
    """Read which file each tensor is in."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise BrokenFileError(f"{index}: expected a weight_map from tensor to file, got {type(weight_map).__name__}")
    return {name: str(file) for name, file in weight_map.items()}


def _is_file(path: AnyPath) -> bool:
    return os.path.isfile(path) if isinstance(path, Path) else path.is_file()  # a name too long is no file either


def _shorten(names: list[str], most: int = 8) -> str:
    """Join names for an error, leaving out all but the first few."""
    shown = ", ".join(names[:most]) or "none"
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
