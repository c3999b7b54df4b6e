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
from raggedmoe.sharding.axes import TENSOR, TOKEN_AXES, LogicalMesh, axes_of
from raggedmoe.sharding.rules import partition


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """How a table ``[V D]`` lies on a mesh. Its methods are for use inside `shard_map`."""

    mesh: LogicalMesh
    spec: PartitionSpec  # over logical axes

    @property
    def is_split(self) -> bool:
        """Whether a tensor rank has only its own entries."""
        return self.spec[0] is not None

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The mesh's axes of the tensor ranks."""
        return self.mesh.axes(TENSOR)

    @property
    def token_spec(self) -> PartitionSpec:
        """The partition of tokens over the mesh's own axes."""
        return self.mesh.spec(PartitionSpec(TOKEN_AXES))

    @property
    def mesh_spec(self) -> PartitionSpec:
        """The partition over the mesh's own axes."""
        return self.mesh.spec(self.spec)

    @property
    def _width_axes(self) -> tuple[str, ...]:
        return axes_of(self.spec[1])

    def gather_width(self, part: jax.Array) -> jax.Array:
        """This rank's entries ``[V/tensor D]`` from the part that is stored here."""
        return lax.all_gather(part, self.mesh.axes(*self._width_axes), axis=1, tiled=True)

    def scatter_gradient(self, gradient: jax.Array) -> jax.Array:
        """The gradients ``[V/tensor D]`` of all devices' tokens added up, of which the part that is stored here."""
        # Scattered first, so that the sum over the other axes is of the part alone.
        gradient = lax.psum_scatter(gradient, self.mesh.axes(*self._width_axes), scatter_dimension=1, tiled=True)
        return lax.psum(gradient, self.mesh.axes(*(axis for axis in TOKEN_AXES if axis not in self._width_axes)))

    def first_entry(self, num_entries: int) -> Any:
        """The number of this rank's first entry, where each has so many."""
        return lax.axis_index(self.tensor_axes) * num_entries if self.is_split else 0


def table_sharding(mesh: LogicalMesh, shape: tuple[int, ...]) -> TableSharding:
    """Where the plan puts a table."""
    spec = ParamSpec(shape=shape, dtype=jnp.float32, axes=("vocab", "model_dim"))
    return TableSharding(mesh=mesh, spec=partition("table", spec, mesh.sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], dtype: Any, sharding: TableSharding
) -> Float[Array, "B S D"]:
    """The tokens' entries, in that type."""

    def on_device(part: jax.Array, ids: jax.Array) -> jax.Array:
        entries = sharding.gather_width(part.astype(dtype))
        if not sharding.is_split:
            return jnp.take(entries, ids, axis=0, mode="clip")
        here, is_here = _local_ids(ids, entries.shape[0], table.shape[0], sharding)
        return lax.psum(
            jnp.where(is_here[..., None], jnp.take(entries, here, axis=0, mode="clip"), 0), sharding.tensor_axes
        )

    tokens = sharding.token_spec
    specs = (sharding.mesh_spec, tokens)
    return jax.shard_map(on_device, mesh=sharding.mesh.mesh, in_specs=specs, out_specs=tokens)(table, ids)


def _local_ids(
    ids: jax.Array, num_entries: int, vocab_size: int, sharding: TableSharding
) -> tuple[jax.Array, jax.Array]:
    """The tokens' places among this rank's entries, and which of them are there."""
    here = jnp.clip(ids, 0, vocab_size - 1) - sharding.first_entry(num_entries)
    return here, (here >= 0) & (here < num_entries)


def _forward(table: jax.Array, ids: jax.Array, dtype: Any, sharding: TableSharding) -> tuple[jax.Array, tuple]:
    return embedding_lookup(table, ids, dtype, sharding), (ids, jax.ShapeDtypeStruct(table.shape, table.dtype))


def _backward(dtype: Any, sharding: TableSharding, saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, table = saved
    num_entries = table.shape[0] // (sharding.mesh.size(TENSOR) if sharding.is_split else 1)

    def on_device(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        wide = cotangent.astype(accumulator(cotangent.dtype)).reshape(-1, table.shape[1])
        here, is_here = _local_ids(ids, num_entries, table.shape[0], sharding)
        here = jnp.where(is_here, here, num_entries).reshape(-1)  # out of range: added to nothing
        zeros = pvary_like(jnp.zeros((num_entries, table.shape[1]), wide.dtype), wide, here)
        return sharding.scatter_gradient(zeros.at[here].add(wide, mode="drop")).astype(table.dtype)

    specs = (sharding.token_spec,) * 2
    mapped = jax.shard_map(on_device, mesh=sharding.mesh.mesh, in_specs=specs, out_specs=sharding.mesh_spec)
    return mapped(ids, cotangent), None


embedding_lookup.defvjp(_forward, _backward)
