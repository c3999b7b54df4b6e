"""Host buffers that JAX takes over without a copy, and back."""

import math
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64  # bytes; XLA's CPU client copies what is less aligned
PIECE_BYTES = 16 * 2**20  # of a tensor, held at once beside the parameters


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


def on_host(array: jax.Array | np.ndarray, at: tuple[int | slice, ...]) -> np.ndarray:
    """Some of an array. What is whole in a CPU's memory is not copied; of others, no more is fetched than asked for."""
    if isinstance(array, np.ndarray):
        return array[at]
    devices = array.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(array)[at]
    return np.asarray(array[at])
