"""`grouped_matmul` by tokamax's first Pallas kernel for TPUs, called below its own choice of kernels and tiles.

That choice looks at the device that is attached, refuses widths under 128, and has tile sizes for one generation only:
elsewhere it takes 128 of each, about 50 times slower than those here (docs/log.md).

On a GPU it is tokamax's Triton kernel, which `tokamax_gpu` puts our contract to.
"""

import functools
import importlib.util

import jax.numpy as jnp
from jax import lax

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import matmul_precision, padded_rows
from raggedmoe.kernels.grouped_matmul import peers, tokamax_gpu
from raggedmoe.kernels.grouped_matmul.gradients import gradients
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.proof import INTERPRETED_KERNEL, Level, Proof
from raggedmoe.kernels.registry import FORWARD, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    if hardware.platform == "gpu":
        return tokamax_gpu.forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import gmm

    num_rows, inner = lhs.shape
    out_dim = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    sizes = (lhs.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    tiles = peers.forward_tiles(num_rows, inner, out_dim, rhs.shape[0], sizes, hardware)
    with peers.compiled_for(hardware):
        out = gmm(
            padded_rows(lhs, tiles.rows),
            rhs,
            peers.group_sizes(bounds),
            precision=matmul_precision(lhs.dtype) or lax.Precision.DEFAULT,
            out_dtype=out_dtype,
            tiling=tuple(tiles),
            group_offset=jnp.int32(peers.FIRST_GROUP),
            transpose_rhs=transpose_rhs,
        )
    return out[:num_rows]


def transposed(lhs, rhs, bounds, *, hardware):
    """``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    if hardware.platform == "gpu":
        return tokamax_gpu.transposed(lhs, rhs, bounds)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import tgmm

    groups = bounds.shape[0] - 1
    (num_rows, inner), out_dim = lhs.shape, rhs.shape[1]
    tiles = peers.transposed_tiles(num_rows, inner, out_dim, groups, lhs.dtype.itemsize, hardware)
    with peers.compiled_for(hardware):
        return tgmm(
            padded_rows(lhs, tiles.rows).T,
            padded_rows(rhs, tiles.rows),
            peers.group_sizes(bounds),
            precision=matmul_precision(lhs.dtype) or lax.Precision.DEFAULT,
            out_dtype=lhs.dtype,
            tiling=tuple(tiles),
            group_offset=jnp.int32(peers.FIRST_GROUP),
            num_actual_groups=groups,
        )


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Why it cannot run."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install raggedmoe[tokamax]"
    if hardware.platform == "cpu":
        return "its kernels are for TPUs and GPUs, not for cpu"
    if hardware.platform == "gpu" and not tokamax_gpu.has_triton():
        return (
            "this tokamax's kernel for GPUs needs jax-triton and triton; pip install jax-triton, or use tokamax 0.0.12"
        )
    return peers.types_why_not(call) or unchecked_why_not(call)


def note(call: Call, hardware: Hardware) -> str | None:
    """What a user should know of its cost."""
    if hardware.platform == "gpu" and call.options["transpose_rhs"] == (call.direction == FORWARD):
        return "its Triton kernel transposes the matrices in memory first"
    return None


COMPILED_FOR_GPU = Proof(
    level=Level.COMPILED,
    chips=("h100",),
    first_jax="0.10.2",
    last_jax="0.10.2",
    shown_by="JAX's CUDA plugin compiled it for the chip (docs/log.md); nobody has run it there",
)


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="tokamax",
    forward=forward,
    backward=functools.partial(gradients, forward, transposed),
    # On a TPU megablox's kernel and metadata from another package: 131,443 cycles, where that has 125,222. On a GPU
    # nobody has run it through our adapter yet: auto takes it once `raggedmoe verify` has passed on such a chip.
    rank={"tpu": 17, "gpu": 10},
    proofs=(*INTERPRETED_KERNEL, COMPILED_FOR_GPU),
    why_not=why_not,
    note=note,
    takes_hardware=True,
)
