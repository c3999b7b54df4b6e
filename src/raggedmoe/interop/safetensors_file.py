"""Reading and writing safetensors files piece by piece.

The `safetensors` package maps a file into memory, where every page that was read counts as the process's own until the
system wants it back, so that a model takes twice its memory. This module reads bytes to where they are needed. A file
is a length, a JSON header and the bytes; all that a header may get wrong is checked before any tensor is read.
"""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from raggedmoe.storage import AnyPath
from raggedmoe.storage.trees import file_size, read_into, write_pieces

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 32  # what any NumPy takes; a checkpoint's tensors have four at most
MAX_SHOWN = 8  # names that an error lists
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
DTYPE_NAMES: dict[np.dtype, str] = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


class BrokenFileError(ValueError):
    """A file that is not what it says it is; the message names the file, the tensor and what was expected."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: its name, type and shape, and where its bytes are."""

    path: AnyPath
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # where its first byte is in the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read the tensor, or some rows of its first dimension."""
        if not self.shape:
            return self._bytes(0, self.dtype.itemsize).view(self.dtype).reshape(())
        stop = self.shape[0] if stop is None else stop
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._bytes(start * row, (stop - start) * row).view(self.dtype).reshape(stop - start, *self.shape[1:])

    def _bytes(self, start: int, count: int) -> np.ndarray:
        buffer = np.empty(count, np.uint8)
        if read_into(self.path, self.offset + start, buffer.data) != count:
            raise BrokenFileError(f"{self.path}: {self.name} ended early; was the file changed while it was read?")
        return buffer


def read_header(path: AnyPath) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Read which tensors are in a file, by name, and its free-text metadata."""
    if not path.is_file():
        raise BrokenFileError(f"{path}: expected a safetensors file, found none; is the download complete?")
    size = file_size(path)
    length = int.from_bytes(_read(path, 0, min(size, 8)), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise BrokenFileError(
            f"{path}: expected a header within the file's {size} bytes and the format's limit of "
            f"{MAX_HEADER_BYTES}, got a header length of {length}; the file is truncated or no safetensors file"
        )
    raw = _read(path, 8, length)
    try:
        header = json.loads(raw, object_pairs_hook=_refuse_duplicates)
        metadata = header.pop("__metadata__", {})
        entries = {name: (entry["dtype"], entry["shape"], entry["data_offsets"]) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenFileError(
            f"{path}: expected a JSON header with dtype, shape and data_offsets of every tensor, got {error!r}"
        ) from None
    tensors = {name: _parse_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extent(path, tensors, 8 + length, size)
    return tensors, metadata if isinstance(metadata, dict) else {}


def _read(path: AnyPath, start: int, count: int) -> bytearray:
    content = bytearray(count)
    del content[read_into(path, start, memoryview(content)) :]
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's pairs, and refuse a name that occurs twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
        more = f" and {len(twice) - MAX_SHOWN} more" if len(twice) > MAX_SHOWN else ""
        raise ValueError(f"twice in the header: {', '.join(twice[:MAX_SHOWN])}{more}")
    return values


def _parse_entry(path: AnyPath, name: str, entry: tuple[Any, Any, Any], data_start: int) -> StoredTensor:
    """Check what a header says of a tensor."""
    dtype, shape, offsets = entry
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BrokenFileError(f"{path}: {name} has type {dtype!r}; expected one of {', '.join(DTYPES)}")

    def naturals(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)

    if not naturals(shape) or not naturals(offsets) or len(offsets) != 2:
        raise BrokenFileError(
            f"{path}: {name} has shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}; "
            "expected a list of sizes, and a start and an end, none negative"
        )
    if len(shape) > MAX_DIMENSIONS:
        raise BrokenFileError(f"{path}: {name} has {len(shape)} dimensions; expected at most {MAX_DIMENSIONS}")
    expected = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != expected:
        raise BrokenFileError(
            f"{path}: {name} ({dtype} {shape}) needs {expected} bytes, its data_offsets {offsets} hold "
            f"{offsets[1] - offsets[0]}"
        )
    return StoredTensor(
        path=path, name=name, dtype=np.dtype(DTYPES[dtype]), shape=tuple(shape), offset=data_start + offsets[0]
    )


def _check_extent(path: AnyPath, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """Require that the tensors lie one after the other and fill the file."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.num_bytes)):
        if tensor.offset + tensor.num_bytes > size:
            raise BrokenFileError(
                f"{path}: {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, the file has {size}; "
                "it is truncated: download it again"
            )
        if tensor.offset != position:
            raise BrokenFileError(
                f"{path}: {tensor.name} starts at byte {tensor.offset}, expected {position}: "
                "tensors may neither overlap nor leave holes"
            )
        position += tensor.num_bytes
    if position != size:
        raise BrokenFileError(f"{path}: expected {position} bytes by its header, got {size}")


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A tensor to write, whose pieces are made when it is their turn."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Iterator[np.ndarray]  # in order; together they have the tensor's elements

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    path: AnyPath, tensors: list[NewTensor], metadata: dict[str, str], advance: Callable[[int], None]
) -> None:
    """Write a file. ``advance`` is told the number of bytes of each piece, for a progress bar."""
    write_pieces(path, _encode(tensors, metadata, advance))


def _encode(
    tensors: list[NewTensor], metadata: dict[str, str], advance: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: its header, then each tensor's."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        position += tensor.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors:
        written = 0
        for piece in tensor.pieces:
            flat = np.ascontiguousarray(piece, tensor.dtype).reshape(-1).view(np.uint8)
            yield flat.data
            advance(flat.size)
            written += flat.size
        assert written == tensor.num_bytes, (tensor.name, written, tensor.num_bytes)
