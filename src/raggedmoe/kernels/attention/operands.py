"""What every implementation of `attention` is given, and who sees what."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.kernels.arrays import MOST, accumulator, matmul_precision


class Operands(NamedTuple):
    """The arrays of a call; gradients come back in the same shape."""

    query: Float[Array, "B S N H"]
    key: Float[Array, "B L M H"]
    value: Float[Array, "B L M W"]
    positions: Int[Array, "B S"] | None  # None: query i is at position i
    segments: Int[Array, "B S"] | None
    sinks: Float[Array, " N"] | None

    def query_positions(self) -> Int[Array, "#B S"]:
        """Return the positions of the queries; B is 1 where all sequences have the same."""
        if self.positions is None:
            return jnp.arange(self.query.shape[1], dtype=jnp.int32)[None]
        return self.positions


def visible(
    position: Int[Array, "#B S"], slot: Int[Array, " L"], window: int | None, segments: Any = None
) -> Bool[Array, "#B S L"]:
    """Say whether each query sees each slot. ``segments``: those of the queries and those of the slots."""
    position, slot = position[:, :, None], slot[None, None, :]
    seen = slot <= position
    if window is not None:
        seen &= slot > position - window
    if segments is not None:
        queries, slots = segments
        seen = seen & (queries[:, :, None] == slots[:, None, :])
    return seen


def sees_any_slot(position: Int[Array, "#B S"], num_slots: int, window: int | None) -> Bool[Array, "#B S"]:
    """Say whether a query sees any slot. Without positions all do: each sees itself."""
    seeing = position >= 0
    return seeing if window is None else seeing & (position - window < num_slots - 1)


def segment_numbers(segments: Any) -> Int[Array, "B S"]:
    """Convert segments of any integer type to int32: equal and negative where they were so before.

    Those that int32 cannot hold are numbered: cast or cut, different ones could become the same.
    """
    limits = jnp.iinfo(segments.dtype)
    if limits.max <= MOST:
        return jnp.asarray(segments).astype(jnp.int32)
    if isinstance(segments, np.ndarray):  # before JAX sees them: without x64 it would wrap their values
        numbers: Any = np.unique(segments, return_inverse=True)[1]
    else:
        numbers = jnp.unique(segments, return_inverse=True, size=segments.size)[1]
    numbers = jnp.asarray(numbers, jnp.int32).reshape(segments.shape)
    return jnp.where(segments < 0, numbers - segments.size, numbers) if limits.min < 0 else numbers


def by_key_head(array: Any, num_key_heads: int) -> Any:
    """Group the query heads by their key head: ``[B S N ...] -> [B S M N/M ...]``."""
    batch, length, heads, *rest = array.shape
    return array.reshape(batch, length, num_key_heads, heads // num_key_heads, *rest)


def einsum(equation: str, first: Any, second: Any) -> Any:
    """Compute a sum of products in the accumulator's type."""
    wide = accumulator(first.dtype)
    return jnp.einsum(equation, first, second, precision=matmul_precision(first.dtype), preferred_element_type=wide)
