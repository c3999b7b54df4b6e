"""The operations by themselves, where you would write `jax.lax.ragged_dot`: the same numbers, value and gradients.

python examples/ragged_operations.py --rows 4096 --experts 64
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from raggedmoe import expert_ffn, grouped_matmul

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=4096)
parser.add_argument("--experts", type=int, default=64)
parser.add_argument("--dim", type=int, default=512)
arguments = parser.parse_args()
R, E, D, F = arguments.rows, arguments.experts, arguments.dim, 2 * arguments.dim

keys = jax.random.split(jax.random.key(0), 5)
rows = jax.random.normal(keys[0], (R, D))  # sorted by expert
wi_0, wi_1, wo = (jax.random.normal(key, (E, F, D)) / D**0.5 for key in keys[1:4])
group_sizes = jnp.bincount(jax.random.randint(keys[4], (R,), 0, E), length=E)  # how many rows each expert has


def by_jax(rows: jax.Array, wi_0: jax.Array, wi_1: jax.Array, wo: jax.Array) -> jax.Array:
    """Gated experts by XLA's ragged dot, which needs the up projections as [E D F]."""
    gate, up = (jax.lax.ragged_dot(rows, w.swapaxes(1, 2), group_sizes) for w in (wi_0, wi_1))
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, wo, group_sizes)


def by_grouped_matmul(rows: jax.Array, wi_0: jax.Array, wi_1: jax.Array, wo: jax.Array) -> jax.Array:
    """The same by our grouped matmul: `transpose_rhs` reads [E F D] as it is stored."""
    gate, up = (grouped_matmul(rows, w, group_sizes, transpose_rhs=True) for w in (wi_0, wi_1))
    return grouped_matmul(jax.nn.silu(gate) * up, wo, group_sizes)


def fused(rows: jax.Array, wi_0: jax.Array, wi_1: jax.Array, wo: jax.Array) -> jax.Array:
    """The same as one operation."""
    return expert_ffn(rows, wi_0, wi_1, wo, group_sizes)


def gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the function that computes all four gradients of the sum of squares."""
    return jax.jit(jax.grad(lambda *arrays: (function(*arrays) ** 2).sum(), argnums=(0, 1, 2, 3)))


expected = gradients(by_jax)(rows, wi_0, wi_1, wo)
for function in (by_jax, by_grouped_matmul, fused):
    compute = gradients(function)
    results = jax.block_until_ready(compute(rows, wi_0, wi_1, wo))  # compiled
    start = time.perf_counter()
    jax.block_until_ready(compute(rows, wi_0, wi_1, wo))
    seconds = time.perf_counter() - start
    difference = max(float(abs(a - b).max() / abs(b).max()) for a, b in zip(results, expected, strict=True))
    print(f"{function.__name__:18} {1e3 * seconds:8.1f} ms, largest difference of a gradient {difference:.1e}")
