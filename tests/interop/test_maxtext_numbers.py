"""What a MaxText user typed gives the number that it gave there: each by a few lines of NumPy from MaxText's formula.

The formulas are those of its layers/moe.py, its training loss, its optimizer and its schedules, restated here. Examples
with their expected values are those of its own unit tests and comments.
"""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.interop.maxtext import TRANSLATED
from raggedmoe.models.decoder import ExpertReport
from raggedmoe.models.norm import rms_norm
from raggedmoe.models.presets import model_preset
from raggedmoe.models.rope import rope_cos_sin
from raggedmoe.moe.balance import expert_counts, update_selection_bias
from raggedmoe.moe.config import MoEConfig, RouterConfig
from raggedmoe.moe.dispatch.capacity import prepare_token_choice
from raggedmoe.moe.dispatch.strategy import buffer_rows
from raggedmoe.moe.records import RouteOutput
from raggedmoe.moe.router import combine_weights, route, select_experts
from raggedmoe.params import ParamSpec
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step import step as step_module
from raggedmoe.train.step.optimizer import learning_rate_schedule, make_optimizer, round_to_dtype
from raggedmoe.train.step.step import micro_batch_weights, objective
from tests.moe.examples import stage_settings

B, S, D = 3, 5, 4  # sequences, their tokens, the model's width


@pytest.fixture
def x64():
    """float64, so that a difference from the formula is a difference in the mathematics."""
    with jax.enable_x64(True):
        yield


def configured(*words):
    return resolve(read_words(words), HARDWARE["cpu"], 1)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


# --- The balance loss


def balance_loss(chosen, gate_logits, weight):
    """MaxText's of one layer: from the choices [B S K] and what is ranked [B S E]."""
    num_experts = gate_logits.shape[-1]
    density = np.eye(num_experts)[chosen].sum(2).mean(1)
    density_prob = softmax(gate_logits).mean(1)
    return (density * density_prob).mean() * num_experts**2 * weight


# What MaxText ranks, from the logits: its routed_score_func and routed_bias for these models.
RANKED = {
    "mixtral-tiny routed_score_func=softmax": lambda logits, bias: softmax(logits),
    "mixtral-tiny": lambda logits, bias: logits,
    "qwen3-tiny": lambda logits, bias: logits,
    "gpt-oss-tiny": lambda logits, bias: logits,  # its bias is in the logits
    "deepseek-v2-tiny": lambda logits, bias: softmax(logits),
    "deepseek-v3-tiny": lambda logits, bias: sigmoid(logits) + bias,
}
# And its weights, from the scores of the chosen or their logits.
WEIGHTS = {
    "mixtral-tiny": lambda logits, model: softmax(logits),
    "qwen3-tiny": lambda logits, model: softmax(logits) / softmax(logits).sum(-1, keepdims=True),
    "gpt-oss-tiny": lambda logits, model: softmax(logits),
    "deepseek-v3-tiny": lambda logits, model: (
        sigmoid(logits) / (sigmoid(logits).sum(-1, keepdims=True) + 1e-20) * model.moe.router.scale
    ),
}


def layer_arrays(moe, number):
    """Tokens and the router's parameters of one layer."""
    rng = np.random.default_rng(number)
    arrays = {"x": rng.standard_normal((B * S, D)), "kernel": rng.standard_normal((moe.num_experts, D))}
    if moe.router.logit_bias:
        arrays["logit_bias"] = rng.standard_normal(moe.num_experts)
    if moe.router.selection_bias:
        arrays["selection_bias"] = 0.3 * rng.standard_normal(moe.num_experts)
    return arrays


def logits_of(arrays):
    return arrays["x"] @ arrays["kernel"].T + arrays.get("logit_bias", 0)


@functools.partial(jax.jit, static_argnums=1)
def routed(arrays, moe):
    params = {f"router_{name}": value for name, value in arrays.items() if name != "x"}
    return route(arrays["x"], params, settings=stage_settings(moe, num_sequences=B))


@functools.partial(jax.jit, static_argnums=1)
def slope_of_balance_loss(arrays, moe):
    return jax.grad(lambda kernel: routed({**arrays, "kernel": kernel}, moe)[1]["aux_loss"])(arrays["kernel"])


def in_sequences(array):
    return np.asarray(array).reshape(B, S, -1)


