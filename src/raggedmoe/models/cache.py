"""The cache of a decoder: for each layer what its attention keeps of earlier tokens, slot j holding position j."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.mixer import Memory
from raggedmoe.models.parameters import mixer_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values (or, for latent attention, latents) of every layer."""

    memory: dict[str, jax.Array]  # "stacks.<stack>.<position>.<what>" -> [layers of the stack, B, L, ...]
    lengths: Int[Array, " B"]  # tokens that each sequence has in it

    @property
    def size(self) -> int:
        """Slots for each sequence, L."""
        return next(iter(self.memory.values())).shape[2]


def empty_cache(config: ModelConfig, num_sequences: int, size: int) -> Cache:
    """A cache for that many tokens of each sequence."""
    shapes = mixer_of(config).memory_shapes(config.attention)
    memory = {
        f"stacks.{s}.{p}.{what}": jnp.zeros((stack.repeats, num_sequences, size, *shape), config.dtype)
        for s, stack in enumerate(config.stacks)
        for p in range(len(stack.kinds))
        for what, shape in shapes.items()
    }
    return Cache(memory=memory, lengths=jnp.zeros(num_sequences, jnp.int32))


def update_cache(memory: Memory, layer: jax.Array, new: Memory, slots: Int[Array, "B S"]) -> tuple[Memory, Memory]:
    """Write new tokens to their slots (-1: nowhere). Returns the memory of the whole stack, and that of the layer."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    updated = {}
    for what, old in memory.items():
        outside = jnp.where(slots < 0, old.shape[2], slots)
        updated[what] = old.at[layer, rows, outside].set(new[what].astype(old.dtype), mode="drop")
    return updated, {what: lax.dynamic_index_in_dim(whole, layer, keepdims=False) for what, whole in updated.items()}
