"""One training step: cut into micro-batches, skipped, repeated; its losses, gradients and biases recomputed outside.

The model is small and has every part that the step treats apart: dense layers between those with experts, a selection
bias, all losses of the routers, and multi-token prediction. Its experts are plain einsums, which compile fast.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from raggedmoe.models.decoder import decode, knows_further, predict_further
from raggedmoe.models.presets import model_preset
from raggedmoe.models.specs import is_trained, param_specs
from raggedmoe.moe.config import RouterConfig
from raggedmoe.train.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from raggedmoe.train.rows import Batch
from raggedmoe.train.state import state_of
from raggedmoe.train.step import (
    StepConfig,
    batch_gradients,
    layers_of_biases,
    mtp_weights,
    train_step,
    updated_biases,
)

EPS = float(jnp.finfo(jnp.float32).eps)
LENGTH, RATE, MTP_WEIGHT = 16, 0.01, 0.3
# Documents of each row, by length; what is left is padding. Cut in four, one micro-batch has a row of padding only and
# another has nothing else. The first row ends inside a document: its last token has a target.
ROWS = ((17,), (5, 11), (3, 1, 7), (), (2, 2, 12), (9,), (), ())


def packed(rows, vocab_size, seed=0):
    """A batch of random tokens, by a loop over documents."""
    rng = np.random.default_rng(seed)
    shape = (len(rows), LENGTH)
    ids, targets, positions = (np.zeros(shape, np.int32) for _ in range(3))
    segments, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for row, lengths in enumerate(rows):
        place = 0
        for document, length in enumerate(lengths):
            tokens = rng.integers(0, vocab_size, length)
            for i in range(min(length, LENGTH - place)):
                ids[row, place], segments[row, place], positions[row, place] = tokens[i], document, i
                if i + 1 < length:
                    targets[row, place], weights[row, place] = tokens[i + 1], 1
                place += 1
    return Batch(ids=ids, targets=targets, segments=segments, positions=positions, weights=weights)


def tiny(name, **changes):
    return dataclasses.replace(model_preset(name), **changes)


def small_model(**router):
    preset = model_preset("mixtral-tiny")
    router = RouterConfig(score="sigmoid", selection_bias=True, scale=2.5, **router)
    moe = dataclasses.replace(preset.moe, router=router, moe_backend="jax")
    return dataclasses.replace(preset, vocab_size=61, mlp_dim=32, mtp_layers=1, moe=moe)


def whole_model():
    model = small_model(aux_loss="sequence", aux_loss_weight=0.1, z_loss_weight=0.03)
    return dataclasses.replace(model, num_layers=4, dense_layers=(0, 2))


# Without a first moment and clipping the optimizer's state after a step holds the gradient as it was.
ADAM = OptimizerConfig(steps=40, learning_rate=0.01, warmup_steps=4, b1=0.0, clip_norm=None)
WHOLE = StepConfig(model=whole_model(), optimizer=ADAM, bias_update_rate=RATE, mtp_loss_weight=MTP_WEIGHT)
CUT = dataclasses.replace(WHOLE, micro_batches=4)
BATCH = packed(ROWS, WHOLE.model.vocab_size)


def drawn_params(model, seed=0):
    """Parameters that keep activations at about 1, norms and biases that are not their first values."""
    rng, params = np.random.default_rng(seed), {}
    for name, spec in param_specs(model).items():
        noise = rng.standard_normal(spec.shape, np.float32)
        params[name] = noise * 0.125 if spec.init == "normal" else (spec.init == "ones") + 0.1 * noise
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def first_state(config):
    optimizer = make_optimizer(config.optimizer, param_specs(config.model))
    return state_of(drawn_params(config.model), optimizer, jax.random.key(0))


@functools.cache
def step_of(config):
    return jax.jit(functools.partial(train_step, config=config))


@pytest.fixture(scope="module")
def start():
    return first_state(WHOLE)


@pytest.fixture(scope="module")
def whole(start):
    return step_of(WHOLE)(start, BATCH)


@pytest.fixture(scope="module")
def cut(start):
    """Gradients and losses of the batch in four parts."""
    trained = {name: value for name, value in start.params.items() if is_trained(name)}
    biases = {name: value for name, value in start.params.items() if not is_trained(name)}
    return jax.jit(functools.partial(batch_gradients, config=CUT))(trained, biases, BATCH, key=start.key)


def gradients(state):
    return optax.tree_utils.tree_get(state.optimizer, "mu")


def assert_same_bits(found, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


# --- Micro-batches


def test_micro_batches_have_the_gradient_of_the_whole_batch(whole, cut):
    expected, found = gradients(whole[0]), cut[0]
    assert found.keys() == expected.keys() == {name for name in whole[0].params if is_trained(name)}
    for name, gradient in expected.items():
        # The same terms, one for each of 128 tokens, in sums of another order: √128 roundings, twice over for what
        # came to them through the layers above in a matmul of another size.
        bound = 2 * np.sqrt(BATCH.ids.size) * EPS * np.abs(gradient).max()
        assert np.abs(gradient).max() > 0, name
        assert np.abs(found[name] - gradient).max() <= bound, (name, np.abs(found[name] - gradient).max() / bound)


@pytest.mark.parametrize("part", ["loss", "mtp_loss", "aux_loss", "z_loss"])
def test_micro_batches_have_the_losses_of_the_whole_batch(whole, cut, part):
    found, expected = (float(getattr(losses, part)) for losses in (cut[1], whole[1].losses))
    assert expected > 0.01
    assert abs(found - expected) <= 8 * EPS * expected


def test_micro_batches_have_the_load_of_the_whole_batch(whole, cut):
    np.testing.assert_array_equal(cut[1].load, whole[1].losses.load)


def test_a_batch_that_cannot_be_cut_is_refused(start):
    with pytest.raises(ValueError, match="8 sequences cannot be cut into 3 equal micro-batches"):
        jax.eval_shape(step_of(dataclasses.replace(WHOLE, micro_batches=3)), start, BATCH)


@pytest.mark.parametrize("name", ["micro_batches", "bias_update_rate", "mtp_loss_weight"])
def test_a_negative_setting_is_refused(name):
    value = -1 if name == "micro_batches" else -0.1
    with pytest.raises(ValueError, match=f"{name} >= .*, got {value}"):
        dataclasses.replace(WHOLE, **{name: value})


def test_the_batch_wise_loss_is_the_mean_over_micro_batches_by_their_sequences():
    model = small_model(aux_loss_weight=1.0)
    model = dataclasses.replace(model, num_layers=1, mtp_layers=0)
    config = StepConfig(model=model, optimizer=ADAM, micro_batches=4)
    params = drawn_params(model)
    trained = {name: value for name, value in params.items() if is_trained(name)}
    biases = {name: value for name, value in params.items() if not is_trained(name)}

    @jax.jit
    def aux_loss(segments):
        out = decode(params, BATCH.ids, model, mask=segments >= 0, segments=segments, positions=BATCH.positions)
        return out.experts.aux_loss.sum()

    found = jax.jit(lambda batch: batch_gradients(trained, biases, batch, config, jax.random.key(0))[1])(BATCH)
    part = np.arange(8)[:, None] // 2
    parts = [float(aux_loss(np.where(part == number, BATCH.segments, -1))) for number in range(4)]
    sequences = [2, 1, 2, 0]  # rows of each that have a token
    expected = np.average(parts, weights=sequences)
    assert abs(float(found.aux_loss) - expected) <= 8 * EPS * expected
    assert abs(float(aux_loss(BATCH.segments)) - expected) > 0.01


# --- The objective


@pytest.fixture(scope="module")
def plain_losses(start):
    """The four losses by a forward pass in float64 and NumPy, as a function of the parameters."""
    model = dataclasses.replace(WHOLE.model, dtype=jnp.float64, param_dtype=jnp.float64)
    options = {"mask": BATCH.segments >= 0, "segments": BATCH.segments, "positions": BATCH.positions}

    @jax.jit
    def forward(params):
        given = {name: jnp.asarray(value) for name, value in options.items()}
        out = decode(params, jnp.asarray(BATCH.ids), model, **given)
        further, more = predict_further(params, out.hidden, jnp.asarray(BATCH.ids), model, **given)
        reports = (out.experts, more[0])
        return out.hidden, further[0], sum(r.aux_loss.sum() for r in reports), sum(r.z_loss.sum() for r in reports)

    def mean_cross_entropy(hidden, head, ahead):
        losses = []
        for row, place in np.ndindex(BATCH.ids.shape):
            now, then = place, place + ahead
            if then >= LENGTH or BATCH.segments[row, now] != BATCH.segments[row, then] or not BATCH.weights[row, then]:
                continue
            logits = head @ hidden[row, now]
            losses.append(np.logaddexp.reduce(logits) - logits[BATCH.targets[row, then]])
        return np.mean(losses)

    def losses(params):
        with jax.enable_x64(True):
            hidden, further, aux, z = jax.device_get(forward({n: jnp.asarray(p) for n, p in params.items()}))
        return {
            "loss": mean_cross_entropy(hidden, params["head"], 0),
            "mtp_loss": MTP_WEIGHT * mean_cross_entropy(further, params["head"], 1),
            "aux_loss": aux,
            "z_loss": z,
        }

    return losses


@pytest.fixture(scope="module")
def wide_params(start):
    return {name: np.asarray(value, np.float64) for name, value in start.params.items()}


def test_the_losses_are_those_of_a_plain_forward_pass(whole, plain_losses, wide_params):
    for part, expected in plain_losses(wide_params).items():
        # Hidden states come through five layers of sums over 64 and 96 numbers.
        assert abs(float(getattr(whole[1].losses, part)) - expected) <= 64 * EPS * expected, part


def test_the_routers_learn_from_all_losses_together(whole, plain_losses, wide_params):
    found = {n: np.asarray(g, np.float64) for n, g in gradients(whole[0]).items() if n.endswith("router_kernel")}
    length = np.sqrt(sum((gradient**2).sum() for gradient in found.values()))
    h = 1e-6  # along the gradient: its length is the slope
    ends = []
    for sign in (1, -1):
        moved = {name: wide_params[name] + sign * h / length * gradient for name, gradient in found.items()}
        ends.append(sum(plain_losses({**wide_params, **moved}).values()))
    slope = (ends[0] - ends[1]) / (2 * h)
    assert length > 0.01
    assert abs(slope - length) <= 1e-4 * length


def test_what_stands_at_padding_reaches_nothing(start, whole):
    padding = BATCH.segments < 0
    other = dataclasses.replace(
        BATCH,
        ids=np.where(padding, 7, BATCH.ids),
        targets=np.where(padding, 9, BATCH.targets),
        positions=np.where(padding, 3, BATCH.positions),
    )
    state, report = step_of(WHOLE)(start, other)
    np.testing.assert_array_equal(report.losses.load, whole[1].losses.load)
    for name, gradient in gradients(whole[0]).items():
        np.testing.assert_array_equal(gradients(state)[name], gradient, err_msg=name)


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
    np.testing.assert_array_equal(knows_further(batch.segments, module), expected_known)
    np.testing.assert_array_equal(mtp_weights(batch, module), expected_weights)
    assert 0 < expected_weights.sum() < expected_known.sum() < batch.weights.sum()


# --- The update


def test_parameters_move_by_adamw(start, whole):
    rate = ADAM.learning_rate / ADAM.warmup_steps
    specs = param_specs(WHOLE.model)
    for name, gradient in gradients(whole[0]).items():
        old, g = (np.asarray(a, np.float64) for a in (start.params[name], gradient))
        decay = ADAM.weight_decay * old if specs[name].contracts else 0
        # The first step's moments, corrected for their start at zero, are the gradient and its square.
        expected = old - rate * (g / (np.abs(g) + ADAM.epsilon) + decay)
        np.testing.assert_allclose(whole[0].params[name], expected, atol=4 * EPS, rtol=0, err_msg=name)


def test_the_report_is_what_happened(whole):
    report, load = whole[1], np.asarray(whole[1].losses.load, np.float64)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients(whole[0]).values()))
    share = load / load.sum(1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1).mean()
    assert float(report.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(report.entropy) == pytest.approx(entropy, rel=1e-5)
    assert float(report.max_violation) == pytest.approx((share.max(1) * share.shape[1]).max() - 1, rel=1e-5)
    assert float(report.tokens) == BATCH.weights.sum()
    known = [int((BATCH.segments >= 0).sum())] * 2 + [int(knows_further(jnp.asarray(BATCH.segments), 0).sum())]
    assert load.sum(1).tolist() == [WHOLE.model.moe.experts_per_token * tokens for tokens in known]
    assert int(report.losses.dropped) == 0


def test_the_same_state_and_batch_give_the_same_bits(start, whole):
    assert_same_bits(step_of(WHOLE)(start, BATCH), whole)


def test_a_repeated_batch_is_learned(start):
    state, losses = start, []
    for _ in range(20):
        state, report = step_of(WHOLE)(state, BATCH)
        losses.append(float(report.losses.loss))
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 20
    assert int(state.skipped) == 0
    for name, value in start.params.items():
        assert (np.asarray(state.params[name]) != np.asarray(value)).any(), name


# --- Steps that are skipped


def poisoned(state, name, value):
    place = (0,) * state.params[name].ndim
    return dataclasses.replace(state, params={**state.params, name: state.params[name].at[place].set(value)})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stacks.0.1.moe.router_kernel", np.nan),
        ("final_norm", np.inf),
        ("mtp.0.projection", np.nan),  # only its own loss is NaN
        ("head", 3e38),  # the loss overflows, or only the gradient's norm
    ],
)
def test_a_step_that_is_not_finite_moves_nothing(start, whole, name, value):
    before = poisoned(whole[0], name, value)
    after, report = step_of(WHOLE)(before, BATCH)
    assert not bool(report.finite)
    assert_same_bits(after.params, before.params)
    assert_same_bits(after.optimizer, before.optimizer)
    assert_same_bits(after.key, before.key)
    assert (int(after.step), int(after.skipped), int(after.skipped_in_a_row)) == (2, 1, 1)


def test_skipped_steps_are_counted_and_a_good_one_ends_the_row(start):
    step, state = step_of(WHOLE), start
    bad = poisoned(start, "final_norm", np.nan).params
    seen = []
    for params_are_bad in (False, True, True, False, True, False):
        state, report = step(dataclasses.replace(state, params=bad) if params_are_bad else state, BATCH)
        state = dataclasses.replace(state, params=start.params)
        seen.append((int(state.skipped), int(state.skipped_in_a_row), int(report.skipped_in_a_row)))
    assert seen == [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 0, 0), (3, 1, 1), (3, 0, 0)]
    assert int(state.step) == 6


def test_the_learning_rate_goes_by_the_updates_made(start):
    step, state, schedule = step_of(WHOLE), start, learning_rate_schedule(ADAM)
    state, first = step(state, BATCH)
    _, skipped = step(poisoned(state, "final_norm", np.nan), BATCH)
    state = dataclasses.replace(state, step=state.step + 2, skipped=state.skipped + 2)  # as two skipped steps leave it
    _, fourth = step(state, BATCH)
    rates = [float(report.learning_rate) for report in (first, skipped, fourth)]
    assert rates == pytest.approx([float(schedule(count)) for count in (0, 1, 1)], rel=1e-6)
    assert (
        int(optax.tree_utils.tree_get(state.optimizer, "count", filtering=lambda path, _: "ScaleByAdam" in str(path)))
        == 1
    )


# --- Selection biases


def test_each_bias_moves_by_the_rate_against_its_own_layers_load(start, whole):
    load = np.asarray(whole[1].losses.load)
    assert load.shape == (3, 8)
    places = {("stacks.0.1.moe.router_selection_bias", 0): 0, ("stacks.0.1.moe.router_selection_bias", 1): 1}
    places[("mtp.0.moe.router_selection_bias", ...)] = 2
    directions = set()
    for (name, repeat), layer in places.items():
        direction = np.sign(load[layer].mean() - load[layer]).astype(np.float32)
        directions |= set(direction.tolist())
        expected = np.asarray(start.params[name])[repeat] + np.float32(RATE) * direction
        np.testing.assert_array_equal(np.asarray(whole[0].params[name])[repeat], expected, err_msg=name)
    assert directions >= {-1.0, 1.0}


def test_biases_are_no_business_of_the_optimizer(start):
    assert not [name for name in gradients(start) if name.endswith("router_selection_bias")]


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
    config = StepConfig(model=model, optimizer=ADAM)
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
    config = StepConfig(model=model, optimizer=ADAM, bias_update_rate=RATE)
    rows, experts = len(model.moe_layers) + model.mtp_layers, model.moe.num_experts
    load = np.random.default_rng(0).integers(0, 5, (rows, experts), dtype=np.int32)
    biases = {name: value for name, value in drawn_params(model).items() if not is_trained(name)}
    found = jax.jit(functools.partial(updated_biases, config=config))(biases, load)
    assert found.keys() == biases.keys()
    for name, own in layers_of_biases(config).items():
        direction = np.sign(load[own].mean(1, keepdims=True) - load[own]).astype(np.float32)
        expected = np.asarray(biases[name]) + np.float32(RATE) * direction.reshape(biases[name].shape)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


# --- bfloat16 compute; a rate and a weight of zero


@pytest.fixture(scope="module")
def narrow_steps():
    """Three steps in bfloat16, biases and multi-token prediction switched off."""
    model = dataclasses.replace(small_model(), num_layers=1, dtype=jnp.bfloat16)
    adam = OptimizerConfig(steps=40, learning_rate=1e-5, warmup_steps=0)
    config = StepConfig(model=model, optimizer=adam, bias_update_rate=0.0, mtp_loss_weight=0.0)
    before = first_state(config)
    ones = jnp.ones_like(before.params["final_norm"])
    before = after = dataclasses.replace(before, params={**before.params, "final_norm": ones})
    for _ in range(3):
        after, report = step_of(config)(after, BATCH)
        assert bool(report.finite)
    return before, after, report


def test_updates_below_the_resolution_of_bfloat16_are_kept(narrow_steps):
    before, after, _ = narrow_steps
    old, new = before.params["final_norm"], after.params["final_norm"]
    assert all(value.dtype == jnp.float32 for value in after.params.values())
    np.testing.assert_array_equal(new.astype(jnp.bfloat16), old.astype(jnp.bfloat16))
    assert (np.abs(new - old) > 1e-5).all()  # more than one step's


def test_a_rate_of_zero_leaves_the_biases(narrow_steps):
    before, after, report = narrow_steps
    name = "stacks.0.0.moe.router_selection_bias"
    assert float(report.max_violation) > 0
    np.testing.assert_array_equal(after.params[name], before.params[name])


def test_a_weight_of_zero_leaves_multi_token_prediction_as_it_was(narrow_steps):
    before, after, report = narrow_steps
    assert report.losses.load.shape[0] == 1
    assert float(report.losses.mtp_loss) == 0
    for name in (name for name in before.params if name.startswith("mtp.")):
        np.testing.assert_array_equal(after.params[name], before.params[name], err_msg=name)
