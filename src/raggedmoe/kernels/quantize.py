"""Arrays made into values of 8 bits and scales: by the largest absolute value of what shares a scale, which is exact.

A scale is that value divided by the largest of the format, so that nothing is cut off, and it is 1 where all are zero.
A value is the array's divided by its scale, rounded to the nearest of the format, ties to even.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.qarray import QArray
from raggedmoe.names import check_known

# The largest value of each format; of int8 the one that has a negative.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def quantize(array: Float[Array, "..."], qtype: str, scale_shape: tuple[int, ...]) -> QArray:
    """Quantise an array: values in ``qtype``, and scales of the array's type, float32 at least.

    Args:
      array: of a floating type.
      qtype: "float8_e4m3fn", "float8_e5m2" or "int8".
      scale_shape: for each dimension how many scales there are along it, a divisor of its size: `(R, 1)` for rows.

    What an infinity or NaN shares a scale with becomes NaN.
    """
    scale = absmax_scale(array, qtype, scale_shape)
    return QArray(encode(array, scale, qtype), scale)


def absmax_scale(array: Float[Array, "..."], qtype: str, scale_shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Compute the scales with which the largest absolute value of a block becomes the largest value of the format."""
    check_known("format", qtype, LARGEST)
    if len(scale_shape) != array.ndim or any(num < 1 or size % num for num, size in zip(scale_shape, array.shape)):
        raise ValueError(
            f"expected a scale whose sizes divide those of the array, {list(array.shape)}, got {list(scale_shape)}"
        )
    wide = accumulator(array.dtype)
    largest = jnp.max(jnp.abs(_in_blocks(array, scale_shape)), axis=tuple(range(1, 2 * array.ndim, 2)), initial=0)
    # Not smaller than the least normal number, which some CPUs' settings would make zero.
    scale = jnp.maximum(largest.astype(wide) / np.asarray(LARGEST[qtype], wide), jnp.finfo(wide).tiny)
    return jnp.where(largest == 0, 1, scale)


def encode(array: Float[Array, "..."], scale: Float[Array, "..."], qtype: str) -> Array:
    """Divide an array by its scales, and round to the format; what is larger than its largest value becomes that."""
    check_known("format", qtype, LARGEST)
    factors = scale.reshape(sum([(num, 1) for num in scale.shape], ()))
    ratio = (_in_blocks(array, scale.shape).astype(scale.dtype) / factors).reshape(array.shape)
    ratio = jnp.clip(ratio, -LARGEST[qtype], LARGEST[qtype])
    return (jnp.round(ratio) if qtype == "int8" else ratio).astype(qtype)


def _in_blocks(array: Any, scale_shape: tuple[int, ...]) -> jax.Array:
    """Give every dimension two: its blocks, and what shares a scale."""
    return array.reshape(sum([(num, size // num) for num, size in zip(scale_shape, array.shape)], ()))
