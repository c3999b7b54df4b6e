"""The vocabulary's tables, embedding and head, on a mesh: entries split over the tensor axis, widths stored in parts.

Written for each device's own part, as XLA left alone would gather all tokens' gradients to add them to a split table.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, varying_like
from raggedmoe.mesh import TENSOR, TOKEN_AXES
from raggedmoe.params import ParamSpec
from raggedmoe.partition import axes_of, partition

TOKENS = PartitionSpec(TOKEN_AXES)


@dataclass(frozen=True, kw_only=True)
class TableSharding:
    """How a table ``[V D]`` lies on a mesh. All but `table_sharding` is for use inside `shard_map`."""

    mesh: Mesh
    spec: PartitionSpec

    @property
    def is_split(self) -> bool:
        """Whether a tensor rank has only its own entries."""
        return self.spec[0] is not None

    @property
    def _width_axes(self) -> tuple[str, ...]:
        return axes_of(self.spec[1])

    def whole_width(self, part: jax.Array) -> jax.Array:
        """This rank's entries ``[V/tensor D]`` from the part that is stored here."""
        return lax.all_gather(part, self._width_axes, axis=1, tiled=True) if self._width_axes else part

    def stored_part(self, gradient: jax.Array) -> jax.Array:
        """The gradients ``[V/tensor D]`` of all devices' tokens added up, of which the part that is stored here."""
        if self._width_axes:  # first, so that the sum over the other axes is of the part alone
            gradient = lax.psum_scatter(gradient, self._width_axes, scatter_dimension=1, tiled=True)
        return lax.psum(gradient, tuple(axis for axis in TOKEN_AXES if axis not in self._width_axes))

    def first_entry(self, num_entries: int) -> Any:
        """The number of this rank's first entry, where each has so many."""
        return lax.axis_index(TENSOR) * num_entries if self.is_split else 0


def table_sharding(mesh: Mesh, shape: tuple[int, ...]) -> TableSharding:
    """Where the plan puts a table."""
    spec = ParamSpec(shape=shape, dtype=jnp.float32, axes=("vocab", "model_dim"))
    return TableSharding(mesh=mesh, spec=partition("table", spec, mesh.shape))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embedding_lookup(
    table: Float[Array, "V D"], ids: Int[Array, "B S"], dtype: Any, place: TableSharding
) -> Float[Array, "B S D"]:
    """The tokens' entries, in that type."""

    def own(part: jax.Array, ids: jax.Array) -> jax.Array:
        entries = place.whole_width(part.astype(dtype))
        if not place.is_split:
            return jnp.take(entries, ids, axis=0, mode="clip")
        here, is_here = _own_ids(ids, entries.shape[0], table.shape[0], place)
        return lax.psum(jnp.where(is_here[..., None], jnp.take(entries, here, axis=0, mode="clip"), 0), TENSOR)

    return jax.shard_map(own, mesh=place.mesh, in_specs=(place.spec, TOKENS), out_specs=TOKENS)(table, ids)


def _own_ids(ids: jax.Array, num_entries: int, vocab_size: int, place: TableSharding) -> tuple[jax.Array, jax.Array]:
    """The tokens' places among this rank's entries, and which of them are there."""
    here = jnp.clip(ids, 0, vocab_size - 1) - place.first_entry(num_entries)
    return here, (here >= 0) & (here < num_entries)


def _forward(table: jax.Array, ids: jax.Array, dtype: Any, place: TableSharding) -> tuple[jax.Array, tuple]:
    return embedding_lookup(table, ids, dtype, place), (ids, jax.ShapeDtypeStruct(table.shape, table.dtype))


def _backward(dtype: Any, place: TableSharding, saved: tuple, cotangent: jax.Array) -> tuple[jax.Array, None]:
    ids, table = saved
    num_entries = table.shape[0] // (place.mesh.shape[TENSOR] if place.is_split else 1)

    def own(ids: jax.Array, cotangent: jax.Array) -> jax.Array:
        wide = cotangent.astype(accumulator(cotangent.dtype)).reshape(-1, table.shape[1])
        here, is_here = _own_ids(ids, num_entries, table.shape[0], place)
        here = jnp.where(is_here, here, num_entries).reshape(-1)  # out of range: added to nothing
        zeros = varying_like(jnp.zeros((num_entries, table.shape[1]), wide.dtype), wide, here)
        return place.stored_part(zeros.at[here].add(wide, mode="drop")).astype(table.dtype)

    return jax.shard_map(own, mesh=place.mesh, in_specs=(TOKENS, TOKENS), out_specs=place.spec)(ids, cotangent), None


embedding_lookup.defvjp(_forward, _backward)
