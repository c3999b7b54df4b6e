"""Training steps whose experts are quantised on the way."""

import dataclasses

import jax
import numpy as np
import pytest

from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.models.execution import ModelExecution
from raggedmoe.moe.execution import MoEExecution
from tests.train.step.small_step import BATCH, WHOLE, first_state, step_of

KERNELS = KernelChoice(grouped_matmul="xla")


def config_of(quantization, **options):
    execution = ModelExecution(moe=MoEExecution(kernels=KERNELS, quantization=quantization), **options)
    return dataclasses.replace(WHOLE, execution=execution)


@pytest.mark.slow
def test_a_step_is_the_same_with_layers_scanned_over_or_not_and_with_remat():
    config = config_of(QUANTIZATIONS["int8"])
    state, report = step_of(config)(first_state(config), BATCH)
    for options in ({"scan_layers": False}, {"remat": "full"}):
        other = config_of(QUANTIZATIONS["int8"], **options)
        again, other_report = step_of(other)(first_state(other), BATCH)
        np.testing.assert_allclose(other_report.losses.loss, report.losses.loss, rtol=1e-5)
        np.testing.assert_allclose(other_report.grad_norm, report.grad_norm, rtol=1e-3)
        for name in state.params:
            assert np.asarray(again.params[name]).dtype == np.asarray(state.params[name]).dtype


@pytest.mark.ci
def test_steps_that_round_by_chance_learn_and_repeat():
    quantization = dataclasses.replace(QUANTIZATIONS["fp8"], stochastic_rounding=True)
    config = config_of(quantization)
    step, state, losses = step_of(config), first_state(config), []
    for _ in range(6):
        state, report = step(state, BATCH)
        assert bool(report.finite)
        losses.append(float(report.losses.loss))
    assert losses[-1] < losses[0] - 0.02
    _, again = step(first_state(config), BATCH)
    assert float(again.losses.loss) == losses[0]
    gates = {name: value for name, value in state.params.items() if "router_kernel" in name}
    first = first_state(config).params
    assert all((np.asarray(value) != np.asarray(first[name])).any() for name, value in gates.items())
    assert jax.tree.all(jax.tree.map(lambda value: bool(np.isfinite(value).all()), state.params))
