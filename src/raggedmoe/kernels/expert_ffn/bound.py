"""How far rounding may take the value and the gradients of `expert_ffn`, which rounds its hidden activations as well.

The bound is ``FFN_ROUNDINGS · eps(input)`` times the same network on absolute values, with the activation replaced by a
polynomial that bounds it, its slope and its curvature. Quantised operands add to it as to any sum (`sum_bound.py`).
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.expert_ffn import reference as expert_ffn_reference
from raggedmoe.kernels.expert_ffn.api import ExpertWeights
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.sum_bound import absolute_values, quantized_roundings
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients

FFN_ROUNDINGS = 1


def error_bounds(example: Example, reference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Bound the error of every quantity in ``reference``, the value and gradients that the reference computes."""
    options = (("activation", example.options["activation"]),)
    terms = jitted_value_and_gradients(_majorant, options, *absolute_values(example))
    dtype = example.arrays["rows"].dtype
    eps, sum_eps = float(jnp.finfo(dtype).eps), float(jnp.finfo(accumulator(dtype)).eps)
    return {
        quantity: (FFN_ROUNDINGS * eps + quantized_roundings(example, quantity) * sum_eps)
        * np.asarray(terms[quantity], np.float64)
        for quantity in reference
    }


def _majorant(rows, wi_0, wi_1, wo, group_sizes, biases=None, *, activation):
    def polynomial(gate, up):
        # |f| <= 1.2 g, |f'| <= 1.2 and |f''| <= 1.8 for the smooth ones, with 1.702² · 0.5 the steepest curvature.
        bound = jnp.square(gate) if activation == "relu2" else 1.2 * gate + jnp.square(gate)
        return bound if up is None else bound * (up + 1 if activation == "clamped_swiglu" else up)

    bounds = group_bounds(group_sizes, wi_0.shape[0], rows.shape[0])
    return expert_ffn_reference.forward_with(polynomial, rows, ExpertWeights(wi_0, wi_1, wo, biases), bounds)
