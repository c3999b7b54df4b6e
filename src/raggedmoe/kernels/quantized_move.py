"""Rows moved between devices in 8 bits: each is quantised by itself just before it is sent, and dequantised on arrival.

Backward, the gradients of what arrived go back by the reverse of the same move, in their own type, and are given to the
rows that were sent as if nothing had been rounded: the straight-through rule. A scale counts as a constant.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.quantize import absmax_scale, encode_bits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def move_quantized(
    move: Callable[[Array, Any], Array], qtype: str, rows: Float[Array, "R D"], places: Any
) -> Float[Array, "N D"]:
    """Move rows as values of 8 bits, with a scale for each row beside them, and return what they stand for.

    Args:
      move: computes ``move(array, places)``, which copies rows of an array of any type and width to other places, or
        to none. Where it puts no row it leaves zeros.
      qtype: the format of the values, one of ``LHS_FORMATS``.
      rows: each has a scale of its own, so what one holds, NaN too, reaches no other. Scales are float32, and float64
        for rows of that type.
      places: arrays that say where rows go. They have no gradient.
    """
    if 0 in rows.shape:
        return move(rows, places)
    scale = absmax_scale(rows, qtype, (rows.shape[0], 1))
    values = move(encode_bits(rows, scale, qtype), places)
    return dequantize(QArray(values, move(scale, places), None, qtype), scale.dtype).astype(rows.dtype)


def _forward(move: Any, qtype: str, rows: jax.Array, places: Any) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    return move_quantized(move, qtype, rows, places), (places, rows[:, :0])


def _backward(move: Any, qtype: str, saved: tuple[Any, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    places, like = saved
    rows = pvary_like(jnp.zeros((like.shape[0], cotangent.shape[1]), cotangent.dtype), like)
    _, move_back = jax.vjp(lambda rows: move(rows, places), rows)
    (gradient,) = move_back(cotangent)
    return gradient, None


move_quantized.defvjp(_forward, _backward)
