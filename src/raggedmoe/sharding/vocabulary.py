"""The vocabulary's tables, embedding and head, on a mesh: entries split over the tensor axis, widths stored in parts.

Written for each device's own part, as XLA left alone would gather all tokens' gradients to add them to a split table.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.params import ParamSpec
from raggedmoe.sharding.axes import TOKEN_AXES, LogicalMesh, axes_of
from raggedmoe.sharding.rules import partition
from raggedmoe.sharding.stage import TOKENS, stage


@dataclass(frozen=True)
class TableSharding:
    """How a table ``[V D]`` lies on a mesh. Its methods are for use in stages."""

    mesh: LogicalMesh
    spec: PartitionSpec  # The partition of the table over the logical axes.
    num_entries: int  # The entries of each tensor rank: V of them, or its own part.
    entry_axes: tuple[str, ...]  # The mesh's axes that entries are split over; none: every rank has all of them.
    width_axes: tuple[str, ...]  # The mesh's axes that widths are split over.

    def gather_width(self, part: jax.Array) -> jax.Array:
        """Gather this rank's entries ``[V/tensor D]`` from the parts that its devices store."""
        return lax.all_gather(part, self.width_axes, axis=1, tiled=True)

    def scatter_gradient(self, gradient: jax.Array) -> jax.Array:
        """Add up the gradients ``[V/tensor D]`` of all devices' tokens, and return the part that is stored here."""
        # Scattered first, so that the sum over the other axes is of the part alone.
        gradient = lax.psum_scatter(gradient, self.width_axes, scatter_dimension=1, tiled=True)
        return lax.psum(gradient, tuple(axis for axis in self.mesh.axes(*TOKEN_AXES) if axis not in self.width_axes))

    def local_ids(self, ids: jax.Array) -> jax.Array:
        """Return the tokens' places among this rank's entries; out of range if they are another's."""
        return ids - (lax.axis_index(self.entry_axes) * self.num_entries if self.entry_axes else 0)


def table_sharding(mesh: LogicalMesh, shape: tuple[int, ...]) -> TableSharding:
    """Return the sharding of a table of this shape, by the rules that split all parameters."""
    spec = partition("table", ParamSpec(shape=shape, dtype=None, axes=("vocab", "model_dim")), mesh)
    return TableSharding(mesh, spec, shape[0] // mesh.size(*axes_of(spec[0])), *map(axes_of, mesh.spec(spec)))


def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], dtype: Any, sharding: TableSharding
) -> Float[Array, "B S D"]:
    """Look up the tokens' vectors in a table that is split over the mesh, in the type of the activations."""

    @stage(ids=TOKENS, part=sharding.spec, result=TOKENS)
    def look_up(ids: jax.Array, part: jax.Array) -> jax.Array:
        entries, here = sharding.gather_width(part.astype(dtype)), sharding.local_ids(jnp.clip(ids, 0, last_id))
        vectors = jnp.take(entries, here, axis=0, mode="clip")
        if not sharding.entry_axes:
            return vectors
        is_here = (here >= 0) & (here < sharding.num_entries)
        return lax.psum(jnp.where(is_here[..., None], vectors, 0), sharding.entry_axes)

    @stage(ids=TOKENS, cotangent=TOKENS, result=sharding.spec)
    def add_gradients(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        wide = cotangent.astype(accumulator(cotangent.dtype)).reshape(-1, table.shape[1])
        here = sharding.local_ids(jnp.clip(ids, 0, last_id)).reshape(-1)
        here = jnp.where(here < 0, sharding.num_entries, here)  # out of range: added to nothing
        zeros = pvary_like(jnp.zeros((sharding.num_entries, table.shape[1]), wide.dtype), wide, here)
        return sharding.scatter_gradient(zeros.at[here].add(wide, mode="drop")).astype(table.dtype)

    last_id, run = table.shape[0] - 1, sharding.mesh.run
    return linear_call(functools.partial(run, look_up), functools.partial(run, add_gradients), ids, table)
