"""`quantise` writes a Hugging Face folder anew with its matrices in 8 bits, as transformers reads them.

What is quantised is what DeepSeek and Qwen publish in fp8: every matrix of a layer, experts, attention and dense MLPs,
but not its router, nor the projection of a multi-token-prediction module. Embedding, head, norms and biases stay too,
and in fp8 a matrix whose last block of 128 would be cut. One piece of one matrix is in memory at a time.
"""

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from raggedmoe.interop import compressed_tensors, native
from raggedmoe.interop.arrays import PIECE_BYTES
from raggedmoe.interop.companions import read_companions, write_companions
from raggedmoe.interop.folder import read_tensor_headers
from raggedmoe.interop.hf_config import read_config_json, read_model_config
from raggedmoe.interop.layout import parameter_views
from raggedmoe.interop.matching import Target, match_tensors, targets
from raggedmoe.interop.named_model import read_family, without_missing_mtp
from raggedmoe.interop.quantized import SCALE_SUFFIX as SCALE_INV
from raggedmoe.interop.quantized import ReadableTensor
from raggedmoe.interop.safetensors_file import NewTensor
from raggedmoe.interop.writing import SHARD_BYTES, new_folder, write_json, write_tensors
from raggedmoe.kernels.quantize import absmax_scale, encode
from raggedmoe.names import check_known
from raggedmoe.storage import AnyPath, ObjectPath, as_path

FORMATS = ("fp8", "int8")
BLOCK = (128, 128)  # of fp8, as DeepSeek and Qwen store it
ERRORS = "quantisation.json"  # in the folder: the error of every tensor
# Matrices that stay as they are; "projection" joins the two inputs of a multi-token-prediction module.
KEPT = ("embedding", "head", "router_kernel", "projection")
Pairs = list[tuple[Target, ReadableTensor]]


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """How far a matrix is from what it was."""

    name: str
    param: str  # what it is in every layer, such as "moe.wi_0"
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    relative: float  # root of the sum of squared differences, divided by that of the squared values
    largest: float  # difference, divided by the largest absolute value of the matrix


def quantise(
    folder: str | os.PathLike[str] | ObjectPath,
    out: str | os.PathLike[str],
    to: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = False,
) -> list[TensorError]:
    """Write a model's folder with its matrices in 8 bits, and return the error of each.

    Args:
      folder: a Hugging Face folder with weights that are not quantised.
      out: a new or an empty folder on this machine. It is written whole or not at all; the tokenizer and all else that
        belongs to the model are copied, and the errors are written to its quantisation.json.
      to: "fp8", e4m3 with a scale for each block of 128 × 128; or "int8" with a scale for each row.
      shard_bytes: the largest size of a file; a larger model is several files and an index.
      progress: show a bar on standard error.
    """
    check_known("format", to, FORMATS)
    path, target_path = as_path(folder), as_path(out)
    if isinstance(target_path, ObjectPath):
        raise ValueError(f"{out}: expected a folder of this machine; write there, and copy it to where it should be")
    if native.is_native(path):
        raise ValueError(f"{path}: expected a Hugging Face folder; make one with `raggedmoe export {path} FOLDER`")
    reader = read_config_json(path)
    family = read_family(reader)
    if reader.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: expected weights that are not quantised, found a quantization_config; "
            f"`raggedmoe export {path} FOLDER` writes them in bfloat16"
        )
    if "per_expert" not in family.experts:
        raise ValueError(
            f"{path}: expected a family whose experts are matrices of their own, got {family.model_type}, whose "
            "experts have biases, so that transformers reads them in no format of 8 bits"
        )
    tensors: dict[str, ReadableTensor] = {**read_tensor_headers(path)}
    config = without_missing_mtp(path, read_model_config(reader, family.read_config), tensors)
    pairs = match_tensors(path, family, config, tensors)
    matrices: list[Matrix] = []
    written: list[NewTensor] = []
    ignored: list[str] = []
    for target, source in _sources(pairs, list(targets(family, config, "per_expert"))):
        if _is_quantised(path, target, to):
            matrices.append(Matrix(target, source, to))
            written += matrices[-1].tensors()
        else:
            written.append(_copy_unchanged(target, source))
            ignored += [target.name.removesuffix(".weight")] if len(target.shape) == 2 else []
    if config.tied_embeddings and "lm_head" not in ignored:
        ignored.append("lm_head")  # it has no tensor of its own, but is a layer of theirs
    config_json = {**reader.values, "quantization_config": _settings(to, ignored)}
    with new_folder(Path(str(target_path))) as partial:
        write_json(partial / "config.json", config_json)
        write_tensors(partial, written, metadata={"format": "pt"}, shard_bytes=shard_bytes, progress=progress)
        write_companions(read_companions(path), partial)
        errors = [matrix.error() for matrix in matrices]
        write_json(partial / ERRORS, {"format": to, "tensors": [asdict(error) for error in errors]})
    return errors


