"""What a step is made of: where modules have targets, which load is which bias's, and what is switched off."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.models.mtp import mtp_mask
from raggedmoe.train.settings.sections import OptimizerConfig, StepSettings
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.step.step import layers_of_biases, mtp_weights, update_biases
from tests.train.step.small_step import (
    ADAM,
    BATCH,
    EINSUM,
    LENGTH,
    RATE,
    WHOLE,
    assert_same_bits,
    drawn_params,
    first_state,
    gradients,
    packed,
    small_model,
    sorted_out,
    step_of,
    tiny,
    with_losses,
)


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "bias_update_rate", "mtp_loss_weight"])
def test_a_negative_setting_is_refused(name):
    value = -1 if name == "gradient_accumulation_steps" else -0.1
    with pytest.raises(ValueError, match=f"{name} >= .*, got {value}"):
        with_losses(WHOLE, **{name: value})


@pytest.mark.parametrize("module", [0, 1, 2])
def test_a_module_has_a_target_where_both_tokens_ahead_are_of_the_same_document(module):
    rng = np.random.default_rng(module)
    rows = [rng.integers(1, 6, rng.integers(0, 5)).tolist() for _ in range(12)] + [[40], [1] * LENGTH]
    batch = packed([[*lengths] for lengths in rows if sum(lengths) <= LENGTH or len(lengths) == 1], 61)
    expected_known, expected_weights = np.zeros(batch.ids.shape, bool), np.zeros(batch.ids.shape, np.float32)
    for row, place in np.ndindex(batch.ids.shape):
        joined = place + module + 1
        if batch.segments[row, place] >= 0 and joined < LENGTH:
            same = batch.segments[row, joined] == batch.segments[row, place]
            expected_known[row, place] = same
            expected_weights[row, place] = same and batch.weights[row, joined]
    batch = jax.tree.map(jnp.asarray, batch)
    np.testing.assert_array_equal(mtp_mask(batch.segments, module), expected_known)
    np.testing.assert_array_equal(mtp_weights(batch, module), expected_weights)
    assert 0 < expected_weights.sum() < expected_known.sum() < batch.weights.sum()


def test_biases_are_no_business_of_the_optimizer():
    assert not [name for name in gradients(first_state(WHOLE)) if name.endswith("router_selection_bias")]


MODELS = {
    "alternating windows": tiny("gpt-oss-tiny"),
    "dense first": tiny("deepseek3-tiny"),
    "one module": tiny("deepseek-v3-tiny"),
    "dense between": tiny("deepseek-v3-tiny", num_layers=9, dense_layers=(0, 3, 4, 6), mtp_layers=2),
    "windows and dense": tiny("deepseek-v3-tiny", num_layers=11, dense_layers=(0, 2, 7), windows=(4, None, 8)),
    "last layers in a pattern": tiny(
        "deepseek-v3-tiny", num_layers=7, dense_layers=(), windows=(4, None), mtp_layers=3
    ),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_layers_of_biases_are_found_by_their_number_in_the_model(model):
    config = ResolvedStep(model=model, optimizer=ADAM)
    # Each row of the load by the number of its layer, modules after the model's own.
    row_of_layer = {
        layer: row
        for row, layer in enumerate((*model.moe_layers, *range(model.num_layers, model.num_layers + model.mtp_layers)))
    }
    expected = {
        f"mtp.{m}.moe.router_selection_bias": [row_of_layer[model.num_layers + m]] for m in range(model.mtp_layers)
    }
    for s, stack in enumerate(model.stacks):
        for p, kind in enumerate(stack.kinds):
            if kind.moe:
                layers = [stack.layer(repeat, p) for repeat in range(stack.repeats)]
                expected[f"stacks.{s}.{p}.moe.router_selection_bias"] = [row_of_layer[layer] for layer in layers]
    found = layers_of_biases(config)
    assert found == expected
    assert sorted(row for rows in found.values() for row in rows) == list(range(len(row_of_layer)))


def test_biases_of_several_stacks_move_by_their_own_loads():
    model = MODELS["dense between"]
    config = ResolvedStep(model=model, optimizer=ADAM, losses=StepSettings(bias_update_rate=RATE))
    rows, experts = len(model.moe_layers) + model.mtp_layers, model.moe.num_experts
    load = np.random.default_rng(0).integers(0, 5, (rows, experts), dtype=np.int32)
    _, biases = sorted_out(drawn_params(model))
    found = jax.jit(functools.partial(update_biases, config=config))(biases, load)
    assert found.keys() == biases.keys()
    for name, own in layers_of_biases(config).items():
        direction = np.sign(load[own].mean(1, keepdims=True) - load[own]).astype(np.float32)
        expected = np.asarray(biases[name]) + np.float32(RATE) * direction.reshape(biases[name].shape)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_a_rate_of_zero_leaves_the_biases():
    config = with_losses(WHOLE, bias_update_rate=0.0)
    _, biases = sorted_out(drawn_params(WHOLE.model))
    assert_same_bits(update_biases(biases, jnp.arange(24).reshape(3, 8), config), biases)


# --- bfloat16 compute, no experts, multi-token prediction switched off


@pytest.fixture(scope="module")
def narrow_steps():
    """The state before and after three steps, and the last report."""
    model = dataclasses.replace(small_model(), num_layers=1, dense_layers=(0,), dtype=jnp.bfloat16)
    adam = OptimizerConfig(schedule_steps=40, learning_rate=1e-5, warmup_steps=0)
    config = ResolvedStep(model=model, execution=EINSUM, optimizer=adam, losses=StepSettings(mtp_loss_weight=0.0))
    before = first_state(config)
    ones = jnp.ones_like(before.params["final_norm"])
    before = after = dataclasses.replace(before, params={**before.params, "final_norm": ones})
    for _ in range(3):
        after, report = step_of(config)(after, BATCH)
    return before, after, report


@pytest.mark.ci
def test_updates_below_the_resolution_of_bfloat16_are_kept(narrow_steps):
    before, after, _ = narrow_steps
    old, new = before.params["final_norm"], after.params["final_norm"]
    assert all(value.dtype == jnp.float32 for value in after.params.values())
    np.testing.assert_array_equal(new.astype(jnp.bfloat16), old.astype(jnp.bfloat16))
    assert np.mean(np.abs(new - old) > 1.5e-5) > 0.5  # more than one step's, if the gradient keeps its sign


@pytest.mark.ci
def test_a_weight_of_zero_leaves_multi_token_prediction_as_it_was(narrow_steps):
    before, after, report = narrow_steps
    assert float(report.losses.mtp_loss) == 0
    names = [name for name in before.params if name.startswith("mtp.")]
    assert names
    for name in names:
        np.testing.assert_array_equal(after.params[name], before.params[name], err_msg=name)


def test_a_model_without_experts_has_a_report_too(narrow_steps):
    report = narrow_steps[2]
    assert bool(report.finite)
    assert report.losses.load.shape[0] == 0
    zeros = (report.entropy, report.max_violation, report.losses.aux_loss, report.losses.z_loss, report.losses.dropped)
    assert [float(value) for value in zeros] == [0.0] * 5
