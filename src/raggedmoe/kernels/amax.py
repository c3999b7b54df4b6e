"""Delayed scaling: the scale of an operand is made of the largest absolute value that it had in the steps before.

A matmul is given that value of each of its operands, and is differentiated by it too: what comes back is no gradient,
but the largest value that the operand has in this call. Only so can that of a cotangent, which is there in the backward
pass alone, reach who keeps the history; and layers that are scanned over or computed again need nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.kernels.quantize import LARGEST

DTYPE = jnp.float32  # of all largest values, which of bfloat16 and float32 are exact so


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Amax:
    """The largest absolute value of each operand of a call, a scalar, or None where it has no delayed scale.

    Zero: none is known, and the scale is made of this call's own. The fields are not typed as arrays, as JAX puts
    others in their place when it compares structures.
    """

    rows: Any
    weights: tuple[Any, ...]  # of each matrix
    cotangents: tuple[Any, ...]  # of each product


def delayed_operands(config: QuantConfig, amax: Amax | None, num_weights: int) -> Amax:
    """Return the largest values of the operands whose scales are delayed, zero where none is known."""
    amax = amax or Amax(rows=None, weights=(None,) * num_weights, cotangents=(None,) * num_weights)

    def known(operand: str, value: Any) -> Any:
        if not config.is_delayed(operand):
            return None
        return jnp.zeros((), DTYPE) if value is None else value

    return Amax(
        rows=known("rows", amax.rows),
        weights=tuple(known("weights", value) for value in amax.weights),
        cotangents=tuple(known("cotangents", value) for value in amax.cotangents),
    )


def largest_absolute_value(array: Float[Array, "..."]) -> Float[Array, ""]:
    """Return the largest absolute value of an array's numbers; what is not finite must not stay in a history."""
    return jnp.max(jnp.abs(array), initial=0, where=jnp.isfinite(array)).astype(DTYPE)


def delayed_scale(
    before: Float[Array, ""], current: Float[Array, ""], qtype: str, dtype: Any, axes: Sequence[str] = ()
) -> Float[Array, ""]:
    """Make the scale with which the largest value of the steps before becomes the largest of the format.

    Where none is known, it is made of this call's, on a mesh the largest of all devices along ``axes``.
    """
    axes = tuple(axes)
    # All devices know the same, so either all of them compare theirs or none does.
    of_all = lambda: pvary_like(lax.pmax(current, axes), before) if axes else current  # noqa: E731
    largest = lax.cond(before > 0, lambda: before, of_all)
    scale = jnp.maximum(largest.astype(dtype) / np.asarray(LARGEST[qtype], dtype), jnp.finfo(dtype).tiny)
    return jnp.where(largest > 0, scale, 1)
