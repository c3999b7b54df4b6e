"""Arrays made into values of 8 bits and scales: by the largest absolute value of what shares a scale, which is exact.

A scale is that value divided by the largest of the format, so that nothing is cut off, and it is 1 where all are zero.
A value is the array's divided by its scale, rounded to the nearest of the format, ties to even.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.qarray import QArray
from raggedmoe.names import check_known

# The largest value of each format; of int8 the one that has a negative.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Bits of the mantissa, and the exponent of the least normal value.
MANTISSA = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}


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


def constant_scale(
    array: Float[Array, "..."], value: float | Float[Array, ""], scale_shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Return scales that are all one value, but NaN where they are of something that is not finite.

    Int8 has no NaN, and what is too large becomes the format's largest value: neither may hide what went wrong.
    """
    finite = jnp.all(jnp.isfinite(_in_blocks(array, scale_shape)), axis=tuple(range(1, 2 * array.ndim, 2)))
    return jnp.where(finite, jnp.asarray(value, accumulator(array.dtype)), jnp.nan)


def encode(array: Float[Array, "..."], scale: Float[Array, "..."], qtype: str, key: jax.Array | None = None) -> Array:
    """Divide an array by its scales, and round to the format; what is larger than its largest value becomes that.

    It is rounded to the nearest value, ties to even. With ``key`` chance takes one of the two nearest, each as often as
    it is near, so that the mean over many keys is what was divided.
    """
    check_known("format", qtype, LARGEST)
    factors = scale.reshape(sum([(num, 1) for num in scale.shape], ()))
    ratio = (_in_blocks(array, scale.shape).astype(scale.dtype) / factors).reshape(array.shape)
    ratio = jnp.clip(ratio, -LARGEST[qtype], LARGEST[qtype])
    if qtype == "int8":
        return _round(ratio, key).astype(jnp.int8)
    step, per_step = _steps(ratio, *MANTISSA[qtype])
    return _float8(_round(ratio * per_step, key) * step, qtype)


def encode_bits(
    array: Float[Array, "..."], scale: Float[Array, "..."], qtype: str, key: jax.Array | None = None
) -> Array:
    """Compute what `encode` does in the form that kernels read: int8 itself, or the bits of a float8 in uint8."""
    values = encode(array, scale, qtype, key)
    return values if qtype == "int8" else lax.bitcast_convert_type(values, jnp.uint8)


def _round(array: Float[Array, "..."], key: jax.Array | None) -> Float[Array, "..."]:
    if key is None:
        return jnp.round(array)
    below = jnp.floor(array)
    # A comparison, as a sum with a number just below one may be rounded to one more, and past the largest value.
    return below + (jax.random.uniform(key, array.shape, array.dtype) < array - below)


def _steps(array: Float[Array, "..."], mantissa_bits: int, least: int) -> tuple[Float[Array, "..."], Array]:
    """Compute how far apart a format's values are around each of an array's, and one over it: both are powers of two.

    Values below 2 to the power of ``least`` are as far apart as those above it.
    """
    bits, position, bias = (jnp.uint64, 52, 1023) if array.dtype == jnp.float64 else (jnp.uint32, 23, 127)
    exponent = (lax.bitcast_convert_type(jnp.abs(array), bits) >> position).astype(jnp.int32)
    # Where it is NaN, any power does.
    exponent = jnp.clip(exponent, bias + least, bias + 16) - mantissa_bits
    powers = (exponent.astype(bits) << position, (2 * bias - exponent).astype(bits) << position)
    step, per_step = (lax.bitcast_convert_type(power, array.dtype) for power in powers)
    return step, per_step


def _float8(values: Float[Array, "..."], qtype: str) -> Array:
    """Convert values that a format has to it, by arithmetic on the bits of a float16, which has all of them too.

    XLA's own conversion takes a CPU four times as long (docs/log.md).
    """
    if qtype == "float8_e5m2":  # the upper half of a float16
        codes = lax.bitcast_convert_type(values.astype(jnp.float16), jnp.uint16) >> 8
    else:  # see `dequantize.decode`
        half = (values * np.asarray(2.0**-8, values.dtype)).astype(jnp.float16)
        bits = lax.bitcast_convert_type(half, jnp.uint16)
        codes = ((bits >> 8) & 0x80) | jnp.where(jnp.isnan(values), 0x7F, (bits >> 7) & 0x7F)
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.dtype(qtype))


def _in_blocks(array: Any, scale_shape: tuple[int, ...]) -> jax.Array:
    """Give every dimension two: its blocks, and what shares a scale."""
    return array.reshape(sum([(num, size // num) for num, size in zip(scale_shape, array.shape)], ()))
