"""The layer's weights as its stages use them: what FSDP split is gathered once, just before use.

Backward, the gradients are summed and split again the same way: one reduce-scatter for each all-gather.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from raggedmoe.kernels.arrays import pvary_over
from raggedmoe.moe.records import MoEParams, StageSettings
from raggedmoe.sharding.axes import EXPERT, FSDP, axes_of
from raggedmoe.sharding.rules import partition
from raggedmoe.sharding.stage import BETWEEN_PROJECTIONS, PER_DEVICE, TOKENS, stage


def gather_router(params: MoEParams, settings: StageSettings) -> MoEParams:
    """The router's parameters, whole on every device."""
    router = {name: array for name, array in params.items() if name.startswith("router_")}
    return _all_gather(router, settings, over=(FSDP, EXPERT), result=TOKENS)


def gather_experts(params: MoEParams, settings: StageSettings, dtype: jnp.dtype) -> tuple[MoEParams, MoEParams]:
    """The experts' matrices with the bias of the down projection, and the biases of the up projections.

    They come in the type that they are multiplied in, which is also what is sent.
    """
    names = [name for name in params if not name.startswith(("router_", "shared_"))]
    experts = {name: params[name].astype(dtype) for name in names}
    up_biases = {name: experts.pop(name) for name in names if name.startswith("bias_wi")}
    return (
        _all_gather(experts, settings, over=(FSDP,), result=PER_DEVICE),
        _all_gather(up_biases, settings, over=(FSDP,), result=BETWEEN_PROJECTIONS),
    )


def _all_gather(
    params: MoEParams, settings: StageSettings, *, over: tuple[str, ...], result: PartitionSpec
) -> MoEParams:
    """Parameters gathered over logical axes, one copy for each device."""
    mesh, declared = settings.on_mesh, settings.config.param_specs()
    if mesh.mesh is None:
        return params
    specs = {name: partition(name, declared[name], mesh.sizes, mesh.tensor_split) for name in params}
    varies_over = mesh.axes(*axes_of(result[0]))

    @stage(parts=specs, result=result)
    def all_gather_weights(parts: MoEParams) -> MoEParams:
        # Each device's own before the gather: backward, the sum over the other axes is of the part that is kept.
        weights = {name: pvary_over(part, varies_over) for name, part in parts.items()}
        for name, spec in specs.items():
            for dim, entry in enumerate(spec):
                axes = mesh.axes(*(axis for axis in axes_of(entry) if axis in over))
                weights[name] = lax.all_gather(weights[name], axes, axis=dim, tiled=True)
        return weights

    return mesh.run(all_gather_weights, params)
