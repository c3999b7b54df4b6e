"""The one way in which a decoder multiplies by a dense weight."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator, matmul_precision


def contract(equation: str, x: Float[Array, "..."], weight: Float[Array, "..."]) -> Float[Array, "..."]:
    """An einsum of activations with a weight cast to their type: sums in float32 at least, result in their type."""
    out = jnp.einsum(
        equation,
        x,
        weight.astype(x.dtype),
        precision=matmul_precision(x.dtype),
        preferred_element_type=accumulator(x.dtype),
    )
    return out.astype(x.dtype)
