"""What an expert's weights hold, NaN too, reaches the tokens that chose it and no others, in every strategy."""

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ExpertConfig, MoEExecution
from tests.moe.examples import layer_gradients, moe_config, random_params, random_tokens

pytestmark = pytest.mark.usefixtures("x64")

EXPERTS = jnp.asarray([[0, 2], [3, 0], [2, 5], [4, 3], [5, 4]], jnp.int32)  # expert 1 has no token
EMPTY, BUSY = 1, 2
CHOSE_BUSY = np.asarray(EXPERTS == BUSY).any(1)
WAYS = {
    "capacity": ({"capacity_factor": 3.0}, MoEExecution()),
    **{name: ({}, MoEExecution(moe_backend=name)) for name in ("dense", "ragged_dot", "cpu", "expert_ffn")},
}


def results(config, execution, expert, value):
    """The output and all gradients, with that value in everything that an expert has."""
    params = random_params(config)
    own = {
        name for name, spec in config.param_specs().items() if not name.startswith("router") and "expert" in spec.axes
    }
    assert own >= {"wi_0", "wi_1", "wo", "bias_wi_0", "bias_wi_1", "bias_wo"}
    if expert is not None:
        params = {name: array.at[expert].set(value) if name in own else array for name, array in params.items()}
    x, cotangent = random_tokens(config, 5), random_tokens(config, 5, seed=3)
    out, gradients = layer_gradients(x, params, config, cotangent, execution=execution, replay=EXPERTS)
    return {"output": out.output, **gradients}, own


# The kernels by themselves are tested too.
@pytest.mark.product
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way in ("cpu", "expert_ffn") else []) for way in WAYS]
)
def test_an_experts_nan_reaches_its_own_tokens_alone(way):
    options, execution = WAYS[way]
    config = moe_config(experts=ExpertConfig(biases=True), **options)
    clean, own = results(config, execution, None, None)
    for value in (np.nan, np.inf):
        idle, _ = results(config, execution, EMPTY, value)
        for name, array in idle.items():
            np.testing.assert_allclose(array, clean[name], rtol=1e-12, atol=1e-12, err_msg=f"{name}, idle expert")
        busy, _ = results(config, execution, BUSY, value)
        for name in ("output", "x"):
            others = np.asarray(busy[name])[~CHOSE_BUSY]
            np.testing.assert_allclose(others, clean[name][~CHOSE_BUSY], rtol=1e-12, atol=1e-12, err_msg=name)
            assert not np.isfinite(np.asarray(busy[name])[CHOSE_BUSY]).any(axis=1).all()
        rest = np.arange(config.num_experts) != BUSY
        for name in own:
            others = np.asarray(busy[name])[rest]
            np.testing.assert_allclose(others, clean[name][rest], rtol=1e-12, atol=1e-12, err_msg=f"{name} of others")
