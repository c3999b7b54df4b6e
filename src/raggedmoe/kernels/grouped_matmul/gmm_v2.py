"""`grouped_matmul` by tokamax's second Pallas kernel for TPUs, called below its own choice of kernels.

It fetches only the rows of a group, makes its metadata in the kernel, and finds tiles for the chip compiled for itself.
"""

import functools
import importlib.util

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import full_precision, pad_rows
from raggedmoe.kernels.grouped_matmul import external_gmm, tokamax
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.proof import COMPILED_KERNEL
from raggedmoe.kernels.registry import Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    from tokamax._src.ops.gmm_v2.gmm_v2 import gmm_v2

    with external_gmm.compile_target(hardware), full_precision(lhs.dtype):
        out = gmm_v2(
            pad_rows(lhs, external_gmm.SUBLANES),
            rhs,
            external_gmm.shifted_group_sizes(bounds),
            group_offset=jnp.full(1, external_gmm.FIRST_GROUP, jnp.int32),
            tile_info=_tiles_with_room,
            preferred_element_type=jnp.dtype(out_dtype),
            zero_initialize=True,
            transpose_rhs=transpose_rhs,
        )
    return out[: lhs.shape[0]]


def _tiles_with_room(dims, lhs, rhs, vmem_limit, fused_activation):
    """Have gmm_v2 choose its tiles for less VMEM than there is, as its count leaves something out.

    At R 16384, I 7168, O 2048, G 64 transposed the compiler wants 118.6 MiB on a v6e, and gmm_v2 counts 115.2 at most.
    """
    from tokamax._src.ops.gmm_v2.gmm_v2 import calculate_tiling

    return calculate_tiling(dims, lhs, rhs, vmem_limit * 15 // 16, fused_activation)


def transposed_matmul(lhs, rhs, bounds, *, hardware):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    from tokamax._src.ops.gmm_v2.tgmm_v2 import tgmm_v2

    inner = lhs.shape[1]
    if (
        inner < external_gmm.SUBLANES
    ):  # it zeroes the matrices of empty groups by whole sublanes of I, and asserts that it can
        lhs = jnp.pad(lhs, ((0, 0), (0, external_gmm.SUBLANES - inner)))
    with external_gmm.compile_target(hardware), full_precision(lhs.dtype):
        out = tgmm_v2(
            pad_rows(lhs, external_gmm.SUBLANES),
            pad_rows(rhs, external_gmm.SUBLANES),
            external_gmm.shifted_group_sizes(bounds),
            bounds.shape[0] - 1,
            group_offset=jnp.full(1, external_gmm.FIRST_GROUP, jnp.int32),
            preferred_element_type=lhs.dtype,
        )
    return out[:, :inner]


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    reason = tokamax.why_not(call, hardware)
    if reason is None and importlib.util.find_spec("tokamax._src.ops.gmm_v2") is None:
        return "this tokamax has no second kernel; it came with tokamax 0.0.13, which needs Python 3.12"
    return reason


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="gmm_v2",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    # By the compiler's schedule the best of the others: at R 8192, I 2048, O 1408, G 16 on a v6e 106,534 issue cycles
    # with its metadata, 121,000 for skewed groups, where XLA's has 112,330 and 165,000. Interpret mode cannot copy
    # from a reshaped reference, so auto takes it only after `raggedmoe verify` has passed on such a chip.
    rank={"tpu": 15},
    proofs=COMPILED_KERNEL,
    why_not=why_not,
    takes_hardware=True,
)
