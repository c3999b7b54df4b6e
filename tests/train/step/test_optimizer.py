"""AdamW, its schedules and what decays, against formulas and a plain NumPy loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import PRESETS, model_preset
from raggedmoe.params import ParamSpec
from raggedmoe.train.settings.sections import OptimizerConfig
from raggedmoe.train.step.optimizer import decay_mask, learning_rate_schedule, make_optimizer
from raggedmoe.train.step.state import state_from_params

PEAK, STEPS = 0.02, 50


def expected_rate(config, step):
    """The learning rate by the formulas of the papers."""
    if step >= config.schedule_steps:
        return 0
    if step < config.warmup_steps:
        return PEAK * (step + (config.warmup_from == "first")) / config.warmup_steps
    last = PEAK * config.final_share
    step, after = step - config.warmup_steps, config.schedule_steps - config.warmup_steps
    decay = after if config.schedule == "cosine" else math.floor(config.decay_fraction * config.schedule_steps)
    if config.schedule == "constant" or step < after - decay:
        return PEAK
    done = (step - (after - decay)) / (decay - 1)
    if config.schedule == "cosine" or config.decay_style == "cosine":
        return last + (PEAK - last) * (1 + math.cos(math.pi * done)) / 2
    return last + (PEAK - last) * (1 - done)


@pytest.mark.parametrize("style", ["cosine", "wsd", "constant", "wsd-cosine"])
@pytest.mark.parametrize("warmup", ["0", "1", "2", "10", "1-zero", "10-zero"])
def test_schedule_is_its_formula_at_every_step(style, warmup):
    schedule, _, decay_style = style.partition("-")
    warmup_steps, _, warmup_from = warmup.partition("-")
    config = OptimizerConfig(
        schedule_steps=STEPS,
        learning_rate=PEAK,
        schedule=schedule,
        warmup_steps=int(warmup_steps),
        warmup_from=warmup_from or "first",
        decay_fraction=0.29,  # 14.5 steps
        decay_style=decay_style or "linear",
        final_fraction=0.25,
    )
    found = jax.jit(jax.vmap(learning_rate_schedule(config)))(jnp.arange(STEPS + 3))
    expected = [expected_rate(config, step) for step in range(STEPS + 3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_run_may_be_all_warm_up():
    config = OptimizerConfig(schedule_steps=4, learning_rate=PEAK, warmup_steps=4)
    np.testing.assert_allclose(learning_rate_schedule(config)(np.arange(5)), PEAK * np.array([0.25, 0.5, 0.75, 1, 0]))


@pytest.mark.parametrize(("schedule", "fraction"), [("cosine", 0.1), ("wsd", 1.0)])
def test_a_run_of_one_step_is_at_the_end_of_a_cosine_and_at_the_peak_otherwise(schedule, fraction):
    config = OptimizerConfig(schedule_steps=1, warmup_steps=0, learning_rate=PEAK, schedule=schedule)
    assert float(learning_rate_schedule(config)(0)) == pytest.approx(fraction * PEAK)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "cosin"}, "expected one of cosine, wsd, constant, got 'cosin'"),
        ({"schedule_steps": 0}, "schedule_steps >= 1, got 0"),
        ({"warmup_steps": STEPS + 1}, "use fewer warm-up steps or more steps"),
        ({"warmup_from": "one"}, "warmup_from: expected one of first, zero, got 'one'"),
        ({"decay_style": "square"}, "decay_style: expected one of linear, cosine, got 'square'"),
        ({"weight_decay_of": "norms"}, "weight_decay_of: expected one of matrices, all, got 'norms'"),
        ({"adam_eps_root": -1.0}, "adam_eps_root >= 0, got -1.0"),
        ({"adam_eps": 1e-16}, "adam_eps >= 1e-15, got 1e-16"),
        ({"warmup_steps": -1}, "got -1"),
        ({"schedule": "wsd", "warmup_steps": 30, "decay_fraction": 0.5}, "together are more than schedule_steps=50"),
        ({"final_fraction": 1.5}, "0 <= final_fraction <= 1, got 1.5"),
        ({"adam_b2": 1.0}, "0 <= adam_b2 < 1, got 1.0"),
        ({"learning_rate": 0.0}, "learning_rate > 0, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate: expected a finite number, got nan"),
        ({"weight_decay": -0.1}, "weight_decay >= 0, got -0.1"),
        ({"gradient_clipping_threshold": -0.5}, "gradient_clipping_threshold >= 0, got -0.5"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**{"schedule_steps": STEPS, **changes}).for_run(1000)


SPECS = {
    "matrix": ParamSpec(shape=(5, 3), dtype=jnp.float32, axes=("mlp_dim", "model_dim"), contracts="model_dim"),
    "norm": ParamSpec(shape=(3,), dtype=jnp.float32, axes=("model_dim",), init="ones"),
    "bias": ParamSpec(shape=(2, 3), dtype=jnp.float32, axes=("expert", "model_dim"), init="zeros"),
}


def drawn(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(spec.shape) * scale for name, spec in SPECS.items()}


def plain_adamw(config, params, gradients):
    """A textbook AdamW with clipping, in float64: the parameters after all these gradients."""
    params = {name: value.copy() for name, value in params.items()}
    decaying = ("matrix", "norm", "bias") if config.weight_decay_of == "all" else ("matrix",)
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for step, gradient in enumerate(gradients):
        norm = math.sqrt(sum((value**2).sum() for value in gradient.values()))
        limit = config.gradient_clipping_threshold
        shorter = min(1, limit / norm) if limit else 1
        for name in params:
            g = gradient[name] * shorter
            first[name] = config.adam_b1 * first[name] + (1 - config.adam_b1) * g
            second[name] = config.adam_b2 * second[name] + (1 - config.adam_b2) * g**2
            mean = first[name] / (1 - config.adam_b1 ** (step + 1))
            square = second[name] / (1 - config.adam_b2 ** (step + 1))
            decay = config.weight_decay * params[name] if name in decaying else 0
            root = np.sqrt(square + config.adam_eps_root)
            params[name] -= expected_rate(config, step) * (mean / (root + config.adam_eps) + decay)
    return params


def run_steps(optimizer, params, gradients):
    """Return the parameters after a step with each of the gradients, all in float32."""
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update({name: jnp.asarray(g, jnp.float32) for name, g in gradient.items()}, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("norm", [1.8e19, 1e-15, 0.0])
@pytest.mark.parametrize("opt_type", ["adamw", "muon"])
def test_no_update_overflows_while_the_gradients_norm_is_finite(opt_type, norm):
    """So a step looks at the norm alone before it moves the parameters. With the least adam_eps, and with zeros."""
    config = OptimizerConfig(opt_type=opt_type, adam_eps=1e-15, gradient_clipping_threshold=0.0, schedule_steps=STEPS)
    config = config.for_run(STEPS)
    signs = {name: np.sign(value) for name, value in drawn(1).items()}
    gradients = {name: value * norm / math.sqrt(24) for name, value in signs.items()}  # of 15 + 3 + 6 numbers
    gradients["matrix"][0, 0] = 0
    assert np.isfinite(optax.tree.norm({name: jnp.asarray(g, jnp.float32) for name, g in gradients.items()}))
    after = run_steps(make_optimizer(config, SPECS), drawn(0), [gradients] * 3)
    assert all(np.isfinite(value).all() for value in after.values())


@pytest.mark.parametrize("largest", [0.1, 100.0])
def test_gradients_are_clipped_as_optax_clips_them(largest):
    config = OptimizerConfig(gradient_clipping_threshold=largest, schedule_steps=STEPS).for_run(STEPS)
    gradients = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(1).items()}
    ours, theirs = make_optimizer(config, SPECS), optax.clip_by_global_norm(largest)
    state = ours.init(gradients)
    assert state[0] == theirs.init(gradients)  # so that a checkpoint fits either
    _, state = ours.update(gradients, state, gradients)
    expected, _ = theirs.update(gradients, theirs.init(gradients))
    for name, value in expected.items():
        mu = state[1][0].mu[name] / (1 - config.adam_b1)
        np.testing.assert_allclose(mu, value, rtol=4 * np.finfo(np.float32).eps, err_msg=name)


def test_clipping_leaves_each_gradients_type():
    """A model of float64 has a router of float32, whose moments stay so; here with the types that need no setting."""
    config = OptimizerConfig(gradient_clipping_threshold=0.1, schedule_steps=STEPS).for_run(STEPS)
    types = {"matrix": jnp.float32, "norm": jnp.bfloat16, "bias": jnp.float32}
    gradients = {name: jnp.asarray(value, types[name]) for name, value in drawn(1).items()}
    optimizer = make_optimizer(config, SPECS)
    _, state = optimizer.update(gradients, optimizer.init(gradients), gradients)
    assert {name: mu.dtype for name, mu in state[1][0].mu.items()} == {name: jnp.dtype(t) for name, t in types.items()}


@pytest.mark.parametrize(("largest", "of", "root"), [(0.0, "matrices", 0.0), (1.0, "all", 1e-3)])
def test_five_steps_are_those_of_a_plain_loop(largest, of, root):
    config = OptimizerConfig(
        schedule_steps=STEPS,
        learning_rate=PEAK,
        warmup_steps=2,
        gradient_clipping_threshold=largest,
        weight_decay=0.3,
        weight_decay_of=of,
        adam_eps=1e-3,
        adam_eps_root=root,
    )
    # Longer and shorter than the limit in turn, so that a clipping that always scales is seen.
    gradients = [drawn(seed, 0.02 if seed % 2 else 3.0) for seed in range(1, 6)]
    params = run_steps(make_optimizer(config, SPECS), drawn(0), gradients)
    for name, expected in plain_adamw(config, drawn(0), gradients).items():
        # A few roundings of numbers of about 1 in each step.
        np.testing.assert_allclose(params[name], expected, atol=5 * 4 * 1.2e-7, rtol=0, err_msg=name)


def in_a_layer(specs, prefix):
    """Which parameters of one layer decay, and which do not."""
    found = {True: set(), False: set()}
    for name, decay in decay_mask(specs).items():
        if name.startswith(prefix):
            found[decay].add(name.removeprefix(prefix))
    return found


def test_matrices_of_gpt_oss_decay_and_its_norms_biases_and_sinks_do_not():
    specs = param_specs(model_preset("gpt-oss-tiny"))
    assert in_a_layer(specs, "stacks.0.1.") == {
        True: {
            *("attention.wq", "attention.wk", "attention.wv", "attention.wo"),
            *("moe.router_kernel", "moe.wi_0", "moe.wi_1", "moe.wo"),
        },
        False: {
            *("attention_norm", "mlp_norm"),
            *("attention.bq", "attention.bk", "attention.bv", "attention.bo", "attention.sinks"),
            *("moe.router_logit_bias", "moe.bias_wi_0", "moe.bias_wi_1", "moe.bias_wo"),
        },
    }
    outside = {name: decay for name, decay in decay_mask(specs).items() if not name.startswith("stacks.")}
    assert outside == {"embedding": True, "final_norm": False, "head": True}


def test_matrices_of_deepseek_v3_decay_and_its_norms_do_not():
    specs = param_specs(model_preset("deepseek-v3-tiny"))
    attention = {f"attention.{name}" for name in ("q_a", "q_b", "kv_a", "k_b", "v_b", "wo")}
    norms = {"attention_norm", "mlp_norm", "attention.q_a_norm", "attention.kv_a_norm"}
    experts = {f"moe.{name}" for name in ("router_kernel", "wi_0", "wi_1", "wo")}
    shared = {f"moe.shared_{name}" for name in ("wi_0", "wi_1", "wo")}
    assert in_a_layer(specs, "stacks.0.0.") == {True: attention | {"mlp.wi_0", "mlp.wi_1", "mlp.wo"}, False: norms}
    assert in_a_layer(specs, "stacks.1.0.") == {True: attention | experts | shared, False: norms}
    assert in_a_layer(specs, "mtp.0.") == {
        True: attention | experts | shared | {"projection"},
        False: norms | {"embedding_norm", "hidden_norm", "final_norm"},
    }


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-tiny")])
def test_a_parameter_decays_exactly_if_it_is_drawn_at_random(preset):
    specs = param_specs(model_preset(preset))
    found = decay_mask(specs)
    assert found == {name: specs[name].init == "normal" for name in found}
    left_out = specs.keys() - found.keys()
    assert all(name.endswith("router_selection_bias") for name in left_out)


def test_bfloat16_parameters_have_float32_moments():
    params = {name: jnp.asarray(value, jnp.bfloat16) for name, value in drawn(0).items()}
    optimizer = make_optimizer(OptimizerConfig(schedule_steps=STEPS), SPECS)
    state = state_from_params(params, SPECS, optimizer, jax.random.key(0))
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert len(moments) == 2 * len(params)
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(jnp.float32)}
    assert all(value.dtype == jnp.bfloat16 for value in state.params.values())
