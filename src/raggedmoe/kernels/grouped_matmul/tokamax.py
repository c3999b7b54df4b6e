"""`grouped_matmul` by tokamax's first Pallas kernel for TPUs, called below its own choice of kernels and tiles.

That choice looks at the device that is attached, refuses widths under 128, and has tile sizes for one generation only:
elsewhere it takes 128 of each, about 50 times slower than those here (docs/log.md).

On a GPU it is tokamax's Triton kernel, which `tokamax_gpu` puts our contract to.
"""

import functools
import importlib.util

from jax import lax

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.grouped_matmul import external_gmm, tokamax_gpu
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.proof import INTERPRETED_KERNEL, Level, Proof
from raggedmoe.kernels.registry import FORWARD, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    if hardware.platform == "gpu":
        return tokamax_gpu.forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import gmm

    kernel = functools.partial(gmm, precision=_precision(lhs.dtype), out_dtype=out_dtype)
    with external_gmm.compile_target(hardware):
        return external_gmm.call_gmm(kernel, lhs, rhs, bounds, transpose_rhs, out_dtype, hardware)


def transposed_matmul(lhs, rhs, bounds, *, hardware):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    if hardware.platform == "gpu":
        return tokamax_gpu.transposed_matmul(lhs, rhs, bounds)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import tgmm

    kernel = functools.partial(tgmm, precision=_precision(lhs.dtype), out_dtype=lhs.dtype)
    with external_gmm.compile_target(hardware):
        return external_gmm.call_tgmm(kernel, lhs, rhs, bounds, hardware)


def _precision(dtype):
    return matmul_precision(dtype) or lax.Precision.DEFAULT


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install raggedmoe[tokamax]"
    if hardware.platform == "cpu":
        return "its kernels are for TPUs and GPUs, not for cpu"
    if hardware.platform == "gpu" and not tokamax_gpu.has_triton():
        return (
            "this tokamax's kernel for GPUs needs jax-triton and triton; pip install jax-triton, or use tokamax 0.0.12"
        )
    return external_gmm.types_why_not(call) or unchecked_why_not(call)


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
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
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    # On a TPU megablox's kernel and metadata from another package: 131,443 cycles, where that has 125,222. On a GPU
    # nobody has run it through our adapter yet: auto takes it once `raggedmoe verify` has passed on such a chip.
    rank={"tpu": 17, "gpu": 10},
    proofs=(*INTERPRETED_KERNEL, COMPILED_FOR_GPU),
    why_not=why_not,
    note=note,
    takes_hardware=True,
)
