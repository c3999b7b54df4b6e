"""The devices that a CPU makes for a run which asks for several."""

import math
import os

import jax


def make_cpu_devices(num_devices: int, num_processes: int = 1) -> int:
    """Make so many CPU devices, or a process's share of them, if the CPU backend has not started.

    Return how many were made, or 0 if their number was set before, or is enough. Other backends are not changed.
    """
    num_devices = math.ceil(num_devices / num_processes)
    set_by_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if num_devices == 1 or set_by_flags or jax.config.values["jax_num_cpu_devices"] > 0:
        return 0
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:  # it has started
        if jax.default_backend() == "cpu" and jax.local_device_count() < num_devices:
            raise ValueError(
                f"expected {num_devices} devices of this CPU, as the degrees ask for, but JAX has started with "
                f"{jax.local_device_count()}: call raggedmoe.train before anything uses JAX, or begin the script with "
                f"jax.config.update('jax_num_cpu_devices', {num_devices})"
            ) from None
        return 0
    return num_devices
