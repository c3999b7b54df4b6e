"""What the tests of the layer share: examples, the scalar loss whose gradients are compared, and the bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.moe.config import MoEConfig, RouterConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.layer import DEFAULT_EXECUTION, moe_route_and_compute
from raggedmoe.moe.records import StageSettings
from raggedmoe.sharding.axes import LogicalMesh
from tests.moe import numpy_layer
from tests.moe.dense_layer import dense_layer

# Roundings that meet in one result. Every term passes through a handful of operations, and the sums here are short, so
# eps · Σ|terms| times this is more than they can add up to; a wrong term is larger by orders of magnitude.
ROUNDINGS = 64
SCALARS = ("aux_loss", "z_loss", "entropy", "max_violation")


def moe_config(router=None, **options):
    """A small layer; sizes are odd and all different, so that no two axes can be mistaken."""
    sizes = {"num_experts": 6, "experts_per_token": 2, "model_dim": 7, "expert_dim": 5}
    return MoEConfig(**{**sizes, "router": RouterConfig(**(router or {})), **options})


def stage_settings(config, execution=DEFAULT_EXECUTION, on_mesh=LogicalMesh(), num_sequences=1):  # noqa: B008, frozen
    """What a stage of the layer is given beside arrays, for tests that call one alone."""
    return StageSettings(config=config, execution=execution, on_mesh=on_mesh, num_sequences=num_sequences)


EINSUM = MoEExecution(moe_backend="dense")  # experts that compile fast, for what has nothing to do with the kernels


def random_params(config, seed=0, dtype=np.float64):
    """Values of every parameter, biases included, of about the size that training has."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, spec in config.param_specs().items():
        value = rng.normal(size=spec.shape)
        fan_in = spec.shape[spec.axes.index(spec.contracts)] if spec.contracts else 4
        params[name] = jnp.asarray(value * fan_in**-0.5 + (name == "router_expert_scale"), dtype)
    return params


def random_tokens(config, num_tokens, seed=1, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_tokens, config.model_dim)), dtype)


def random_experts(rng, num_tokens, per_token, num_experts, skew=0.0):
    """K different experts for each token; with skew, a few of them are much more popular."""
    taste = skew * rng.normal(size=num_experts)
    return np.argsort(-(taste + rng.gumbel(size=(num_tokens, num_experts))), axis=1)[:, :per_token].astype(np.int32)


def layer(x, params, config, execution=DEFAULT_EXECUTION, **options):
    """The layer on a dictionary of parameters."""
    return moe_route_and_compute(x, params, config, execution, **options)


run_layer = jax.jit(layer, static_argnames=("config", "execution", "num_sequences"))


def scalar_loss(out, cotangent):
    """One number that depends on everything differentiable that a layer returns."""
    return (out.output * cotangent).sum() + out.aux_loss + out.z_loss


@functools.partial(jax.jit, static_argnames=("config", "execution", "num_sequences"))
def layer_gradients(x, params, config, cotangent, **options):
    """The layer's result, and the gradients of the scalar loss for the tokens and every parameter."""

    def loss(x, params):
        out = layer(x, params, config, **options)
        return scalar_loss(out, cotangent), out

    (_, out), (dx, gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, params)
    return out, {"x": dx, **gradients}


@functools.partial(jax.jit, static_argnames="config")
def dense_gradients(x, params, config, cotangent, experts, mask=None, kept=None, added=None):
    """Compute the gradients by the dense oracle."""
    mask = jnp.ones(x.shape[0], bool) if mask is None else mask

    def loss(x, params):
        output, aux_loss, z_loss = dense_layer(x, params, config, experts, mask=mask, kept=kept, added=added)
        return (output * cotangent).sum() + aux_loss + z_loss

    dx, gradients = jax.grad(loss, argnums=(0, 1))(x, params)
    return {"x": dx, **gradients}


def oracle_loss(x, params, config, cotangent, **options):
    """Compute the loss by the NumPy oracle."""
    return scalar_loss(numpy_layer.layer(x, params, config, **options), cotangent)


def finite_differences(x, params, config, cotangent, names, step=1e-6, **options):
    """Central differences of the NumPy oracle's loss for every element of the named inputs."""
    inputs = {"x": np.array(x), **{name: np.array(value) for name, value in params.items()}}
    gradients = {}
    for name in names:
        gradients[name] = np.zeros(inputs[name].shape)
        for index in np.ndindex(inputs[name].shape):
            sides = []
            for sign in (1, -1):
                moved = {**inputs, name: inputs[name].copy()}
                moved[name][index] += sign * step
                sides.append(oracle_loss(moved.pop("x"), moved, config, np.asarray(cotangent), **options))
            gradients[name][index] = (sides[0] - sides[1]) / (2 * step)
    return gradients


def assert_close(actual, expected, name="", scale=None, roundings=ROUNDINGS):
    """Equal but for rounding in the type of `actual`; `scale` is Σ|terms|, by default the largest expected value."""
    expected = np.asarray(expected, np.float64)
    eps = float(jnp.finfo(actual.dtype).eps)
    scale = max(1.0, np.abs(expected).max(initial=0.0)) if scale is None else scale
    difference = np.abs(np.asarray(actual, np.float64) - expected)
    assert actual.shape == expected.shape, f"{name}: expected shape {expected.shape}, got {actual.shape}"
    assert (difference <= roundings * eps * scale).all(), f"{name}: off by {difference.max()}, scale {scale}"


def magnitude(x, params, config, result):
    """Σ|terms| of every output: the layer on absolute values, with a polynomial above any activation."""
    x, params = np.abs(np.asarray(x, np.float64)), {k: np.abs(np.asarray(v, np.float64)) for k, v in params.items()}
    total = np.zeros(x.shape)
    for t, weights in enumerate(result.weights):
        for e, weight in weights.items():
            total[t] += abs(weight) * numpy_layer.expert(x[t], params, e, "majorant")
        if "shared_wo" in params:
            total[t] += numpy_layer.shared_expert(x[t], params, "majorant")
    return total


def assert_gradients_close(actual, expected, scale=None):
    """Every gradient, by name; none may be missing."""
    assert set(expected) <= set(actual)
    for name, value in expected.items():
        assert_close(actual[name], value, f"gradient of {name}", scale)


def assert_agrees(out, expected, *, skip=()):
    """All that a layer returned against the NumPy oracle."""
    assert_close(out.output, expected.output, "output")
    for name in SCALARS:
        if name not in skip:
            assert_close(getattr(out, name), getattr(expected, name), name)
    assert np.array_equal(out.load, expected.load)
    assert int(out.dropped) == expected.dropped
    if expected.experts is not None:
        assert np.array_equal(out.experts, expected.experts)
