"""How many parameters a model has, and how many of them a token uses. Nothing is allocated."""

import math
from dataclasses import dataclass

import jax

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.specs import param_specs
from raggedmoe.params import init_params
from raggedmoe.partition import is_routed


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a model. The multi-token-prediction modules are no part of the model's size as published."""

    total: int
    active: int  # that one token uses: all but the experts that it does not choose
    mtp: int  # of the multi-token-prediction modules, beside the total
    bytes: int  # of all of them, as stored


def count_params(config: ModelConfig) -> Count:
    """Count by the shapes that initialisation would make."""
    specs = param_specs(config)
    shapes = jax.eval_shape(lambda: init_params(specs, jax.random.key(0)))
    total = mtp = idle = 0
    for name, array in shapes.items():
        size = math.prod(array.shape)
        if name.startswith("mtp."):
            mtp += size
            continue
        total += size
        if is_routed(name, specs[name]):
            idle += size // config.moe.num_experts * (config.moe.num_experts - config.moe.experts_per_token)
    return Count(
        total=total,
        active=total - idle,
        mtp=mtp,
        bytes=sum(math.prod(array.shape) * array.dtype.itemsize for array in shapes.values()),
    )