@pytest.mark.parametrize("name", RANKED)
def test_load_balance_loss_weight_adds_maxtexts_loss_and_its_gradient(x64, name):
    config = configured(*name.split(), "load_balance_loss_weight=0.03")
    model = config.step.model
    num_layers = len(model.moe_layers) + config.step.mtp_layers
    ours, theirs = 0.0, []
    for number in range(num_layers):  # whose losses a run adds up
        arrays = {key: jnp.asarray(value) for key, value in layer_arrays(model.moe, number).items()}
        found, statistics = routed(arrays, model.moe)
        chosen = in_sequences(found.experts)
        ours += float(statistics["aux_loss"])

        def loss(kernel, arrays=arrays, chosen=chosen):
            host = {key: np.asarray(value) for key, value in arrays.items()}
            ranked = RANKED[name](logits_of({**host, "kernel": kernel}), host.get("selection_bias"))
            return balance_loss(chosen, in_sequences(ranked), 0.03)

        theirs.append(loss(np.asarray(arrays["kernel"])))
    assert ours == pytest.approx(np.mean(theirs), rel=1e-12)
    # The gradient of the last layer's part of the mean, along a direction.
    kernel = np.asarray(arrays["kernel"])
    direction = np.random.default_rng(9).standard_normal(kernel.shape)
    slope = (loss(kernel + 1e-6 * direction) - loss(kernel - 1e-6 * direction)) / 2e-6 / num_layers
    assert abs(slope) > 1e-6
    assert (np.asarray(slope_of_balance_loss(arrays, model.moe)) * direction).sum() == pytest.approx(slope, rel=1e-6)


def test_the_layers_that_the_mean_is_over_are_those_whose_losses_are_added():
    step = configured("deepseek-v3-tiny", "load_balance_loss_weight=0.03", "mtp_num_layers=2").step
    rows = sum(map(len, step_module.layers_of_biases(step).values()))
    moe = step.model.moe
    assert rows == len(step.model.moe_layers) + 2
    assert moe.router.aux_loss_weight == pytest.approx(0.03 * moe.experts_per_token / rows)
    untrained = configured("deepseek-v3-tiny", "load_balance_loss_weight=0.03", "mtp_loss_weight=0").step.model
    expected = 0.03 * moe.experts_per_token / len(untrained.moe_layers)
    assert untrained.moe.router.aux_loss_weight == pytest.approx(expected)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_the_chosen_experts_are_maxtexts(x64, name):
    model = model_preset(name)
    arrays = layer_arrays(model.moe, 0)
    found, _ = routed({key: jnp.asarray(value) for key, value in arrays.items()}, model.moe)
    chosen = np.take_along_axis(logits_of(arrays), np.asarray(found.experts), axis=1)
    np.testing.assert_allclose(found.weights, WEIGHTS[name](chosen, model), rtol=1e-12)


def weights_there(family, logits, bias, words):
    """MaxText's choice of experts and their weights, one token at a time, for a model without groups."""
    functions = {"sigmoid": sigmoid, "softmax": softmax, "sqrtsoftplus": lambda x: np.log1p(np.exp(x)) ** 0.5}
    in_deepseek = family.startswith("deepseek")
    scores = functions.get(words["routed_score_func"], np.asarray)(logits)
    ranked = scores + bias
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, :2]
    weights = np.take_along_axis(scores if family == "deepseek_v3" else ranked, chosen, axis=-1)
    if in_deepseek:
        if words["routed_score_func"] != "softmax":
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * words["routed_scaling_factor"]
    else:
        weights = softmax(weights)
    return chosen, weights / weights.sum(-1, keepdims=True) if words["norm_topk_prob"] else weights


ROUTERS = {
    "sigmoid": {"routed_score_func": "sigmoid"},
    "softmax": {"routed_score_func": "softmax"},
    "sqrtsoftplus": {"routed_score_func": "sqrtsoftplus"},
    "normalized": {"routed_score_func": "sigmoid", "norm_topk_prob": True},
    "biased": {"routed_bias": True},
}


def router_case(name, router):
    """A model with those words, and all of the words that MaxText's formula reads."""
    own = {"deepseek-v3-tiny": {"routed_bias": True}, "gpt-oss-tiny": {"routed_bias": False}}.get(name, {})
    typed = {"num_experts_per_tok": 2, "routed_scaling_factor": 1.7, "n_routing_groups": -1, **own, **ROUTERS[router]}
    model = configured(name, *(f"{word}={value}" for word, value in typed.items())).step.model
    return model, {"routed_score_func": "", "norm_topk_prob": False, **typed}


