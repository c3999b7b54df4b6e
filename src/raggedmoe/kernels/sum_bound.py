"""How far rounding may take the value and the gradients of an operation that only sums products.

The bound is ``eps(result) · |result| + SUM_ROUNDINGS · eps(accumulator) · Σ|terms|``: the two roundings of the result
to its type, and the roundings of the sum, whose error grows like ``eps · sqrt(n) · |partial sums|``, about
``eps · Σ|terms|``. ``Σ|terms|`` is the reference itself on the absolute values of the inputs, so no length or scale is
guessed.

A quantised operand adds ``DEQUANTIZE_ROUNDINGS · eps(accumulator) · Σ|terms|``: its values are exact in the type of
sums, and a value times its scale is rounded once, by half of eps, in each of the two results; where an implementation
scales a sum instead of its terms, that is one rounding as well. The gradient of a scale is a sum of products of values,
which are exact, with the gradient of the array, which errs as above, so the two sums' roundings add up.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients

SUM_ROUNDINGS = 4
DEQUANTIZE_ROUNDINGS = 1


def sum_error_bounds(
    function: Callable[..., Any], example: Example, reference: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Bound the error of every quantity in ``reference``, the operation ``function`` being linear in each array."""
    options = {**example.options, "implementation": "reference"}
    options.pop("preferred_element_type", None)
    arrays, cotangent = absolute_values(example)
    terms = jitted_value_and_gradients(function, tuple(options.items()), arrays, cotangent)
    bounds = {}
    for quantity, expected in reference.items():
        sum_eps = float(jnp.finfo(accumulator(expected.dtype)).eps)
        roundings = SUM_ROUNDINGS + quantized_roundings(example, quantity)
        bounds[quantity] = result_rounding(expected) + roundings * sum_eps * np.asarray(terms[quantity], np.float64)
    return bounds


def quantized_roundings(example: Example, quantity: str) -> int:
    """Count what quantised operands add to the roundings of a quantity: see above."""
    stored = [name for name, array in example.arrays.items() if isinstance(array, QArray)]
    return DEQUANTIZE_ROUNDINGS * len(stored) + SUM_ROUNDINGS * (quantity[1:] in stored)


def absolute_values(example: Example) -> tuple[dict[str, Any], Any]:
    """Take the absolute values of an example's floating arrays and of its cotangent, in the type of sums.

    Of quantised ones the values lose their signs as well.
    """

    def absolute(a: Any) -> Any:
        if isinstance(a, QArray):
            return QArray(_without_signs(a), absolute(a.scale), None, a.qtype)
        return jnp.abs(a).astype(accumulator(a.dtype)) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(absolute, (dict(example.arrays), example.cotangent), is_leaf=lambda a: isinstance(a, QArray))


def _without_signs(operand: QArray) -> Any:
    """Clear the signs of quantised values: of int8 by absolute value, of the others by their bit."""
    if operand.qtype == "int8":
        return jnp.abs(operand.qvalue)
    return operand.qvalue & (0x77 if operand.qtype == "mxfp4" else 0x7F)


def result_rounding(expected: Any) -> np.ndarray:
    """Bound what the roundings of both results to their type make, element by element."""
    return float(jnp.finfo(expected.dtype).eps) * np.abs(np.asarray(expected, np.float64))
