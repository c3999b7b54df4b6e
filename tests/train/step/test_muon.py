"""Muon against a plain loop over matrices in float64, against optax's own, and on meshes against one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from jax.sharding import PartitionSpec

from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.params import ParamSpec
from raggedmoe.sharding.axes import logical_mesh
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import param_shardings
from raggedmoe.train.settings.sections import OptimizerConfig
from raggedmoe.train.step.muon import batch_partition, orthogonalize, scale_by_muon, takes_muon
from raggedmoe.train.step.optimizer import make_optimizer
from tests.aot.hlo_collectives import collectives
from tests.train.step.test_optimizer import run_steps

EPS = float(jnp.finfo(jnp.float32).eps)
RATE, DECAY = 0.02, 0.3
CONFIG = OptimizerConfig(
    opt_type="muon",
    learning_rate=RATE,
    schedule="constant",
    schedule_steps=20,
    warmup_steps=0,
    weight_decay=DECAY,
    gradient_clipping_threshold=0.0,
)
# name -> the parameter, and its matrices by hand: dimensions of the batch, sizes summed over, the others
SPECS = {
    "stacks.0.0.moe.wi_0": ((2, 4, 6, 8), ("layer", "expert", "expert_dim", "model_dim"), "model_dim"),
    "stacks.0.0.moe.wo": ((2, 4, 6, 8), ("layer", "expert", "expert_dim", "model_dim"), "expert_dim"),
    "stacks.0.0.moe.router_kernel": ((2, 4, 8), ("layer", "expert", "model_dim"), "model_dim"),
    "stacks.0.0.attention.wq": ((2, 4, 3, 8), ("layer", "head", "head_dim", "model_dim"), "model_dim"),
    "stacks.0.0.attention.wo": ((2, 4, 3, 8), ("layer", "head", "head_dim", "model_dim"), ("head", "head_dim")),
    "mtp.0.projection": ((8, 16), ("model_dim", "embedding_and_hidden"), "embedding_and_hidden"),
    "embedding": ((10, 8), ("vocab", "model_dim"), "model_dim"),
    "final_norm": ((8,), ("model_dim",), None),
}
SPECS = {
    name: ParamSpec(
        shape=shape, dtype=jnp.float32, axes=axes, contracts=contracts, init="normal" if contracts else "ones"
    )
    for name, (shape, axes, contracts) in SPECS.items()
}
# By hand: the matrices of a parameter, [number, inputs, outputs].
MATRICES = {
    "stacks.0.0.moe.wi_0": lambda a: a.reshape(8, 6, 8).swapaxes(1, 2),
    "stacks.0.0.moe.wo": lambda a: a.reshape(8, 6, 8),
    "stacks.0.0.moe.router_kernel": lambda a: a.swapaxes(1, 2),
    "stacks.0.0.attention.wq": lambda a: a.reshape(2, 12, 8).swapaxes(1, 2),
    "stacks.0.0.attention.wo": lambda a: a.reshape(2, 12, 8),
    "mtp.0.projection": lambda a: a.T[None],
}


def drawn(seed, specs=SPECS):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(spec.shape) for name, spec in specs.items()}


def newton_schulz(matrix):
    """The iteration of the paper on one matrix, in float64."""
    x = matrix / (np.sqrt((matrix**2).sum()) + 1e-8)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def plain_muon(config, params, gradients):
    """All matrices after all these gradients, one by one."""
    beta, found = config.muon_beta, {}
    for name, matrices in MATRICES.items():
        weights, momentum = matrices(params[name]).copy(), 0.0
        for step, gradient in enumerate(gradients):
            g = matrices(gradient[name])
            momentum = beta * momentum + (1 - beta) * g
            ahead = beta * momentum / (1 - beta ** (step + 2)) + (1 - beta) * g / (1 - beta ** (step + 1))
            for each in range(len(weights)):
                inputs, outputs = weights[each].shape
                rms = config.muon_consistent_rms
                scale = math.sqrt(max(1, outputs / inputs)) if rms is None else rms * math.sqrt(max(inputs, outputs))
                update = scale * newton_schulz(ahead[each])
                weights[each] -= RATE * (update + (config.muon_weight_decay or DECAY) * weights[each])
        found[name] = weights
    return found


@pytest.mark.parametrize(("rms", "decay"), [(0.2, None), (None, 0.1)])
def test_five_steps_are_those_of_a_plain_loop_over_all_matrices(rms, decay):
    config = dataclasses.replace(CONFIG, muon_consistent_rms=rms, muon_weight_decay=decay)
    gradients = [drawn(seed) for seed in range(1, 6)]
    params = run_steps(make_optimizer(config, SPECS), drawn(0), gradients)
    for name, expected in plain_muon(config, drawn(0), gradients).items():
        # Of roundings the iteration makes at most 3.4445⁵ = 485 times as much, of numbers of about 1, times the rate.
        bound = 5 * RATE * 485 * EPS + 5 * 4 * EPS
        np.testing.assert_allclose(MATRICES[name](np.asarray(params[name])), expected, rtol=0, atol=bound, err_msg=name)


def test_what_muon_does_not_take_is_trained_as_without_it():
    plain = make_optimizer(dataclasses.replace(CONFIG, opt_type="adamw"), SPECS)
    params, gradient = (
        {name: jnp.asarray(value, jnp.float32) for name, value in drawn(seed).items()} for seed in (0, 1)
    )
    found, expected = (o.update(gradient, o.init(params), params)[0] for o in (make_optimizer(CONFIG, SPECS), plain))
    for name in ("embedding", "final_norm"):
        np.testing.assert_array_equal(found[name], expected[name])
        assert not takes_muon(name, SPECS[name])
    assert not np.allclose(found["mtp.0.projection"], expected["mtp.0.projection"])


def test_it_is_the_muon_of_optax_on_one_device():
    matrices = {name: spec for name, spec in SPECS.items() if name in MATRICES}
    places = {
        "stacks.0.0.moe.wi_0": (3, 2),
        "stacks.0.0.moe.wo": (2, 3),
        "stacks.0.0.moe.router_kernel": (2, 1),
        "stacks.0.0.attention.wq": (3, (1, 2)),
        "stacks.0.0.attention.wo": ((1, 2), 3),
        "mtp.0.projection": (1, 0),
    }
    numbers = {name: optax.contrib.MuonDimensionNumbers(*places[name]) for name in matrices}
    ours = make_optimizer(CONFIG, matrices)
    theirs = optax.contrib.muon(
        RATE, weight_decay=DECAY, muon_weight_dimension_numbers=numbers, consistent_rms=CONFIG.muon_consistent_rms
    )
    params = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(0, matrices).items()}
    results = []
    for optimizer in (ours, theirs):
        state, moved = optimizer.init(params), params
        for seed in (1, 2):
            gradient = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(seed, matrices).items()}
            updates, state = optimizer.update(gradient, state, moved)
            moved = optax.apply_updates(moved, updates)
        results.append(moved)
    for name in matrices:
        bound = 2 * RATE * 485 * EPS + 8 * EPS
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=0, atol=bound, err_msg=name)


def test_singular_values_come_near_to_one_and_a_matrix_of_zeros_stays():
    matrices = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 16)), jnp.float32).at[2].set(0)
    found = orthogonalize(matrices, 1e-8)
    values = np.linalg.svd(found[:2], compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert not found[2].any()


@pytest.mark.parametrize("model", ["deepseek-v3-tiny", "gpt-oss-tiny"])
def test_muon_takes_the_matrices_of_the_layers(model):
    specs = param_specs(model_preset(model))
    taken = {name.rpartition(".")[2] for name, spec in specs.items() if takes_muon(name, spec)}
    attention = {"q_a", "q_b", "kv_a", "k_b", "v_b"} if model.startswith("deepseek") else {"wq", "wk", "wv"}
    others = {"shared_wi_0", "shared_wi_1", "shared_wo", "projection"} if model.startswith("deepseek") else set()
    assert taken == attention | {"wi_0", "wi_1", "wo", "router_kernel"} | others


# --- Meshes


def on_mesh(plan, specs):
    mesh = logical_mesh(plan.mesh())
    places = param_shardings(mesh, specs)
    update = scale_by_muon(CONFIG, specs, mesh).update
    return mesh, places, jax.jit(functools.partial(update, params=None), out_shardings=(places, None))


@pytest.mark.parametrize(
    "degrees",
    [{"fsdp": 2}, {"expert": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 8}],
    ids=lambda degrees: "-".join(f"{axis}{size}" for axis, size in degrees.items()),
)
def test_a_mesh_gives_the_updates_of_one_device(degrees):
    specs = {
        name: spec
        for name, spec in param_specs(model_preset("deepseek-v3-tiny")).items()
        if takes_muon(name, spec) and not name.startswith("mtp.")
    }
    gradient = {name: jnp.asarray(value, jnp.float32) for name, value in drawn(1, specs).items()}
    alone = scale_by_muon(CONFIG, specs)
    expected, _ = jax.jit(alone.update)(gradient, alone.init(gradient))
    _, places, update = on_mesh(Plan(**degrees), specs)
    here = jax.device_put(gradient, places)
    found, _ = update(here, alone.init(here))
    for name, value in expected.items():
        scale = float(jnp.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=485 * EPS * scale, err_msg=name)
        assert found[name].sharding.is_equivalent_to(places[name], value.ndim)


def test_a_device_computes_its_share_of_the_experts_and_sees_no_others():
    spec = ParamSpec(
        shape=(2, 8, 16, 32), dtype=jnp.float32, axes=SPECS["stacks.0.0.moe.wi_0"].axes, contracts="model_dim"
    )
    specs, plan = {"stacks.0.0.moe.wi_0": spec}, Plan(fsdp=4, expert=2)
    mesh, places, update = on_mesh(plan, specs)
    assert batch_partition("stacks.0.0.moe.wi_0", spec, mesh) == PartitionSpec(None, ("expert", "fsdp"), None, None)
    gradient = jax.device_put({name: jnp.zeros(each.shape) for name, each in specs.items()}, places)
    alone = scale_by_muon(CONFIG, specs)
    compiled = update.lower(gradient, alone.init(gradient)).compile()
    matrices = [match for match in compiled.as_text().split() if match.startswith("f32[2,8,16")]
    assert not matrices, "all experts on one device"
    sent = collectives(compiled.as_text())
    assert {kind for kind, _ in sent} == {"all-to-all"}
    # There and back, of a device's part, the two layers of one expert.
    assert sum(sent.values()) == 2 * 2 * 16 * 32 * 4