@pytest.mark.parametrize(("name", "router"), [("deepseek-v3-tiny", "softmax"), ("mixtral-tiny", "sigmoid")])
def test_the_weights_of_a_routers_words_have_the_slope_of_maxtexts(x64, name, router):
    model, words = router_case(name, router)
    arrays = {key: jnp.asarray(value) for key, value in layer_arrays(model.moe, 0).items()}
    rng = np.random.default_rng(3)
    cotangent, direction = rng.standard_normal((B * S, 2)), rng.standard_normal(arrays["kernel"].shape)

    @jax.jit
    def gradient(kernel):
        return jax.grad(lambda kernel: (routed({**arrays, "kernel": kernel}, model.moe)[0].weights * cotangent).sum())(
            kernel
        )

    def value(kernel):
        logits = np.asarray(arrays["x"]) @ kernel.T
        bias = np.asarray(arrays.get("selection_bias", 0.0))
        return (weights_there(model.family, logits, bias, words)[1] * cotangent).sum()

    kernel = np.asarray(arrays["kernel"])
    slope = (value(kernel + 1e-6 * direction) - value(kernel - 1e-6 * direction)) / 2e-6
    assert (np.asarray(gradient(arrays["kernel"])) * direction).sum() == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "router"),
    [
        *(("deepseek-v3-tiny", router) for router in ("sigmoid", "softmax", "sqrtsoftplus", "normalized")),
        *(("deepseek-v2-tiny", router) for router in ("sigmoid", "softmax", "normalized")),
        *(("mixtral-tiny", router) for router in ("sigmoid", "softmax", "normalized", "biased")),
        *(("gpt-oss-tiny", router) for router in ("sigmoid", "biased")),
    ],
)
def test_the_words_of_a_router_choose_and_weigh_as_in_maxtext(x64, name, router):
    model, words = router_case(name, router)
    arrays = layer_arrays(model.moe, 0)
    logits = arrays["x"] @ arrays["kernel"].T
    bias = arrays.get("selection_bias", arrays.get("logit_bias", np.zeros(1)))
    assert bias.any() == words.get("routed_bias", False)
    chosen, weights = weights_there(model.family, logits, bias, words)
    found, _ = routed({key: jnp.asarray(value) for key, value in arrays.items()}, model.moe)
    np.testing.assert_array_equal(found.experts, chosen)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-12)


def test_a_word_that_maxtext_reads_for_deepseeks_models_alone_changes_nothing_of_others():
    words = ("routed_scaling_factor=2.5", "n_routing_groups=2", "topk_routing_group=1")
    config = configured("mixtral-tiny", *words)
    assert config.step.model.moe.router == configured("mixtral-tiny").step.model.moe.router
    for word in words:
        assert any(note.startswith(f"{word}: changes nothing: as in MaxText") for note in config.notes)


@pytest.mark.parametrize("words", [["deepseek-v2-tiny"], ["mixtral-tiny", "routed_score_func=sigmoid"]])
def test_a_bias_that_would_be_part_of_the_weights_is_refused(words):
    with pytest.raises(ValueError, match="a bias on scores that is part of the weights is not built"):
        configured(*words, "routed_bias=true")


# --- Capacity


