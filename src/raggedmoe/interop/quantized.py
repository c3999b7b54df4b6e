"""Checkpoints whose weights are stored in fewer bits, read as bfloat16: DeepSeek's blocks of fp8, gpt-oss's mxfp4.

A decoded tensor stands in for the stored ones it is made of and is read in the same way, some rows at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.safetensors_file import BrokenFileError, StoredTensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The sixteen values of 4 bits: sign, two bits of exponent, one of mantissa.
FP4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"


@runtime_checkable
class Readable(Protocol):
    """A tensor of a checkpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True)
class ScaledBlocks:
    """A matrix of fp8 with one factor for each block of it."""

    values: StoredTensor
    factors: StoredTensor
    block: tuple[int, int]
    dtype: np.dtype = BFLOAT16

    @property
    def path(self) -> Path:
        return self.values.path

    @property
    def name(self) -> str:
        return self.values.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = self.shape[0] if stop is None else stop
        tall, wide = self.block
        factors = self.factors.read(start // tall, -(-stop // tall)).astype(np.float32)
        factors = factors.repeat(tall, axis=0)[start % tall :][: stop - start]
        factors = factors.repeat(wide, axis=1)[:, : self.shape[1]]
        return (self.values.read(start, stop).astype(np.float32) * factors).astype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Mxfp4:
    """Rows of 4-bit values, two in a byte, with one power of two for each 32 of them."""

    blocks: StoredTensor  # uint8 [..., blocks, 16]
    exponents: StoredTensor  # uint8 [..., blocks]; 127 is a factor of 1
    dtype: np.dtype = BFLOAT16

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.blocks.shape[:-2], self.blocks.shape[-2] * self.blocks.shape[-1] * 2)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        packed = self.blocks.read(start, stop)
        exponents = self.exponents.read(start, stop).astype(np.int32) - 127
        pairs = np.stack([FP4[packed & 0x0F], FP4[packed >> 4]], axis=-1)  # the lower half of a byte comes first
        values = np.ldexp(pairs.reshape(*packed.shape[:-1], -1), exponents[..., None])
        return values.reshape(packed.shape[0], *self.shape[1:]).astype(self.dtype)


def decoded(reader: ConfigReader, found: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    """The tensors with those that config.json says are quantised replaced by readable ones."""
    settings = reader.get("quantization_config")
    if settings is None:
        return dict(found)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method == "fp8":
        return _fp8(reader, settings, found)
    if method == "mxfp4":
        return _mxfp4(found)
    raise ValueError(
        f"{reader.path}: weights quantised by {method!r} are not supported; expected fp8 (DeepSeek's blocks), mxfp4 or "
        "none: get the model in bfloat16"
    )


def _fp8(reader: ConfigReader, settings: dict[str, Any], found: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"{reader.path}: expected fp8 weights in blocks, such as [128, 128], got {block}")
    read: dict[str, Readable] = {}
    for name, tensor in found.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in found:
            continue
        if not tensor.dtype.name.startswith("float8"):
            read[name] = tensor
            continue
        if len(tensor.shape) != 2:
            raise BrokenFileError(f"{tensor.path}: {name}: expected fp8 in matrices only, found {list(tensor.shape)}")
        factors = _companion(name, name + SCALE_SUFFIX, found)
        expected = tuple(-(-size // step) for size, step in zip(tensor.shape, block))
        _check_companion(factors, expected, ("float32", "bfloat16", "float16"))
        read[name] = ScaledBlocks(values=tensor, factors=factors, block=(block[0], block[1]))
    return read


def _mxfp4(found: Mapping[str, StoredTensor]) -> dict[str, Readable]:
    read: dict[str, Readable] = {}
    for name, tensor in found.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in found:
            continue
        if not name.endswith(BLOCKS):
            read[name] = tensor
            continue
        exponents = _companion(name, name.removesuffix(BLOCKS) + SCALES, found)
        _check_companion(exponents, tensor.shape[:-1], ("uint8",))
        if len(tensor.shape) < 3 or tensor.shape[-1] != 16 or tensor.dtype.name != "uint8":
            raise BrokenFileError(
                f"{tensor.path}: {name}: expected uint8 [..., blocks, 16], found {tensor.dtype}{list(tensor.shape)}"
            )
        read[name] = Mxfp4(blocks=tensor, exponents=exponents)
    return read


def _companion(name: str, wanted: str, found: Mapping[str, StoredTensor]) -> StoredTensor:
    if wanted not in found:
        raise BrokenFileError(f"{found[name].path}: {name} is quantised; expected its factors {wanted}, found none")
    return found[wanted]


def _check_companion(tensor: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.shape != shape or tensor.dtype.name not in dtypes:
        raise BrokenFileError(
            f"{tensor.path}: {tensor.name}: expected {' or '.join(dtypes)}{list(shape)}, "
            f"found {tensor.dtype}{list(tensor.shape)}"
        )
