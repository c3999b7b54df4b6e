"""Adding a model's adapters to its weights, so that it is one of weights alone."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.lora import LEADING_AXES, B, first_matrix, is_adapter, merged_weight
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import ParamSpec


def _merge(weight: Any, first: jax.Array, second: jax.Array, *, spec: ParamSpec, scale: float) -> jax.Array:
    """Add an adapter's product to a weight, each matrix of a stack of quantised ones by itself."""
    dtype = jnp.dtype(spec.dtype)
    if not isinstance(weight, QArray):
        return merged_weight(weight, spec, first, second, scale)
    is_stack = spec.axes[0] in LEADING_AXES
    one = replace(spec, shape=spec.shape[1:], axes=spec.axes[1:]) if is_stack else spec

    def add(parts: tuple[QArray, jax.Array, jax.Array]) -> jax.Array:
        stored, a, b = parts
        return merged_weight(dequantize(stored, accumulator(dtype)), one, a, b, scale).astype(dtype)

    return jax.lax.map(add, (weight, first, second)) if is_stack else add((weight, first, second))


def merge_lora(model: Decoder) -> Decoder:
    """Make the model that computes the same without adapters: each weight plus its adapter's product.

    The sum is computed in float32 at least and rounded once, to the weight's type. A weight that stayed quantised
    becomes an array of the model's type; those without an adapter stay as they are. What was trained whole is taken as
    it is. Without adapters the model is returned.
    """
    lora = model.config.lora
    if lora is None:
        return model
    specs, arrays, merged = param_specs(model.config), model.params, {}
    for name, spec in specs.items():
        if is_adapter(name):
            continue
        merged[name] = arrays[name]
        if f"{name}{B}" in arrays:
            add = jax.jit(functools.partial(_merge, spec=spec, scale=lora.scale))
            merged[name] = add(arrays[name], first=arrays[first_matrix(name)], second=arrays[f"{name}{B}"])
    return Decoder(
        replace(model.config, lora=None),
        params=merged,
        execution=model.execution,
        mesh=model.mesh,
        companions=model.companions,
    )
