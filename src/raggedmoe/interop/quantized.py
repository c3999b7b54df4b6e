"""Quantized checkpoints: DeepSeek's fp8 with a scale for each block, gpt-oss's mxfp4, int8 of compressed-tensors.

A dequantized tensor takes the place of the stored ones that it is made of, and is read like them, some rows at a time:
in bfloat16, unless another type is asked for. `kept_weights.py` reads its values and scales apart instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from raggedmoe.interop import compressed_tensors
from raggedmoe.interop.compressed_tensors import Int8Tensor, product_dtype
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.safetensors_file import BrokenFileError, StoredTensor
from raggedmoe.storage import AnyPath

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)  # exponents of two alone
# The sixteen values of fp4 (e2m1): a sign, two bits of exponent and one of mantissa.
FP4_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"


@runtime_checkable
class ReadableTensor(Protocol):
    """A tensor of a checkpoint, stored as it is or quantized."""

    @property
    def path(self) -> AnyPath: ...
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
class BlockFp8Tensor:
    """A matrix of fp8 with one scale for each block of it."""

    values: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    dtype: np.dtype = BFLOAT16

    @property
    def path(self) -> AnyPath:
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
        product = product_dtype(self.dtype)
        scales = self.scales.read(start // tall, -(-stop // tall)).astype(product)
        scales = scales.repeat(tall, axis=0)[start % tall :][: stop - start]
        scales = scales.repeat(wide, axis=1)[:, : self.shape[1]]
        return (self.values.read(start, stop).astype(product) * scales).astype(self.dtype)

    @property
    def qtype(self) -> str:
        return self.values.dtype.name

    @property
    def kept_block(self) -> tuple[int, ...]:
        """How much of each dimension shares a scale, if all that do are as many: a block that is cut is divided."""
        return tuple(size if size <= step else math.gcd(size, step) for size, step in zip(self.shape, self.block))

    def read_codes(self, start: int, stop: int) -> np.ndarray:
        return self.values.read(start, stop).view(np.uint8)

    @property
    def scale_dtype(self) -> str:
        """The type in which scales are held: float32, or of shared exponents their bits."""
        return "uint8" if self.scales.dtype == E8M0 else "float32"

    def read_scales(self) -> np.ndarray:
        scales = self.scales.read()
        scales = scales.view(np.uint8) if scales.dtype == E8M0 else scales.astype(np.float32)
        for dim, (size, step, kept) in enumerate(zip(self.shape, self.block, self.kept_block)):
            scales = scales.take(np.arange(0, size, kept) // step, axis=dim)
        return scales


@dataclass(frozen=True, kw_only=True)
class Mxfp4Tensor:
    """Rows of fp4 values, two in a byte, with one power of two as the scale of each 32 of them."""

    blocks: StoredTensor  # uint8 [..., blocks, 16]
    exponents: StoredTensor  # uint8 [..., blocks]; 127 is a factor of 1
    dtype: np.dtype = BFLOAT16

    @property
    def path(self) -> AnyPath:
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
        pairs = np.stack(
            [FP4_VALUES[packed & 0x0F], FP4_VALUES[packed >> 4]], axis=-1
        )  # the lower half of a byte comes first
        values = np.ldexp(pairs.reshape(*packed.shape[:-1], -1), exponents[..., None])
        return values.reshape(packed.shape[0], *self.shape[1:]).astype(self.dtype)

    @property
    def qtype(self) -> str:
        return "mxfp4"

    @property
    def kept_block(self) -> tuple[int, ...]:
        return (*(1,) * (len(self.shape) - 1), 32)

    def read_codes(self, start: int, stop: int) -> np.ndarray:
        """Read values of four bits, each in a byte of its own."""
        packed = self.blocks.read(start, stop)
        pairs = np.stack([packed & 0x0F, packed >> 4], axis=-1)
        return pairs.reshape(packed.shape[0], *self.shape[1:])

    @property
    def scale_dtype(self) -> str:
        return "uint8"

    def read_scales(self) -> np.ndarray:
        return self.exponents.read()


QuantizedTensor = BlockFp8Tensor | Mxfp4Tensor | Int8Tensor


def read_as(tensor: ReadableTensor, dtype: Any) -> ReadableTensor:
    """Have a quantised tensor dequantised to a type, rounded once; others are read as they are stored."""
    return replace(tensor, dtype=np.dtype(dtype)) if isinstance(tensor, QuantizedTensor) else tensor


def dequantize_tensors(reader: ConfigReader, tensors: Mapping[str, StoredTensor]) -> dict[str, ReadableTensor]:
    """Replace the tensors that config.json says are quantized by dequantized ones."""
    settings = reader.get("quantization_config")
    if settings is None:
        return dict(tensors)
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method == "fp8":
        return _fp8(reader, settings, tensors)
    if method == "mxfp4":
        return _mxfp4(tensors)
    if method == compressed_tensors.METHOD:
        return {**compressed_tensors.pair_tensors(reader.path, settings, tensors)}
    raise ValueError(
        f"{reader.path}: weights quantised by {method!r} are not supported; expected fp8 (DeepSeek's blocks), mxfp4, "
        f"{compressed_tensors.METHOD} (int8) or none: get the model in bfloat16"
    )


def _fp8(
    reader: ConfigReader, settings: dict[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, ReadableTensor]:
    """Pair each fp8 matrix with its scales."""
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"{reader.path}: expected fp8 weights in blocks, such as [128, 128], got {block}")
    readable: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in tensors:
            continue
        if not tensor.dtype.name.startswith("float8"):
            readable[name] = tensor
            continue
        if len(tensor.shape) != 2:
            raise BrokenFileError(f"{tensor.path}: {name}: expected fp8 in matrices only, found {list(tensor.shape)}")
        scales = _scale_tensor(name, name + SCALE_SUFFIX, tensors)
        expected = tuple(-(-size // step) for size, step in zip(tensor.shape, block))
        _check_scales(scales, expected, ("float32", "bfloat16", "float16", E8M0.name))
        readable[name] = BlockFp8Tensor(values=tensor, scales=scales, block=(block[0], block[1]))
    return readable


def _mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, ReadableTensor]:
    """Pair each tensor of fp4 blocks with its scales."""
    readable: dict[str, ReadableTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors:
            continue
        if not name.endswith(BLOCKS):
            readable[name] = tensor
            continue
        exponents = _scale_tensor(name, name.removesuffix(BLOCKS) + SCALES, tensors)
        _check_scales(exponents, tensor.shape[:-1], ("uint8",))
        if len(tensor.shape) < 3 or tensor.shape[-1] != 16 or tensor.dtype.name != "uint8":
            raise BrokenFileError(
                f"{tensor.path}: {name}: expected uint8 [..., blocks, 16], found {tensor.dtype}{list(tensor.shape)}"
            )
        readable[name] = Mxfp4Tensor(blocks=tensor, exponents=exponents)
    return readable


def _scale_tensor(name: str, scale_name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """Find the scales of a quantized tensor."""
    if scale_name not in tensors:
        raise BrokenFileError(
            f"{tensors[name].path}: {name} is quantised; expected its factors {scale_name}, found none"
        )
    return tensors[scale_name]


def _check_scales(tensor: StoredTensor, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if tensor.shape != shape or tensor.dtype.name not in dtypes:
        raise BrokenFileError(
            f"{tensor.path}: {tensor.name}: expected {' or '.join(dtypes)}{list(shape)}, "
            f"found {tensor.dtype}{list(tensor.shape)}"
        )
