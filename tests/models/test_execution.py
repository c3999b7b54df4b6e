"""How a model runs is not what it is: nothing of it is saved, and one model object runs in several ways."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from raggedmoe import Decoder, KernelChoice, ModelExecution, MoE, MoEExecution, Plan, interop
from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.kernels.registry import record_selections
from raggedmoe.models.config import ModelConfig
from raggedmoe.moe.execution import ACROSS_RANKS
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, tiny
from tests.moe.examples import assert_close

# For each setting some value that is not its default, with what it needs beside it.
MOE_CHANGES = {
    "moe_backend": {"moe_backend": "ragged_dot"},
    "strategy": {"strategy": "all_to_all"},
    "kernels": {"kernels": KernelChoice(grouped_matmul="xla")},
    "ragged_buffer_factor": {"strategy": "ring", "ragged_buffer_factor": 1.5},
    "token_chunks": {"token_chunks": 2},
    "width_chunks": {"width_chunks": 2},
    "tensor_split": {"tensor_split": "model_dim"},
    "recompute_dispatch": {"recompute_dispatch": True},
    "quantization": {"quantization": QUANTIZATIONS["fp8"]},
    "dispatch_dtype": {"strategy": "ring", "dispatch_dtype": "int8"},
    "hardware": {"hardware": "v6e"},
}
CHANGES = {
    "attention_implementation": {"attention_implementation": "chunked"},
    "scan_layers": {"scan_layers": False},
    "remat": {"remat": ("attn_out",)},
    **{f"moe.{name}": {"moe": MoEExecution(**change)} for name, change in MOE_CHANGES.items()},
}


def test_every_setting_is_among_those_that_are_tried():
    names = {entry.name for entry in dataclasses.fields(ModelExecution)} - {"moe"}
    assert CHANGES.keys() == names | {f"moe.{entry.name}" for entry in dataclasses.fields(MoEExecution)}


def saved_bytes(model, folder):
    interop.save(model, folder / "hugging_face")
    interop.save_native(model, folder / "native")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_setting_of_how_a_model_runs_changes_a_saved_byte(tmp_path):
    config = tiny("mixtral-tiny", num_layers=1)
    params = drawn_params(config)
    plain = saved_bytes(Decoder(config, params=params), tmp_path / "plain")
    assert len(plain) >= 4
    for name, change in CHANGES.items():
        execution = ModelExecution(**change)
        assert execution != ModelExecution(), name
        mesh = Plan(expert=2).mesh() if execution.moe.strategy in ACROSS_RANKS else None
        model = Decoder(config, params=params, execution=execution, mesh=mesh)
        assert saved_bytes(model, tmp_path / name) == plain, name


@pytest.mark.ci
@pytest.mark.usefixtures("without_native_kernels")  # they would fuse the experts
def test_one_model_runs_in_two_ways_without_being_made_again():
    config = tiny("mixtral-tiny", num_layers=1)
    model, ids = Decoder(config, params=drawn_params(config), execution=EINSUM), drawn_ids(config, 1, 8)
    with record_selections() as of_einsum:
        by_einsum = model(ids)
    with record_selections() as of_kernels:
        by_kernels = model(ids, execution=ModelExecution(scan_layers=False))
    called = [{selection.call.operation for selection in found} for found in (of_einsum, of_kernels)]
    assert called == [{"attention"}, {"attention", "ragged_gather", "grouped_matmul", "ragged_gather_reduce"}]
    assert model.execution == EINSUM
    assert_close(by_kernels, by_einsum)


@pytest.mark.parametrize("make", [ModelConfig, lambda **words: dataclasses.replace(tiny("mixtral-tiny"), **words)])
def test_how_a_model_runs_is_refused_where_it_says_what_it_is(make):
    message = r"ModelConfig says what a model is and has no remat, scan_layers; ModelExecution says how it runs: "
    message += r"Decoder\(config, execution=ModelExecution\(remat='full', scan_layers=False\)\)"
    with pytest.raises(TypeError, match=message):
        make(remat="full", scan_layers=False)


@pytest.mark.usefixtures("only_our_checks")
def test_the_other_kind_of_execution_is_refused():
    config = tiny("mixtral-tiny")
    with pytest.raises(TypeError, match=r"a ModelExecution, got MoEExecution; .*ModelExecution\(moe=MoEExecution"):
        Decoder(config, params={}, execution=MoEExecution())
    with pytest.raises(TypeError, match="expected execution to be a MoEExecution, got ModelExecution"):
        MoE(config.moe, rngs=nnx.Rngs(0), execution=ModelExecution())


def test_an_execution_that_does_not_fit_the_model_is_refused():
    config = tiny("mixtral-tiny")
    with pytest.raises(ValueError, match="remat keeps 'kv_a', which this model never computes"):
        Decoder(config, params=drawn_params(config), execution=ModelExecution(remat=("kv_a",)))
    model, execution = Decoder(config, params=drawn_params(config)), MoEExecution(strategy="capacity")
    with pytest.raises(ValueError, match="strategy='capacity' cannot be used with capacity_factor=None"):
        model(jnp.zeros((1, 2), jnp.int32), execution=ModelExecution(moe=execution))
