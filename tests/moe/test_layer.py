"""The layer as users have it: the nnx module, its backends and types, masks, and JAX's transformations."""

import functools
import traceback
from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from raggedmoe import ExpertConfig, MoE, MoEExecution, MoEOutput, Plan
from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.native.library import why_absent
from raggedmoe.kernels.registry import CannotRunError, record_selections
from raggedmoe.moe.execution import BACKENDS
from raggedmoe.moe.layer import DEFAULT_EXECUTION
from raggedmoe.moe.module import SelectionBias
from tests.kernels.compare import on_cpu
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_close,
    assert_gradients_close,
    dense_gradients,
    layer,
    layer_gradients,
    magnitude,
    moe_config,
    random_params,
    random_tokens,
    run_layer,
)

EXPERTS = ExpertConfig(biases=True, num_shared=1, shared_gate=True)
LOSSES = {"aux_loss_weight": 0.3, "z_loss_weight": 0.2}
FOR_TPUS = [
    name
    for name, backend in BACKENDS.items()
    if backend.kernels.grouped_matmul not in ("auto", *on_cpu("grouped_matmul"))
]
WAYS = {
    **{backend: MoEExecution(moe_backend=backend) for backend in BACKENDS if backend not in FOR_TPUS},
    "capacity": MoEExecution(strategy="capacity"),
}
# On this machine "cpu" is what "auto" takes.
DIFFERENT = {name: way for name, way in WAYS.items() if name != "cpu"}
every_different_way = pytest.mark.parametrize("way", DIFFERENT.values(), ids=DIFFERENT)


def axes_of(config):
    return {name: spec.axes for name, spec in config.param_specs().items()}


def module(config, seed=0):
    return MoE(config, params=random_params(config, seed, np.float32), axes=axes_of(config))


TOKENS = 12
EVERYBODY, SOME = np.ones(TOKENS, bool), np.arange(TOKENS) % 3 != 1


def config_of(way=DEFAULT_EXECUTION):
    factor = 100.0 if way.strategy == "capacity" else None  # room for all
    return moe_config({**LOSSES, "logit_bias": True}, experts=EXPERTS, capacity_factor=factor)


def both_of(way, mask=EVERYBODY, x=None):
    """Value and gradients in float32, through one compiled function for all tests of a way."""
    config = config_of(way)
    x = np.array(random_tokens(config, TOKENS, dtype=np.float32)) if x is None else x
    params = random_params(config, dtype=np.float32)
    mask = jnp.asarray(mask)
    return layer_gradients(jnp.asarray(x), params, config, jnp.ones(x.shape), execution=way, mask=mask)


def filled_tokens(rows, fill):
    """The tokens of `both_of` with `fill` in some rows."""
    x = np.array(random_tokens(moe_config(), TOKENS, dtype=np.float32))
    x[rows] = fill
    return x


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in DIFFERENT),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.ci) for name in ("auto", "capacity")),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in WAYS if name not in ("auto", "capacity")),
    ],
)
def test_value_is_within_the_roundings_of_the_type(name, dtype):
    config = config_of(WAYS[name])
    x = random_tokens(config, TOKENS, dtype=dtype)
    # The router's parameters stay float32; the experts' are rounded before the oracle sees them, so that what is
    # compared is the layer's arithmetic.
    params = {
        key: jnp.asarray(value, jnp.float32 if key.startswith("router") else dtype)
        for key, value in random_params(config, dtype=np.float32).items()
    }
    out = both_of(WAYS[name])[0] if dtype == "float32" else run_layer(x, params, config, WAYS[name])
    expected = numpy_layer.layer(np.asarray(x, np.float64), params, config)
    difference = np.abs(np.asarray(out.output, np.float64) - expected.output)
    # Hidden rows, the expert's output, the combined sum, the shared output and the total are each rounded once, half
    # an eps each; the float32 sums and the router's weights are a few more where eps is float32's.
    roundings = 2.5 if dtype == "bfloat16" else 8
    bound = roundings * float(jnp.finfo(dtype).eps) * magnitude(x, params, config, expected)
    assert out.output.dtype == dtype
    assert np.array_equal(out.experts, expected.experts)
    assert (difference <= bound).all()


