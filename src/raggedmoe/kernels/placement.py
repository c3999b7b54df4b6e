"""What a Pallas kernel must know of the mesh: XLA cannot divide it, and JAX may check what each part varies over."""

from typing import Any

import jax
from jax.sharding import AxisType

from raggedmoe.kernels.arrays import pvary_like
from raggedmoe.kernels.registry import Call


def placement(*arrays: Any) -> dict[str, bool]:
    """Make the options of a call that say who divides the arrays over the mesh in use, and whether JAX checks it."""
    avals = [jax.typeof(array) for array in arrays]
    meshes = [jax.sharding.get_abstract_mesh(), *(aval.sharding.mesh for aval in avals)]
    axes = [axis for mesh in meshes for axis in zip(mesh.axis_sizes, mesh.axis_types)]
    return {
        "divided_by_xla": any(size > 1 and kind != AxisType.Manual for size, kind in axes),
        "checked_shard_map": any(aval.manual_axis_type.varying for aval in avals),
    }


def placement_why_not(call: Call) -> str | None:
    """Say why a Pallas kernel cannot run under the mesh in use."""
    if call.options.get("divided_by_xla"):
        return f"XLA cannot divide its kernel over a mesh: call {call.operation} in shard_map"
    return None


def unchecked_why_not(call: Call) -> str | None:
    """Say why a kernel of others cannot run under the mesh in use: it does not say what its results vary over."""
    if call.options.get("divided_by_xla"):
        return f"XLA cannot divide its kernel over a mesh: call {call.operation} in shard_map(..., check_vma=False)"
    if call.options.get("checked_shard_map"):
        return "its kernel does not say over which mesh axes its results vary: use shard_map(..., check_vma=False)"
    return None


def pvary_alike(*arrays: Any) -> tuple[Any, ...]:
    """Type arrays, or trees of them, in `shard_map` as varying over every mesh axis that one of them does.

    A `custom_vjp` wants gradients of its arguments' types, and a gradient varies as any of the others does.
    """
    leaves = jax.tree.leaves(arrays)
    return jax.tree.map(lambda array: pvary_like(array, *leaves), arrays)


def result(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.ShapeDtypeStruct:
    """Describe a kernel's result that varies over the mesh axes that one of its operands does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
