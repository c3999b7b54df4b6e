"""`grouped_matmul` for CPUs in C++ (cpu_native.cc), called through XLA's FFI on the threads that XLA has.

A group's rows are multiplied tile by tile with float32 sums; a matrix is widened and packed once for each tile of rows,
in cache, or with few rows, as in decoding, streamed once. A group without rows costs nothing. Every sum has a fixed
order, so that the result does not depend on the number of threads.
"""

import functools

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.native.library import native_call, native_implementation, native_why_not
from raggedmoe.kernels.registry import Call


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype):
    shape = (lhs.shape[0], rhs.shape[1] if transpose_rhs else rhs.shape[2])
    return native_call("raggedmoe_grouped_matmul", (shape, out_dtype), lhs, rhs, bounds, transpose_rhs=transpose_rhs)


def transposed_matmul(lhs, rhs, bounds):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    shape = (bounds.shape[0] - 1, lhs.shape[1], rhs.shape[1])
    return native_call("raggedmoe_transposed_matmul", (shape, lhs.dtype), lhs, rhs, bounds)


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run."""
    dtype, out_dtype = call.arrays["lhs"].dtype, call.options["out_dtype"]
    if out_dtype not in ("float32", str(dtype)):
        return f"its results are of the operands' type or float32, not {out_dtype}"
    return native_why_not(call, hardware, dtype)


IMPLEMENTATION = native_implementation(
    "grouped_matmul",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    why_not=why_not,
)
