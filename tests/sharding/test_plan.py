"""Degrees, and the place of every parameter: who holds what."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from raggedmoe.aot.collectives import Step, least_sent
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.params import ParamSpec
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


ROUTED = ParamSpec(
    shape=(8, 12, 16), dtype="float32", axes=("expert", "expert_dim", "model_dim"), contracts="model_dim"
)


def test_routed_experts_are_split_by_expert_tensor_and_fsdp():
    by_hidden, by_width = (
        Plan(fsdp=2, expert=4, tensor=2, tensor_split=split) for split in ("expert_dim", "model_dim")
    )
    assert by_hidden.spec("moe.wi_0", ROUTED) == P("expert", "tensor", "fsdp")
    assert by_width.spec("moe.wi_0", ROUTED) == P("expert", None, ("tensor", "fsdp"))


def test_routed_experts_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match=r"moe.wo: its expert_dim=12 is not divisible by tensor_parallelism=8"):
        Plan(tensor=8).spec("moe.wo", ROUTED)


def test_other_parameters_stay_whole_where_they_do_not_divide():
    spec = ParamSpec(shape=(50257, 12), dtype="float32", axes=("vocab", "model_dim"), contracts="model_dim")
    assert Plan(tensor=2, fsdp=4).spec("embedding", spec) == P(None, ("fsdp", "expert"))
    assert Plan(fsdp=8).spec("embedding", spec) == P("tensor", None)


@pytest.mark.parametrize("name", ["deepseek-v3-tiny", "gpt-oss-tiny", "mixtral-tiny"])
def test_the_parts_of_every_parameter_are_as_large_as_the_plan_says(name):
    plan = Plan(fsdp=2, expert=2, tensor=2)
    specs = param_specs(model_preset(name))
    shardings, planned = plan.shardings(plan.mesh(), specs), plan.device_bytes(specs)
    for name, spec in specs.items():
        part = shardings[name].shard_shape(spec.shape)
        assert np.prod(part) * np.dtype(spec.dtype).itemsize == planned[name]


@pytest.mark.parametrize("strategy", ["all_to_all", "ring", "capacity"])
def test_the_least_that_a_device_sends_by_hand(strategy):
    """Four ways (rows there and back, and both gradients), for 64 tokens of 2 sequences on each of 4 ranks."""
    factor = {"capacity_factor": 1.5} if strategy == "capacity" else {}
    config = MoEConfig(num_experts=8, experts_per_token=2, model_dim=16, expert_dim=4, **factor)
    execution = MoEExecution(strategy=strategy)
    step = Step(num_tokens=64, num_sequences=2, dtype="bfloat16", ragged=True)
    row = 16 * 2
    slots = 8 * 2 * int(32 * 2 / 8 * 1.5)  # of each expert in each sequence
    expected = {"all_to_all": 64 * 2 * row * 3 / 4, "ring": 64 * row * 3, "capacity": slots * row * 3 / 4}
    assert least_sent(config, execution, Plan(expert=4), step) == 4 * expected[strategy]
