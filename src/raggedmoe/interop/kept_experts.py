"""Experts that stay quantised as a checkpoint stores them, in our layout: values and scales, never widened."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedmoe.interop.arrays import aligned_empty, to_device
from raggedmoe.interop.layout import parameter_views
from raggedmoe.interop.matching import Target
from raggedmoe.interop.quantized import QuantizedTensor, ReadableTensor
from raggedmoe.kernels.qarray import QArray, QuantizedForm
from raggedmoe.params import Params, ParamSpec

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


def check_are_arrays(params: Params) -> None:
    """Require parameters that can be written in our own format: all of them are arrays."""
    quantised = [name for name, array in params.items() if isinstance(array, QArray)]
    if quantised:
        raise ValueError(
            f"expected a model of arrays to write, got quantised {', '.join(quantised[:3])}"
            f"{' and others' if len(quantised) > 3 else ''}; write it with raggedmoe.interop.save, or load it without "
            "keep_quantised"
        )


def kept_forms(pairs: Sequence[tuple[Target, ReadableTensor]]) -> dict[str, QuantizedForm]:
    """Find the experts' matrices of which every tensor is quantised alike, so that they can stay so, and say how."""
    forms: dict[str, set[QuantizedForm | None]] = {}
    for target, tensor in pairs:
        for param, spec in zip(target.params, target.specs):
            if param.endswith(MATRICES):
                forms.setdefault(param, set()).add(_form(target, spec, tensor))
    alike = {param: distinct.pop() for param, distinct in forms.items() if len(distinct) == 1}
    return {param: form for param, form in alike.items() if form is not None}


def _form(target: Target, spec: ParamSpec, tensor: ReadableTensor) -> QuantizedForm | None:
    """Return how a tensor is quantised, as a part of a parameter; None: it cannot stay as it is stored."""
    if not isinstance(tensor, QuantizedTensor):
        return None
    dims = target.entry.layout.dims
    if any(len(dim) > 1 and block > 1 for dim, block in zip(dims, tensor.kept_block)):
        return None  # a block that holds numbers of several parameters
    if tensor.qtype == "mxfp4" and spec.shape[-1] % 2:
        return None  # two neighbours are not in one row
    blocks = {axis: block for dim, block in zip(dims, tensor.kept_block) for axis in dim}
    rows, columns = (blocks[axis] for axis in spec.axes[-2:])
    scale_dtype = "uint8" if tensor.qtype == "mxfp4" else "float32"
    return QuantizedForm(qtype=tensor.qtype, block=(rows, columns), scale_dtype=scale_dtype)


def make_buffer(spec: ParamSpec, form: QuantizedForm) -> KeptBuffer:
    """Allocate a parameter, with all layers and experts."""
    struct = form.struct(spec.shape)
    values, scales = (aligned_empty(part.shape, part.dtype) for part in (struct.qvalue, struct.scale))
    return KeptBuffer(values=values, scales=scales, qtype=form.qtype)


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
    parts_of = zip(target.specs, buffers)
    specs = [replace(spec, shape=buffer.scales.shape[len(target.index) :]) for spec, buffer in parts_of]
    first = target.entry.layout.axes[0]
    parts = parameter_views(stored, target.entry.layout, specs, specs[0].shape[specs[0].axes.index(first)])
    for buffer, part in zip(buffers, parts):
        buffer.scales[target.index] = part
