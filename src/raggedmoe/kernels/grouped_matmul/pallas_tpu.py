"""`grouped_matmul` by our TensorCore kernels: see `pallas_tpu_kernel` for how they work."""

import functools

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import pad_rows
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.grouped_matmul.tiles import LANES, Problem, packed_rows, tiles_for, transposed_tiles_for
from raggedmoe.kernels.placement import placement_why_not
from raggedmoe.kernels.proof import INTERPRETED_KERNEL
from raggedmoe.kernels.registry import BACKWARD, DRHS, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware: Hardware, tiles=None):
    from raggedmoe.kernels.grouped_matmul import pallas_tpu_kernel as kernel

    out_dim = rhs.shape[1 if transpose_rhs else 2]
    problem = _problem(lhs.shape[0], lhs.shape[1], out_dim, transpose_rhs, lhs.dtype, out_dtype)
    if tiles is None:
        tiles = tiles_for(problem, hardware)
    if tiles is None:  # O is no multiple of the lanes, and too wide for one piece: the matrices are padded
        spare = -out_dim % LANES
        rhs = jnp.pad(rhs, [(0, 0), (0, spare), (0, 0)] if transpose_rhs else [(0, 0), (0, 0), (0, spare)])
        wide = forward(lhs, rhs, bounds, transpose_rhs=transpose_rhs, out_dtype=out_dtype, hardware=hardware)
        return wide[:, :out_dim]
    rows = pad_rows(lhs, tiles.cut.packed)
    out = kernel.grouped_matmul(rows, rhs, bounds, tiles=tiles, transpose_rhs=transpose_rhs, out_dtype=out_dtype)
    return out[: lhs.shape[0]]


def transposed_matmul(lhs, rhs, bounds, *, hardware: Hardware, tiles=None):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    from raggedmoe.kernels.grouped_matmul import pallas_tpu_transposed_kernel as kernel

    sizes = lhs.shape[1], rhs.shape[1]
    if tiles is None:
        tiles = transposed_tiles_for(_problem(lhs.shape[0], *sizes, False, lhs.dtype, lhs.dtype), hardware)
    if tiles is None:  # as above, for either; in fours, so that there is a tile to divide them by
        lhs, rhs = (jnp.pad(array, [(0, 0), (0, -array.shape[1] % (4 * LANES))]) for array in (lhs, rhs))
        return transposed_matmul(lhs, rhs, bounds, hardware=hardware)[:, : sizes[0], : sizes[1]]
    packed = tiles.cut.packed
    return kernel.transposed_matmul(pad_rows(lhs, packed), pad_rows(rhs, packed), bounds, tiles=tiles)


def _problem(num_rows, inner, out, transpose_rhs, dtype, out_dtype) -> Problem:
    return Problem(
        num_rows=num_rows,
        inner=inner,
        out=out,
        transpose_rhs=transpose_rhs,
        itemsize=jnp.dtype(dtype).itemsize,
        out_itemsize=jnp.dtype(out_dtype).itemsize,
    )


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    dtype = call.arrays["lhs"].dtype
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, got {dtype}"
    if call.options["out_dtype"] not in ("bfloat16", "float32"):
        return f"gives bfloat16 and float32, not {call.options['out_dtype']}"
    for problem in _problems(call):
        if tiles_for(problem, hardware) is None and tiles_for(_pad(problem), hardware) is None:
            return f"not even 128 rows of width {problem.inner} fit the VMEM of a {hardware.name}"
    return placement_why_not(call)


def _problems(call: Call) -> list[Problem]:
    """List what tiles are needed for: the forward pass, or the lhs gradient."""
    lhs, rhs, transpose = call.arrays["lhs"], call.arrays["rhs"], call.options["transpose_rhs"]
    out = rhs.shape[1 if transpose else 2]
    if call.direction in (BACKWARD, DRHS):
        return [_problem(lhs.shape[0], out, lhs.shape[1], not transpose, lhs.dtype, lhs.dtype)]
    return [_problem(lhs.shape[0], lhs.shape[1], out, transpose, lhs.dtype, call.options["out_dtype"])]


def _pad(problem: Problem) -> Problem:
    return Problem(**{**vars(problem), "out": -(-problem.out // LANES) * LANES})


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    notes = []
    for problem in _problems(call):
        if problem.num_rows % packed_rows(problem):
            notes.append(f"the rows are copied: {problem.num_rows} is no multiple of {packed_rows(problem)}")
        if tiles_for(problem, hardware) is None:
            notes.append(f"the matrices are copied: {problem.out} columns are no multiple of {LANES}")
    return "; ".join(notes) or None


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="pallas_tpu",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    rank={"tpu": 10},
    proofs=INTERPRETED_KERNEL,
    why_not=why_not,
    note=note,
    takes_hardware=True,
)
