"""The layer's weights as its stages use them: what FSDP split is gathered once, just before use.

Backward, the gradients are summed and split again the same way: one reduce-scatter for each all-gather.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from raggedmoe.kernels.arrays import varying_over
from raggedmoe.mesh import AXES, EXPERT, FSDP, TOKEN_AXES
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.records import MoEParams, RouterParams
from raggedmoe.partition import axes_of, partition
from raggedmoe.sharding.stage import (
    BETWEEN_PROJECTIONS,
    PER_DEVICE,
    PER_SHARD,
    Lies,
    OnMesh,
    Placement,
    field_name,
)


def gather_router(params: RouterParams, config: MoEConfig, run: OnMesh) -> Any:
    """The router's parameters, whole on every device."""
    return _all_gather(params, "router_", config, run, over=(FSDP, EXPERT), result=PER_SHARD)


def gather_experts(params: MoEParams, config: MoEConfig, run: OnMesh, dtype: jnp.dtype) -> tuple[Any, Any]:
    """The experts' matrices with the bias of the down projection, and the biases of the up projections, by name.

    They come in the type that they are multiplied in, which is also what is sent.
    """
    matrices: dict[str, Any] = {"wi_0": params.wi_0, "wi_1": params.wi_1, "wo": params.wo}
    up_biases: dict[str, Any] = {}
    if params.biases is not None:
        matrices["bias_wo"] = params.biases.wo
        up_biases = {"bias_wi_0": params.biases.wi_0, "bias_wi_1": params.biases.wi_1}
    matrices, up_biases = jax.tree.map(lambda weight: weight.astype(dtype), (matrices, up_biases))
    return (
        _all_gather(matrices, "", config, run, over=(FSDP,), result=PER_DEVICE),
        _all_gather(up_biases, "", config, run, over=(FSDP,), result=BETWEEN_PROJECTIONS),
    )


def _all_gather(
    params: Any, prefix: str, config: MoEConfig, run: OnMesh, *, over: tuple[str, ...], result: Lies
) -> Any:
    """Parameters gathered over some mesh axes, one copy for each device; ``prefix`` and a field make a spec's name."""
    if run.mesh is None:
        return params
    sizes, split = run.mesh.shape, config.tensor_split
    partitions = {
        name.removeprefix(prefix): partition(name, spec, sizes, split) for name, spec in config.param_specs().items()
    }
    varies_over = AXES if run.placement(result) is PER_DEVICE else TOKEN_AXES

    def gather(path: Any, part: jax.Array) -> jax.Array:
        # Each device's own before the gather: backward, the sum over the other axes is of the part that is kept.
        part, split = varying_over(part, varies_over), partitions[field_name(path)]
        for dim, entry in enumerate(split):
            axes = tuple(axis for axis in axes_of(entry) if axis in over)
            part = lax.all_gather(part, axes, axis=dim, tiled=True) if axes else part
        return part

    return run.run(
        lambda parts: jax.tree_util.tree_map_with_path(gather, parts),
        params,
        arguments=(Placement(spec=PartitionSpec(), fields=partitions),),
        result=result,
    )
