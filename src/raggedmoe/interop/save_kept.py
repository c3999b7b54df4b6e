"""Writing matrices that stayed quantised: in the format in which they came, value for value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from raggedmoe.interop import compressed_tensors
from raggedmoe.interop.arrays import fetch_to_host
from raggedmoe.interop.compressed_tensors import METHOD
from raggedmoe.interop.layout import first_axis, parameter_views, stored_shape
from raggedmoe.interop.matching import Target
from raggedmoe.interop.quantized import BLOCKS, E8M0, SCALES
from raggedmoe.interop.quantized import SCALE_SUFFIX as SCALE_INV
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.module import Decoder
from raggedmoe.params import ParamSpec

METHODS = {"fp8": "float8_e4m3fn", METHOD: "int8", "mxfp4": "mxfp4"}


@dataclass(frozen=True, kw_only=True)
class KeptFormat:
    """The quantization_config of the checkpoint that a model's matrices came from."""

    settings: Mapping[str, Any]

    @property
    def method(self) -> str:
        return str(self.settings["quant_method"])

    @property
    def expert_layout(self) -> str:
        """The layout in which the experts are written."""
        return "mxfp4" if self.method == "mxfp4" else "per_expert"

    def quantization_config(self, stays: list[str]) -> dict[str, Any]:
        """Make the quantization_config of what is written; ``stays`` names the other modules with matrices."""
        key = "ignore" if self.method == METHOD else "modules_to_not_convert"
        kept = {**self.settings, key: sorted({*(self.settings.get(key) or ()), *stays})}
        return kept | ({"format": compressed_tensors.PACKED} if self.method == METHOD else {})


def kept_format(model: Decoder, original: Mapping[str, Any]) -> KeptFormat | None:
    """Find the format of a model's quantised matrices in ``original``, its config.json; None: it has none."""
    stored = {name: array for name, array in model.params.items() if isinstance(array, QArray)}
    if not stored:
        return None
    settings = original.get("quantization_config")
    formats = {array.qtype for array in stored.values()}
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or {METHODS.get(str(method))} != formats:
        raise ValueError(
            f"expected the config.json of the checkpoint that the matrices are stored as in, with quantization_config "
            f"for {', '.join(sorted(map(str, formats)))}, got {method!r}; give its folder as companions"
        )
    return KeptFormat(settings=settings)


def widened_modules(targets: Sequence[Target], params: Mapping[str, Any]) -> list[str]:
    """Name the modules whose matrices are written as arrays."""
    matrices = [target for target in targets if len(target.shape) == 2]
    return [
        target.name.removesuffix(".weight") for target in matrices if not isinstance(params[target.params[0]], QArray)
    ]


def kept_tensors(target: Target, params: Mapping[str, Any], kept: KeptFormat, dtype: np.dtype) -> list[NewTensor]:
    """Describe the tensors of a target whose parameters are quantised: values, and what belongs to them.

    Scales, which are held in float32, are written in ``dtype``, that of the other weights, if it holds them exactly.
    """
    operands = [params[name] for name in target.params]
    codes = _pieces(target, operands)
    if kept.method == "mxfp4":
        name = target.name.removesuffix(BLOCKS)
        blocks = (*target.shape[:-1], target.shape[-1] // 32)
        packed = (piece[..., 0::2] | piece[..., 1::2] << 4 for piece in codes)
        return [
            _new(name + BLOCKS, np.uint8, (*blocks, 16), packed),
            _new(name + SCALES, np.uint8, blocks, _scales(target, operands, blocks)),
        ]
    rows, columns = target.shape
    held = [fetch_to_host(operand.scale, target.index) for operand in operands]
    scale_dtype = dtype if all(np.array_equal(array.astype(dtype), array) for array in held) else np.dtype(np.float32)
    scale_dtype = E8M0 if operands[0].scale.dtype == np.uint8 else scale_dtype
    if kept.method == METHOD:
        packed_name, scale, shape = (target.name + suffix for suffix in compressed_tensors.SUFFIXES)
        num = _held_scales(target, held)[1][1]
        packed = (compressed_tensors.pack(piece.view(np.int8)) for piece in codes)
        return [
            _new(packed_name, np.int32, (rows, -(-columns // 4)), packed),
            _new(scale, scale_dtype, (rows, num), _scales(target, operands, (rows, num))),
            _new(shape, np.int64, (2,), iter([np.asarray([rows, columns])])),
        ]
    block = kept.settings["weight_block_size"]
    scale_shape = tuple(-(-size // step) for size, step in zip(target.shape, block))
    return [
        _new(target.name, ml_dtypes.float8_e4m3fn, target.shape, (piece.view("float8_e4m3fn") for piece in codes)),
        _new(target.name + SCALE_INV, scale_dtype, scale_shape, _scales(target, operands, scale_shape, tuple(block))),
    ]


def _new(name: str, dtype: Any, shape: tuple[int, ...], pieces: Iterator[np.ndarray]) -> NewTensor:
    return NewTensor(name=name, dtype=np.dtype(dtype), shape=shape, pieces=pieces)


def _pieces(target: Target, operands: list[QArray]) -> Iterator[np.ndarray]:
    """Yield the values of a stored tensor, one in a byte: whole, or of all experts one by one."""
    layout, specs = target.entry.layout, target.specs
    num = specs[0].shape[first_axis(layout, specs[0])] if layout.axes[0] == "expert" else 1
    size = specs[0].shape[first_axis(layout, specs[0])]
    step, rows = size // num, target.shape[0] // num
    for first in range(0, size, step):
        piece = np.empty((rows, *target.shape[1:]), np.uint8)
        for operand, spec, part in zip(operands, specs, parameter_views(piece, layout, specs, step)):
            where: list[slice] = [slice(None)] * len(spec.shape)
            where[first_axis(layout, spec)] = slice(first, first + step)
            codes = fetch_to_host(operand.qvalue, (*target.index, *where)).view(np.uint8)
            if operand.qtype == "mxfp4":
                codes = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
            part[...] = codes
        yield piece


def _scales(
    target: Target, operands: list[QArray], shape: tuple[int, ...], block: tuple[int, ...] | None = None
) -> Iterator[np.ndarray]:
    """Yield a stored tensor's scales. Those of a block that was held in equal parts are all alike, so one is taken."""
    held, layout = [fetch_to_host(operand.scale, target.index) for operand in operands], target.entry.layout
    specs, of_dims = _held_scales(target, held)
    whole = np.empty(of_dims, held[0].dtype)
    first = specs[0].shape[first_axis(layout, specs[0])]
    for array, part in zip(held, parameter_views(whole, layout, specs, first)):
        part[...] = array
    for dim, step in enumerate(block or ()):
        size = target.shape[dim]
        held_step = size // whole.shape[dim]
        whole = whole.take(np.arange(shape[dim]) * step // held_step, axis=dim)
    whole = whole.reshape(shape)
    yield whole.view(E8M0) if block and whole.dtype == np.uint8 else whole


def _held_scales(target: Target, held: Sequence[np.ndarray]) -> tuple[list[ParamSpec], tuple[int, ...]]:
    """Declare a target's scales as they are held, and return how many there are along each stored dimension."""
    specs = [replace(spec, shape=array.shape) for spec, array in zip(target.specs, held)]
    return specs, stored_shape(target.entry.layout, specs)
