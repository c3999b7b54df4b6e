"""Where a run's state, parameters and batches lie, on one device and on a plan's mesh."""

import jax
import pytest

from raggedmoe.models.parameters import param_specs
from raggedmoe.sharding import training
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.training import check_all_take_part, train_sharding, transfer_slices
from raggedmoe.train.step.programs import ONE_DEVICE, state_template
from tests.train.step.small_step import WHOLE, assert_same_bits, drawn_params

SPLIT = train_sharding(Plan(data=2, fsdp=2, tensor=2))


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
    found = SPLIT.put(params, template)
    assert_same_bits(found, params)
    assert all(found[name].sharding == template[name].sharding for name in params)


def test_a_process_that_would_have_no_device_is_refused(monkeypatch):
    check_all_take_part(SPLIT)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for sharding, num in ((SPLIT, 8), (ONE_DEVICE, 1)):
        message = f"each of 2 processes a device, got {num} of 8 devices, none of process 1; use them all"
        with pytest.raises(ValueError, match=message):
            check_all_take_part(sharding)


def test_a_large_parameter_is_moved_between_hosts_in_few_parts(monkeypatch):
    monkeypatch.setattr(training, "TRANSFER_BYTES", 64)
    assert transfer_slices((), 4) == [slice(None)]
    assert transfer_slices((3, 100), 4) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert transfer_slices((10, 4), 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert transfer_slices((10,), 4) == [slice(0, 10)]
