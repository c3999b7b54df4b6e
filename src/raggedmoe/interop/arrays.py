"""Moving arrays between host buffers and JAX, without a copy where that can be."""

import math
from typing import Any

import jax
import numpy as np

ALIGNMENT = 64  # bytes; XLA's CPU client copies what is less aligned
PIECE_BYTES = 16 * 2**20  # how much of a tensor is held at once beside the parameters


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocate an uninitialised array that starts at a multiple of the alignment."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def to_device(buffer: np.ndarray) -> jax.Array:
    """Turn a buffer into a JAX array. On a CPU they share their memory, so the buffer must not be written to again."""
    return jax.device_put(buffer, may_alias=True)


def fetch_to_host(array: jax.Array | np.ndarray, index: tuple[int | slice, ...]) -> np.ndarray:
    """Fetch part of an array. An array in one CPU's memory is not copied; of others only that part is transferred."""
    if isinstance(array, np.ndarray):
        return array[index]
    devices = array.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return np.asarray(array)[index]
    return np.asarray(array[index])
