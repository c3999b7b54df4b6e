"""How every parameter is split over a mesh, from the names of its axes: the one rule that plans and layers read."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from raggedmoe.kernels.arrays import pvary_over
from raggedmoe.kernels.qarray import QArray
from raggedmoe.params import ParamSpec, Specs, divisors, init_params
from raggedmoe.sharding.axes import EXPERT, FSDP, TENSOR, LogicalMesh, axes_of
from raggedmoe.sharding.stage import stage

# Of a parameter that all tokens use, the first width that it has is split over axes that otherwise split tokens only,
# and the first of the other dimensions over the tensor axis.
WIDTH_AXES = (FSDP, EXPERT)
WIDTH_DIMS = ("model_dim", "q_latent", "kv_latent")
TENSOR_DIMS = ("head", "kv_head", "mlp_dim", "shared_dim", "vocab")
Shardings = dict[str, NamedSharding | None]  # by the parameters' names; on one device there is none


class UnevenSplitError(ValueError):
    """A dimension of routed experts that the degrees of parallelism which split it do not divide."""

    def __init__(self, name: str, dim: str, size: int, degrees: Mapping[str, int]) -> None:
        self.dim, self.size, self.degrees = dim, size, degrees
        self.fitting = [number for number in divisors(size) if number <= 4096]
        by = " × ".join(f"{axis}_parallelism={degree}" for axis, degree in degrees.items())
        super().__init__(f"{name}: its {dim}={size} is not divisible by {by}; a product may be in {self.fitting}")


def partition(name: str, spec: ParamSpec, mesh: LogicalMesh, *, small: bool = False) -> PartitionSpec:
    """Say how a parameter is split over the logical axes of a mesh.

    What does not divide stays whole, but for routed experts: there it is an error, as they are nearly all of a model.
    What is small beside them is split like them by whichever width it has: adapters, and the scales of quantised ones,
    ``small``, which may stay whole over FSDP alone, as it gathers them before use anyway.
    """
    routed, splits = is_routed(name, spec), dict[str, tuple[str, ...]]()
    if routed:
        splits = {"expert": (EXPERT,), mesh.tensor_split: (TENSOR,)}
        if len([dim for dim in spec.axes if dim != "layer"]) > 2:  # not the biases, which are small
            width = next(dim for dim in ("model_dim", "expert_dim") if dim in spec.axes)
            splits[width] = (*splits.get(width, ()), FSDP)
    elif len([dim for dim in spec.axes if dim != "layer"]) > 1:  # not norms and biases: small, and whole everywhere
        for dims, over in ((WIDTH_DIMS, WIDTH_AXES), (TENSOR_DIMS, (TENSOR,))):
            splits.update(dict.fromkeys([dim for dim in dims if dim in spec.axes][:1], over))
    entries, is_adapter = [], "lora_rank" in spec.axes
    for dim, size in zip(spec.axes, spec.shape):
        axes = splits.get(dim, ())
        while size % mesh.size(*axes):
            if routed and not is_adapter and not (small and (size == 1 or axes[-1] == FSDP)):
                degrees = {axis: mesh.size(axis) for axis in axes if mesh.size(axis) > 1}
                raise UnevenSplitError(name, dim, size, degrees)
            axes = axes[:-1]
        entries.append(axes)
    return PartitionSpec(*entries) if splits else PartitionSpec()


def stored_partition(name: str, spec: ParamSpec, array: Any, mesh: LogicalMesh) -> Any:
    """Say how a parameter is split as it is stored: an array, or the values and scales of a quantised one.

    Each is a parameter with the same axes. A byte of two values cannot be split; nor, by the tensor axis, a block of
    routed experts that shares a scale, as their parts are used as they are. Dense weights XLA divides, blocks too.
    """
    if not isinstance(array, QArray):
        return partition(name, spec, mesh)
    values = partition(f"bytes of {name}", replace(spec, shape=array.qvalue.shape), mesh)
    scales = partition(f"scales of {name}", replace(spec, shape=array.scale.shape), mesh, small=True)
    return QArray(values, scales, None, array.qtype)


def param_shardings(mesh: LogicalMesh, specs: Specs) -> Shardings:
    """Return the sharding of every parameter on a mesh; on one device there is none."""
    return {name: mesh.sharding(partition(name, spec, mesh)) for name, spec in specs.items()}


def all_gather_params(params: dict[str, Any], specs: Specs, mesh: LogicalMesh, result: PartitionSpec) -> dict[str, Any]:
    """Gather some of a layer's parameters as its stages use them: what FSDP split is there whole, just before use.

    Backward, the gradients are summed and split again the same way: one reduce-scatter for each all-gather.
    """
    stored = {name: stored_partition(name, specs[name], array, mesh) for name, array in params.items()}

    @stage(parts=stored, result=result)
    def all_gather_weights(parts: dict[str, Any]) -> dict[str, Any]:
        def gather(part: jax.Array, spec: PartitionSpec) -> jax.Array:
            # Each device's own before the gather: backward, the sum over the other axes is of the part that is kept.
            weight = pvary_over(part, mesh.axes(*axes_of(result[0])))
            for i, axes in enumerate(map(axes_of, spec)):
                # Without FSDP beside it the expert axis splits the experts themselves, which stay where they are.
                over = [axis for axis in axes if axis in WIDTH_AXES and FSDP in axes]
                weight = lax.all_gather(weight, mesh.axes(*over), axis=i, tiled=True)
            return weight

        return jax.tree.map(gather, parts, stored)

    return mesh.run(all_gather_weights, params)


def make_params(specs: Specs, params: Mapping[str, Any] | None, rngs: Any, mesh: LogicalMesh) -> Mapping[str, Any]:
    """Return the parameters that a module was given, or draw new ones, each device its own part."""
    if (rngs is None) == (params is None):
        raise ValueError("expected rngs for new parameters or params for given ones, got both or neither")
    if params is not None:
        return params
    return jax.jit(functools.partial(init_params, specs), out_shardings=param_shardings(mesh, specs))(rngs.params())


def is_routed(name: str, spec: ParamSpec) -> bool:
    """Tell whether a token uses its experts' part of a parameter alone: so it is but for routers' and dense weights."""
    return "expert" in spec.axes and not name.rpartition(".")[2].startswith("router_")