def slots_of(choices, num_experts, capacity):
    """The slot of each choice among those of its expert in its sequence, by the strategy; -1: dropped."""
    choices = np.asarray(choices)
    num_sequences, length, per_token = choices.shape
    routing = RouteOutput(
        experts=jnp.asarray(choices.reshape(-1, per_token), jnp.int32),
        tokens=None,
        mask=jnp.ones(num_sequences * length, bool),
        weights=jnp.ones((num_sequences * length, per_token)),
    )
    found = jax.jit(prepare_token_choice, static_argnums=(1, 2, 3))(routing, num_experts, capacity, num_sequences)
    rows = np.asarray(found.row_of_slot).reshape(choices.shape)
    is_kept = rows < num_experts * num_sequences * capacity
    sequence = np.arange(num_sequences)[:, None, None]
    assert (rows[is_kept] // capacity == (choices * num_sequences + sequence)[is_kept]).all()
    assert found.dropped.sum() == (~is_kept).sum()
    return np.where(is_kept, rows % capacity, -1)


def capacity_of(length, per_token, num_experts, factor):
    """MaxText's slots of an expert in a sequence."""
    return int(max(math.ceil(length * per_token / num_experts) * factor, factor))


@pytest.mark.parametrize("factor", ["0.5", "1", "1.25", "2.0"])
@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-v2-tiny"])
def test_capacity_factor_has_the_slots_of_maxtext(name, factor):
    for length in (16, 30):
        moe = configured(name, "sparse_matmul=False", f"capacity_factor={factor}").step.model.moe
        expected = capacity_of(length, moe.experts_per_token, moe.num_experts, float(factor))
        assert moe.capacity(length) == expected


# MaxText's own example of four sequences: eight experts, two for each of four tokens, factor 2.
CHOICES = [
    [[0, 5], [0, 4], [1, 0], [3, 5]],
    [[1, 2], [4, 1], [5, 0], [7, 1]],
    [[6, 2], [2, 3], [4, 2], [1, 2]],
    [[4, 1], [0, 7], [5, 0], [4, 7]],
]
SLOTS = [
    [[0, 0], [1, 0], [0, -1], [0, 1]],
    [[0, 0], [0, 1], [0, 0], [0, -1]],
    [[0, 0], [1, 0], [0, -1], [0, -1]],
    [[0, 0], [0, 0], [0, 1], [1, 1]],
]


def test_four_of_maxtexts_choices_are_dropped_and_the_others_have_its_slots():
    moe = MoEConfig(num_experts=8, experts_per_token=2, model_dim=4, expert_dim=4, capacity_factor=2.0)
    assert moe.capacity(4) == capacity_of(4, 2, 8, 2) == 2
    assert slots_of(CHOICES, 8, 2).tolist() == SLOTS


def test_an_earlier_tokens_second_choice_goes_before_a_later_ones_first():
    # Tokens that choose experts 0 and 1, and 1 and 3, of one slot each: expert 1 has none for the second token.
    assert capacity_of(2, 2, 4, 1) == 1
    assert slots_of([[[0, 1], [1, 3]]], 4, 1).tolist() == [[[0, 0], [-1, 0]]]


def test_slots_are_given_by_maxtexts_cumulative_sum():
    rng = np.random.default_rng(0)
    choices = np.argsort(rng.random((4, 9, 6)) + np.linspace(0, 1, 6), axis=-1)[:, :, :3]
    fused = np.eye(6, dtype=int)[choices].reshape(4, 27, 6)
    count = (np.cumsum(fused, axis=1) * fused).sum(-1).reshape(choices.shape)  # from 1
    capacity = capacity_of(9, 3, 6, 0.8)
    expected = np.where(count <= capacity, count - 1, -1)
    assert (expected < 0).any()
    np.testing.assert_array_equal(slots_of(choices, 6, capacity), expected)


@pytest.mark.parametrize(("factor", "num_tokens", "per_token"), [(1.0, 8, 3), (1.3, 7, 3), (2.55, 5, 2)])
def test_ragged_buffer_factor_has_the_rows_of_maxtext(factor, num_tokens, per_token):
    found = buffer_rows(num_tokens, per_token, held=4, num_ranks=8, factor=factor)
    assert found == int(num_tokens * per_token * factor)


# --- The choice of experts


def test_groups_are_ranked_by_their_two_best_biased_scores_and_weights_have_no_bias():
    # MaxText's own example: two tokens, four groups of four experts, of which two are allowed.
    biased = np.array(
        [
            [0.20, 0.10, 0.05, 0.10, 0.10, 0.60, 0.30, 0.10, 0.80, 0.01, 0.01, 0.01, 0.05, 0.80, 0.20, 0.10],
            [0.68, 0.20, 0.06, 0.03, 0.32, 0.10, 0.05, 0.02, 0.65, 0.20, 0.04, 0.01, 0.32, 0.10, 0.05, 0.02],
        ],
        np.float32,
    )
    scores = jnp.asarray(biased - 0.5)
    params = {"router_kernel": jnp.zeros((16, 1)), "router_selection_bias": jnp.full(16, 0.5)}
    router = RouterConfig(score="sigmoid", normalize="none", selection_bias=True, num_groups=4, groups_per_token=2)

    @jax.jit
    def choice(scores, params):
        ranking, mask = scores + params["router_selection_bias"][None], jnp.ones(2, bool)
        chosen = select_experts(ranking, router, 4, mask, None, None, ())
        return chosen, combine_weights(scores, chosen, params, router)

    chosen, weights = choice(scores, params)
    assert chosen.tolist() == [[13, 5, 6, 14], [0, 8, 1, 9]]
    expected = [[0.3, 0.1, -0.2, -0.3], [0.18, 0.15, -0.3, -0.3]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


def test_routed_bias_update_rate_moves_the_bias_as_maxtext_does():
    # MaxText's own example: 16 choices of four experts, which are chosen 5, 4, 3 and 4 times.
    choices = [[[0, 1], [3, 0], [3, 1], [1, 0]], [[0, 3], [2, 0], [1, 2], [2, 3]]]
    rate = configured("deepseek-v3-tiny", "routed_bias_update_rate=0.01").step.losses.bias_update_rate
    moved = jax.jit(lambda chosen: update_selection_bias(jnp.zeros(4), expert_counts(chosen, 4), rate))(
        jnp.asarray(choices).reshape(-1, 2)
    )
    np.testing.assert_allclose(moved, [-0.01, 0.0, 0.01, 0.0])


# --- Multi-token prediction


def test_mtp_loss_scaling_factor_multiplies_the_mean_over_all_targets_of_all_modules(monkeypatch):
    config = configured("deepseek-v3-tiny", "mtp_num_layers=2", "mtp_loss_scaling_factor=0.1").step
    none = jnp.zeros(1)
    report = ExpertReport(
        **dict.fromkeys(("aux_loss", "z_loss", "entropy", "max_violation"), none),
        load=jnp.zeros((1, 4), jnp.int32),
        dropped=jnp.zeros(1, jnp.int32),
    )
    hidden = jnp.zeros((2, 5, 4))
    sums = iter([80.0, 30.0, 12.0])  # cross-entropies of the model and of both modules
    monkeypatch.setattr(step_module, "decode", lambda *_, **__: SimpleNamespace(hidden=hidden, experts=report))
    monkeypatch.setattr(step_module, "mtp_forward", lambda *_, **__: ([hidden] * 2, [report] * 2))
    monkeypatch.setattr(step_module, "_cross_entropy", lambda *_: jnp.asarray(next(sums)))
    segments = np.zeros((1, 2, 5), np.int32)
    weights = np.tile([1.0, 1, 1, 1, 0], (1, 2, 1)).astype(np.float32)  # 8 targets; 6 and 4 of the modules
    batch = Batch(ids=segments, targets=segments, segments=segments, positions=segments, weights=weights)

    @jax.jit
    def losses_of(batch):
        one, shares = jax.tree.map(lambda array: array[0], (batch, micro_batch_weights(batch, config)))
        return objective({}, {}, one, shares, config, jax.random.key(0))[1]

    losses = losses_of(jax.tree.map(jnp.asarray, batch))
    assert float(losses.loss) == pytest.approx(80 / 8)
    assert float(losses.mtp_loss) == pytest.approx(0.1 * (30 + 12) / (6 + 4))


# --- The optimizer


def rates(steps, schedule_steps, warmup_fraction, final_fraction, peak, kind, decay_fraction=0.1, style="linear"):
    """MaxText's learning rate of every step."""

    def cosine(length):
        share = 0.5 * (np.cos(np.pi * np.arange(length) / (length - 1)) + 1)
        return peak * share + peak * final_fraction * (1 - share)

    warmup = int(schedule_steps * warmup_fraction)
    parts = [peak * np.arange(warmup) / max(warmup, 1)]
    if kind == "cosine":
        parts.append(cosine(schedule_steps - warmup))
    else:
        decay = int(schedule_steps * decay_fraction)
        parts.append(np.full(schedule_steps - warmup - decay, peak))
        parts.append(np.linspace(peak, peak * final_fraction, decay) if style == "linear" else cosine(decay))
    parts.append(np.zeros(max(steps - schedule_steps, 0)))
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "words",
    [
        {"warmup_steps_fraction": 0.1, "learning_rate_final_fraction": 0.1},
        {"warmup_steps_fraction": 0.29, "cosine_learning_rate_final_fraction": 0.3},
        {"warmup_steps_fraction": 0.0, "learning_rate_schedule_steps": 30},
        {"warmup_steps_fraction": 0.1, "lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.29},
        {
            "warmup_steps_fraction": 0.1,
            "lr_schedule_type": "wsd",
            "wsd_decay_steps_fraction": 0.3,
            "wsd_decay_style": "cosine",
            "learning_rate_schedule_steps": 35,
            "learning_rate_final_fraction": 0.0,
        },
    ],
    ids=["cosine", "rounding", "zero-at-the-end", "wsd", "wsd-cosine"],
)
def test_the_learning_rate_of_every_step_is_maxtexts(words):
    steps, peak = 50, 3e-4
    typed = {"steps": steps, "learning_rate": peak, "learning_rate_final_fraction": 0.1, **words}
    if "cosine_learning_rate_final_fraction" in words:
        del typed["learning_rate_final_fraction"]
    config = configured("mixtral-tiny", *(f"{name}={value}" for name, value in typed.items())).step.optimizer
    expected = rates(
        steps,
        words.get("learning_rate_schedule_steps", steps),
        words["warmup_steps_fraction"],
        typed.get("learning_rate_final_fraction", words.get("cosine_learning_rate_final_fraction")),
        peak,
        words.get("lr_schedule_type", "cosine"),
        words.get("wsd_decay_steps_fraction"),
        words.get("wsd_decay_style", "linear"),
    )
    found = jax.jit(jax.vmap(learning_rate_schedule(config)))(jnp.arange(steps))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-10)


SPECS = {
    "matrix": ParamSpec(shape=(3, 2), dtype=jnp.float32, axes=("mlp_dim", "model_dim"), contracts="model_dim"),
    "norm": ParamSpec(shape=(2,), dtype=jnp.float32, axes=("model_dim",), init="ones"),
}


def test_adam_weight_decay_decays_every_parameter_as_maxtexts_optimizer_does():
    words = ["adam_weight_decay=0.3", "adam_b1=0.8", "adam_b2=0.9", "adam_eps=0.01", "adam_eps_root=0.02"]
    words += ["gradient_clipping_threshold=0.5", "learning_rate=0.1", "warmup_steps_fraction=0", "steps=4"]
    config = configured("mixtral-tiny", *words).step.optimizer
    rng = np.random.default_rng(0)
    expected = {name: rng.standard_normal(spec.shape) for name, spec in SPECS.items()}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in expected.items()}
    optimizer = make_optimizer(config, SPECS)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    mean, square = ({name: np.zeros(spec.shape) for name, spec in SPECS.items()} for _ in range(2))
    for step, rate in enumerate(rates(4, 4, 0, 0.1, 0.1, "cosine")[:2], start=1):
        gradients = {name: rng.standard_normal(spec.shape) for name, spec in SPECS.items()}
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        assert norm > 0.5
        for name, gradient in gradients.items():
            mean[name] = 0.8 * mean[name] + 0.2 * gradient * 0.5 / norm
            square[name] = 0.9 * square[name] + 0.1 * (gradient * 0.5 / norm) ** 2
            root = np.sqrt(square[name] / (1 - 0.9**step) + 0.02) + 0.01
            expected[name] = expected[name] - rate * (mean[name] / (1 - 0.8**step) / root + 0.3 * expected[name])
        updates, state = update({name: jnp.asarray(g, jnp.float32) for name, g in gradients.items()}, state, params)
        params = optax.apply_updates(params, updates)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_numbers_of_muon_are_those_of_the_call_that_maxtext_makes():
    words = ["opt_type=muon", "muon_beta=0.8", "muon_weight_decay=0.3", "muon_consistent_rms=0.1", "adam_eps=0.01"]
    words += ["gradient_clipping_threshold=0", "learning_rate=0.1", "warmup_steps_fraction=0", "steps=4"]
    config = configured("mixtral-tiny", *words).step.optimizer
    theirs = optax.contrib.muon(
        learning_rate_schedule(config),
        beta=0.8,
        eps=0.01,
        weight_decay=0.3,
        consistent_rms=0.1,
        muon_weight_dimension_numbers={"matrix": optax.contrib.MuonDimensionNumbers(1, 0)},
    )
    specs = {"matrix": SPECS["matrix"]}
    results = []
    for optimizer in (make_optimizer(config, specs), theirs):
        rng = np.random.default_rng(0)
        params = {"matrix": jnp.asarray(rng.standard_normal(SPECS["matrix"].shape), jnp.float32)}
        state = optimizer.init(params)
        for _ in range(3):
            gradients = {"matrix": jnp.asarray(rng.standard_normal(SPECS["matrix"].shape), jnp.float32)}
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        results.append(params["matrix"])
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)


