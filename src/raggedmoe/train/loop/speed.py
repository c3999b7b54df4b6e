"""The peak FLOP/s, of which model FLOP utilisation (MFU) is a share."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from raggedmoe.hardware import Hardware

MATMUL_SIZE, NUM_REPEATS = 1536, 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a run's speed is measured by."""

    flops_per_token: float
    peak_flops: float  # per second, of all devices together

    def mfu(self, tokens_per_second: float) -> float:
        """Return the model FLOP utilisation at that speed."""
        return tokens_per_second * self.flops_per_token / self.peak_flops


def peak_flops(hardware: Hardware, dtype: jnp.dtype, num_devices: int = 1) -> float:
    """Return the peak FLOP/s of so many devices: the table's figure, or on a CPU what a dense matmul reaches.

    The table has no figure for float32, which is assumed to be half as fast as bfloat16. Devices of a CPU share it.
    """
    if hardware.bf16_flops is not None:
        one = hardware.bf16_flops / hardware.devices_per_chip / (1 if jnp.dtype(dtype).itemsize <= 2 else 2)
        return one * num_devices
    return measure_peak_flops(dtype)


def measure_peak_flops(dtype: jnp.dtype) -> float:
    """Measure the FLOP/s of the fastest of a few dense matmuls on the default device."""
    left = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(left, left).block_until_ready()
    best = float("inf")
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        multiply(left, left).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * MATMUL_SIZE**3 / best
