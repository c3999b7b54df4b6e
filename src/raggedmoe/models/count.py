"""How many parameters a model has, and how many of them a token uses. Nothing is allocated."""

from dataclasses import dataclass

import jax.numpy as jnp

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.rules import is_routed


@dataclass(frozen=True, kw_only=True)
class Count:
    """Parameters of a model. The multi-token-prediction modules are no part of the model's size as published."""

    total: int
    active: int  # that one token uses: all but the experts that it does not choose
    mtp: int  # of the multi-token-prediction modules, beside the total
    trained: int  # of all of them, those that learn by gradient
    bytes: int  # of all of them, as stored


def count_params(config: ModelConfig) -> Count:
    """Count by the declared shapes."""
    specs = param_specs(config)
    total = mtp = idle = 0
    for name, spec in specs.items():
        if name.startswith("mtp."):
            mtp += spec.num_elements
            continue
        total += spec.num_elements
        if is_routed(name, spec):
            unused = config.moe.num_experts - config.moe.experts_per_token
            idle += spec.num_elements // config.moe.num_experts * unused
    return Count(
        total=total,
        active=total - idle,
        mtp=mtp,
        trained=sum(spec.num_elements for spec in specs.values() if spec.trained),
        bytes=sum(spec.num_elements * jnp.dtype(spec.dtype).itemsize for spec in specs.values()),
    )
