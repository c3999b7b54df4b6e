"""`grouped_matmul` by our TensorCore kernels: see `pallas_tpu_kernel` for how they work."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import pad_rows
from raggedmoe.kernels.dequantize import decode_scale, decode_values, dequantize
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.grouped_matmul.tiles import (
    LANES,
    Problem,
    packed_rows,
    stored_bytes,
    tiles_for,
    transposed_tiles_for,
)
from raggedmoe.kernels.grouped_matmul.tpu_operands import (
    PARTIAL_SUMS,
    ROWS,
    VALUES,
    MatmulOperand,
    Multiplication,
    Scales,
    matrix_scales,
    multiplication,
    native_type,
    operand_in_call,
    operand_of,
    operands_why_not,
    row_scales,
    scaled_rows,
    split_blocks,
    values_of,
)
from raggedmoe.kernels.placement import placement_why_not
from raggedmoe.kernels.proof import interpreted_with
from raggedmoe.kernels.qarray import FORMATS, QArray
from raggedmoe.kernels.registry import BACKWARD, DRHS, NATIVE, WIDENED, Call, Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware: Hardware, tiles=None):
    from raggedmoe.kernels.grouped_matmul import pallas_tpu_kernel as kernel

    how = multiplication(operand_of(lhs), operand_of(rhs), transpose_rhs, hardware)
    problem = problem_of(operand_of(lhs), operand_of(rhs), transpose_rhs, out_dtype, hardware)
    if tiles is None:
        tiles = tiles_for(problem, hardware)
    spare = 0
    if tiles is None:  # O is no multiple of the lanes, and too wide for one piece: the matrices are padded
        spare = -problem.out % problem.lanes
        tiles = tiles_for(_pad(problem), hardware)
        assert tiles is not None  # or `why_not` has refused it
    if how.scaled == ROWS:
        lhs = scaled_rows(lhs, rhs, bounds)
    matrices, scales = _pad_columns(values_of(rhs), matrix_scales(rhs, transpose_rhs, how), spare, how, transpose_rhs)
    out = kernel.grouped_matmul(
        pad_rows(values_of(lhs), tiles.cut.packed),
        matrices,
        bounds,
        split_blocks(scales, how, tiles, transpose_rhs)._replace(rows=row_scales(lhs, tiles.cut.packed)),
        how=how,
        tiles=tiles,
        transpose_rhs=transpose_rhs,
        out_dtype=out_dtype,
    )
    return out[: lhs.shape[0], : problem.out]


def _pad_columns(
    matrices: jax.Array, scales: Scales, spare: int, how: Multiplication, transpose_rhs: bool
) -> tuple[jax.Array, Scales]:
    """Append columns of zeros to matrices, and scales for them."""
    if not spare:
        return matrices, scales
    columns, blocks = scales.columns, scales.blocks
    if columns is not None:
        columns = jnp.pad(columns, [(0, 0), (0, 0), (0, spare)])
    if how.scaled == VALUES:
        rows, lanes = (spare // how.block[0], 0) if transpose_rhs else (0, spare // how.block[1])
        blocks = jnp.pad(blocks, [(0, 0), (0, rows), (0, lanes)])
    elif blocks is not None:
        blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, 0), (0, spare)])
    zeros = [(0, 0), (0, spare), (0, 0)] if transpose_rhs else [(0, 0), (0, 0), (0, spare // how.neighbours)]
    return jnp.pad(matrices, zeros), scales._replace(columns=columns, blocks=blocks)


def transposed_matmul(lhs, rhs, bounds, out_dtype=None, *, hardware: Hardware, tiles=None):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    out_dtype = jnp.dtype(lhs.dtype if out_dtype is None else out_dtype)
    if isinstance(lhs, QArray) or isinstance(rhs, QArray):
        lhs, rhs, factor = _arrays(lhs, rhs, hardware)
        if factor is not None:  # one number, which XLA multiplies into what reads the result
            sums = transposed_matmul(lhs, rhs, bounds, jnp.float32, hardware=hardware, tiles=tiles)
            return (sums * factor).astype(out_dtype)
    return _run_transposed(lhs, rhs, bounds, out_dtype, hardware, tiles)


def _run_transposed(lhs, rhs, bounds, out_dtype, hardware, tiles):
    from raggedmoe.kernels.grouped_matmul import pallas_tpu_transposed_kernel as kernel

    sizes = lhs.shape[1], rhs.shape[1]
    if tiles is None:
        problem = Problem(
            num_rows=lhs.shape[0],
            inner=sizes[0],
            out=sizes[1],
            transpose_rhs=False,
            itemsize=lhs.dtype.itemsize,
            rhs_itemsize=rhs.dtype.itemsize,
            out_itemsize=out_dtype.itemsize,
            multiplied=str(lhs.dtype),
        )
        tiles = transposed_tiles_for(problem, hardware)
    if tiles is None:  # as above, for either; in fours, so that there is a tile to divide them by
        lhs, rhs = (jnp.pad(array, [(0, 0), (0, -array.shape[1] % (4 * LANES))]) for array in (lhs, rhs))
        return _run_transposed(lhs, rhs, bounds, out_dtype, hardware, None)[:, : sizes[0], : sizes[1]]
    packed = tiles.cut.packed
    return kernel.transposed_matmul(
        pad_rows(lhs, packed), pad_rows(rhs, packed), bounds, tiles=tiles, out_dtype=out_dtype
    )


def _arrays(lhs, rhs, hardware: Hardware):
    """Make the arrays of a transposed matmul, and the factor of its sums, or None.

    Where one scale is for all, which the sums are given, the values themselves are multiplied, natively or in bfloat16;
    otherwise what is quantised is dequantised, in memory.
    """
    operands = operand_of(lhs), operand_of(rhs)
    uniform = all(o.scale is None or o.scale.shape == (1, 1) for o in operands)
    if not uniform or not all(o.qtype or o.dtype == jnp.bfloat16 for o in operands):
        return *(dequantize(array, jnp.float32).astype(jnp.float32) for array in (lhs, rhs)), None
    factors = [decode_scale(a.scale, jnp.float32)[0, 0] for a in (lhs, rhs) if isinstance(a, QArray)]
    factor = functools.reduce(jnp.multiply, factors)
    if _transposed_is_native(*operands, hardware):
        return values_of(lhs), values_of(rhs), factor
    values = (decode_values(a.qvalue, a.qtype, jnp.bfloat16) if isinstance(a, QArray) else a for a in (lhs, rhs))
    return *values, factor


def _transposed_is_native(lhs: MatmulOperand, rhs: MatmulOperand, hardware: Hardware) -> bool:
    uniform = all(o.scale is not None and o.scale.shape == (1, 1) for o in (lhs, rhs))
    return uniform and native_type(lhs, rhs, hardware)


def problem_of(
    lhs: MatmulOperand, rhs: MatmulOperand, transpose_rhs: bool, out_dtype: Any, hardware: Hardware
) -> Problem:
    """Describe a matmul as its tiles depend on it."""
    how = multiplication(lhs, rhs, transpose_rhs, hardware)
    return Problem(
        num_rows=lhs.shape[0],
        inner=lhs.shape[1],
        out=rhs.shape[1 if transpose_rhs else 2],
        transpose_rhs=transpose_rhs,
        itemsize=jnp.dtype(how.rows).itemsize,
        rhs_itemsize=stored_bytes(how.matrices),
        out_itemsize=jnp.dtype(out_dtype).itemsize,
        multiplied=how.multiplied,
        block=how.block,
        partial_sums=how.scaled == PARTIAL_SUMS,
    )


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    for name in ("lhs", "rhs"):
        dtype = call.arrays[name].dtype
        if dtype not in (jnp.bfloat16, jnp.float32):
            return f"takes bfloat16 and float32, got {dtype}"
    if call.options["out_dtype"] not in ("bfloat16", "float32"):
        return f"gives bfloat16 and float32, not {call.options['out_dtype']}"
    reason = _operands_why_not(call)
    if reason is not None:
        return reason
    if call.direction != DRHS:
        problem = _problem(call, hardware)
        if tiles_for(problem, hardware) is None and tiles_for(_pad(problem), hardware) is None:
            return f"not even 128 rows of width {problem.inner} fit the VMEM of a {hardware.name}"
    return placement_why_not(call)


def _operands_why_not(call: Call) -> str | None:
    return None if call.direction == DRHS else operands_why_not(*_operands(call))


def _operands(call: Call) -> tuple[MatmulOperand, MatmulOperand, bool]:
    """Describe the matmul of the forward pass, or that of the rows' gradient."""
    lhs, rhs, transpose = operand_in_call(call, "lhs"), operand_in_call(call, "rhs"), call.options["transpose_rhs"]
    if call.direction != BACKWARD:
        return lhs, rhs, transpose
    cotangent = MatmulOperand((lhs.shape[0], rhs.shape[1 if transpose else 2]), lhs.dtype)
    return cotangent, rhs, not transpose


