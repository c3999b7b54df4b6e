"""RMSNorm."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator


def rms_norm(
    x: Float[Array, "..."], weight: Float[Array, "..."], epsilon: float, num_dims: int = 1
) -> Float[Array, "..."]:
    """Return ``x / sqrt(mean(x²) + epsilon) · weight`` over the last dimensions, computed in float32 at least."""
    wide = x.astype(accumulator(x.dtype))
    axes = tuple(range(-num_dims, 0))
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - num_dims) + weight.shape
    return (normed * weight.astype(wide.dtype).reshape(shape)).astype(x.dtype)
