"""Where a decoder's dense weights are on a mesh while they are used. XLA moves them there.

A weight is stored in parts, as the plan says. A layer that uses it has it whole but for the tensor axis: its parts are
gathered in the type of the activations just before, one layer at a time, and its gradient goes back in parts.

The vocabulary's tables, embedding and head, have their entries split over the tensor axis. They are gathered by stages,
as XLA left alone would gather all tokens' gradients to add them to a split table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, pvary_over
from raggedmoe.kernels.qarray import cast_array
from raggedmoe.params import Params, ParamSpec, Specs
from raggedmoe.sharding.axes import FSDP, TOKEN_AXES, LogicalMesh, axes_of
from raggedmoe.sharding.rules import WIDTH_AXES, partition, stored_partition
from raggedmoe.sharding.stage import TOKENS, stage


def all_gather_dense_weights(weights: Params, specs: Specs, mesh: LogicalMesh, dtype: Any) -> Params:
    """Gather the dense weights of matmuls over the axes that split their width, in the type that they are used in.

    What is quantised is gathered as it is stored. Routed experts and routers stay where they are: the MoE layer's
    stages gather them.
    """
    gathered = dict(weights)
    for name, spec in specs.items():
        if name not in weights or spec.contracts is None or "expert" in spec.axes or mesh.mesh is None:
            continue
        weight = cast_array(weights[name], dtype)
        stored = stored_partition(name, spec, weight, mesh)
        gathered[name] = jax.tree.map(functools.partial(_gather_weight, mesh), weight, stored)
    return gathered


# What makes a gathered weight, and what only gives it another shape or type, for `jax.checkpoint`: none of that is kept
# for the backward pass, which gathers again, or every layer's weights would be there whole at once.
_SHAPING = ("reshape", "transpose", "squeeze", "slice", "dynamic_slice", "broadcast_in_dim", "pvary", "pcast")


def save_all_but_gathered_weights(mesh: LogicalMesh) -> Callable[..., bool]:
    """Make the policy, for `jax.checkpoint`, to keep all but gathered weights, in whatever shape they are used."""

    def is_saved(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name.startswith("all_gather"):
            return not set(mesh.axes(FSDP)) & set(params["axis_name"])
        return primitive.name != "linear_call" and primitive.name not in _SHAPING

    return is_saved


def _gather_weight(mesh: LogicalMesh, weight: jax.Array, stored: PartitionSpec) -> jax.Array:
    """Lay a weight out as it is used, and its gradient as the weight is stored.

    XLA alone would lay the gradient out as the weight is used: whole, on every device.
    """
    if not any(stored):
        return weight
    used = PartitionSpec(*(tuple(axis for axis in axes_of(entry) if axis not in WIDTH_AXES) for entry in stored))
    if not jnp.issubdtype(weight.dtype, jnp.floating):  # values of 8 bits, which have no gradient
        return mesh.constrain(weight, used)
    lay_out, of_gradient = (lambda _, array, at=at: mesh.constrain(array, at) for at in (used, stored))
    return linear_call(lay_out, of_gradient, (), weight)


@dataclass(frozen=True)
class TableSharding:
    """How a table ``[V D]`` lies on a mesh. Its methods are for use in stages."""

    mesh: LogicalMesh
    spec: PartitionSpec  # The partition of the table over the logical axes.
    entry_axes: tuple[str, ...]  # The mesh's axes that entries are split over; none: every rank has all of them.

    def gather_width(self, part: jax.Array) -> jax.Array:
        """Gather this rank's entries ``[V/tensor D]`` from the parts that its devices store.

        Backward, gradients are scattered first, so that the sum over other axes is of the part that is stored here.
        """
        part = pvary_over(part, self.mesh.axes(*TOKEN_AXES))
        return lax.all_gather(part, self.mesh.axes(*axes_of(self.spec[1])), axis=1, tiled=True)

    def local_ids(self, ids: jax.Array, entries: jax.Array) -> jax.Array:
        """Return the tokens' places among this rank's entries; out of range if they are another's."""
        return ids - lax.axis_index(self.entry_axes) * entries.shape[0]


def table_sharding(mesh: LogicalMesh, shape: tuple[int, ...]) -> TableSharding:
    """Return the sharding of a table of this shape, by the rules that split all parameters."""
    spec = partition("table", ParamSpec(shape=shape, dtype=None, axes=("vocab", "model_dim")), mesh)
    return TableSharding(mesh, spec, mesh.axes(*axes_of(spec[0])))


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], dtype: Any, sharding: TableSharding
) -> Float[Array, "B S D"]:
    """Look up the tokens' vectors in a table that is split over the mesh, in the type of the activations.

    Backward, their gradients are added up in float32 at least.
    """

    @stage(ids=TOKENS, part=sharding.spec, result=TOKENS)
    def look_up(ids: jax.Array, part: jax.Array) -> jax.Array:
        entries, here = sharding.gather_width(part), sharding.local_ids(ids, part)
        is_here = (here >= 0) & (here < part.shape[0])
        vectors = jnp.take(entries, here, axis=0, mode="clip")
        return lax.psum(jnp.where(is_here[..., None], vectors, 0), sharding.entry_axes)

    def add_gradients(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        wide = jax.ShapeDtypeStruct(table.shape, accumulator(cotangent.dtype))
        (gradient,) = jax.linear_transpose(functools.partial(run, ids), wide)(cotangent.astype(wide.dtype))
        return gradient.astype(table.dtype)

    run = functools.partial(sharding.mesh.run, look_up)
    ids = jnp.clip(ids, 0, table.shape[0] - 1)
    return linear_call(lambda ids, table: run(ids, table.astype(dtype)), add_gradients, ids, table)
