"""Matrices that stay quantised as a checkpoint stores them, in our layout: values and scales, never widened."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raggedmoe.interop.arrays import aligned_empty, to_device
from raggedmoe.interop.layout import PARAM_AXIS, axis_sizes, first_axis, parameter_views
from raggedmoe.interop.matching import Target
from raggedmoe.interop.quantized import QuantizedTensor, ReadableTensor
from raggedmoe.kernels.qarray import QArray, QuantizedForm
from raggedmoe.lora import is_matrix
from raggedmoe.params import Params, ParamSpec

WHOLE = ("embedding", "head", "router_kernel")  # matrices that are no layer's, or that are used in float32


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
    """Find the matrices of layers of which every tensor is quantised alike, so that they can stay so, and say how."""
    forms: dict[str, set[QuantizedForm | None]] = {}
    for target, tensor in pairs:
        for number, (param, spec) in enumerate(zip(target.params, target.specs)):
            if is_matrix(spec) and param.rpartition(".")[2] not in WHOLE:
                forms.setdefault(param, set()).add(_form(target, number, tensor))
    alike = {param: found.pop() for param, found in forms.items() if len(found) == 1}
    kept = {param: form for param, form in alike.items() if form is not None}
    # A tensor's parameters stay quantised all together.
    apart = {param for target, _ in pairs for param in target.params if not all(name in kept for name in target.params)}
    return {param: form for param, form in kept.items() if param not in apart}


def _form(target: Target, number: int, tensor: ReadableTensor) -> QuantizedForm | None:
    """Return how a tensor is quantised, as one of its parameters; None: it cannot stay as it is stored."""
    if not isinstance(tensor, QuantizedTensor):
        return None
    spec, blocks = target.specs[number], axis_blocks(target, tensor)
    if blocks is None or (tensor.qtype == "mxfp4" and spec.shape[-1] % 2):  # two neighbours that are not in one row
        return None
    if tensor.qtype in ("int8", "mxfp4") and math.prod(blocks) < math.prod(tensor.kept_block):
        return None  # divided, it could not be written in its format again
    axes = [axis.split("+")[number] if "+" in axis else axis for axis in target.entry.layout.axes]
    of_axis = dict(zip(axes, blocks))
    return QuantizedForm(
        qtype=tensor.qtype, block=tuple(of_axis[axis] for axis in spec.axes), scale_dtype=tensor.scale_dtype
    )


def axis_blocks(target: Target, tensor: QuantizedTensor) -> list[int] | None:
    """Say how much of each axis of a tensor's layout shares a scale, if all that do are as many; None: they cannot be.

    A dimension of two axes, heads and their width, has blocks of several whole heads, or of equal parts of one. Others
    are divided, and so are those that hold numbers of two parameters that follow one another: that repeats scales.
    """
    layout, blocks = target.entry.layout, list[int]()
    sizes = axis_sizes(layout, target.specs)
    for dim, block in zip(layout.dims, tensor.kept_block):
        *outer, inner = dim
        parts = [sizes[inner]]
        if "+" in inner:
            parts = [spec.shape[spec.axes.index(part)] for spec, part in zip(target.specs, inner.split("+"))]
        whole, rest = divmod(block, sizes[inner])
        if not outer and len(parts) == 1:
            blocks.append(block)
        elif block == 1:
            blocks += [1] * len(dim)
        elif PARAM_AXIS in dim or len(outer) > 1:
            return None
        elif outer and len(parts) == 1 and not rest and not sizes[outer[0]] % whole:
            blocks += [whole, sizes[inner]]
        else:
            blocks += [1] * len(outer) + [math.gcd(block, *parts)]
    return blocks


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
    stored, layout, blocks = tensor.read_scales(), target.entry.layout, axis_blocks(target, tensor)
    assert blocks is not None
    of_axis = dict(zip(layout.axes, blocks))
    for dim, (axes, block) in enumerate(zip(layout.dims, tensor.kept_block)):
        stored = stored.repeat(block // math.prod(of_axis[axis] for axis in axes), axis=dim)
    parts_of = zip(target.specs, buffers)
    specs = [replace(spec, shape=buffer.scales.shape[len(target.index) :]) for spec, buffer in parts_of]
    parts = parameter_views(stored, layout, specs, specs[0].shape[first_axis(layout, specs[0])])
    for buffer, part in zip(buffers, parts):
        buffer.scales[target.index] = part
