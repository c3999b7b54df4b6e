"""The layer's weights as its stages use them: what FSDP split is gathered once, just before use.

Backward, the gradients are summed and split again the same way: one reduce-scatter for each all-gather.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from raggedmoe.kernels.arrays import varying_over
from raggedmoe.mesh import AXES, EXPERT, FSDP, TOKEN_AXES
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.grid import EACH, EACH_DEVICE, Grid, Place
from raggedmoe.moe.records import MoEParams, RouterParams
from raggedmoe.partition import axes_of, partition


@dataclass(frozen=True, kw_only=True)
class HeldExperts:
    """The weights of the experts held here, ready for use. On a mesh each is a `Spread`; only stages look inside."""

    matrices: Any  # {"wi_0", "wi_1", "wo", "bias_wo"}, those that there are
    up_biases: Any  # {"bias_wi_0", "bias_wi_1"}, those that there are


def gathered_router(params: RouterParams, config: MoEConfig, grid: Grid) -> Any:
    """The router's parameters, `RouterParams`, whole on every device."""
    if grid.mesh is None:
        return params
    flat = {f"router_{field.name}": getattr(params, field.name) for field in fields(RouterParams)}
    return _gathered(flat, config, grid, (FSDP, EXPERT), EACH)


def gathered_experts(params: MoEParams, config: MoEConfig, grid: Grid, dtype: jnp.dtype) -> HeldExperts:
    """The experts' weights in the type that they are multiplied in, which is also what is sent."""
    matrices: dict[str, Any] = {"wi_0": params.wi_0, "wi_1": params.wi_1, "wo": params.wo}
    up_biases: dict[str, Any] = {}
    if params.biases is not None:
        matrices["bias_wo"] = params.biases.wo
        up_biases = {"bias_wi_0": params.biases.wi_0, "bias_wi_1": params.biases.wi_1}
    matrices, up_biases = (
        {name: value.astype(dtype) for name, value in each.items() if value is not None}
        for each in (matrices, up_biases)
    )
    if grid.mesh is None:
        return HeldExperts(matrices=matrices, up_biases=up_biases)
    return HeldExperts(
        matrices=_gathered(matrices, config, grid, (FSDP,), EACH_DEVICE),
        up_biases=_gathered(up_biases, config, grid, (FSDP,), up_place(config)),
    )


def up_place(config: MoEConfig) -> Place:
    """Of what comes between the projections: each tensor rank has its part of F, or all have the same sums over D."""
    return EACH_DEVICE if config.tensor_split == "expert_dim" else EACH


def _gathered(flat: Mapping[str, Any], config: MoEConfig, grid: Grid, over: tuple[str, ...], place: Place) -> Any:
    """The parameters gathered over some mesh axes, one copy for each device."""
    assert grid.mesh is not None
    specs = {name: spec for name, spec in config.param_specs().items() if name in flat}
    partitions = {name: partition(name, spec, grid.mesh.shape, config.tensor_split) for name, spec in specs.items()}
    axes = AXES if place is EACH_DEVICE else TOKEN_AXES

    def stage(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # Each device's own before the gather: backward, the sum over the other axes is of the part that is kept.
        return {name: _whole(varying_over(part, axes), partitions[name], over) for name, part in parts.items()}

    given = {name: flat[name] for name in specs}
    return grid.run(stage, given, places=(Place(spec=partitions),), result=place)


def _whole(part: jax.Array, split: PartitionSpec, over: tuple[str, ...]) -> jax.Array:
    for dim, entry in enumerate(split):
        axes = tuple(axis for axis in axes_of(entry) if axis in over)
        if axes:
            part = lax.all_gather(part, axes, axis=dim, tiled=True)
    return part
