"""Decoders whose matrices, those of attention, dense MLPs and shared experts too, are stored quantised.

Everywhere they compute what they would with the arrays that these stand for, which float32 holds to the last bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from raggedmoe import Decoder, merge_lora
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.fingerprint import fingerprint
from raggedmoe.models.generate import generate
from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import partition, stored_partition
from raggedmoe.sharding.stage import TOKENS
from tests.interop.folders import quantised_in
from tests.kernels.quantized_oracle import spread
from tests.models.drawn import drawn_ids, drawn_params, quick_jit, tiny
from tests.models.test_decoder import EPS, loss_of
from tests.models.test_lora import LORA, assert_near, merged_in_float64, of_adapters, split
from tests.models.test_mesh import MESHES, RAGGED_DOT, with_moe

ROWS, LENGTH, BLOCK = 4, 12, 8


def stored_and_meant(config, seed=0):
    """Parameters with all matrices of layers in int8, in blocks of 8 × 8 or whole heads, and what they stand for."""
    rng, specs = np.random.default_rng(seed), param_specs(config)
    stored = drawn_params(config)
    meant = dict(stored)
    for name in quantised_in(specs, "int8"):
        spec = specs[name]
        shape = tuple(
            size if axis in ("layer", "expert", "head", "kv_head") else size // BLOCK
            for axis, size in zip(spec.axes, spec.shape)
        )
        scale = (rng.uniform(0.5, 1.5, shape) / 64).astype(np.float32)
        values = np.round(np.asarray(stored[name]) * 64).clip(-127, 127).astype(np.int8)
        meant[name] = jnp.asarray(values * spread(scale, values.shape))
        stored[name] = QArray(jnp.asarray(values), jnp.asarray(scale), None, "int8")
    return stored, meant


@pytest.fixture(scope="module")
def v3():
    """Latent attention, a dense layer, shared experts and multi-token prediction, with adapters everywhere."""
    config = dataclasses.replace(tiny("deepseek-v3-tiny", num_layers=2, dense_layers=(0,)), lora=LORA)
    stored, meant = stored_and_meant(config)
    assert any(name.startswith("mtp.") and isinstance(array, QArray) for name, array in stored.items())
    ids = drawn_ids(config, ROWS, LENGTH)
    return config, stored, meant, ids, learn(config, stored, ids)


def learn(config, params, ids, execution=RAGGED_DOT, **options):
    """The loss, and its gradients by all that is trained."""
    trained, frozen = split(config, params)
    loss = loss_of(config, ids, execution, **options)
    return jax.device_get(quick_jit(jax.value_and_grad(lambda trained: loss({**trained, **frozen})))(trained))


def test_adapters_learn_beside_them_as_beside_merged_weights_in_float64(v3):
    config, _, meant, ids, (value, gradients) = v3
    plain = dataclasses.replace(config, lora=None)
    merged = {name: jnp.asarray(array, jnp.float32) for name, array in merged_in_float64(config, meant).items()}
    expected, of_weights = jax.device_get(quick_jit(jax.value_and_grad(loss_of(plain, ids, RAGGED_DOT)))(merged))
    assert abs(float(value) - float(expected)) <= 32 * EPS * abs(float(expected))
    by_adapters = of_adapters(config, meant, of_weights)
    assert by_adapters.keys() == gradients.keys()
    assert all(np.abs(gradient).max() > 0 for gradient in by_adapters.values())
    assert_near(gradients, by_adapters)


def learn_on_mesh(config, plan, stored, ids):
    """The same, each part in its place."""
    mesh, specs = plan.mesh(), param_specs(config)
    on_mesh = plan.logical_mesh()
    places = {name: stored_partition(name, specs[name], array, on_mesh) for name, array in stored.items()}
    placed = jax.device_put(stored, jax.tree.map(on_mesh.sharding, places))
    strategy = "all_to_all" if plan.expert > 1 else None
    execution = with_moe(dataclasses.replace(RAGGED_DOT, scan_layers=False), strategy=strategy)
    return learn(config, placed, jax.device_put(ids, NamedSharding(mesh, TOKENS)), execution, mesh=mesh)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ci if n == "mixed" else pytest.mark.slow) for n in MESHES]
)
def test_a_mesh_has_the_loss_and_the_gradients_of_one_device(v3, name):
    config, stored, _, ids, (value, gradients) = v3
    found, by_name = learn_on_mesh(config, MESHES[name], stored, ids)
    assert abs(float(found) - float(value)) <= 32 * EPS * abs(float(value))
    assert_near(by_name, gradients)


def test_values_and_scales_are_split_alike_where_blocks_divide_and_else_scales_are_whole(v3):
    config, stored, *_ = v3
    specs, mesh = param_specs(config), Plan(fsdp=2, tensor=4).logical_mesh()
    name = "stacks.0.0.mlp.wi_0"  # 128 × 64 in 16 × 8 blocks
    whole = stored_partition(name, specs[name], stored[name], mesh)
    assert whole.qvalue == whole.scale == partition(name, specs[name], mesh)
    few = QArray(stored[name].qvalue, stored[name].scale[:, :2, :1], None, "int8")
    cut = stored_partition(name, specs[name], few, mesh)
    assert cut.qvalue == whole.qvalue
    assert not any(cut.scale)


def test_a_block_that_the_tensor_axis_cuts_is_the_same_block(v3):
    """Of a dense weight, which XLA divides; of routed experts it is refused."""
    config, stored, _, ids, _ = v3
    name, wide = "stacks.0.0.mlp.wi_0", dict(stored)
    wide[name] = QArray(stored[name].qvalue, stored[name].scale[:, :1, :1] * jnp.ones((1, 2, 1)), None, "int8")
    value, gradients = learn(config, wide, ids)
    found, by_name = learn_on_mesh(config, Plan(tensor=4), wide, ids)
    assert abs(float(found) - float(value)) <= 32 * EPS * abs(float(value))
    assert_near(by_name, gradients)


@pytest.mark.parametrize("model", ["deepseek-v3-tiny", "qwen3-tiny"])
def test_text_of_what_is_stored_is_that_of_what_it_stands_for(model):
    config = tiny(model, num_layers=2)
    stored, meant = stored_and_meant(config)
    prompts = [[5, 9, 2, 17], [3, 1]]
    texts = [list(generate(Decoder(config, params=params), prompts, max_new_tokens=8)) for params in (stored, meant)]
    assert texts[0] == texts[1]
    assert len({token for tokens in texts[0] for token in tokens}) > 2


@pytest.mark.usefixtures("without_native_kernels")
def test_xla_computes_the_same_bits_of_both():
    config = tiny("deepseek-v3-tiny", num_layers=2, mtp_layers=0, dense_layers=(0, 1))
    stored, meant = stored_and_meant(config)
    ids = drawn_ids(config, 2, LENGTH)
    scores = jax.jit(lambda params: logits(params, decode(params, ids, config).hidden, config))
    np.testing.assert_array_equal(scores(stored), scores(meant))


def test_they_have_the_fingerprint_of_what_they_stand_for_and_merge_with_it(v3):
    config, stored, meant, *_ = v3
    assert fingerprint(stored, config) == fingerprint(meant, config)
    merged, expected = (merge_lora(Decoder(config, params=params)).params for params in (stored, meant))
    assert not any(isinstance(array, QArray) for array in merged.values())
    for name, array in expected.items():
        np.testing.assert_allclose(merged[name], array, rtol=0, atol=4 * EPS * np.abs(array).max(), err_msg=name)
