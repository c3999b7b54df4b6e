"""The losses, the bias rule and the statistics against plain NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from raggedmoe import MoEExecution, update_selection_bias
from raggedmoe.moe import balance
from tests.moe import numpy_layer
from tests.moe.examples import (
    EINSUM,
    assert_agrees,
    assert_close,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
    run_layer,
)
from tests.moe.on_mesh import mesh_of, run_on_mesh

pytestmark = pytest.mark.usefixtures("x64")

NUM_TOKENS, NUM_EXPERTS = 12, 5
MASKS = {
    "all": np.ones(NUM_TOKENS, bool),
    "some": np.arange(NUM_TOKENS) % 3 != 1,
    "a_sequence_missing": np.arange(NUM_TOKENS) >= 4,
    "none": np.zeros(NUM_TOKENS, bool),
}
balance_loss = jax.jit(balance.load_balance_loss, static_argnames="num_sequences")
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def routed(mask):
    """Probabilities and experts of an unfair routing; a masked token's experts are E."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(NUM_TOKENS, NUM_EXPERTS))
    probabilities = np.array([numpy_layer.softmax(row) for row in logits])
    experts = random_experts(rng, NUM_TOKENS, 2, NUM_EXPERTS, skew=2.0)
    return logits, probabilities, np.where(mask[:, None], experts, NUM_EXPERTS)


@every_mask
@pytest.mark.parametrize("num_sequences", [None, 1, 3, 12])
def test_balance_loss_is_that_of_the_oracle(num_sequences, mask):
    _, probabilities, experts = routed(mask)
    found = balance_loss(probabilities, experts, mask, num_sequences=num_sequences)
    assert_close(found, numpy_layer.balance_loss(probabilities, experts, mask, num_sequences or 1))


def test_balance_loss_is_one_at_perfect_balance():
    experts = np.arange(NUM_EXPERTS)[:, None]
    even = np.full((NUM_EXPERTS, NUM_EXPERTS), 1 / NUM_EXPERTS)
    assert_close(balance_loss(even, experts, jnp.ones(NUM_EXPERTS, bool)), 1.0)


@every_mask
def test_z_loss_is_that_of_the_oracle(mask):
    logits, _, _ = routed(mask)
    assert_close(balance.router_z_loss(jnp.asarray(logits), jnp.asarray(mask)), numpy_layer.z_loss(logits, mask))


@pytest.mark.parametrize("load", [[3, 0, 1, 4, 4], [2, 2, 2, 2, 2], [0, 0, 9, 0, 0], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("statistic", ["entropy", "max_violation"])
def test_statistic_of_a_load_is_that_of_the_oracle(statistic, load):
    function = {"entropy": balance.load_entropy, "max_violation": balance.max_violation}[statistic]
    assert_close(function(jnp.asarray(load)), getattr(numpy_layer, statistic)(load))


@pytest.mark.parametrize("load", [[3, 0, 1, 4, 4], [2, 2, 2, 2, 2], [2**24, 2**24 + 1, 2**24 - 1, 2**24, 2**24]])
def test_bias_moves_by_the_rate_towards_the_mean_load(load):
    bias = np.linspace(-1, 1, 5)
    expected = [b + 0.01 * ((n < np.mean(load)) - float(n > np.mean(load))) for b, n in zip(bias, load)]
    assert_close(update_selection_bias(jnp.asarray(bias), jnp.asarray(load), rate=0.01), np.array(expected))


@every_mask
@pytest.mark.parametrize("aux_loss", ["batch", "sequence"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "logits"])
def test_layer_reports_losses_and_statistics_of_the_oracle(score, aux_loss, mask):
    normalize = "softmax" if score == "logits" else "sum"
    router = {"score": score, "normalize": normalize, "aux_loss": aux_loss}
    config = moe_config({**router, "aux_loss_weight": 0.01, "z_loss_weight": 0.001})
    x, params, mask = random_tokens(config, NUM_TOKENS), random_params(config), jnp.asarray(mask)
    out = run_layer(x, params, config, EINSUM, mask=mask, num_sequences=3)
    assert_agrees(out, numpy_layer.layer(x, params, config, mask=mask, num_sequences=3))


@pytest.mark.parametrize("selection", ["learned", "expert_choice"])
def test_masked_batch_gives_finite_numbers(selection):
    by_expert = selection == "expert_choice"  # which has no balance loss
    capacity = {"capacity_factor": 1.0} if by_expert else {}
    weight = 0.0 if by_expert else 1.0
    config = moe_config({"selection": selection, "aux_loss_weight": weight, "z_loss_weight": 1.0}, **capacity)
    out = run_layer(random_tokens(config, 4), random_params(config), config, mask=jnp.zeros(4, bool))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(out))
    assert not np.asarray(out.output).any()


@functools.cache
def sharded_balance_loss(num_sequences):
    def sharded(probabilities, experts, mask):
        return balance.load_balance_loss(probabilities, experts, mask, num_sequences=num_sequences, axes=("data",))

    mesh = Mesh(np.array(jax.devices()[:3]), ("data",))
    return jax.jit(jax.shard_map(sharded, mesh=mesh, in_specs=P("data"), out_specs=P()))


@every_mask
@pytest.mark.parametrize("num_sequences", [None, 2])
def test_balance_loss_over_a_mesh_is_that_of_the_whole_batch(num_sequences, mask):
    _, probabilities, experts = routed(mask)
    found = sharded_balance_loss(num_sequences)(probabilities, experts, mask)
    parts = 3 * num_sequences if num_sequences else 1
    assert_close(found, numpy_layer.balance_loss(probabilities, experts, mask, parts))


def test_bias_update_survives_loads_whose_product_with_e_overflows():
    load = np.ones(256, np.int32)
    load[0], load[1:9] = 9_000_000, 7_000_000
    moved = np.asarray(balance.update_selection_bias(jnp.zeros(256), jnp.asarray(load), rate=1.0))
    expected = np.sign(load.astype(np.float64).mean() - load)
    np.testing.assert_array_equal(moved, expected)


@pytest.mark.parametrize("aux_loss", ["batch", "sequence"])
def test_losses_on_a_mesh_are_those_of_the_global_batch(aux_loss):
    losses = {"aux_loss": aux_loss, "aux_loss_weight": 1.0, "z_loss_weight": 1.0}
    config, execution = moe_config(losses, num_experts=4), MoEExecution(strategy="ring")
    x, params = random_tokens(config, 16), random_params(config)
    # The ranks see unequal numbers of tokens that count and different experts: the mean of their own losses is wrong.
    mask = jnp.arange(16) > 5
    x = jnp.where(jnp.arange(16)[:, None] < 8, x, jnp.abs(x))
    out = run_on_mesh(x, params, config, mesh_of(expert=2), execution=execution, mask=mask, num_sequences=2)
    expected = numpy_layer.layer(x, params, config, mask=mask, num_sequences=2)
    for name in ("aux_loss", "z_loss", "load", "entropy", "max_violation"):
        np.testing.assert_allclose(getattr(out, name), getattr(expected, name), rtol=1e-12, err_msg=name)


def test_bias_moves_by_the_sign_of_the_sum_not_the_sum_of_signs():
    shards = jnp.asarray([[9, 1, 2], [1, 2, 3], [1, 2, 3]])
    bias = jnp.zeros(3)
    whole = update_selection_bias(bias, shards.sum(0), rate=1.0)
    assert whole.tolist() == [-1.0, 1.0, 0.0]
    averaged = jnp.mean(jnp.stack([update_selection_bias(bias, load, rate=1.0) for load in shards]), axis=0)
    assert np.sign(averaged).tolist() != whole.tolist()
