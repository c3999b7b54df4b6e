"""A way to run a layer that makes no sense is refused, with what was expected, what came and what to do."""

import pytest

from raggedmoe import KernelChoice, MoEExecution

# What is wrong -> the settings, and the expected, the given and the remedy in the message.
BAD_EXECUTIONS = {
    "unknown_backend": (
        {"moe_backend": "ragged-dot"},
        r"unknown moe_backend 'ragged-dot': expected one of auto.*did you mean 'ragged_dot'\?",
    ),
    "unknown_strategy": (
        {"strategy": "rings"},
        r"unknown strategy 'rings': expected one of local, .*did you mean 'ring'\?",
    ),
    "unknown_split": ({"tensor_split": "expert"}, r"unknown tensor_split 'expert'.*did you mean 'expert_dim'"),
    "no_chunk": ({"token_chunks": 0}, r"expected token_chunks to be a positive integer, got 0"),
    "fused_with_width_chunks": (
        {"moe_backend": "expert_ffn", "width_chunks": 2},
        r"'expert_ffn' cannot be used with width_chunks=2: its activation needs the whole width; change one of them",
    ),
    "fused_with_a_split_width": (
        {"moe_backend": "expert_ffn", "tensor_split": "model_dim"},
        r"'expert_ffn' cannot be used with tensor_split='model_dim': its activation needs the whole width",
    ),
    "backend_and_kernels": (
        {"moe_backend": "cpu", "kernels": KernelChoice(grouped_matmul="xla")},
        r"moe_backend='cpu' cannot be used with grouped_matmul='xla': it names 'cpu'; change one of them",
    ),
    "backend_and_strategy": (
        {"moe_backend": "dense", "strategy": "local"},
        r"moe_backend='dense' cannot be used with strategy='local': it moves no rows to their experts",
    ),
    "buffer_of_no_ranks": (
        {"ragged_buffer_factor": 1.5},
        r"ragged_buffer_factor=1\.5 cannot be used with strategy='local': ring and all_to_all alone have such a buffer",
    ),
    "8_bits_of_rows_that_stay": (
        {"dispatch_dtype": "int8"},
        r"dispatch_dtype='int8' cannot be used with strategy='local': ring and all_to_all alone send rows in 8 bits",
    ),
    "8_bits_of_slots": ({"strategy": "capacity", "dispatch_dtype": "int8"}, r"cannot be used with strategy='capacity'"),
    "unknown_8_bits": (
        {"strategy": "ring", "dispatch_dtype": "float8"},
        r"unknown dispatch_dtype 'float8': expected one of float8_e4m3fn, float8_e5m2, int8",
    ),
    "negative_buffer": (
        {"strategy": "ring", "ragged_buffer_factor": -1.0},
        r"expected ragged_buffer_factor > 0, or None, got -1\.0",
    ),
    "sending_rows_again": (
        {"strategy": "ring", "recompute_dispatch": True},
        r"recompute_dispatch=True cannot be used with strategy='ring': rows would be sent a second time",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_EXECUTIONS.values(), ids=BAD_EXECUTIONS)
def test_execution_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEExecution(**options).backend  # noqa: B018