@every_different_way
def test_gradients_in_float32_are_those_of_the_oracle(way):
    out, gradients = both_of(way)
    # The dense oracle knows no ways: with one configuration for all of them it is compiled once.
    config = config_of()
    x, params = random_tokens(config, TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(value, np.float64) for name, value in params.items()}
        expected = dense_gradients(jnp.asarray(x, np.float64), wide, config, jnp.ones(x.shape), out.experts)
    assert all(gradients[name].dtype == np.float32 for name in gradients)
    assert_gradients_close(gradients, expected)


def kept_for_backward(execution):
    """How many arrays of so many columns are kept of the routed rows, of a layer without biases and losses."""
    config = moe_config()
    x, params = random_tokens(config, TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    num_rows = TOKENS * config.experts_per_token

    def residuals(x, params):
        return jax.tree.leaves(jax.vjp(lambda *args: layer(*args, config, execution).output, x, params)[1])

    shapes = [array.shape for array in jax.eval_shape(residuals, x, params)]
    return Counter(shape[1] for shape in shapes if len(shape) == 2 and shape[0] == num_rows)


def assert_same_operations(found, expected):
    """Require the bits of the same operations on the same numbers.

    Kernels in C++ do them as they are. Plain ones XLA compiles into either program, where it may take a product and a
    sum together in one and not in the other: that leaves out a rounding of the product, half an eps of it.
    """
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if why_absent() is None or not jnp.issubdtype(actual.dtype, jnp.floating):
            np.testing.assert_array_equal(actual, wanted)
        else:
            assert_close(actual, wanted, roundings=0.5)


@pytest.mark.parametrize("backend", ["auto", "cpu", "expert_ffn"])
def test_rows_are_dispatched_again_rather_than_kept_and_all_else_is_the_same(backend):
    config = moe_config()
    way, again = (MoEExecution(moe_backend=backend, recompute_dispatch=again) for again in (False, True))
    assert_same_operations(both_of(again), both_of(way))
    width, hidden = config.model_dim, config.expert_dim
    # Kept are both arguments of the activation, and what the router's gradient needs: the experts' results.
    assert kept_for_backward(again) == {hidden: 2, width: 1}
    assert kept_for_backward(way)[width] == 2


def traced_with(backend):
    """Trace the layer with this backend for the chip in use."""
    config, execution = config_of(), MoEExecution(moe_backend=backend)
    tokens, params = random_tokens(config, TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    jax.eval_shape(lambda x: run_layer(x, params, config, execution).output, jnp.asarray(tokens))


@pytest.mark.parametrize("backend", FOR_TPUS)
def test_a_tpus_backend_says_why_it_cannot_run_on_a_cpu(backend):
    with pytest.raises(CannotRunError, match=r"for TPUs, not for cpu|not installed"):
        traced_with(backend)


@pytest.mark.parametrize("backend", FOR_TPUS)
def test_a_tpus_backend_computes_the_experts_with_its_kernel(backend):
    chosen = BACKENDS[backend].kernels.grouped_matmul
    if chosen == "gmm_v2" and not (find_spec("tokamax") and find_spec("tokamax._src.ops.gmm_v2")):
        pytest.skip("needs a tokamax with the second kernel")
    chip = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="TPU v6e", num_cores=1, platform="tpu"))
    with jax.sharding.use_abstract_mesh(chip), record_selections() as selections:
        traced_with(backend)
    assert {found.chosen.name for found in selections if found.call.operation == "grouped_matmul"} == {chosen}


@pytest.mark.parametrize(
    ("weigh", "factor"),
    [
        ("input", 0.4),
        pytest.param("output", 0.8, marks=pytest.mark.ci),
        pytest.param("input", 0.8, marks=pytest.mark.slow),
        pytest.param("output", 0.4, marks=pytest.mark.slow),
    ],
)
def test_rows_that_fit_the_capacity_are_exact_and_the_others_add_nothing(x64, weigh, factor):
    config = moe_config({"weigh": weigh, **LOSSES}, capacity_factor=factor, experts=EXPERTS, experts_per_token=3)
    x, params = random_tokens(config, 15), random_params(config)
    expected = numpy_layer.layer(x, params, config, num_sequences=3)
    out, gradients = layer_gradients(x, params, config, jnp.ones_like(x), num_sequences=3)
    assert expected.dropped > 0
    assert_agrees(out, expected)
    kept = numpy_layer.kept_slots(expected.experts, config, 3)
    slopes = dense_gradients(x, params, config, jnp.ones_like(x), out.experts, kept=jnp.asarray(kept))
    assert_gradients_close(gradients, slopes)


