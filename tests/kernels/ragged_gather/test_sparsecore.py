"""What the SparseCore gather cannot take, and what it says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.ragged_gather import sparsecore as gather_declaration
from raggedmoe.kernels.registry import Call


@pytest.mark.parametrize(
    ("chip", "dtype", "weights", "rows", "reason"),
    [
        ("v5e", "bfloat16", "float32", 40, "no SparseCore of v5e is known; xla gathers"),
        ("v4", "bfloat16", "float32", 40, "no SparseCore of v4 is known; xla gathers"),
        ("h100", "bfloat16", "float32", 40, "not for gpu"),
        ("v6e", "float16", "float32", 40, "takes bfloat16 and float32 x, got float16"),
        ("v6e", "float32", "float64", 40, "got float64 weights"),
        ("tpu7x", "float32", "float32", 2**30, "beyond 32-bit addresses"),
        ("tpu7x", "float32", "float32", 40, None),
    ],
)
def test_why_not(chip, dtype, weights, rows, reason):
    arrays = {
        "x": jax.ShapeDtypeStruct((rows, 31), jnp.dtype(dtype)),
        "indices": jax.ShapeDtypeStruct((120,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((120,), np.dtype(weights)),
    }
    found = gather_declaration.IMPLEMENTATION.why_not(Call(operation="ragged_gather", arrays=arrays), HARDWARE[chip])
    assert found is None if reason is None else reason in found
