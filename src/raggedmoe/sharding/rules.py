"""How every parameter is split over a mesh, from the names of its axes: the one rule that plans and layers read."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.params import ParamSpec, Specs, init_params
from raggedmoe.sharding.axes import EXPERT, FSDP, TENSOR, LogicalMesh, entry_of, logical_mesh

SPLITS = ("expert_dim", "model_dim")  # what the tensor axis splits of routed experts: F or D

# Of a parameter that all tokens use, the first width that it has is split over axes that otherwise split tokens only,
# and the first of the other dimensions over the tensor axis.
WIDTH_AXES = (FSDP, EXPERT)
WIDTH_DIMS = ("model_dim", "q_latent", "kv_latent")
TENSOR_DIMS = ("head", "kv_head", "mlp_dim", "shared_dim", "vocab")


def partition(name: str, spec: ParamSpec, sizes: Mapping[str, int], tensor_split: str = "expert_dim") -> PartitionSpec:
    """How a parameter is split over axes of these sizes.

    What does not divide stays whole, but for routed experts: there it is an error, as they are nearly all of a model.
    """
    if is_routed(name, spec):
        return _partition_experts(name, spec, sizes, tensor_split)
    if len([axis for axis in spec.axes if axis != "layer"]) < 2:
        return PartitionSpec()  # norms and biases: small, and whole everywhere
    first = {dims: [dim for dim in dims if dim in spec.axes][:1] for dims in (WIDTH_DIMS, TENSOR_DIMS)}
    entries = {**dict.fromkeys(first[WIDTH_DIMS], WIDTH_AXES), **dict.fromkeys(first[TENSOR_DIMS], (TENSOR,))}
    return PartitionSpec(
        *(entry_of(_dividing_axes(entries.get(dim, ()), size, sizes)) for dim, size in zip(spec.axes, spec.shape))
    )


def param_shardings(
    mesh: Mesh | LogicalMesh, specs: Specs, tensor_split: str = "expert_dim"
) -> dict[str, NamedSharding]:
    """The sharding of every parameter on a mesh."""
    logical = logical_mesh(mesh)
    return {name: logical.sharding(partition(name, spec, logical.sizes, tensor_split)) for name, spec in specs.items()}


def make_params(
    specs: Specs, params: Mapping[str, Any] | None, rngs: Any, mesh: LogicalMesh | None, tensor_split: str
) -> Mapping[str, Any]:
    """The parameters that a module was given, or new ones, of which on a mesh each device draws its own part."""
    if (rngs is None) == (params is None):
        raise ValueError("expected rngs for new parameters or params for given ones, got both or neither")
    if params is not None:
        return params
    shardings = None if mesh is None else param_shardings(mesh, specs, tensor_split)
    return jax.jit(functools.partial(init_params, specs), out_shardings=shardings)(rngs.params())


def is_routed(name: str, spec: ParamSpec) -> bool:
    """Whether a token uses only its own experts' part of a parameter: all that have an expert axis but the router's."""
    return "expert" in spec.axes and not name.rpartition(".")[2].startswith("router_")


def _partition_experts(name: str, spec: ParamSpec, sizes: Mapping[str, int], tensor_split: str) -> PartitionSpec:
    entries: dict[str, tuple[str, ...]] = {"expert": (EXPERT,), tensor_split: (TENSOR,)}
    if "expert_dim" in spec.axes and "model_dim" in spec.axes:  # not the biases, which are small
        entries["model_dim"] = (*entries.get("model_dim", ()), FSDP)
    for dim, size in zip(spec.axes, spec.shape):
        axes = entries.get(dim, ())
        if size % _degree(axes, sizes):
            degrees = " × ".join(f"{axis}_parallelism={sizes[axis]}" for axis in axes if sizes[axis] > 1)
            fitting = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
            raise ValueError(f"{name}: its {dim}={size} is not divisible by {degrees}; a product may be in {fitting}")
    return PartitionSpec(*(entry_of(entries.get(dim, ())) for dim in spec.axes))


def _degree(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _dividing_axes(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The longest beginning of the axes that divides the size."""
    while size % _degree(axes, sizes):
        axes = axes[:-1]
    return axes
