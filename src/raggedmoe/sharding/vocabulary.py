"""The vocabulary's tables, embedding and head, on a mesh: entries split over the tensor axis, widths stored in parts.

Written for each device's own part, as XLA left alone would gather all tokens' gradients to add them to a split table.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, pvary_like
from raggedmoe.params import ParamSpec
from raggedmoe.sharding.axes import TOKEN_AXES, LogicalMesh, axes_of, entry_of
from raggedmoe.sharding.rules import partition


@dataclass(frozen=True)
class TableSharding:
    """How a table ``[V D]`` lies on a mesh. Its methods are for use inside `shard_map`."""

    mesh: LogicalMesh
    num_entries: int  # The entries of each tensor rank: V of them, or its own part.
    entry_axes: tuple[str, ...]  # The mesh's axes that entries are split over; none: every rank has all of them.
    width_axes: tuple[str, ...]  # The mesh's axes that widths are split over.

    @property
    def spec(self) -> PartitionSpec:
        """The partition of the table over the mesh's own axes."""
        return PartitionSpec(entry_of(self.entry_axes), entry_of(self.width_axes))

    @property
    def token_spec(self) -> PartitionSpec:
        """The partition of tokens over the mesh's own axes."""
        return self.mesh.spec(PartitionSpec(TOKEN_AXES))

    def gather_width(self, part: jax.Array) -> jax.Array:
        """This rank's entries ``[V/tensor D]`` from the part that is stored here."""
        return lax.all_gather(part, self.width_axes, axis=1, tiled=True)

    def scatter_gradient(self, gradient: jax.Array) -> jax.Array:
        """The gradients ``[V/tensor D]`` of all devices' tokens added up, of which the part that is stored here."""
        # Scattered first, so that the sum over the other axes is of the part alone.
        gradient = lax.psum_scatter(gradient, self.width_axes, scatter_dimension=1, tiled=True)
        return lax.psum(gradient, tuple(axis for axis in self.mesh.axes(*TOKEN_AXES) if axis not in self.width_axes))

    def local_ids(self, ids: jax.Array) -> jax.Array:
        """The tokens' places among this rank's entries; out of range if they are another's."""
        return ids - (lax.axis_index(self.entry_axes) * self.num_entries if self.entry_axes else 0)


def table_sharding(mesh: LogicalMesh, shape: tuple[int, ...]) -> TableSharding:
    """The sharding of a table of this shape, by the rules that split all parameters."""
    spec = partition("table", ParamSpec(shape=shape, dtype=None, axes=("vocab", "model_dim")), mesh.sizes)
    entries, widths = map(axes_of, spec)
    num_entries = shape[0] // mesh.size(*entries)
    return TableSharding(mesh, num_entries, entry_axes=mesh.axes(*entries), width_axes=mesh.axes(*widths))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], dtype: Any, sharding: TableSharding
) -> Float[Array, "B S D"]:
    """The vectors of the tokens from a table that is split over the mesh, in the type of the activations."""

    def on_device(part: jax.Array, ids: jax.Array) -> jax.Array:
        entries, here = sharding.gather_width(part.astype(dtype)), sharding.local_ids(jnp.clip(ids, 0, last_id))
        vectors = jnp.take(entries, here, axis=0, mode="clip")
        if not sharding.entry_axes:
            return vectors
        is_here = (here >= 0) & (here < sharding.num_entries)
        return lax.psum(jnp.where(is_here[..., None], vectors, 0), sharding.entry_axes)

    last_id, specs = table.shape[0] - 1, (sharding.spec, sharding.token_spec)
    return jax.shard_map(on_device, mesh=sharding.mesh.mesh, in_specs=specs, out_specs=specs[1])(table, ids)


def _forward(table: jax.Array, ids: jax.Array, dtype: Any, sharding: TableSharding) -> tuple[jax.Array, tuple]:
    return embedding_lookup(table, ids, dtype, sharding), (ids, jax.ShapeDtypeStruct(table.shape, table.dtype))


def _backward(dtype: Any, sharding: TableSharding, saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, table = saved

    def on_device(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        wide = cotangent.astype(accumulator(cotangent.dtype)).reshape(-1, table.shape[1])
        here = sharding.local_ids(jnp.clip(ids, 0, table.shape[0] - 1)).reshape(-1)
        here = jnp.where(here < 0, sharding.num_entries, here)  # out of range: added to nothing
        zeros = pvary_like(jnp.zeros((sharding.num_entries, table.shape[1]), wide.dtype), wide, here)
        return sharding.scatter_gradient(zeros.at[here].add(wide, mode="drop")).astype(table.dtype)

    specs = (sharding.token_spec,) * 2
    mapped = jax.shard_map(on_device, mesh=sharding.mesh.mesh, in_specs=specs, out_specs=sharding.spec)
    return mapped(ids, cotangent), None


embedding_lookup.defvjp(_forward, _backward)
