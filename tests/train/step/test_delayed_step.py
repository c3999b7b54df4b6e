"""Training steps whose experts' scales are made of histories in the train state."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.sharding.axes import ONE_DEVICE
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from raggedmoe.train.checkpoint.stored_arrays import leaves_by_name
from raggedmoe.train.settings.sections import CheckpointConfig
from raggedmoe.train.step.programs import compile_programs, state_template
from raggedmoe.train.step.step import held_out_loss
from tests.moe.test_delayed_scales import assert_near
from tests.train.step.small_step import BATCH, assert_same_bits, first_state, step_of, with_losses
from tests.train.step.test_quantized_step import config_of

LENGTH = 3
FP8 = dataclasses.replace(QUANTIZATIONS["fp8"], history=LENGTH)
CONFIG = config_of(FP8)


def start_of(config, mesh=ONE_DEVICE):
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_template(config).amax_history)
    state = dataclasses.replace(jax.tree.map(jnp.copy, first_state(config)), amax_history=empty)
    return jax.tree.map(lambda a, t: jax.device_put(a, t.sharding), state, state_template(config, mesh))


def after_steps(config, num_steps, state=None):
    state = start_of(config) if state is None else state
    for _ in range(num_steps):
        state, report = step_of(config)(state, BATCH)
    return state, report


def restored(folder, state, config):
    with Checkpoints(folder, CheckpointConfig(async_checkpointing=False)) as checkpoints:
        checkpoints.save(int(state.step), state, {})
        return checkpoints.restore(state_template(config)).state


def test_the_state_has_a_history_for_each_operand_of_each_layer_with_experts():
    template = state_template(CONFIG).amax_history
    assert {leaf.shape[-1] for leaf in jax.tree.leaves(template)} == {LENGTH}
    layers = {name.rpartition(".moe.")[0] for name in template}
    assert "mtp.0" in layers
    assert len(jax.tree.leaves(template)) == 8 * len(layers)
    assert state_template(config_of(QUANTIZATIONS["fp8"])).amax_history == {}
    untrained = with_losses(CONFIG, mtp_loss_weight=0.0)
    assert not any(name.startswith("mtp.") for name in state_template(untrained).amax_history)


@pytest.mark.ci
def test_steps_learn_go_on_from_a_checkpoint_bit_for_bit_and_keep_histories_where_they_are_skipped(tmp_path):
    state, first = after_steps(CONFIG, 1)
    for name, history in leaves_by_name(state.amax_history).items():
        assert (np.asarray(history)[..., 0] > 0).all(), name
        assert not np.asarray(history)[..., 1:].any(), name
    for name, weights in start_of(CONFIG).params.items():
        if name.endswith(".moe.wo"):
            largest = np.abs(np.asarray(weights)).max((-3, -2, -1))
            np.testing.assert_array_equal(
                state.amax_history[name.replace(".wo", ".amax_down")].weights[0][..., 0], largest
            )
    whole, last = after_steps(CONFIG, 5, jax.tree.map(jnp.copy, state))
    assert bool(last.finite)
    assert float(last.losses.loss) < float(first.losses.loss) - 0.02
    resumed, _ = after_steps(CONFIG, 5, restored(tmp_path, state, CONFIG))
    assert_same_bits(resumed, whole)
    spoilt = dataclasses.replace(whole, params={**whole.params, "final_norm": whole.params["final_norm"] * jnp.nan})
    after, report = after_steps(CONFIG, 1, spoilt)
    assert not bool(report.finite)
    assert_same_bits(after.amax_history, whole.amax_history)


def test_other_histories_than_those_of_a_checkpoint_begin_empty(tmp_path):
    state = start_of(CONFIG)
    state = dataclasses.replace(state, amax_history=jax.tree.map(lambda a: a + 1, state.amax_history))
    longer = config_of(dataclasses.replace(FP8, history=LENGTH + 1))
    none = config_of(QUANTIZATIONS["fp8"])
    assert_same_bits(restored(tmp_path / "same", state, CONFIG), state)
    found = restored(tmp_path / "longer", state, longer)
    assert jax.tree.map(jnp.shape, found.amax_history) == jax.tree.map(jnp.shape, state_template(longer).amax_history)
    assert not any(np.asarray(history).any() for history in jax.tree.leaves(found.amax_history))
    assert_same_bits(found.params, state.params)
    assert restored(tmp_path / "none", state, none).amax_history == {}
    without = dataclasses.replace(state, amax_history={})
    begun = restored(tmp_path / "begun", without, CONFIG)
    assert_same_bits(begun.amax_history, start_of(CONFIG).amax_history)


@pytest.mark.ci
def test_the_largest_of_all_micro_batches_enters_a_history():
    state, _ = after_steps(CONFIG, 1)  # whose histories make the same scales for the whole and its parts
    whole, _ = after_steps(CONFIG, 1, state)
    cut, _ = after_steps(with_losses(CONFIG, gradient_accumulation_steps=2), 1, state)
    assert all((np.asarray(history)[..., :2] > 0).all() for history in jax.tree.leaves(whole.amax_history))
    assert_near(cut.amax_history, whole.amax_history, 1e-3)


@pytest.mark.slow
def test_a_step_is_the_same_with_layers_scanned_over_or_not_and_with_remat():
    state, report = after_steps(CONFIG, 2)
    for options in ({"scan_layers": False}, {"remat": "full"}):
        again, other = after_steps(config_of(FP8, **options), 2)
        np.testing.assert_allclose(other.losses.loss, report.losses.loss, rtol=1e-5)
        np.testing.assert_allclose(other.grad_norm, report.grad_norm, rtol=1e-3)
        assert_near(again.amax_history, state.amax_history, 1e-3)


@pytest.mark.slow
def test_eight_devices_take_the_steps_of_one():
    mesh = Plan(fsdp=4, data=2).logical_mesh()
    programs = compile_programs(CONFIG, BATCH, None, mesh)
    on_mesh, state = start_of(CONFIG, mesh), start_of(CONFIG)
    for _ in range(2):
        on_mesh, _ = programs.step(on_mesh, BATCH)
        state, _ = step_of(CONFIG)(state, BATCH)
    assert_near(jax.device_get(on_mesh.amax_history), state.amax_history, 0.01)


@pytest.mark.ci
def test_evaluation_reads_the_histories():
    state = start_of(CONFIG)
    evaluate = jax.jit(functools.partial(held_out_loss, config=CONFIG.model, execution=CONFIG.execution))
    small = jax.tree.map(lambda history: jnp.full_like(history, 1e-3), state.amax_history)
    known, clipped = (evaluate({**state.layer_inputs, **histories}, BATCH)[0] for histories in ({}, small))
    assert np.isfinite(clipped)
    assert abs(float(clipped) - float(known)) > 1e-3 * float(known)
