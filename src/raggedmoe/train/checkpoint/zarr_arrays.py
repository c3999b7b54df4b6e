"""The arrays of a checkpoint as objects: every part of an array is one, which tensorstore writes and reads (zarr 3).

orbax writes to disks and to Google's storage alone. Here each process writes the parts that it holds, uncompressed and
without a file that describes them, as the manifest does: so an object's bytes are those of the part in memory, whose
checksum is taken there, and nothing is read back.
"""

import hashlib
import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from raggedmoe.storage import AnyPath, ObjectPath
from raggedmoe.storage.object_store import FIRST_PAUSE, LONGEST_PAUSE, endpoint, retry_seconds
from raggedmoe.storage.trees import NUM_REQUESTS
from raggedmoe.train.checkpoint.manifest import StoredFile

CHUNK_BYTES = 256 * 2**20  # a larger part of an array is several objects


@dataclass(frozen=True)
class _Part:
    """A part of an array that this process writes, copied to the host."""

    name: str
    index: tuple[slice, ...]
    values: np.ndarray


class ArrayWriter:
    """Writes this process's parts of the arrays below a folder. They are copied when it is made."""

    def __init__(self, folder: AnyPath, arrays: dict[str, jax.Array]) -> None:
        self._folder, self._arrays = folder, {name: (array.shape, array.dtype) for name, array in arrays.items()}
        self.chunks = {name: chunk_shape(array) for name, array in arrays.items()}
        shards = [
            (name, shard)
            for name, array in arrays.items()
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        for _, shard in shards:
            shard.data.copy_to_host_async()
        self._parts = [_Part(name, shard.index, np.array(shard.data, copy=True)) for name, shard in shards]

    def write(self) -> dict[str, StoredFile]:
        """Write all parts, and return the objects with their checksums."""
        stores = {name: _open(self._folder, name, *self._arrays[name], chunks) for name, chunks in self.chunks.items()}
        errors: list[ValueError] = []  # after one, no other part is begun; those under way end before it is raised

        def write(part: _Part) -> dict[str, StoredFile]:
            if errors:
                return {}
            writing = stores[part.name][part.index].write(part.values, can_reference_source_data_indefinitely=True)
            files = dict(_describe_objects(part, self.chunks[part.name]))
            try:
                writing.result()
            except ValueError as error:  # which tensorstore raises for everything
                errors.append(error)
            return files

        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            described = list(pool.map(write, self._parts))
        if errors:
            raise OSError(f"{self._folder} could not be written: {errors[0]}") from errors[0]
        return {name: file for files in described for name, file in files.items()}


def chunk_shape(array: jax.Array) -> tuple[int, ...]:
    """Return the shape of an array's objects: that of a device's part, cut along its first dimensions if too large."""
    shape = list(array.sharding.shard_shape(array.shape))
    for dim, size in enumerate(shape):
        num_needed = math.ceil(math.prod(shape) * array.dtype.itemsize / CHUNK_BYTES)
        if num_needed > 1:
            shape[dim] = size // next(num for num in range(min(num_needed, size), size + 1) if size % num == 0)
    return tuple(shape)


def read_arrays(
    folder: AnyPath,
    stored: dict[str, jax.ShapeDtypeStruct],
    chunks: dict[str, tuple[int, ...]],
    shardings: dict[str, jax.sharding.Sharding | None],
) -> dict[str, jax.Array]:
    """Read arrays to the devices of their shardings; without one, to no device in particular."""

    def read(name: str) -> jax.Array:
        array, sharding = stored[name], shardings[name]
        try:
            store = _open(folder, name, array.shape, array.dtype, chunks[name])
            if sharding is None:
                return jnp.asarray(store.read().result())
            return jax.make_array_from_callback(array.shape, sharding, lambda index: store[index].read().result())
        except ValueError as error:
            raise OSError(f"{folder / name} could not be read: {error}") from error

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return dict(zip(stored, pool.map(read, stored)))


def _describe_objects(part: _Part, chunks: tuple[int, ...]) -> Iterator[tuple[str, StoredFile]]:
    """Iterate over the objects of a part, by their names below the folder, with the checksums of their bytes."""
    origin = [index.start or 0 for index in part.index]
    for offsets in itertools.product(*(range(0, size, step) for size, step in zip(part.values.shape, chunks))):
        values = part.values[tuple(slice(start, start + step) for start, step in zip(offsets, chunks))]
        numbers = [(first + offset) // step for first, offset, step in zip(origin, offsets, chunks)]
        content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        name = "/".join([part.name, "c", *map(str, numbers)])
        yield name, StoredFile(size=content.nbytes, sha256=hashlib.sha256(content.data).hexdigest())


def _open(folder: AnyPath, name: str, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> ts.TensorStore:
    """Open a stored array. No request is made, as nothing describes it but the arguments."""
    metadata = {
        "shape": shape,
        "data_type": np.dtype(dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "fill_value": False if np.dtype(dtype) == np.bool_ else 0,
    }
    spec = {
        "driver": "zarr3",
        "kvstore": _kvstore(folder / name),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # zeros are data
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, assume_metadata=True, context=_context(retry_seconds())).result()


def _kvstore(folder: AnyPath) -> dict[str, Any]:
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder}/"}
    assert isinstance(folder, ObjectPath)
    server, region = endpoint(), os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    place: dict[str, Any] = {"driver": "s3", "bucket": folder.bucket_name, "path": folder.prefix}
    return place | ({"endpoint": server} if server else {}) | ({"aws_region": region} if region else {})


def _context(seconds: float) -> ts.Context:
    """Return the retries and the source of credentials, such that requests are repeated for about so many seconds."""
    num_retries, paused = 1, FIRST_PAUSE
    while paused < seconds:
        paused += min(FIRST_PAUSE * 2**num_retries, LONGEST_PAUSE)
        num_retries += 1
    retries = {"max_retries": num_retries, "initial_delay": f"{FIRST_PAUSE}s", "max_delay": f"{LONGEST_PAUSE}s"}
    source = "environment" if os.environ.get("AWS_ACCESS_KEY_ID") else "default"
    return ts.Context({"s3_request_retries": retries, "aws_credentials": {"type": source}})