@pytest.mark.parametrize("lead", [pytest.param((5,), marks=pytest.mark.ci), (2, 3, 5), (2, 0)])
def test_output_has_the_shape_of_the_input(lead):
    layer = module(moe_config({"aux_loss": "sequence", **LOSSES}))
    out = nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((*lead, 7)))
    assert isinstance(out, MoEOutput)
    assert out.output.shape == (*lead, 7)
    assert out.experts.shape == (*lead, 2)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(out))


def test_module_counts_its_sequences(x64):
    config = moe_config({"aux_loss": "sequence", **LOSSES})
    layer = MoE(config, params=random_params(config), axes=axes_of(config))
    x = random_tokens(config, 24)
    mask = jnp.arange(24) % 5 != 0
    out = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, x.reshape(2, 3, 4, 7), mask.reshape(2, 3, 4))
    expected = numpy_layer.layer(x, random_params(config), config, mask=mask, num_sequences=6)
    assert_close(out.aux_loss, expected.aux_loss)
    assert_close(out.output.reshape(24, 7), expected.output)


def masked_run(fill, way):
    """Value and gradients where masked tokens hold `fill`."""
    return both_of(way, SOME, filled_tokens(~SOME, fill))


@every_different_way
@pytest.mark.parametrize("fill", [np.nan, 1e30])
def test_what_masked_tokens_hold_changes_no_bit(way, fill):
    for found, expected in zip(
        jax.tree.leaves(masked_run(fill, way)), jax.tree.leaves(masked_run(0.0, way)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@every_different_way
def test_masked_tokens_get_zero_and_give_zero(way):
    out, gradients = masked_run(np.nan, way)
    assert not np.asarray(out.output)[~SOME].any()
    assert not np.asarray(gradients["x"])[~SOME].any()


@every_different_way
def test_same_input_gives_the_same_bits(way):
    runs = [both_of(way) for _ in range(2)]
    for one, other in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(one, other)


@every_different_way
def test_nan_stays_in_its_token(way):
    clean, out = (both_of(way, x=filled_tokens(rows, np.nan))[0] for rows in ([], [4]))
    others = np.arange(TOKENS) != 4
    np.testing.assert_array_equal(out.output[others], clean.output[others])
    assert np.isnan(out.output[4]).all()
    assert len(set(out.experts[4].tolist())) == 2
    assert np.asarray(out.experts).max() < 6


@pytest.mark.ci
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_gradient_survives(wrap):
    layer = module(moe_config(LOSSES))
    x = random_tokens(layer.config, 9, dtype=np.float32)

    def loss(x):
        out = layer(x)
        return out.output.sum() + out.aux_loss + out.z_loss

    _, expected = layer_gradients(x, random_params(layer.config, dtype=np.float32), layer.config, jnp.ones_like(x))
    assert_close(jax.jit(jax.grad(wrap(loss)))(x), expected["x"])


@pytest.mark.slow
def test_scan_over_layers_is_their_composition(x64):
    config = moe_config(LOSSES)
    stack = [random_params(config, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack)
    x = random_tokens(config, 9)

    @jax.jit
    def scanned(x):
        return jax.lax.scan(lambda x, params: (x + run_layer(x, params, config).output, None), x, stacked)[0]

    expected = np.asarray(x)
    for params in stack:
        expected = expected + numpy_layer.layer(expected, params, config).output
    assert_close(scanned(x), expected)
    assert np.isfinite(jax.grad(lambda x: scanned(x).sum())(x)).all()


# "ragged_dot" has a rule of ours: JAX batches it only if the weights are batched too.
@pytest.mark.ci
@pytest.mark.parametrize("backend", ["auto", pytest.param("expert_ffn", marks=pytest.mark.slow), "ragged_dot"])
def test_vmap_is_a_loop_over_batches(x64, backend):
    config, execution = moe_config({"aux_loss_weight": 0.3}), MoEExecution(moe_backend=backend)
    params, batches = random_params(config), random_tokens(config, 12).reshape(3, 4, 7)

    def gradient(x):
        out, gradients = layer_gradients(x, params, config, jnp.ones_like(x), execution=execution)
        return vars(out), gradients

    out, gradients = jax.vmap(gradient)(batches)
    for i, batch in enumerate(batches):
        assert_close(out["output"][i], numpy_layer.layer(batch, params, config).output)
        expected = dense_gradients(batch, params, config, jnp.ones_like(batch), out["experts"][i])
        assert_gradients_close({name: gradient[i] for name, gradient in gradients.items()}, expected)


def test_split_and_merge_give_the_same_layer():
    layer = module(moe_config(LOSSES))
    x = random_tokens(layer.config, 5, dtype=np.float32)
    merged = nnx.merge(*nnx.split(layer))
    call = nnx.jit(lambda layer: layer(x).output)
    np.testing.assert_array_equal(call(merged), call(layer))


@pytest.mark.slow
def test_training_lowers_the_loss():
    config = moe_config({**LOSSES, "selection_bias": True}, num_experts=4, experts=EXPERTS)
    layer = MoE(config, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    x = random_tokens(config, 32, dtype=np.float32)
    target = random_tokens(config, 32, seed=9, dtype=np.float32)

    @nnx.jit
    def step(layer, optimizer):
        def loss(layer):
            out = layer(x)
            return jnp.mean((out.output - target) ** 2) + 0.01 * (out.aux_loss + out.z_loss)

        value, gradients = nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, gradients)
        return value

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]


def test_selection_bias_is_no_parameter_to_train():
    layer = MoE(moe_config({"selection_bias": True}), rngs=nnx.Rngs(0))
    assert isinstance(layer.router_selection_bias, SelectionBias)
    assert not isinstance(layer.router_selection_bias, nnx.Param)
    assert "router_selection_bias" not in nnx.state(layer, nnx.Param)


def test_initial_values_have_the_declared_shapes_and_scale():
    config = moe_config({"expert_scale": True, "logit_bias": True}, model_dim=64, expert_dim=32, experts=EXPERTS)
    layer = MoE(config, rngs=nnx.Rngs(0))
    for name, spec in config.param_specs().items():
        value = np.asarray(getattr(layer, name)[...])
        assert value.shape == spec.shape
        if spec.contracts:
            fan_in = spec.shape[spec.axes.index(spec.contracts)]
            assert value.std() == pytest.approx(fan_in**-0.5, rel=0.3)
        else:
            assert (value == (spec.init == "ones")).all()


def test_module_passes_every_argument_on():
    config = moe_config({"selection": "hash", "jitter": 0.3})
    layer, x = module(config), random_tokens(config, 6, dtype=np.float32)
    arguments = {"mask": jnp.arange(6) != 2, "token_ids": jnp.arange(6) * 7, "key": jax.random.key(1)}
    expected = run_layer(x, random_params(config, dtype=np.float32), config, **arguments)
    shaped = {name: value if name == "key" else value.reshape(2, 3) for name, value in arguments.items()}
    out = jax.jit(functools.partial(MoE.__call__, layer))(x.reshape(2, 3, 7), **shaped)
    assert_close(out.output.reshape(6, 7), expected.output)
    np.testing.assert_array_equal(out.experts.reshape(6, 2), expected.experts)


@pytest.mark.parametrize("strategy", ["local", "ring"])
def test_a_kernel_is_five_calls_below_the_layer_at_most(monkeypatch, strategy):
    calls = []

    def record(*arrays, **options):
        names = [frame.name for frame in traceback.extract_stack() if "/src/raggedmoe/" in frame.filename]
        below = len(names) - 1 - names[::-1].index("routed_experts")
        calls.append([name for name in names[below + 1 :] if not name.startswith("<")] + ["grouped_matmul"])
        return grouped_matmul(*arrays, **options)

    monkeypatch.setattr("raggedmoe.moe.experts.grouped_matmul", record)
    mesh = Plan(expert=2).mesh() if strategy == "ring" else None
    config, execution = moe_config(), MoEExecution(strategy=strategy, moe_backend="ragged_dot")
    x = jnp.ones((2, 4, config.model_dim))
    jax.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0), execution=execution, mesh=mesh)(x).output)
    assert len(calls) == 3
    assert max(map(len, calls)) <= 5, calls
