"""Where a decoder's activations and dense weights are on a mesh while they are used. XLA moves them there.

A weight is stored in parts, as the plan says. A layer that uses it has it whole but for the tensor axis: its parts are
gathered in the type of the activations just before, one layer at a time, and its gradient goes back in parts.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from raggedmoe.params import Params, Specs
from raggedmoe.sharding.axes import FSDP, TENSOR, TOKEN_AXES, LogicalMesh, axes_of
from raggedmoe.sharding.rules import WIDTH_AXES, partition
from raggedmoe.sharding.stage import TOKENS, stage


def all_gather_dense_weights(weights: Params, specs: Specs, mesh: LogicalMesh | None, dtype: Any) -> Params:
    """Gather the dense weights of matmuls over the axes that split their width, in the type that they are used in.

    Routed experts and routers stay as they are stored: the MoE layer's stages gather them.
    """
    if mesh is None:
        return weights
    gathered = dict(weights)
    for name, spec in specs.items():
        if name not in weights or spec.contracts is None or "expert" in spec.axes:
            continue
        stored = partition(name, spec, mesh)
        if any(stored):
            axes = [tuple(axis for axis in axes_of(entry) if axis not in WIDTH_AXES) for entry in stored]
            used = mesh.sharding(PartitionSpec(*axes))
            gathered[name] = _gather_weight(weights[name].astype(dtype), used, mesh.sharding(stored))
    return gathered


# What makes a gathered weight, and what only gives it another shape or type, for `jax.checkpoint`: none of that is kept
# for the backward pass, which gathers again, or every layer's weights would be there whole at once.
_SHAPING = ("reshape", "transpose", "squeeze", "slice", "dynamic_slice", "broadcast_in_dim", "pvary", "pcast")


def save_all_but_gathered_weights(mesh: LogicalMesh) -> Callable[..., bool]:
    """Make the policy, for `jax.checkpoint`, to keep all but gathered weights, in whatever shape they are used."""
    fsdp = set(mesh.axes(FSDP))

    def is_saved(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name.startswith("all_gather"):
            return not fsdp & set(params["axis_name"])
        return primitive.name != "linear_call" and primitive.name not in _SHAPING

    return is_saved


def _gather_weight(weight: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Lay a weight out as it is used, and its gradient as the weight is stored.

    XLA alone would lay the gradient out as the weight is used: whole, on every device.
    """
    return linear_call(
        lambda _, weight: lax.with_sharding_constraint(weight, used),
        lambda _, cotangent: lax.with_sharding_constraint(cotangent, stored),
        (),
        weight,
    )


def sharded_attention(
    attention: Callable[..., jax.Array],
    mesh: LogicalMesh,
    query: Float[Array, "B S N H"],
    key: Float[Array, "B L M H"],
    value: Float[Array, "B L M W"],
    options: dict[str, jax.Array | None],
) -> Float[Array, "B S N W"]:
    """Compute attention on each device for its own sequences and heads, as XLA cannot divide a Pallas kernel.

    Heads are split over the tensor axis where it divides their numbers, or where all query heads read one key head.
    ``options``: the positions, segments and sinks.
    """
    num_queries, num_keys, num_ranks = query.shape[2], key.shape[2], mesh.size(TENSOR)
    keys_divide = num_keys % num_ranks == 0
    of_queries = TENSOR if num_queries % num_ranks == 0 and (keys_divide or num_keys == 1) else None
    of_keys = of_queries if keys_divide else None
    queries, keys = (PartitionSpec(TOKEN_AXES, None, heads, None) for heads in (of_queries, of_keys))
    more = {"positions": TOKENS, "segments": TOKENS, "sinks": PartitionSpec(of_queries)}

    # Unchecked, as kernels of others do not say over which axes their results vary.
    @stage(query=queries, key=keys, value=keys, options=more, result=queries, checked=False)
    def attend(query: jax.Array, key: jax.Array, value: jax.Array, options: dict[str, Any]) -> jax.Array:
        return attention(query, key, value, **options)

    return mesh.run(attend, query, key, value, options)
