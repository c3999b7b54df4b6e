"""What the values and scales of a quantised operand stand for, in the type of sums, and the gradient of the scales.

Values are converted by arithmetic on their bits: every value of every format is exact, and XLA's own conversion from
float8 takes a CPU up to 27 times as long (docs/log.md). Their product with a scale is the one rounding.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.qarray import QArray

FLOAT4 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # e2m1


def dequantize(operand, wide):
    """Compute the array that a quantised operand stands for, in the type ``wide``; an array is returned as it is."""
    if not isinstance(operand, QArray):
        return operand
    values, scale = decode_values(operand.qvalue, operand.qtype, wide), decode_scale(operand.scale, wide)
    # Every dimension as (blocks, what shares a scale).
    blocks = [(num, size // num) for size, num in zip(values.shape, scale.shape)]
    product = values.reshape(sum(blocks, ())) * scale.reshape(sum([(num, 1) for num, _ in blocks], ()))
    return product.reshape(values.shape)


def decode_values(codes, qtype, wide):
    """Convert values from the form in which kernels read them; all of them exactly."""
    if qtype == "int8":
        return codes.astype(wide)
    if qtype == "mxfp4":
        pair = jnp.stack([codes & 0x0F, codes >> 4], axis=-1)
        return jnp.take(jnp.asarray(FLOAT4, wide), pair.reshape(*codes.shape[:-1], -1).astype(jnp.int32), axis=0)
    bits = codes.astype(jnp.uint16)
    if qtype == "float8_e5m2":  # the upper half of a float16
        return lax.bitcast_convert_type(bits << 8, jnp.float16).astype(wide)
    # e4m3fn in the place of a float16's exponent and mantissa is 2⁸ times too small; all but NaN is finite.
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(wide) * np.asarray(256, wide))


def decode_scale(scale, wide):
    """Convert scales; of shared exponents, the last code is NaN, and the first 2⁻¹²⁷, which may be flushed to zero."""
    if scale.dtype != jnp.uint8:
        return scale.astype(wide)
    code = scale.astype(jnp.int32)
    bits = jnp.maximum(code << 23, np.int32(1 << 22))  # 2⁻¹²⁷ is not normal
    return jnp.where(code == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32)).astype(wide)


def gradient_type(operand):
    """Return the type of the gradient of what an operand stands for: its own, or of a quantised one that of sums."""
    return accumulator(operand.dtype) if isinstance(operand, QArray) else operand.dtype


def operand_gradient(operand: Any, gradient: Any, used: Any) -> Any:
    """Turn the gradient of the array that an operand stands for into that of the operand.

    Of a quantised one, the scales have a gradient, ``Σ value · gradient`` over what shares a scale; values and shared
    exponents are constants. ``used`` says which groups or rows are; what the others hold, NaN too, adds nothing.
    """
    if not isinstance(operand, QArray):
        return gradient
    if operand.scale.dtype == jnp.uint8:
        return QArray(None, None, None, operand.qtype)
    values = decode_values(operand.qvalue, operand.qtype, gradient.dtype)
    terms = jnp.where(used.reshape(-1, *[1] * (values.ndim - 1)), values * gradient, 0)
    scale = operand.scale
    split = terms.reshape(sum([(num, size // num) for size, num in zip(terms.shape, scale.shape)], ()))
    return QArray(None, split.sum(tuple(range(1, 2 * terms.ndim, 2))).astype(scale.dtype), None, operand.qtype)