def test_grad_dtype_rounds_gradients_and_mu_dtype_the_mean():
    """One step of plain Adam on a gradient that bfloat16 cannot hold: 8 bits of precision, to nearest even."""
    words = ["grad_dtype=bfloat16", "mu_dtype=bfloat16", "learning_rate=0.1", "warmup_steps_fraction=0", "steps=4"]
    config = configured("mixtral-tiny", *words, "adam_weight_decay=0", "gradient_clipping_threshold=0").step.optimizer
    assert (config.grad_dtype, config.mu_dtype) == ("bfloat16", "bfloat16")
    gradient = np.asarray([1.00390625, 1.01171875, -3.1415927], np.float32)  # 1 + 2⁻⁸ and 1 + 3·2⁻⁸ are halfway
    held = np.asarray([1.0, 1.015625, -3.140625], np.float32)
    np.testing.assert_array_equal(jax.jit(round_to_dtype, static_argnums=1)(gradient, config.grad_dtype), held)
    np.testing.assert_array_equal(round_to_dtype(jnp.asarray(gradient), "float32"), gradient)
    optimizer = make_optimizer(config, {"bias": replace(SPECS["norm"], shape=(3,))})
    params = {"bias": jnp.zeros(3)}
    _, state = optimizer.update({"bias": jnp.asarray(held)}, optimizer.init(params), params)
    parts = jax.tree.leaves(state, is_leaf=lambda part: hasattr(part, "mu"))
    (moments,) = [part for part in parts if hasattr(part, "mu")]
    assert (moments.mu["bias"].dtype, moments.nu["bias"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(moments.mu["bias"].astype(np.float32), 0.1 * held, rtol=2**-8)


# --- Sizes that are numbers


def test_routed_scaling_factor_multiplies_the_normalised_weights(x64):
    moe = configured("deepseek-v3-tiny", "routed_scaling_factor=1.7").step.model.moe
    arrays = layer_arrays(moe, 0)
    found, _ = routed({key: jnp.asarray(value) for key, value in arrays.items()}, moe)
    scores = 1 / (1 + np.exp(-np.take_along_axis(logits_of(arrays), np.asarray(found.experts), axis=1)))
    np.testing.assert_allclose(found.weights, 1.7 * scores / (scores.sum(1, keepdims=True) + 1e-20), rtol=1e-12)


def test_normalization_layer_epsilon_is_added_to_the_mean_square_of_every_norm():
    model = configured("mixtral-tiny", "normalization_layer_epsilon=0.5").step.model
    assert (model.norm_epsilon, model.attention.norm_epsilon) == (0.5, 0.5)
    x = np.asarray([[1.0, -2.0, 3.0]])
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), jnp.ones(3), model.norm_epsilon), x / np.sqrt((x**2).mean() + 0.5), rtol=1e-6
    )


