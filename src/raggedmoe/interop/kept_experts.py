"""Experts that stay quantised as a checkpoint stores them, in our layout: values and scales, never widened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedmoe.interop.arrays import aligned_empty, to_device
from raggedmoe.interop.layout import parameter_views
from raggedmoe.interop.matching import Target
from raggedmoe.interop.quantized import QuantizedTensor, ReadableTensor
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.module import Decoder
from raggedmoe.params import ParamSpec

MATRICES = (".moe.wi_0", ".moe.wi_1", ".moe.wo")


@dataclass(frozen=True, kw_only=True)
class KeptBuffer:
    """The values and scales of one parameter, while they are read."""

    values: np.ndarray  # int8, or bits in uint8; of mxfp4 two in a byte
    scales: np.ndarray
    qtype: str

    def to_device(self) -> QArray:
        """Make the array that the layers are given."""
        return QArray(to_device(self.values), to_device(self.scales), None, self.qtype)


def check_is_of_arrays(model: Decoder) -> None:
    """Require a model that can be written: all of its parameters are arrays."""
    quantised = [name for name, array in model.params.items() if isinstance(array, QArray)]
    if quantised:
        raise ValueError(
            f"expected a model of arrays to write, got quantised {', '.join(quantised[:3])}"
            f"{' and others' if len(quantised) > 3 else ''}; write it with raggedmoe.interop.save, or load it without "
            "keep_quantised"
        )


def kept_params(pairs: Sequence[tuple[Target, ReadableTensor]]) -> set[str]:
    """Find the experts' matrices of which every tensor is quantised alike, so that they can stay as they are."""
    forms: dict[str, set[object]] = {}
    for target, tensor in pairs:
        for param, spec in zip(target.params, target.specs):
            if param.endswith(MATRICES):
                forms.setdefault(param, set()).add(_form(target, spec, tensor))
    return {param for param, param_forms in forms.items() if len(param_forms) == 1 and None not in param_forms}


def _form(target: Target, spec: ParamSpec, tensor: ReadableTensor) -> object:
    """Return what must be the same for all tensors of a parameter; None: it cannot stay as it is stored."""
    if not isinstance(tensor, QuantizedTensor):
        return None
    dims = target.entry.layout.dims
    if any(len(dim) > 1 and block > 1 for dim, block in zip(dims, tensor.kept_block)):
        return None  # a block that holds numbers of several parameters
    if tensor.qtype == "mxfp4" and spec.shape[-1] % 2:
        return None  # two neighbours are not in one row
    return tensor.qtype, _scale_shape(target, spec, tensor)


def _scale_shape(target: Target, spec: ParamSpec, tensor: QuantizedTensor) -> tuple[int, ...]:
    """Return the shape of a parameter's scales: each of its axes divided by what shares a scale there."""
    blocks = {axis: block for dim, block in zip(target.entry.layout.dims, tensor.kept_block) for axis in dim}
    return tuple(size // blocks[axis] for axis, size in zip(spec.axes, spec.shape))


def make_buffer(param: str, whole: ParamSpec, target: Target, tensor: QuantizedTensor) -> KeptBuffer:
    """Allocate a parameter; ``whole`` declares it with all layers and experts."""
    spec = target.specs[target.params.index(param)]
    lead = whole.shape[: len(target.index)]
    shape = whole.shape if tensor.qtype != "mxfp4" else (*whole.shape[:-1], whole.shape[-1] // 2)
    scales = (*lead, *_scale_shape(target, spec, tensor))
    dtype = np.uint8 if tensor.qtype == "mxfp4" else np.float32
    codes = np.int8 if tensor.qtype == "int8" else np.uint8
    return KeptBuffer(values=aligned_empty(shape, codes), scales=aligned_empty(scales, dtype), qtype=tensor.qtype)


def fill_values(target: Target, piece: np.ndarray, place: slice, axis: int, buffers: Sequence[KeptBuffer]) -> None:
    """Write some rows of a tensor's values, one in a byte, to ``place`` along that axis of its parameters."""
    parts = parameter_views(piece, target.entry.layout, target.specs, place.stop - place.start)
    for buffer, spec, part in zip(buffers, target.specs, parts):
        where: list[slice] = [slice(None)] * len(spec.shape)
        if buffer.qtype == "mxfp4":
            part = part[..., 0::2] | part[..., 1::2] << 4
        where[axis] = place
        at: tuple[int | slice, ...] = (*target.index, *where)
        buffer.values[at] = part


def fill_scales(target: Target, tensor: QuantizedTensor, buffers: Sequence[KeptBuffer]) -> None:
    """Write a tensor's scales to those of its parameters."""
    stored = tensor.read_scales()
    specs = [replace(spec, shape=_scale_shape(target, spec, tensor)) for spec in target.specs]
    first = target.entry.layout.axes[0]
    parts = parameter_views(stored, target.entry.layout, specs, specs[0].shape[specs[0].axes.index(first)])
    for buffer, part in zip(buffers, parts):
        buffer.scales[target.index] = part
