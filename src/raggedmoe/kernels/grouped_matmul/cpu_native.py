"""`grouped_matmul` for CPUs in C++ (cpu_native.cc), called through XLA's FFI on the threads that XLA has.

A group's rows are multiplied tile by tile with float32 sums; a matrix is widened and packed once for each tile of rows,
in cache, or with few rows, as in decoding, streamed once. A group without rows costs nothing. Every sum has a fixed
order, so that the result does not depend on the number of threads.

Quantised matrices are decoded a part at a time (native/quantized.cc): for few rows in registers, so that each byte of
an active expert is read from memory once, and for many into memory, where the part is multiplied as a dense one.
"""

import functools

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.native.library import native_call, native_implementation, native_why_not
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.registry import EMULATED, Call

FORMAT_NUMBERS = {"int8": 0, "float8_e4m3fn": 1, "float8_e5m2": 2, "mxfp4": 3}  # as in quantized.cc
SCALES = ("float32", "bfloat16", "uint8")


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    lhs = dequantize(lhs, jnp.float32)
    if isinstance(rhs, QArray):
        return _multiply_quantized(lhs, rhs, bounds, transpose_rhs, out_dtype)
    shape = (lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2])
    return native_call("raggedmoe_grouped_matmul", (shape, out_dtype), lhs, rhs, bounds, transpose_rhs=transpose_rhs)


def _multiply_quantized(lhs, rhs, bounds, transpose_rhs, out_dtype):
    shape = (lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2])
    kernel_dtype = jnp.float32 if lhs.dtype == jnp.float32 else out_dtype
    operands, number = (lhs, rhs.qvalue, rhs.scale, bounds), FORMAT_NUMBERS[rhs.qtype]
    options = {"transpose_rhs": transpose_rhs, "format": number}
    return native_call("raggedmoe_quantized_matmul", (shape, kernel_dtype), *operands, **options).astype(out_dtype)


def transposed_matmul(lhs, rhs, bounds, out_dtype=None):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    out_dtype = lhs.dtype if out_dtype is None else out_dtype
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        lhs, rhs = (dequantize(operand, jnp.float32).astype(jnp.float32) for operand in (lhs, rhs))
    shape = (bounds.shape[0] - 1, lhs.shape[1], rhs.shape[1])
    kernel_dtype = jnp.float32 if lhs.dtype == jnp.float32 else out_dtype
    return native_call("raggedmoe_transposed_matmul", (shape, kernel_dtype), lhs, rhs, bounds).astype(out_dtype)


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run."""
    dtype, out_dtype = call.arrays["lhs"].dtype, call.options["out_dtype"]
    if out_dtype not in ("float32", str(dtype)) and "rhs" not in call.formats:
        return f"its results are of the operands' type or float32, not {out_dtype}"
    return quantized_why_not(call, "lhs", ("rhs",)) or native_why_not(call, hardware, dtype)


def quantized_why_not(call: Call, rows: str, weights: tuple[str, ...]) -> str | None:
    """Say which quantised operands it cannot take."""
    for name in weights:
        scale = call.arrays.get(f"{name}_scale")
        if scale is not None and str(scale.dtype) not in SCALES:
            return f"it takes scales in {', '.join(SCALES)}, and those of {name} are {scale.dtype}"
        if rows in call.formats and name not in call.formats and call.arrays[rows].dtype != jnp.float32:
            return f"it multiplies quantised {rows} by quantised {name}, or in float32"
    return None


IMPLEMENTATION = native_implementation(
    "grouped_matmul",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    why_not=why_not,
    quantized=EMULATED,
)
