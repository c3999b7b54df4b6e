"""`ragged_gather` as one XLA gather with a mask."""

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.proof import COMPILED_XLA
from raggedmoe.kernels.registry import BACKWARD, Call, Implementation


def valid_rows(indices, start, end, num_tokens):
    """Say which output rows are in range and read an existing row."""
    row = jnp.arange(indices.shape[0], dtype=jnp.int32)
    return (row >= start) & (row < end) & (indices >= 0) & (indices < num_tokens)


def forward(x, indices, start, end, weights):
    valid = valid_rows(indices, start, end, x.shape[0])[:, None]
    rows = jnp.take(x, indices, axis=0, mode="clip")
    if weights is not None:
        wide = accumulator(x.dtype)
        rows = (rows.astype(wide) * weights.astype(wide)[:, None]).astype(x.dtype)
    return jnp.where(valid, rows, jnp.zeros((), x.dtype))


def backward(x, indices, start, end, weights, inverse, cotangent):
    valid = valid_rows(indices, start, end, x.shape[0])
    wide = accumulator(x.dtype)
    dweights = None
    if weights is not None:
        products = jnp.take(x, indices, axis=0, mode="clip").astype(wide) * cotangent.astype(wide)
        dweights = jnp.where(valid, products.sum(1), 0).astype(weights.dtype)
    if inverse is not None:
        # Imported here because that file's backward pass is this one's forward.
        from raggedmoe.kernels.ragged_gather_reduce import xla as ragged_gather_reduce

        slots = None if weights is None else jnp.take(weights, inverse, mode="clip")
        return ragged_gather_reduce.forward(cotangent, inverse, start, end, slots), dweights
    contributions = cotangent.astype(wide)
    if weights is not None:
        contributions = contributions * weights.astype(wide)[:, None]
    target = jnp.where(valid, indices, x.shape[0])  # out of range: dropped
    return jnp.zeros(x.shape, wide).at[target].add(contributions, mode="drop").astype(x.dtype), dweights


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    return scatter_add_note(call, hardware) or "cost grows with the buffer, not with its valid rows"


def scatter_add_note(call: Call, hardware: Hardware) -> str | None:
    """Say that the gradient is a scatter-add, where it is; `ragged_gather_reduce` has the same condition."""
    if call.direction == BACKWARD and "inverse" not in call.arrays:
        return "no inverse given: the gradient is a scatter-add"
    return None


IMPLEMENTATION = Implementation(
    operation="ragged_gather",
    name="xla",
    forward=forward,
    backward=backward,
    rank={"cpu": 20, "gpu": 20, "tpu": 20},
    proofs=COMPILED_XLA,
    note=note,
)
