"""`grouped_matmul` by tokamax's first Pallas kernel for TPUs, called below its own choice of kernels and tiles.

That choice looks at the device that is attached, refuses widths under 128, and has tile sizes for one generation only:
elsewhere it takes 128 of each, about 50 times slower than those here (docs/log.md).

On a GPU it is tokamax's Triton kernel, which `tokamax_gpu` puts our contract to.
"""

import functools
import importlib.util

import jax.numpy as jnp
from jax import lax

from raggedmoe.hardware import FP8, Hardware
from raggedmoe.kernels.arrays import matmul_precision
from raggedmoe.kernels.dequantize import decode_scale
from raggedmoe.kernels.grouped_matmul import external_gmm, tokamax_gpu
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.grouped_matmul.tpu_operands import native_type, operand_in_call, sums_why_not, values_of
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.proof import Level, Proof, interpreted_with
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import BACKWARD, FORWARD, NATIVE, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    if hardware.platform == "gpu":
        return tokamax_gpu.forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import gmm

    kernel = functools.partial(gmm, precision=_precision(lhs.dtype), out_dtype=out_dtype)
    if isinstance(lhs, QArray):  # and so is rhs
        lhs, rhs = _their_arrays(lhs, rhs, transpose_rhs)
        kernel = functools.partial(kernel, precision=lax.Precision.DEFAULT)
    with external_gmm.compile_target(hardware):
        return external_gmm.call_gmm(kernel, lhs, rhs, bounds, transpose_rhs, out_dtype, hardware)


def _their_arrays(lhs: QArray, rhs: QArray, transpose_rhs: bool):
    """Make tokamax's quantised arrays, which are qwix's: a float32 scale for each row, and for each output channel."""
    import qwix

    groups, *_ = rhs.shape
    out = rhs.shape[1 if transpose_rhs else 2]
    of_rows = jnp.broadcast_to(decode_scale(lhs.scale, jnp.float32), (lhs.shape[0], 1))
    scale = decode_scale(rhs.scale, jnp.float32).reshape(rhs.scale.shape[0], -1)
    scale = jnp.broadcast_to(jnp.repeat(scale, out // scale.shape[1], axis=1), (groups, out))
    of_columns = scale[:, :, None] if transpose_rhs else scale[:, None, :]
    return qwix.QArray(values_of(lhs), of_rows), qwix.QArray(values_of(rhs), of_columns)


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
    return external_gmm.types_why_not(call) or unchecked_why_not(call) or _quantized_why_not(call, hardware)


def _quantized_why_not(call: Call, hardware: Hardware) -> str | None:
    """Say which quantised operands it does not take."""
    if not call.formats:
        return None
    if hardware.platform == "gpu":
        return "its kernel for GPUs is given arrays here"
    if set(call.formats) != {"lhs", "rhs"} or call.direction == BACKWARD:
        return "it multiplies quantised rows by quantised matrices alone"
    lhs, rhs = operand_in_call(call, "lhs"), operand_in_call(call, "rhs")
    if not native_type(lhs, rhs, hardware):
        return f"a {hardware.name} does not multiply {lhs.qtype} by {rhs.qtype} natively"
    if lhs.scale.shape[1] > 1 or rhs.scale.shape[2 if call.options["transpose_rhs"] else 1] > 1:
        return "it is given one scale for each row, and for each output channel: there are more along what is summed"
    return sums_why_not(lhs)


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
    proofs=(*interpreted_with("int8", *FP8), COMPILED_FOR_GPU),
    why_not=why_not,
    note=note,
    quantized=NATIVE,
    takes_hardware=True,
)