def test_rope_max_timescale_is_the_slowest_period():
    """A pair's angle at position p is p / timescale^(2i / H)."""
    attention = configured("mixtral-tiny", "rope_max_timescale=300").step.model.attention
    cos, sin = rope_cos_sin(attention.rope, attention.rope_dim, jnp.asarray([[5]]))
    angles = 5 / 300 ** (np.arange(0, attention.rope_dim, 2) / attention.rope_dim)
    np.testing.assert_allclose(cos[0, 0], np.cos(angles), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles), rtol=1e-5, atol=1e-6)


# --- That none is forgotten

CHECKED = {
    *("load_balance_loss_weight", "capacity_factor", "ragged_buffer_factor", "routed_bias_update_rate"),
    *("mtp_loss_scaling_factor", "warmup_steps_fraction", "wsd_decay_steps_fraction", "adam_weight_decay"),
    *("learning_rate_final_fraction", "cosine_learning_rate_final_fraction", "learning_rate", "adam_b1", "adam_b2"),
    *("adam_eps", "adam_eps_root", "gradient_clipping_threshold"),
    *("muon_beta", "muon_weight_decay", "muon_consistent_rms"),
    *("routed_scaling_factor", "normalization_layer_epsilon", "rope_max_timescale"),
}


def test_every_word_of_maxtext_that_sets_a_number_is_checked_here():
    found = set()
    for name, entry in TRANSLATED.items():
        try:
            settings = entry("0.5").settings
        except ValueError:
            continue
        if any(SETTINGS[setting].type.name == "float" for setting in settings):
            found.add(name)
    assert found <= CHECKED
