"""Degrees, and the place of every parameter: who holds what."""

import jax
import numpy as np
import pytest

from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.sharding.axes import AXES
from raggedmoe.sharding.plan import Plan


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
        (
            {"expert": 3, "data": -1},
            8,
            r"8 devices cannot be divided by expert_parallelism=3 = 3.*one of \[1, 2, 4, 8\]",
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
