"""`grouped_matmul` by tokamax's second Pallas kernel for TPUs, called below its own choice of kernels.

It fetches only the rows of a group, makes its metadata in the kernel, and finds tiles for the chip compiled for itself.
"""

import importlib.util

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.grouped_matmul import peers, tokamax
from raggedmoe.kernels.proof import COMPILED_KERNEL
from raggedmoe.kernels.registry import Call, Implementation

ROWS = 16  # a multiple of the sublanes of a tile, 8 of float32 and 16 of bfloat16


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    from tokamax._src.ops.gmm_v2.gmm_v2 import gmm_v2

    with peers.compiled_for(hardware), peers.full_precision(lhs.dtype):
        out = gmm_v2(
            peers.padded_rows(lhs, ROWS),
            rhs,
            peers.group_sizes(bounds),
            group_offset=jnp.full(1, peers.FIRST_GROUP, jnp.int32),
            preferred_element_type=jnp.dtype(out_dtype),
            zero_initialize=True,
            transpose_rhs=transpose_rhs,
        )
    return out[: lhs.shape[0]]


def backward(lhs, rhs, bounds, cotangent, *, transpose_rhs, hardware):
    dlhs = forward(cotangent, rhs, bounds, transpose_rhs=not transpose_rhs, out_dtype=lhs.dtype, hardware=hardware)
    first, second = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    return dlhs, transposed(first, second, bounds, hardware=hardware)


def transposed(lhs, rhs, bounds, *, hardware):
    """``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    from tokamax._src.ops.gmm_v2.tgmm_v2 import tgmm_v2

    with peers.compiled_for(hardware), peers.full_precision(lhs.dtype):
        return tgmm_v2(
            peers.padded_rows(lhs, ROWS),
            peers.padded_rows(rhs, ROWS),
            peers.group_sizes(bounds),
            bounds.shape[0] - 1,
            group_offset=jnp.full(1, peers.FIRST_GROUP, jnp.int32),
            preferred_element_type=lhs.dtype,
        )


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Why it cannot run."""
    reason = tokamax.why_not(call, hardware)
    if reason is None and importlib.util.find_spec("tokamax._src.ops.gmm_v2") is None:
        return "this tokamax has no second kernel; it came with tokamax 0.0.13, which needs Python 3.12"
    return reason


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="gmm_v2",
    forward=forward,
    backward=backward,
    rank={"tpu": 50},
    proofs=COMPILED_KERNEL,
    why_not=why_not,
    takes_hardware=True,
)
