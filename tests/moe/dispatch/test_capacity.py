"""What does not fit the capacity of an expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ExpertConfig
from tests.moe.examples import moe_config, random_params, random_tokens, run_layer

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.product
@pytest.mark.parametrize("selection", ["learned", "expert_choice"])
@pytest.mark.parametrize("factor", [0.2, 0.5, 6.0])
def test_every_dropped_token_is_counted(factor, selection):
    config = moe_config({"selection": selection}, capacity_factor=factor, experts=ExpertConfig(biases=True))
    # Every expert says 1 to everything: what is missing from a token's sum is what was dropped.
    params = {name: jnp.full(v.shape, float(name == "bias_wo")) for name, v in random_params(config).items()}
    params["router_kernel"] = random_params(config)["router_kernel"]
    x = random_tokens(config, 20)
    mask = jnp.arange(20) % 7 != 3
    out = run_layer(x, params, config, mask=mask)
    if selection == "expert_choice":
        missing = int(((np.asarray(out.output)[:, 0] == 0) & np.asarray(mask)).sum())
    else:
        scores = np.asarray(jax.nn.softmax(x @ params["router_kernel"].T, axis=-1))
        missing = 0
        for t in np.flatnonzero(mask):
            weights = np.sort(scores[t])[-2:] / np.sort(scores[t])[-2:].sum()
            sums = {0: [1.0], 1: list(weights), 2: [0.0]}
            missing += min(sums, key=lambda n: min(abs(float(out.output[t, 0]) - s) for s in sums[n]))
    assert int(out.dropped) == missing
    assert (missing > 0) == (factor < 1.0)
