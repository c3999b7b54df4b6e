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
from raggedmoe.kernels.arrays import matmul_precision, pad_rows
from raggedmoe.kernels.dequantize import decode_scale, dequantize
from raggedmoe.kernels.grouped_matmul import external_gmm, tokamax_gpu
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.grouped_matmul.tpu_operands import (
    MatmulOperand,
    native_type,
    operand_in_call,
    operand_of,
    sums_why_not,
    values_of,
)
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.proof import Level, Proof, interpreted_with
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import BACKWARD, DRHS, FORWARD, NATIVE, WIDENED, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    if hardware.platform == "gpu":
        return tokamax_gpu.forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import gmm

    precision, num_rows = _precision(lhs.dtype), lhs.shape[0]
    if _is_native(operand_of(lhs), operand_of(rhs), transpose_rhs, hardware):
        lhs, rhs = _their_arrays(lhs, rhs, transpose_rhs)
        precision = lax.Precision.DEFAULT
    elif isinstance(lhs, QArray) or isinstance(rhs, QArray):
        lhs, rhs = _widen(lhs, rhs)
        precision = _precision(lhs.dtype)
    kernel = functools.partial(gmm, precision=precision, out_dtype=out_dtype)
    with external_gmm.compile_target(hardware):
        return external_gmm.call_gmm(kernel, lhs, rhs, bounds, transpose_rhs, out_dtype, hardware)[:num_rows]


def _is_native(lhs: MatmulOperand, rhs: MatmulOperand, transpose_rhs: bool, hardware: Hardware) -> bool:
    """Tell whether its kernel is given the values as they are: with one scale for each row and output channel."""
    if not native_type(lhs, rhs, hardware) or sums_why_not(lhs) is not None:
        return False
    if any(size % external_gmm.LANES for size in rhs.shape[1:]):  # it lays scales out in whole tiles of memory
        return False
    return lhs.scale.shape[1] == 1 and rhs.scale.shape[2 if transpose_rhs else 1] == 1


def _widen(*operands):
    return tuple(dequantize(operand, jnp.float32).astype(jnp.float32) for operand in operands)


def _their_arrays(lhs: QArray, rhs: QArray, transpose_rhs: bool):
    """Make tokamax's quantised arrays, which are qwix's: a float32 scale for each row, and for each output channel."""
    import qwix

    groups, out = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    of_rows = jnp.broadcast_to(decode_scale(lhs.scale, jnp.float32), (lhs.shape[0], 1))
    rows = (pad_rows(array, external_gmm.LANES) for array in (values_of(lhs), of_rows))
    scale = decode_scale(rhs.scale, jnp.float32).reshape(rhs.scale.shape[0], -1)
    scale = jnp.broadcast_to(jnp.repeat(scale, out // scale.shape[1], axis=1), (groups, out))
    of_columns = scale[:, :, None] if transpose_rhs else scale[:, None, :]
    return qwix.QArray(*rows), qwix.QArray(values_of(rhs), of_columns)


def transposed_matmul(lhs, rhs, bounds, out_dtype=None, *, hardware):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    out_dtype = lhs.dtype if out_dtype is None else out_dtype
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        lhs, rhs = _widen(lhs, rhs)
    if hardware.platform == "gpu":
        return tokamax_gpu.transposed_matmul(lhs, rhs, bounds)
    from tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel import tgmm

    kernel = functools.partial(tgmm, precision=_precision(lhs.dtype), out_dtype=out_dtype)
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
    if hardware.platform == "gpu" and call.formats:
        return "its kernel for GPUs is given arrays alone here"
    return external_gmm.types_why_not(call) or unchecked_why_not(call)


def quantized(call: Call, hardware: Hardware) -> str:
    """Say what it does with the quantised operands of a call."""
    if call.direction in (BACKWARD, DRHS):
        return WIDENED
    operands = operand_in_call(call, "lhs"), operand_in_call(call, "rhs")
    return NATIVE if _is_native(*operands, call.options["transpose_rhs"], hardware) else WIDENED


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
    transposed=transposed_matmul,
    why_not=why_not,
    note=note,
    quantized=quantized,
    takes_hardware=True,
)
