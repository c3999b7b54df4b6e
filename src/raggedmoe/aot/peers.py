"""What a grouped matmul is held against: one dense matmul of the same size, and JAX's own ragged dot, as they are.

Other libraries' kernels are implementations like any other, under the same contract: megablox, tokamax, gmm_v2, xla.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.aot.case import Program
from raggedmoe.aot.subjects import example_named, gradients, with_integers
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.names import unknown

OPERATION = "grouped_matmul"


def dense(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """All rows times the first group's matrix: what a chip can do at best."""
    return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32).astype(lhs.dtype)


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """JAX's own, without a contract about rows that belong to no group."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


PEERS: dict[str, Callable[..., Any]] = {"dense": dense, "ragged_dot": ragged_dot}


def peer_call(
    peer: str, *, call: str, dtype: str = "bfloat16", direction: str = FORWARD, gradient: str | None = None
) -> Program:
    """A peer on an example call of `grouped_matmul`."""
    if peer not in PEERS:
        raise unknown("peer", peer, PEERS)
    example = example_named(OPERATION, call, dtype)
    arrays = with_integers({name: example.arrays[name] for name in ("lhs", "rhs", "group_sizes")})
    cotangent = with_integers(example.cotangent)
    transpose, rhs = example.options.get("transpose_rhs", False), arrays["rhs"]
    if peer == "dense":
        arrays["rhs"] = jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)

    def function(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return PEERS[peer](lhs, jnp.swapaxes(rhs, -1, -2) if transpose else rhs, group_sizes)

    if direction == BACKWARD:
        return Program(
            function=lambda arrays, cotangent: gradients(function, arrays, cotangent, gradient),
            args=(arrays, cotangent),
        )
    return Program(function=lambda arrays: function(**arrays), args=(arrays,))
