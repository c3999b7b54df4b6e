"""One training step: cut into micro-batches, skipped, repeated; its losses, gradients and biases recomputed outside."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from raggedmoe.models.decoder import decode
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.mtp import mtp_forward, mtp_mask
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import RouterConfig
from raggedmoe.train.settings.sections import StepSettings
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.step.optimizer import learning_rate_schedule
from raggedmoe.train.step.step import batch_gradients
from tests.train.step.small_step import (
    ADAM,
    BATCH,
    EINSUM,
    EPS,
    LENGTH,
    MTP_WEIGHT,
    RATE,
    ROWS,
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

CUT = with_losses(WHOLE, gradient_accumulation_steps=4)


@pytest.fixture(scope="module")
def start():
    return first_state(WHOLE)


@pytest.fixture(scope="module")
def whole(start):
    return step_of(WHOLE)(start, BATCH)


@pytest.fixture(scope="module")
def cut(start):
    """Gradients and losses of the batch in four parts."""
    return jax.jit(functools.partial(batch_gradients, config=CUT))(*sorted_out(start.params), BATCH, key=start.key)


# --- Micro-batches


def test_micro_batches_have_the_gradient_of_the_whole_batch(whole, cut):
    expected, found = gradients(whole[0]), cut[0]
    assert found.keys() == expected.keys() == {name for name in whole[0].params if not name.endswith("selection_bias")}
    for name, gradient in expected.items():
        # The same terms, one for each of 128 tokens, in sums of another order: √128 roundings, in each of five layers.
        bound = 5 * np.sqrt(BATCH.ids.size) * EPS * np.abs(gradient).max()
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
    with pytest.raises(ValueError, match="batch_size=8 is not divisible by gradient_accumulation_steps=3; use"):
        jax.eval_shape(step_of(with_losses(WHOLE, gradient_accumulation_steps=3)), start, BATCH)


@pytest.mark.ci
def test_the_batch_wise_loss_is_that_of_each_micro_batch_and_the_capacity_that_of_each_sequence():
    model = small_model(aux_loss_weight=1.0)
    moe = dataclasses.replace(model.moe, capacity_factor=0.5)
    model = dataclasses.replace(model, num_layers=1, mtp_layers=0, moe=moe)
    config = ResolvedStep(model=model, optimizer=ADAM, losses=StepSettings(gradient_accumulation_steps=4))
    params = drawn_params(model)

    @jax.jit
    def report(ids, segments, positions):
        return decode(params, ids, model, mask=segments >= 0, segments=segments, positions=positions).experts

    found = jax.jit(lambda batch: batch_gradients(*sorted_out(params), batch, config, jax.random.key(0))[1])(BATCH)
    arrays = (BATCH.ids, BATCH.segments, BATCH.positions)
    parts = [report(*(array[row : row + 2] for array in arrays)) for row in range(0, 8, 2)]
    sequences = [2, 1, 2, 0]  # rows of each that have a token
    expected = np.average([float(part.aux_loss[0]) for part in parts], weights=sequences)
    assert abs(float(found.aux_loss) - expected) <= 8 * EPS * expected
    assert abs(float(report(*arrays).aux_loss[0]) - expected) > 0.01
    assert int(found.dropped) == int(report(*arrays).dropped[0]) > 0


def test_random_routing_differs_by_step_and_micro_batch():
    """Four micro-batches of the same tokens: a step adds up what each of them gives with the key of its own number."""
    preset = tiny("mixtral-tiny", vocab_size=61, num_layers=1)
    moe = dataclasses.replace(preset.moe, router=RouterConfig(selection="random"))
    model = dataclasses.replace(preset, moe=moe)
    config = ResolvedStep(
        model=model, execution=EINSUM, optimizer=ADAM, losses=StepSettings(gradient_accumulation_steps=4)
    )
    rows = packed(ROWS[:2], model.vocab_size)
    batch = jax.tree.map(lambda array: np.tile(array, (4, 1)), rows)
    state = dataclasses.replace(first_state(config), step=jnp.asarray(3, jnp.int32))

    def mean_loss(params, number):
        key = jax.random.fold_in(jax.random.fold_in(state.key, 3), number)
        where = {"mask": rows.segments >= 0, "segments": rows.segments, "positions": rows.positions}
        out = decode(params, jnp.asarray(rows.ids), model, EINSUM, **jax.tree.map(jnp.asarray, where), key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.hidden @ params["head"].T, rows.targets)
        return (losses * rows.weights).sum() / rows.weights.sum(), out.experts.load

    one = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    parts = [jax.device_get(one(state.params, number)) for number in range(4)]
    after, report = step_of(config)(state, batch)
    loads = [load for (_, load), _ in parts]
    assert len({load.tobytes() for load in loads}) == 4
    np.testing.assert_array_equal(report.losses.load, sum(loads))
    expected = np.mean([loss for (loss, _), _ in parts], dtype=np.float64)
    assert abs(float(report.losses.loss) - expected) <= 16 * EPS * expected
    for name, gradient in gradients(after).items():
        expected = np.mean([own[name] for _, own in parts], axis=0, dtype=np.float64)
        # The same terms, one for each of 128 tokens, in sums of another order: √128 roundings, in layer and head.
        bound = 2 * np.sqrt(batch.ids.size) * EPS * np.abs(expected).max()
        assert np.abs(gradient - expected).max() <= bound, (name, np.abs(gradient - expected).max() / bound)


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
        further, more = mtp_forward(params, out.hidden, jnp.asarray(BATCH.ids), model, **given)
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


@pytest.mark.ci
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


# --- The update


def test_parameters_move_by_adamw(start, whole):
    rate = ADAM.learning_rate / ADAM.warmup_steps
    specs = param_specs(WHOLE.model)
    for name, gradient in gradients(whole[0]).items():
        old, g = (np.asarray(a, np.float64) for a in (start.params[name], gradient))
        decay = ADAM.weight_decay * old if specs[name].contracts else 0
        # The first step's moments, corrected for their start at zero, are the gradient and its square.
        expected = old - rate * (g / (np.abs(g) + ADAM.adam_eps) + decay)
        # XLA may compute a gradient twice, for each moment: the two differ by the rounding of their sum's terms, which
        # are as large as the largest gradient. Of an update that is a part of a gradient that small.
        twice = 4 * EPS * np.abs(g).max() / np.maximum(np.abs(g), np.finfo(np.float32).tiny)
        bound = 4 * EPS + rate * np.minimum(twice, 1)
        difference = np.abs(np.asarray(whole[0].params[name], np.float64) - expected)
        assert (difference <= bound).all(), (name, (difference / bound).max())
        assert np.median(bound) < 5 * EPS, name


def test_the_report_is_what_happened(whole):
    report, load = whole[1], np.asarray(whole[1].losses.load, np.float64)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients(whole[0]).values()))
    share = load / load.sum(1, keepdims=True)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(1).mean()
    assert float(report.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert float(report.entropy) == pytest.approx(entropy, rel=1e-5)
    assert float(report.max_violation) == pytest.approx((share.max(1) * share.shape[1]).max() - 1, rel=1e-5)
    assert float(report.targets) == BATCH.weights.sum()
    assert int(report.tokens) == (BATCH.segments >= 0).sum()
    known = [int((BATCH.segments >= 0).sum())] * 2 + [int(mtp_mask(jnp.asarray(BATCH.segments), 0).sum())]
    assert load.sum(1).tolist() == [WHOLE.model.moe.experts_per_token * tokens for tokens in known]
    assert int(report.losses.dropped) == 0


def test_the_same_state_and_batch_give_the_same_bits(start, whole):
    assert_same_bits(step_of(WHOLE)(start, BATCH), whole)


@pytest.mark.ci
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


# --- Steps that are run again


@pytest.mark.parametrize(
    "factor", [pytest.param(0.5, id="drops"), pytest.param(8.0, id="has-room", marks=pytest.mark.ci)]
)
def test_a_step_that_drops_rows_and_will_be_run_again_changes_nothing(factor):
    preset = tiny("mixtral-tiny", vocab_size=61)
    moe = dataclasses.replace(preset.moe, capacity_factor=factor)
    model = dataclasses.replace(preset, moe=moe, num_layers=1)
    config = dataclasses.replace(WHOLE, model=model, execution=ModelExecution(), rerun_on_overflow=True)
    before = first_state(config)
    after, report = step_of(config)(before, BATCH)
    if factor < 1:
        assert int(report.losses.dropped) > 0
        assert_same_bits(after, before)
    else:
        assert int(report.losses.dropped) == 0
        assert int(after.step) == int(before.step) + 1
