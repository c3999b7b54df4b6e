"""Matrices of int8 as the compressed-tensors package stores them, with a scale for each output or for parts of it.

There are two formats of the same values: "int-quantized" has them as int8, "pack-quantized", which is what transformers
reads of experts, has 128 more of each as bytes, four in an int32, the first in its lowest bits.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from raggedmoe.interop.safetensors_file import BrokenFileError, StoredTensor
from raggedmoe.storage import AnyPath

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
METHOD, PACKED, PLAIN = "compressed-tensors", "pack-quantized", "int-quantized"
SUFFIXES = PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX = "_packed", "_scale", "_shape"  # of a name that ends in .weight
OFFSET = 0x80  # bytes of the packed format are the bits of an int8 but for this one


@dataclass(frozen=True, kw_only=True)
class Int8Tensor:
    """A matrix of int8, with scales for each row, or for equal parts of each row."""

    name: str
    values: StoredTensor  # int8 [rows, columns], or int32 [rows, columns / 4, rounded up]
    scales: StoredTensor  # [rows, parts]
    shape: tuple[int, ...]
    dtype: np.dtype = BFLOAT16

    @property
    def path(self) -> AnyPath:
        return self.values.path

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        stop = self.shape[0] if stop is None else stop
        product = product_dtype(self.dtype)
        scales = self.scales.read(start, stop).astype(product).repeat(self.kept_block[1], axis=1)
        return (self.read_codes(start, stop).astype(product) * scales).astype(self.dtype)

    @property
    def qtype(self) -> str:
        return "int8"

    @property
    def kept_block(self) -> tuple[int, ...]:
        """How much of each dimension shares a scale."""
        return 1, self.shape[1] // self.scales.shape[1]

    def read_codes(self, start: int, stop: int) -> np.ndarray:
        """Read some rows of values, as int8."""
        stored = self.values.read(start, stop)
        if stored.dtype == np.int8:
            return stored
        return (stored.view(np.uint8)[:, : self.shape[1]] ^ OFFSET).view(np.int8)

    @property
    def scale_dtype(self) -> str:
        """The type in which scales are held."""
        return "float32"

    def read_scales(self) -> np.ndarray:
        return self.scales.read().astype(np.float32)


def product_dtype(dtype: np.dtype) -> np.dtype:
    """Return the type in which values are multiplied by scales, to be rounded to ``dtype``: float32 at least."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def pack(values: np.ndarray) -> np.ndarray:
    """Pack int8 [rows, columns] as int32 [rows, columns / 4], the last of which is filled up with zero bytes."""
    spare = -values.shape[1] % 4
    unsigned = values.view(np.uint8) ^ OFFSET
    return np.ascontiguousarray(np.pad(unsigned, ((0, 0), (0, spare)))).view(np.int32)


def make_settings(ignored: list[str]) -> dict[str, Any]:
    """Make the quantization_config of a model whose linear layers, but for these, are int8 with scales by row."""
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def pair_tensors(
    path: AnyPath | str, settings: dict[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Int8Tensor | StoredTensor]:
    """Pair the int8 values of each matrix with their scales."""
    _check_settings(path, settings)
    matrices: dict[str, Int8Tensor] = {}
    read: set[str] = set()
    for name, tensor in tensors.items():
        is_packed = name.endswith(".weight" + PACKED_SUFFIX)
        if not is_packed and tensor.dtype != np.int8:
            continue
        weight = name.removesuffix(PACKED_SUFFIX)
        scales = _find(tensor, weight + SCALE_SUFFIX, tensors)
        read |= {name, scales.name}
        shape = tensor.shape
        if is_packed:
            stored_shape = _find(tensor, weight + SHAPE_SUFFIX, tensors)
            read.add(stored_shape.name)
            shape = _read_shape(tensor, stored_shape)
        _check_scales(weight, shape, scales)
        matrices[weight] = Int8Tensor(name=weight, values=tensor, scales=scales, shape=shape)
    return {name: tensor for name, tensor in tensors.items() if name not in read} | matrices


def _check_settings(path: AnyPath | str, settings: dict[str, Any]) -> None:
    """Require weights of int8 without zero points, in a format that is read here."""
    groups = settings.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [scheme if isinstance(scheme, dict) else {} for scheme in listed]
    weights = [scheme.get("weights") for scheme in schemes]
    formats = {settings.get("format"), *(scheme.get("format") for scheme in schemes)} - {None}
    is_int8 = bool(weights) and all(
        isinstance(of_group, dict)
        and (of_group.get("num_bits"), of_group.get("type", "int"), of_group.get("symmetric", True)) == (8, "int", True)
        for of_group in weights
    )
    if not is_int8 or not formats <= {PACKED, PLAIN}:
        raise ValueError(
            f"{path}: expected weights of compressed-tensors in int8, symmetric, as {PACKED} or {PLAIN}, got format "
            f"{settings.get('format')!r} with groups {groups!r}; get the model in bfloat16"
        )


def _find(of: StoredTensor, name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    if name not in tensors:
        raise BrokenFileError(f"{of.path}: {of.name} is quantised; expected {name} beside it, found none")
    return tensors[name]


def _read_shape(packed: StoredTensor, stored: StoredTensor) -> tuple[int, ...]:
    """Read the shape of a packed matrix, of which the packed values alone say less."""
    is_shape = stored.shape == (2,) and stored.dtype.name in ("int64", "int32")
    shape = tuple(stored.read().tolist()) if is_shape else None
    if (
        shape is None
        or packed.dtype != np.int32
        or min(shape) < 1
        or packed.shape != (shape[0], math.ceil(shape[1] / 4))
    ):
        raise BrokenFileError(
            f"{packed.path}: {packed.name}: expected int32 [rows, columns / 4] for the sizes in {stored.name}, found "
            f"{packed.dtype}{list(packed.shape)} for {shape or f'{stored.dtype}{list(stored.shape)}'}"
        )
    return shape


def _check_scales(name: str, shape: tuple[int, ...], scales: StoredTensor) -> None:
    fits = (
        len(shape) == len(scales.shape) == 2
        and scales.shape[0] == shape[0]
        and scales.shape[1] > 0
        and shape[1] % scales.shape[1] == 0
        and scales.dtype.name in ("float32", "bfloat16", "float16")
    )
    if not fits:
        raise BrokenFileError(
            f"{scales.path}: {scales.name}: expected float32, bfloat16 or float16 [rows, parts of a row] for {name} "
            f"{list(shape)}, found {scales.dtype}{list(scales.shape)}"
        )
