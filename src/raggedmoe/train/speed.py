"""The peak that model FLOP utilisation is a share of."""

import time

import jax
import jax.numpy as jnp

from raggedmoe.hardware import Hardware

SIDE, TURNS = 1536, 5


def peak_flops(hardware: Hardware, dtype: jnp.dtype, num_devices: int = 1) -> float:
    """Operations a second of so many devices: the table's figure, or on a CPU what a dense matmul reaches here.

    The table has none for float32, which is taken for half as fast as bfloat16. Host devices share one processor.
    """
    if hardware.bf16_flops is not None:
        one = hardware.bf16_flops / hardware.devices_per_chip / (1 if jnp.dtype(dtype).itemsize <= 2 else 2)
        return one * num_devices
    return measured_peak(dtype)


def measured_peak(dtype: jnp.dtype) -> float:
    """The best of a few dense matmuls on the default device."""
    left = jnp.ones((SIDE, SIDE), dtype)
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(left, left).block_until_ready()
    best = float("inf")
    for _ in range(TURNS):
        start = time.perf_counter()
        multiply(left, left).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * SIDE**3 / best
