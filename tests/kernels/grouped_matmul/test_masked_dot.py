"""What is said of XLA's grouped matmul on GPUs, which copies the rows for each group."""

import jax
import jax.numpy as jnp
import pytest

from raggedmoe.hardware import hardware_by_name
from raggedmoe.kernels.grouped_matmul import masked_dot
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Call, candidates

H100 = hardware_by_name("h100")


def matmul_call(rows, groups, inner, out, direction=FORWARD, transpose_rhs=False):
    arrays = {
        "lhs": jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16),
        "rhs": jax.ShapeDtypeStruct((groups, out, inner) if transpose_rhs else (groups, inner, out), jnp.bfloat16),
    }
    options = {"transpose_rhs": transpose_rhs, "group_offset": False, "out_dtype": "bfloat16"}
    return Call(operation="grouped_matmul", arrays=arrays, options=options, direction=direction)


def ffn_call(rows, groups, width, hidden, direction=FORWARD):
    arrays = {name: jax.ShapeDtypeStruct((groups, hidden, width), jnp.bfloat16) for name in ("wi_0", "wi_1", "wo")}
    arrays["rows"] = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return Call(operation="expert_ffn", arrays=arrays, options={}, direction=direction)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(
    ("direction", "elements"),
    [(FORWARD, 8192 * 32768), (BACKWARD, 16 * 8192 * (2048 + 1408))],  # as the compiler for an H100 prints them
)
def test_the_copies_of_rows_are_those_that_the_compiler_makes(direction, elements, transpose_rhs):
    call = matmul_call(8192, 16, 2048, 1408, direction, transpose_rhs)
    assert masked_dot.copied_bytes(call) == 2 * elements
    assert "16 times the work" in masked_dot.note(call, H100)
    assert f"copied 16 times ({2 * elements / 2**30:.2f} GiB)" in masked_dot.note(call, H100)


def test_the_copies_of_an_expert_are_those_of_its_widest_matmul():
    assert masked_dot.copied_bytes(ffn_call(8, 3, 16, 48)) == 2 * 8 * 3 * 48
    assert masked_dot.copied_bytes(ffn_call(8, 3, 16, 48, BACKWARD)) == 2 * 8 * 3 * (16 + 48)


@pytest.mark.parametrize("make", [matmul_call, ffn_call])
@pytest.mark.parametrize(("rows", "refused"), [(16384, False), (32768, True)])
def test_a_copy_that_does_not_fit_the_memory_is_refused_with_its_size(make, rows, refused):
    """DeepSeek-V3's 256 experts: 56 and 112 GiB."""
    call = make(rows, 256, 7168, 2048)
    found = {c.implementation.name: c.reason for c in candidates(call, ("xla", "reference"), H100)}
    assert found["reference"] is None
    if refused:
        assert found["xla"].startswith("XLA's ragged dot copies the rows once for each group on a GPU: 112 GiB")
        assert "a h100 has 75" in found["xla"]
    else:
        assert found["xla"] is None
    assert masked_dot.why_not(call, hardware_by_name("tpu7x")) is None
