"""Peers in JAX: `jax.lax.ragged_dot`, alone and in our layer, and tokamax's where it is installed."""

from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.bench.case import Case
from raggedmoe.bench.contender import Prepared, contender
from raggedmoe.bench.ours import prepare_grouped_matmul, prepare_layer
from raggedmoe.moe.execution import MoEExecution

MOST_SECONDS, MOST_BYTES = 30.0, 4e9
FLOPS = 60e9  # of a small machine, a second: to know beforehand what would take too long


def ragged_dot_reason(case: Case) -> str | None:
    """Leave out what would take too long: on a CPU XLA multiplies all rows, in masked copies, by every expert."""
    shape = case.sizes
    seconds = shape.num_experts * case.flops / FLOPS
    num_bytes = shape.num_experts * shape.rows * max(shape.model_dim, shape.expert_dim) * 4
    if seconds > MOST_SECONDS or num_bytes > MOST_BYTES:
        return f"every row by every expert: about {seconds:.0f} s a call and {num_bytes / 1e9:.1f} GB"
    return None


@contender("jax.lax.ragged_dot", "layer", why_not=ragged_dot_reason)
def layer_ragged_dot(case: Case) -> Prepared:
    """Prepare our layer with XLA's grouped matmuls."""
    return prepare_layer(case, MoEExecution(moe_backend="ragged_dot"))


@contender("jax.lax.ragged_dot", "grouped_matmul", why_not=ragged_dot_reason)
def grouped_matmul_ragged_dot(case: Case) -> Prepared:
    """Prepare XLA's own."""

    def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return jax.lax.ragged_dot(lhs, jnp.swapaxes(rhs, 1, 2), group_sizes)

    return prepare_grouped_matmul(case, ragged_dot)


@contender("tokamax.ragged_dot", "grouped_matmul", needs=("tokamax",), why_not=ragged_dot_reason)
def grouped_matmul_tokamax(case: Case) -> Prepared:
    """Prepare that of tokamax, which on a CPU is XLA's."""
    import tokamax

    def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        return tokamax.ragged_dot(lhs, jnp.swapaxes(rhs, 1, 2), group_sizes)

    return prepare_grouped_matmul(case, ragged_dot)
