"""Host buffers that JAX takes over without a copy."""

import math
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64  # bytes; XLA's CPU client copies what is less aligned


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that starts at a multiple of the alignment."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def to_device(buffer: np.ndarray) -> jax.Array:
    """The buffer as an array of JAX's; on a CPU the same memory, so the buffer must not be written to any more."""
    return jax.device_put(buffer, may_alias=True)
