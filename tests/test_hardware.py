"""The table of chips, and which chip a computation is for."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from raggedmoe.hardware import HARDWARE, hardware_by_name, hardware_of_device, target_hardware

# Per chip, from the vendors' public pages: bf16 and fp8 TFLOP/s, HBM GB (rounded down), HBM GB/s, link GB/s.
FIGURES = {
    "v4": (275, None, 34, 1200, 45),
    "v5e": (197, None, 16, 819, 45),
    "v5p": (459, 459, 102, 2460, 90),
    "v6e": (918, 918, 32, 1638, 90),
    "tpu7x": (2307, 4614, 206, 7380, 100),
    "h100": (989, 1979, 80, 3350, 450),
    "b200": (2250, 4500, 193, 7700, 900),
}
# VMEM MiB per core, TensorCores, SparseCores, SparseCore lanes, JAX devices a chip.
TPU_CORES = {
    "v4": (16, 2, 0, 0, 1),
    "v5e": (128, 1, 0, 0, 1),
    "v5p": (64, 2, 4, 8, 1),
    "v6e": (128, 1, 2, 8, 1),
    "tpu7x": (64, 2, 4, 16, 2),
}


@pytest.mark.parametrize("name", FIGURES)
def test_speeds_and_memory_are_the_published_ones(name):
    chip = HARDWARE[name]
    fp8 = None if chip.fp8_flops is None else chip.fp8_flops / 1e12
    assert FIGURES[name] == (
        chip.bf16_flops / 1e12,
        fp8,
        chip.hbm_bytes // 10**9,
        chip.hbm_bandwidth / 1e9,
        chip.link_bandwidth / 1e9,
    )


@pytest.mark.parametrize("name", TPU_CORES)
def test_tpu_cores_are_the_published_ones(name):
    chip = HARDWARE[name]
    assert TPU_CORES[name] == (
        chip.vmem_bytes // 2**20,
        chip.tensor_cores,
        chip.sparse_cores,
        chip.sparse_core_lanes,
        chip.devices_per_chip,
    )


def test_formats_that_chips_multiply_are_the_published_ones():
    """And no chip is said to multiply a format at a speed that is not known."""
    fp8 = ("float8_e4m3fn", "float8_e5m2")
    native = {name: chip.native_formats for name, chip in HARDWARE.items() if chip.native_formats}
    assert native == {"v5e": ("int8",), "v6e": ("int8", *fp8), "tpu7x": fp8, "h100": fp8, "b200": fp8}
    assert {name: chip.int8_flops for name, chip in HARDWARE.items() if chip.int8_flops} == {
        "v5e": 393e12,
        "v6e": 1836e12,
    }
    for chip in HARDWARE.values():
        assert ("int8" in chip.native_formats) == (chip.int8_flops is not None)
        assert not set(fp8) & set(chip.native_formats) or chip.fp8_flops is not None


def test_every_chip_but_the_host_has_figures():
    assert HARDWARE.keys() - FIGURES.keys() == {"cpu"}


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "TPU v4", "v4"),
        ("tpu", "TPU v5 lite", "v5e"),
        ("tpu", "TPU v5e", "v5e"),
        ("tpu", "TPU v5", "v5p"),
        ("tpu", "TPU v5p", "v5p"),
        ("tpu", "TPU v6 lite", "v6e"),
        ("tpu", "TPU7x", "tpu7x"),
        ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_a_device_is_found_by_its_kind(platform, kind, name):
    assert hardware_of_device(platform, kind).name == name


@pytest.mark.parametrize(("platform", "kind"), [("tpu", "TPU v99"), ("gpu", "TPU v4")])
def test_an_unknown_device_has_a_name_of_its_own_and_no_figures(platform, kind):
    chip = hardware_of_device(platform, kind)
    assert (chip.name, chip.platform, chip.bf16_flops) == (f"{platform}:{kind}", platform, None)


@pytest.mark.parametrize(("name", "near"), [("TPU7", "tpu7x"), ("v5ee", "v5e"), ("H100", "h100")])
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=f"unknown hardware '{name}': expected one of cpu, .*did you mean '{near}'"):
        hardware_by_name(name)


def test_the_chip_given_comes_first(abstract_mesh):
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")):
        assert target_hardware("h100") is target_hardware(HARDWARE["h100"]) is HARDWARE["h100"]


def test_the_abstract_mesh_in_use_comes_before_the_local_device(abstract_mesh):
    arrays = np.ones(2), jax.numpy.ones(2)
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")):
        assert target_hardware(arrays=arrays) is HARDWARE["tpu7x"]


def test_the_mesh_that_was_set_is_the_target():
    with jax.set_mesh(Mesh(np.array(jax.devices()), ("x",))):
        assert target_hardware() is HARDWARE["cpu"]


def test_the_target_is_that_of_the_mesh_inside_shard_map(abstract_mesh):
    seen = []

    def body(x):
        seen.append(target_hardware(arrays=(x,)).name)
        return x

    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=abstract_mesh("tpu", "TPU v5 lite"), in_specs=spec, out_specs=spec)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct((8,), "float32"))
    assert set(seen) == {"v5e"}


def test_without_a_mesh_the_arrays_say_where_they_are():
    assert target_hardware(arrays=(jax.device_put(1.0, jax.devices()[3]),)) is HARDWARE["cpu"]
