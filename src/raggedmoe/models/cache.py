"""The cache of a decoder: for each layer what its attention keeps of earlier tokens.

Slot j holds position j. A layer with a sliding window keeps the window only: its W slots are a ring, in which position
p stands in slot ``p % W``.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from raggedmoe import compat
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.mixer import Memory
from raggedmoe.models.parameters import mixer_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values (or, for latent attention, latents) of every layer."""

    # "stacks.<stack>.<position>.<what>" -> [layers of the stack, B, L, ...], or a tuple with an array for each of these
    # layers (`unstack_cache`). L is the cache's size, or the window where that is smaller.
    memory: dict[str, Any]
    lengths: Int[Any, " B"]  # tokens that each sequence has in it
    size: int = field(metadata={"static": True})  # the most tokens that a sequence can have in it


class VisibleMemory(NamedTuple):
    """What the queries of one layer attend to, and where in it they are."""

    memory: Memory  # each [B L ...]
    positions: Int[Array, "B S"] | None  # of the queries among these slots; None: a query for each slot
    window: int | None  # what of it a query sees; None: all slots up to its own


def empty_cache(config: ModelConfig, num_sequences: int, size: int) -> Cache:
    """Make a cache for that many tokens of each sequence."""
    shapes, dtype = mixer_of(config).memory_shapes(config.attention), jnp.dtype(config.dtype)
    if compat.SLICES_BF16_BY_WIDENING_ALL and dtype == jnp.bfloat16:
        dtype = jnp.dtype(jnp.uint16)  # its bits: to write to a part of a bfloat16 array widens or copies all of it
    memory: dict[str, Any] = {
        f"stacks.{s}.{p}.{what}": jnp.zeros(
            (stack.repeats, num_sequences, min(size, kind.window or size), *shape), dtype
        )
        for s, stack in enumerate(config.stacks)
        for p, kind in enumerate(stack.kinds)
        for what, shape in shapes.items()
    }
    return Cache(memory=memory, lengths=jnp.zeros(num_sequences, jnp.int32), size=size)


def unstack_cache(cache: Cache) -> Cache:
    """Split a cache into an array for each layer, which layers that are not scanned update in place.

    It is converted name by name and the old arrays are freed, so that no more than one of them is there twice.
    """
    memory = dict(cache.memory)
    for name, whole in memory.items():
        assert isinstance(whole, jax.Array)
        memory[name] = split_layers(whole)
        jax.block_until_ready(memory[name])
        whole.delete()
    return replace(cache, memory=memory)


@jax.jit
def split_layers(stacked: Any) -> tuple[Any, ...]:
    """Copy an array of several layers, or the values and scales of a quantised one, into one for each of them."""
    return tuple(jax.tree.map(lambda array, at=layer: array[at], stacked) for layer in range(stacked.shape[0]))


def update_cache(
    memory: Memory, layer: jax.Array, new: Memory, slots: Int[Array, "B S"], window: int | None
) -> tuple[Memory, VisibleMemory]:
    """Write new tokens to a layer's memory, and say what their queries attend to: earlier tokens and these.

    Args:
      memory: of a whole stack, layers first, or of this layer alone.
      layer: which of the stack.
      new: the tokens' keys and values.
      slots: their places in the sequences, -1 for those that are not kept.
      window: of the layer.
    """
    stacked = {what: whole.ndim > new[what].ndim for what, whole in memory.items()}

    def of_layer(memory: Memory) -> Memory:
        return {
            what: lax.dynamic_index_in_dim(whole, layer, keepdims=False) if stacked[what] else whole
            for what, whole in memory.items()
        }

    old = of_layer(memory)
    num_slots = next(iter(old.values())).shape[1]
    places = _ring_slots(slots, num_slots)
    updated = {what: _write(memory[what], layer if stacked[what] else None, new[what], places) for what in memory}
    if window is None or window > num_slots:  # a cache that ends before the window does is no ring
        return updated, _visible(of_layer(updated), new, slots, window)
    if slots.shape[1] == 1:  # everything in a ring is visible, and softmax does not ask in which order it stands
        return updated, _visible(of_layer(updated), new, jnp.minimum(slots, num_slots - 1), None)
    return updated, _unrolled_ring(old, new, slots, window)


def _ring_slots(slots: Int[Array, "B S"], num_slots: int) -> Int[Array, "B S"]:
    """Return where tokens are written: of more than fit into a ring the last, the others to ``num_slots``: nowhere."""
    end = slots.max(axis=1, keepdims=True) + 1
    return jnp.where((slots < 0) | (slots < end - num_slots), num_slots, slots % num_slots)


def _write(memory: jax.Array, layer: jax.Array | None, new: jax.Array, slots: Int[Array, "B S"]) -> jax.Array:
    """Write tokens to their slots; a slot past the last one is nowhere."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    place = (rows, slots) if layer is None else (layer, rows, slots)
    new = lax.bitcast_convert_type(new, memory.dtype) if _holds_bits(memory) else new.astype(memory.dtype)
    return memory.at[place].set(new, mode="drop")


def _holds_bits(memory: jax.Array) -> bool:
    return memory.dtype == jnp.uint16


def _visible(memory: Memory, new: Memory, positions: Int[Array, "B S"], window: int | None) -> VisibleMemory:
    memory = {
        what: lax.bitcast_convert_type(array, new[what].dtype) if _holds_bits(array) else array
        for what, array in memory.items()
    }
    return VisibleMemory(memory, positions, window)


def _unrolled_ring(old: Memory, new: Memory, slots: Int[Array, "B S"], window: int) -> VisibleMemory:
    """Return what a ring held before several new tokens, and these, in the order of their positions.

    Slot j of the result holds position ``first + j``. In the ring itself, later ones of the new tokens overwrite what
    earlier ones still see.
    """
    start = jnp.where(slots < 0, jnp.iinfo(slots.dtype).max, slots).min(axis=1, keepdims=True)
    first = jnp.maximum(start - window, 0)
    places = jnp.where(slots < 0, -1, slots - first)
    ring = (first + jnp.arange(window, dtype=jnp.int32)[None]) % window
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    memory = {
        what: _write(
            jnp.pad(array[rows, ring], [(0, 0), (0, slots.shape[1])] + [(0, 0)] * (array.ndim - 2)),
            None,
            new[what],
            jnp.where(places < 0, window + slots.shape[1], places),
        )
        for what, array in old.items()
    }
    return _visible(memory, new, places, window)
