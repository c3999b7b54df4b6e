"""The rule that splits every parameter, by the names of its axes."""

import pytest
from jax.sharding import PartitionSpec as P

from raggedmoe.params import ParamSpec
from raggedmoe.sharding.plan import Plan

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
