"""How a checkpoint lays out a tensor, written as in einops with the axis names of our `ParamSpec`.

``"(head head_dim) model_dim"`` is a matrix whose rows are the axes head and head_dim merged into one dimension. Two
signs more describe a tensor that holds several of our parameters: ``nope_dim+value_dim`` is an axis in which they
follow one another, and ``&`` is an axis that counts them, as gpt-oss interleaves gate and up. Reshapes and transposes
follow from the names alone.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raggedmoe.params import ParamSpec

PARAM_AXIS = "&"  # the axis that counts the parameters of a tensor


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """A parsed layout: the dimensions of the stored tensor, each of one axis or of several that are merged."""

    text: str
    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of all dimensions, in order."""
        return tuple(axis for dim in self.dims for axis in dim)


def parse_layout(text: str) -> TensorLayout:
    """Parse the text of a layout."""
    dims = [tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\S+", text)]
    return TensorLayout(text=text, dims=tuple(dims))


def axis_sizes(layout: TensorLayout, specs: Sequence[ParamSpec]) -> dict[str, int]:
    """Return the size of each axis of a layout."""
    sizes: dict[str, int] = {PARAM_AXIS: len(specs)}
    for spec in specs:
        sizes.update(zip(spec.axes, spec.shape))
    for axis in layout.axes:
        if "+" in axis:
            sizes[axis] = sum(sizes[part] for part in axis.split("+"))
    return {axis: sizes[axis] for axis in layout.axes}


def stored_shape(layout: TensorLayout, specs: Sequence[ParamSpec]) -> tuple[int, ...]:
    """Return the shape that the checkpoint's tensor must have."""
    sizes = axis_sizes(layout, specs)
    return tuple(math.prod(sizes[axis] for axis in dim) for dim in layout.dims)


def parameter_views(
    stored: np.ndarray, layout: TensorLayout, specs: Sequence[ParamSpec], first_size: int
) -> list[np.ndarray]:
    """Make a view of each parameter, in the order of its own axes, into a stored tensor or some rows of it.

    Tensors are read in pieces that are cut along the layout's first axis; ``first_size`` is its size in this piece.
    """
    sizes = axis_sizes(layout, specs)
    split = stored.reshape([first_size, *[sizes[axis] for axis in layout.axes[1:]]])
    views = []
    for number, spec in enumerate(specs):
        index: list[slice | int] = []
        names = []
        for axis in layout.axes:
            if axis == PARAM_AXIS:
                index.append(number)
                continue
            if "+" in axis:
                parts = axis.split("+")
                start = sum(specs[i].shape[specs[i].axes.index(parts[i])] for i in range(number))
                index.append(slice(start, start + spec.shape[spec.axes.index(parts[number])]))
                names.append(parts[number])
            else:
                index.append(slice(None))
                names.append(axis)
        views.append(split[tuple(index)].transpose([names.index(axis) for axis in spec.axes]))
    return views


def first_axis(layout: TensorLayout, spec: ParamSpec) -> int:
    """Return the position, in a parameter, of the layout's first axis, along which pieces are cut."""
    return spec.axes.index(layout.axes[0])