def _is_quantised(path: AnyPath, target: Target, to: str) -> bool:
    """Tell whether a tensor is quantised: matrices of layers are, but for those that transformers would misread.

    transformers 5 finds the size of a block of fp8 by division, where it makes arrays of them: 192 rows with two scales
    are 96 and 96 to it, not 128 and 64. Its own quantiser leaves out matrices with such blocks as well.
    """
    param = target.params[0].rpartition(".")[2]
    if len(target.shape) != 2 or param in KEPT or target.copy:
        return False
    if to == "int8" or all(size <= step or size % step == 0 for size, step in zip(target.shape, BLOCK)):
        return True
    if target.entry.per_expert:
        raise ValueError(
            f"{path}: expected experts of 128 rows and columns, or a multiple of it, for fp8, got {target.name} "
            f"{list(target.shape)}, whose last block transformers misreads; use int8, which has scales by row"
        )
    return False


def _settings(to: str, ignored: list[str]) -> dict[str, Any]:
    """Make the quantization_config; ``ignored`` names the modules with matrices that stay as they are."""
    if to == "int8":
        return compressed_tensors.make_settings(ignored)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [*BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ignored,
    }


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """A tensor of one layout, in the tensor of another one that holds it."""

    target: Target
    holder: Target
    tensor: ReadableTensor

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read some rows."""
        if self.holder.name == self.target.name:
            return self.tensor.read(start, stop)
        return self._whole()[start:stop]

    def _whole(self) -> np.ndarray:
        """Cut an expert's matrix from those of all experts, whose layout begins with them; or read a tensor whole."""
        depth = len(self.holder.index)
        inside = self.target.index[depth:]
        rows = slice(inside[0], inside[0] + 1) if inside else slice(0, self.tensor.shape[0])
        stored = self.tensor.read(rows.start, rows.stop)
        views = parameter_views(stored, self.holder.entry.layout, self.holder.specs, rows.stop - rows.start)
        whole = np.empty(self.target.shape, self.dtype)
        layout, specs = self.target.entry.layout, self.target.specs
        first = specs[0].shape[specs[0].axes.index(layout.axes[0])]
        for param, view in zip(self.target.params, parameter_views(whole, layout, specs, first)):
            part = views[self.holder.params.index(param)]
            view[...] = part[0] if inside else part
        return whole


def _sources(pairs: Pairs, wanted: list[Target]) -> Iterator[tuple[Target, HeldTensor]]:
    """Find for each tensor of the layout that is written the one that has it; copies follow as they are."""
    by_place = {(param, pair[0].index): pair for pair in pairs if not pair[0].copy for param in pair[0].params}
    for target in wanted:
        param, index = target.params[0], target.index
        holder, tensor = by_place.get((param, index)) or by_place[param, index[:-1]]
        yield target, HeldTensor(target=target, holder=holder, tensor=tensor)
    for target, tensor in pairs:
        if target.copy:
            yield target, HeldTensor(target=target, holder=target, tensor=tensor)


