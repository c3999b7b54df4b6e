"""Adding a model's adapters to its weights, so that it is one of weights alone."""

import functools
from dataclasses import replace

import jax

from raggedmoe.kernels.qarray import Quantized
from raggedmoe.lora import B, first_matrix, is_adapter, merged_weight
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs


def merge_lora(model: Decoder) -> Decoder:
    """Make the model that computes the same without adapters: each weight plus its adapter's product.

    The sum is computed in float32 at least and rounded once, to the weight's type. What was trained whole is taken as
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
            if isinstance(arrays[name], Quantized):
                raise ValueError(f"expected arrays to merge adapters with, got a quantised {name}; load it dequantised")
            add = jax.jit(functools.partial(merged_weight, spec=spec, scale=lora.scale))
            merged[name] = add(arrays[name], first=arrays[first_matrix(name)], second=arrays[f"{name}{B}"])
    return Decoder(
        replace(model.config, lora=None),
        params=merged,
        execution=model.execution,
        mesh=model.mesh,
        companions=model.companions,
    )
