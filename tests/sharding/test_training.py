"""Where a run's state, parameters and batches lie, on one device and on a plan's mesh."""

import math

import jax
import numpy as np
import pytest

from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding import training
from raggedmoe.sharding.axes import ONE_DEVICE
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.training import check_all_take_part, on_first_host, put
from raggedmoe.train.step.programs import state_template
from tests.train.step.small_step import WHOLE, assert_same_bits, drawn_params

SPLIT = Plan(data=2, fsdp=2, tensor=2).logical_mesh()


def test_moments_lie_where_their_parameters_do():
    template = state_template(WHOLE, SPLIT)
    split = {name: leaf.sharding.spec for name, leaf in template.params.items() if any(leaf.sharding.spec)}
    assert len(split) > len(param_specs(WHOLE.model)) // 2
    adam = template.optimizer[1][0]
    for moments in (adam.mu, adam.nu):
        assert {name: moments[name].sharding.spec for name in split} == split
    assert not any(adam.count.sharding.spec)


def test_given_parameters_are_put_in_their_places():
    params, template = drawn_params(WHOLE.model), state_template(WHOLE, SPLIT).params
    found = put(params, template)
    assert_same_bits(found, params)
    assert all(found[name].sharding == template[name].sharding for name in params)


def test_a_process_that_would_have_no_device_is_refused(monkeypatch):
    check_all_take_part(SPLIT)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for mesh, num in ((SPLIT, 8), (ONE_DEVICE, 1)):
        message = f"each of 2 processes a device, got {num} of 8 devices, none of process 1; use them all"
        with pytest.raises(ValueError, match=message):
            check_all_take_part(mesh)


class OnOtherHosts(np.ndarray):
    """An array of which this process has a part alone."""

    is_fully_addressable = False


@pytest.mark.parametrize("shape", [(10, 4), (3, 100), (10,)])
def test_a_large_parameter_is_moved_between_hosts_in_few_parts(monkeypatch, shape):
    moved, value = [], np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    monkeypatch.setattr(training, "TRANSFER_BYTES", 64)
    monkeypatch.setattr(training.multihost_utils, "process_allgather", lambda part, tiled: moved.append(part) or part)
    found = on_first_host({"wo": value.view(OnOtherHosts)})
    np.testing.assert_array_equal(found["wo"], value)
    assert len(moved) == min(shape[0], -(-value.nbytes // 64))
    assert max(part.nbytes for part in moved) <= max(64, value[0].nbytes)