def _copy_unchanged(target: Target, source: HeldTensor) -> NewTensor:
    step = max(1, PIECE_BYTES // max(1, math.prod(target.shape[1:]) * source.dtype.itemsize))
    pieces = (source.read(start, min(start + step, target.shape[0])) for start in range(0, target.shape[0], step))
    return NewTensor(name=target.name, dtype=source.dtype, shape=target.shape, pieces=pieces)


class Matrix:
    """A matrix on its way to a file: values first, piece by piece, then their scales; its error is known after that."""

    def __init__(self, target: Target, source: HeldTensor, to: str) -> None:
        self.target = target
        self.source = source
        self.to = to
        self.scales: list[np.ndarray] = []
        self.squared_error = self.squared = self.largest_error = self.largest = 0.0

    def tensors(self) -> list[NewTensor]:
        """Describe the tensors that are written, in the order in which they must be."""
        name, (rows, columns) = self.target.name, self.target.shape
        if self.to == "fp8":
            blocks = tuple(-(-size // step) for size, step in zip((rows, columns), BLOCK))
            return [
                _new(name, ml_dtypes.float8_e4m3fn, (rows, columns), self._values()),
                _new(name + SCALE_INV, np.float32, blocks, iter(self.scales)),
            ]
        packed, scale, shape = (name + suffix for suffix in compressed_tensors.SUFFIXES)
        return [
            _new(packed, np.int32, (rows, -(-columns // 4)), map(compressed_tensors.pack, self._values())),
            _new(scale, self._scale_dtype(), (rows, 1), iter(self.scales)),
            _new(shape, np.int64, (2,), iter([np.asarray([rows, columns])])),
        ]

    def _scale_dtype(self) -> np.dtype:
        """Return the type of scales: of int8 that of the weights, in which transformers makes arrays of them."""
        wide = np.dtype(np.float32)
        return wide if self.to == "fp8" or self.source.dtype.itemsize > wide.itemsize else self.source.dtype

    def _values(self) -> Iterator[np.ndarray]:
        rows, columns = self.target.shape
        tall = BLOCK[0] if self.to == "fp8" else 1
        step = max(1, PIECE_BYTES // (4 * columns * tall)) * tall
        for start in range(0, rows, step):
            piece = self.source.read(start, min(start + step, rows)).astype(np.float32)
            if not np.isfinite(piece).all():
                raise ValueError(
                    f"{self.source.tensor.path}: {self.target.name}: expected finite weights, found infinite ones or "
                    "NaN; nothing was written"
                )
            values, scales = quantise_rows(piece, self.to, self._scale_dtype())
            self._add_error(piece, values, scales)
            self.scales.append(scales)
            yield values

    def _add_error(self, piece: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
        """Compare what a reader will compute of a piece with what it was."""
        tall, wide = BLOCK if self.to == "fp8" else (1, piece.shape[1])
        factors = scales.astype(np.float32).repeat(tall, axis=0)[: len(piece)]
        difference = values.astype(np.float32) * factors.repeat(wide, axis=1)[:, : piece.shape[1]] - piece
        self.squared_error += float(np.sum(np.square(difference), dtype=np.float64))
        self.squared += float(np.sum(np.square(piece), dtype=np.float64))
        self.largest_error = max(self.largest_error, float(np.abs(difference).max()))
        self.largest = max(self.largest, float(np.abs(piece).max()))

    def error(self) -> TensorError:
        """Return the error, once everything is written."""
        param = self.target.params[0]
        return TensorError(
            name=self.target.name,
            param=" ".join(name.split(".", 3 if param.startswith("stacks.") else 2)[-1] for name in self.target.params),
            shape=self.target.shape,
            bytes_before=math.prod(self.target.shape) * self.source.dtype.itemsize,
            bytes_after=sum(tensor.num_bytes for tensor in self.tensors()),
            relative=math.sqrt(self.squared_error / self.squared) if self.squared else 0.0,
            largest=self.largest_error / self.largest if self.largest else 0.0,
        )


def _new(name: str, dtype: Any, shape: tuple[int, ...], pieces: Iterator[np.ndarray]) -> NewTensor:
    return NewTensor(name=name, dtype=np.dtype(dtype), shape=shape, pieces=pieces)


def quantise_rows(rows: np.ndarray, to: str, scale_dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Quantise float32 rows: values of their shape, and scales as they are stored. Blocks begin at the first row."""
    if to == "int8":
        values, scales = _encode(rows, "int8", (len(rows), 1), scale_dtype)
        return np.asarray(values), np.asarray(scales)
    padded = np.pad(rows, [(0, -size % step) for size, step in zip(rows.shape, BLOCK)])
    num_blocks = (padded.shape[0] // BLOCK[0], padded.shape[1] // BLOCK[1])
    values, scales = _encode(padded, "float8_e4m3fn", num_blocks, scale_dtype)
    return np.asarray(values)[: rows.shape[0], : rows.shape[1]], np.asarray(scales)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _encode(
    rows: jax.Array, qtype: str, scale_shape: tuple[int, int], scale_dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Make values and scales, rounded to their type first, so that the values are right for what will be read."""
    smallest = jnp.finfo(scale_dtype).smallest_normal
    scales = jnp.maximum(absmax_scale(rows, qtype, scale_shape).astype(scale_dtype), smallest)
    return encode(rows, scales.astype(rows.dtype), qtype), scales
