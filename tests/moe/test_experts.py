"""What an expert computes of its rows."""

import pytest

from tests.moe import numpy_layer
from tests.moe.examples import assert_close, moe_config, random_params, random_tokens, run_layer

pytestmark = pytest.mark.usefixtures("x64")


def test_each_weight_is_contracted_over_its_own_axis_where_f_equals_d():
    config = moe_config(model_dim=6, expert_dim=6)
    x, params = random_tokens(config, 5), random_params(config)
    assert_close(run_layer(x, params, config).output, numpy_layer.layer(x, params, config).output)
