"""Degrees, and the place of every parameter: who holds what."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from raggedmoe.aot.topology import find_topology
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.sharding.axes import AXES
from raggedmoe.sharding.plan import Plan, count_slices
from tests.aot.marks import NEEDS_LIBTPU


@pytest.mark.parametrize(
    ("degrees", "num_devices", "expected"),
    [
        ({}, 8, (1, 1, 1, 1)),
        ({"expert": 4, "fsdp": -1}, 8, (1, 2, 4, 1)),
        ({"data": -1}, 6, (6, 1, 1, 1)),
        ({"tensor": 2, "expert": 2, "data": -1}, 4, (1, 1, 2, 2)),
    ],
)
def test_what_is_left_goes_to_the_open_degree(degrees, num_devices, expected):
    assert tuple(Plan(**degrees).resolve(num_devices).sizes.values()) == expected


@pytest.mark.parametrize(
    ("degrees", "num_devices", "message"),
    [
        ({"expert": 0}, 8, "expected expert_parallelism >= 1, or -1 for the devices that are left, got 0"),
        ({"expert": -1, "fsdp": -1}, 8, "one degree of -1 at most, got fsdp_parallelism and expert_parallelism"),
        (
            {"expert": 16},
            8,
            "expert_parallelism=16 = 16 devices, but there are 8; use degrees whose product is at most 8",
        ),
        ({"slices": 0}, 8, "expected dcn_data_parallelism >= 1, or -1 for all slices, got 0"),
        (
            {"slices": 3, "fsdp": -1},
            8,
            r"dcn_data_parallelism=3 = 3 devices, but there are 8; use degrees whose product is one of \[1, 2, 4, 8\]",
        ),
        ({"slices": 2, "fsdp": 8}, 8, "dcn_data_parallelism=2 × fsdp_parallelism=8 = 16 devices, but there are 8"),
        (
            {"expert": 3, "data": -1},
            8,
            r"expert_parallelism=3 = 3 devices, but there are 8; .* one of \[1, 2, 4, 8\]",
        ),
    ],
)
def test_degrees_that_cannot_be_are_refused_with_what_to_do(degrees, num_devices, message):
    with pytest.raises(ValueError, match=message):
        Plan(**degrees).resolve(num_devices)


def test_a_mesh_has_the_axes_in_their_order_and_the_first_devices():
    mesh = Plan(expert=2, tensor=2).mesh()
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (1, 1, 2, 2)
    assert mesh.devices.reshape(-1).tolist() == jax.devices()[:4]


def test_a_mesh_of_an_open_degree_takes_the_devices_that_are_left_and_no_more_than_there_are():
    assert Plan(expert=2, fsdp=-1).mesh().devices.shape == (1, 4, 2, 1)
    with pytest.raises(ValueError, match="fsdp_parallelism=16 = 16 devices, but there are 8"):
        Plan(fsdp=16).mesh()


def test_slices_are_the_major_part_of_the_data_axis():
    plan = Plan(slices=2, data=2, fsdp=-1).resolve(8)
    assert plan.sizes == {"data": 4, "fsdp": 2, "expert": 1, "tensor": 1}
    slices = plan.mesh().devices.reshape(2, -1)
    assert slices.tolist() == [jax.devices()[:4], jax.devices()[4:]]
    assert Plan(slices=-1, fsdp=-1).resolve(8).sizes == Plan(fsdp=8).sizes


def test_devices_that_say_of_how_many_slices_they_are_fill_in_that_degree_or_refuse_another():
    plan = Plan(slices=-1, fsdp=-1).resolve(16, num_slices=4)
    assert (plan.slices, plan.sizes["data"], plan.fsdp) == (4, 4, 4)
    with pytest.raises(
        ValueError, match=r"dcn_data_parallelism=2 cannot be used with devices of 4 slices: -1 takes them all"
    ):
        Plan(slices=2, fsdp=-1).resolve(16, num_slices=4)


@NEEDS_LIBTPU[0]
@NEEDS_LIBTPU[1]
def test_on_tpus_only_the_data_axis_crosses_slices_whatever_order_devices_come_in():
    devices = find_topology("v5e:2x2", 2).devices
    assert count_slices(devices) == 2
    mesh = Plan(slices=2, data=2, expert=2).mesh(devices[::-1])
    slices = [[device.slice_index for device in part.reshape(-1)] for part in mesh.devices.reshape(2, 4)]
    assert slices == [[0] * 4, [1] * 4]
    with pytest.raises(ValueError, match="dcn_data_parallelism=1 cannot be used with devices of 2 slices"):
        Plan(fsdp=8).mesh(devices)
    with pytest.raises(ValueError, match="8; use degrees whose product is 8, as a mesh of several slices has all"):
        Plan(slices=2, fsdp=2).mesh(devices)


def test_devices_without_the_number_of_a_slice_are_one_slice_on_tpus_and_none_elsewhere():
    described = [SimpleNamespace(platform="tpu")] * 4  # as a topology of one slice has them
    assert count_slices(described) == 1
    assert count_slices([SimpleNamespace(platform="cpu")]) is None


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match=r"unknown tensor_split 'expert_dims'.*did you mean 'expert_dim'"):
        Plan(tensor_split="expert_dims")


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "gpt-oss-tiny", "mixtral-tiny"])
def test_the_parts_of_every_parameter_are_as_large_as_the_plan_says(name):
    plan = Plan(fsdp=2, expert=2, tensor=2)
    specs = param_specs(model_preset(name))
    shardings = plan.shardings(plan.mesh(), specs)
    for name, spec in specs.items():
        assert np.prod(shardings[name].shard_shape(spec.shape)) == plan.device_elements(name, spec)
