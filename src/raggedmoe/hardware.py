"""A table of chips with their figures, and `target_hardware`, which says for which chip a computation is compiled."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from raggedmoe.names import check_known

GB, GIB, MIB = 10**9, 2**30, 2**20


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of chip. Figures are per chip; None means not applicable or, on the host CPU, measured when needed."""

    name: str
    platform: str  # "cpu", "gpu" or "tpu"
    device_kinds: tuple[str, ...] = ()  # how JAX spells it; a device's kind starts with one of these
    bf16_flops: float | None = None  # per second
    fp8_flops: float | None = None
    int8_flops: float | None = None
    native_formats: tuple[str, ...] = ()  # of 8 bits and fewer, that its matrix units multiply as they are
    hbm_bytes: int | None = None
    hbm_bandwidth: float | None = None  # bytes per second
    link_bandwidth: float | None = None  # bytes per second, one way, one link
    link_topology: str | None = None
    vmem_bytes: int | None = None  # per TensorCore
    tensor_cores: int = 0
    sparse_cores: int = 0
    sparse_core_lanes: int = 0
    devices_per_chip: int = 1  # JAX devices that one chip shows


FP8 = ("float8_e4m3fn", "float8_e5m2")


# Sources: the vendors' public pages, JAX's own tpu_info and the public scaling book. Where they differ, the smaller.
_CHIPS = (
    Hardware(name="cpu", platform="cpu", device_kinds=("cpu",)),
    Hardware(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),
        bf16_flops=275e12,
        hbm_bytes=32 * GIB,
        hbm_bandwidth=1200e9,
        link_bandwidth=45e9,
        link_topology="3D torus",
        vmem_bytes=16 * MIB,
        tensor_cores=2,
    ),
    Hardware(
        name="v5e",
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        bf16_flops=197e12,
        int8_flops=393e12,
        native_formats=("int8",),
        hbm_bytes=16 * GB,
        hbm_bandwidth=819e9,
        link_bandwidth=45e9,
        link_topology="2D torus",
        vmem_bytes=128 * MIB,
        tensor_cores=1,
    ),
    Hardware(
        name="v5p",
        platform="tpu",
        device_kinds=("TPU v5p", "TPU v5"),
        bf16_flops=459e12,
        fp8_flops=459e12,
        hbm_bytes=95 * GIB,
        hbm_bandwidth=2460e9,
        link_bandwidth=90e9,
        link_topology="3D torus",
        vmem_bytes=64 * MIB,
        tensor_cores=2,
        sparse_cores=4,
        sparse_core_lanes=8,
    ),
    Hardware(
        name="v6e",
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        bf16_flops=918e12,
        fp8_flops=918e12,
        int8_flops=1836e12,
        native_formats=("int8", *FP8),
        hbm_bytes=32 * GB,
        hbm_bandwidth=1638e9,
        link_bandwidth=90e9,
        link_topology="2D torus",
        vmem_bytes=128 * MIB,
        tensor_cores=1,
        sparse_cores=2,
        sparse_core_lanes=8,
    ),
    Hardware(
        name="tpu7x",
        platform="tpu",
        device_kinds=("TPU7x", "TPU v7x"),
        bf16_flops=2307e12,
        fp8_flops=4614e12,
        native_formats=FP8,
        hbm_bytes=192 * GIB,
        hbm_bandwidth=7380e9,
        link_bandwidth=100e9,
        link_topology="3D torus",
        vmem_bytes=64 * MIB,
        tensor_cores=2,
        sparse_cores=4,
        sparse_core_lanes=16,
        devices_per_chip=2,
    ),
    Hardware(
        name="h100",
        platform="gpu",
        device_kinds=("NVIDIA H100",),
        bf16_flops=989e12,
        fp8_flops=1979e12,
        native_formats=FP8,
        hbm_bytes=80 * GB,
        hbm_bandwidth=3350e9,
        link_bandwidth=450e9,
        link_topology="NVLink",
    ),
    Hardware(
        name="b200",
        platform="gpu",
        device_kinds=("NVIDIA B200",),
        bf16_flops=2250e12,
        fp8_flops=4500e12,
        native_formats=FP8,
        hbm_bytes=180 * GIB,
        hbm_bandwidth=7700e9,
        link_bandwidth=900e9,
        link_topology="NVLink",
    ),
)
HARDWARE: dict[str, Hardware] = {chip.name: chip for chip in _CHIPS}


def hardware_by_name(name: str) -> Hardware:
    """Look up a chip by its name in the table, such as "v6e"."""
    check_known("hardware", name, HARDWARE)
    return HARDWARE[name]


def hardware_of_device(platform: str, device_kind: str) -> Hardware:
    """Find the table's entry for a JAX device, or make one without figures for a chip that is not in the table."""
    # The longest match wins: "TPU v5 lite" is a v5e although "TPU v5" (the v5p's short name) is a prefix of it.
    matches = [
        (len(kind), chip)
        for chip in _CHIPS
        for kind in chip.device_kinds
        if device_kind.lower().startswith(kind.lower()) and chip.platform == platform
    ]
    if matches:
        return max(matches, key=lambda match: match[0])[1]
    return Hardware(name=f"{platform}:{device_kind}", platform=platform, device_kinds=(device_kind,))


def target_hardware(hardware: "Hardware | str | None" = None, arrays: Iterable[Any] = ()) -> Hardware:
    """Return the chip that a computation is for.

    It is decided by, in this order: the argument ``hardware``; the abstract mesh in use (``jax.set_mesh``,
    ``shard_map``, also when it describes a topology that this machine does not have); the mesh or the devices that the
    arrays are on; and, only if none of these says, the backend on which JAX would run the call.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware is not None:
        return hardware_by_name(hardware)
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        return hardware_of_device(device.platform, device.device_kind)
    for array in arrays:
        mesh = getattr(getattr(jax.typeof(array), "sharding", None), "mesh", None)
        device = getattr(mesh, "abstract_device", None)
        if device is not None:
            return hardware_of_device(device.platform, device.device_kind)
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            concrete = next(iter(array.devices()))
            return hardware_of_device(concrete.platform, concrete.device_kind)
    default: Any = jax.config.values["jax_default_device"]
    concrete = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    return hardware_of_device(concrete.platform, concrete.device_kind)
