"""What XLA's ragged dot costs where it has no kernel of its own: one dense matmul over all groups, masked.

On a GPU the rows are copied once for each group, zero where they are not the group's, and multiplied by all matrices
in one piece: ``[R, G·I] x [G·I, O]``. Compiled for an H100, 8192 rows of width 2048 in 16 groups become
``[8192, 32768] x [32768, 1408]``, and the weights' gradient is ``[16, 8192, 2048]ᵀ x [16, 8192, 1408]`` (docs/log.md).
On a CPU the work is the same.
"""

from raggedmoe.hardware import GIB, Hardware
from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.registry import BACKWARD, DRHS, Call


def copied_bytes(call: Call) -> int:
    """Count the bytes of the masked copies that the largest matmul of a call is given, in the call's direction.

    A weight's gradient copies both its operands.
    """
    if call.operation == "expert_ffn":
        rows, (groups, *widths) = call.arrays["rows"], call.arrays["wi_0"].shape
        width = max(widths)
    else:
        rows, (groups, *widths) = call.arrays["lhs"], call.arrays["rhs"].shape
        width = rows.shape[1]
    if call.direction in (BACKWARD, DRHS):
        width = sum(widths)
    dtype = accumulator(rows.dtype) if call.formats else rows.dtype  # quantised operands are widened
    return rows.shape[0] * groups * width * dtype.itemsize


def note(call: Call, hardware: Hardware) -> str | None:
    """Say that it multiplies every row by every group's matrix, where it does."""
    if hardware.platform == "tpu":
        return None
    groups = call.arrays["wi_0" if call.operation == "expert_ffn" else "rhs"].shape[0]
    said = f"XLA multiplies every row by every group's matrix on a {hardware.platform.upper()}: {groups} times the work"
    if hardware.platform == "gpu":
        said += f", with the rows copied {groups} times ({copied_bytes(call) / GIB:.2f} GiB)"
    return said


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say that the copy cannot fit a GPU's memory, where it cannot."""
    copied = copied_bytes(call)
    if hardware.platform != "gpu" or hardware.hbm_bytes is None or copied <= hardware.hbm_bytes:
        return None
    return (
        f"XLA's ragged dot copies the rows once for each group on a GPU: {copied / GIB:.0f} GiB, and a {hardware.name} "
        f"has {hardware.hbm_bytes / GIB:.0f}; name tokamax's kernels, or give each device fewer experts or rows"
    )
