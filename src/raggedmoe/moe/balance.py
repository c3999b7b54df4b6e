"""Keeping experts evenly used: the losses, the loss-free bias rule, and the statistics.

Every mean is made of sums and counts, which ``axes`` (of the mesh; none on one device) reduce first: a loss is that of
the global batch, not the mean of what the shards computed for themselves.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def expert_counts(experts: Int[Array, "T K"], num_experts: int) -> Int[Array, " E"]:
    """Count the slots of each expert; slots of no expert (E) are left out."""
    return jnp.zeros(num_experts, jnp.int32).at[experts.reshape(-1)].add(1, mode="drop")


def load_balance_loss(
    probabilities: Float[Array, "T E"],
    experts: Int[Array, "T K"],
    mask: Bool[Array, " T"],
    *,
    num_sequences: int | None = None,
    axes: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Return ``E · Σ_e f_e · P_e``: f the share of slots, P the mean probability of each expert; 1 at perfect balance.

    It is over the whole batch by default. With ``num_sequences`` the tokens are that many equal sequences, it is taken
    in each, and the mean is over the sequences that have a token.
    """
    num_experts, per_token = probabilities.shape[1], experts.shape[1]
    parts = num_sequences or 1
    probabilities = jnp.where(mask[:, None], probabilities, 0).reshape(parts, -1, num_experts)
    counts = jax.vmap(lambda part: expert_counts(part, num_experts))(experts.reshape(parts, -1, per_token))
    tokens = mask.reshape(parts, -1).sum(1, dtype=jnp.int32)
    # One sequence of all devices' tokens, or on each device sequences of its own.
    of_sequence, of_mean = (axes, ()) if num_sequences is None else ((), axes)
    counts, tokens, sums = lax.psum((counts, tokens, probabilities.sum(1)), of_sequence)
    safe = jnp.maximum(tokens, 1)[:, None].astype(sums.dtype)
    losses = num_experts * (counts.astype(sums.dtype) / (safe * per_token) * (sums / safe)).sum(1)
    present = lax.psum((tokens > 0).sum(), of_mean)
    return lax.psum(losses.sum(), of_mean) / jnp.maximum(present, 1).astype(losses.dtype)


def router_z_loss(logits: Float[Array, "T E"], mask: Bool[Array, " T"], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """Return the mean of ``logsumexp(logits)²`` over the tokens."""
    squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
    tokens = jnp.maximum(lax.psum(mask.sum(), axes), 1).astype(logits.dtype)
    return lax.psum(jnp.where(mask, squares, 0).sum(), axes) / tokens


def update_selection_bias(bias: Float[Array, " E"], load: Int[Array, " E"], rate: float = 1e-3) -> Float[Array, " E"]:
    """Move the biases by the loss-free rule: by ``rate`` up where the load is below the mean, down where it is above.

    Give the load of the whole batch. The sign of a sum is not the sum of signs: add up the loads of shards and chunks
    first, then call this once.
    """
    # In integers, so that a load that equals the mean is seen to, and without a product that could overflow: the mean
    # is quotient + remainder / E, so a load of quotient is below it exactly if there is a remainder.
    quotient, remainder = jnp.divmod(load.sum(), load.shape[0])
    direction = jnp.sign(jnp.where(load == quotient, remainder, quotient - load))
    return bias + rate * direction.astype(bias.dtype)


def load_entropy(load: Int[Array, " E"]) -> Float[Array, ""]:
    """Return the entropy of the distribution of slots over experts, in nats; 0 without any slot."""
    share = load / jnp.maximum(load.sum(), 1)
    return -jnp.where(load > 0, share * jnp.log(jnp.where(load > 0, share, 1)), 0).sum()


def max_violation(load: Int[Array, " E"]) -> Float[Array, ""]:
    """Return how far the busiest expert is above the mean load, as a share of it; 0 without any slot."""
    mean = load.sum() / load.shape[0]
    return jnp.where(mean > 0, load.max() / jnp.where(mean > 0, mean, 1) - 1, 0.0)