def _problem(call: Call, hardware: Hardware) -> Problem:
    lhs, _, _ = operands = _operands(call)
    return problem_of(*operands, lhs.dtype if call.direction == BACKWARD else call.options["out_dtype"], hardware)


def _pad(problem: Problem) -> Problem:
    return Problem(**{**vars(problem), "out": -(-problem.out // problem.lanes) * problem.lanes})


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    if call.direction == DRHS:
        return None
    notes, problem = [], _problem(call, hardware)
    if problem.num_rows % packed_rows(problem):
        notes.append(f"the rows are copied: {problem.num_rows} is no multiple of {packed_rows(problem)}")
    if tiles_for(problem, hardware) is None:
        notes.append(f"the matrices are copied: {problem.out} columns are no multiple of {problem.lanes}")
    return "; ".join(notes) or None


def quantized(call: Call, hardware: Hardware) -> str:
    """Say what it does with the quantised operands of a call."""
    if call.direction == DRHS:
        both = operand_in_call(call, "lhs"), operand_in_call(call, "cotangent")
        return NATIVE if _transposed_is_native(*both, hardware) else WIDENED
    how = multiplication(*_operands(call), hardware)
    if how.native and how.scaled != PARTIAL_SUMS:
        return NATIVE
    bits = 4 if how.matrices == "mxfp4" else 8
    said = f"emulated: {bits} bits are read from memory, and widened in VMEM to {how.multiplied}"
    if how.native:
        said = "native: the chip multiplies the 8-bit values themselves"
    said += {
        ROWS: "; rows are multiplied by scales first, in a copy in float32",
        VALUES: ", where values are multiplied by their scales",
        PARTIAL_SUMS: f"; sums over {LANES} each are scaled",
    }.get(how.scaled, "; scales are applied to the sums")
    if call.direction == BACKWARD and "lhs" in call.formats:
        said += "; for the matrices' gradient rows are dequantised in memory"
    return said


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="pallas_tpu",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    rank={"tpu": 10},
    proofs=interpreted_with(*FORMATS),
    why_not=why_not,
    note=note,
    quantized=quantized,
    takes_hardware=True,
)
