"""Layers whose scales are made of histories: what enters these, on one device and on several, and in parts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from raggedmoe import MoE, MoEExecution
from raggedmoe.kernels.quant_config import QUANTIZATIONS
from raggedmoe.moe.amax_history import empty_histories
from raggedmoe.moe.module import AmaxHistory
from raggedmoe.sharding.axes import logical_mesh
from tests.moe.examples import layer, layer_gradients
from tests.moe.on_mesh import gradients_on_mesh, placed, plan_of
from tests.moe.test_quantized_training import CONFIG, KERNELS, arrays, execution_of, rms

LENGTH = 3
DELAYED = {"history": LENGTH}


def execution(name, **options):
    return execution_of(name, config=DELAYED, **options)


def histories_of(name):
    return empty_histories(CONFIG, replace(QUANTIZATIONS[name], **DELAYED))


def steps(x, params, cotangent, name, num=1, factors=(), **options):
    """The results of some steps, the gradients of the last, and the histories after each."""
    histories, seen = histories_of(name), []
    for number in range(num):
        factor = factors[number] if factors else 1
        out, gradients = layer_gradients(
            factor * x, {**params, **histories}, CONFIG, cotangent, execution=execution(name, **options)
        )
        histories = {name: gradients.pop(name) for name in histories}
        seen.append((out, gradients, jax.device_get(histories)))
    return seen


def assert_near(histories, expected, rtol):
    for (path, history), want in zip(jax.tree.leaves_with_path(histories), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(history, want, rtol=rtol, err_msg=jax.tree_util.keystr(path))


def test_a_history_has_the_largest_values_of_the_last_steps_newest_first():
    x, params, cotangent = arrays()
    factors = (1, 2, 4, 8)
    *_, (_, _, after) = steps(x, params, cotangent, "fp8", len(factors), factors)
    assert jax.tree.structure(after) == jax.tree.structure(histories_of("fp8"))
    up, down = after["amax_up"], after["amax_down"]
    assert len(jax.tree.leaves(after)) == 8
    largest = np.abs(np.asarray(x)).max()
    np.testing.assert_array_equal(up.rows, [8 * largest, 4 * largest, 2 * largest])
    for matrix, history in zip(("wi_0", "wi_1", "wo"), (*up.weights, *down.weights), strict=True):
        np.testing.assert_array_equal(history, [np.abs(np.asarray(params[matrix])).max()] * LENGTH)
    assert all((history > 0).all() for history in (*up.cotangents, down.rows, *down.cotangents))
    weights_alone = histories_of("int8_weights")
    assert len(weights_alone["amax_up"].weights) + len(weights_alone["amax_down"].weights) == 3
    assert len(jax.tree.leaves(weights_alone)) == 3
    assert empty_histories(CONFIG, QUANTIZATIONS["fp8"]) == {}


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_second_step_is_near_the_layer_that_quantises_nothing(name):
    x, params, cotangent = arrays()
    plain, want = layer_gradients(x, params, CONFIG, cotangent, execution=MoEExecution(kernels=KERNELS))
    _, (out, found, _) = steps(x, params, cotangent, name, 2)
    assert 1e-4 < rms(out.output - plain.output) / rms(plain.output) < 0.1
    for quantity in ("wi_0", "wi_1", "wo", "x", "router_kernel"):
        assert 1e-4 < rms(found[quantity] - want[quantity]) / rms(want[quantity]) < 0.2, quantity


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_spike_is_clipped_and_finite_and_the_histories_follow(name):
    x, params, cotangent = arrays()
    factors = (1, 1, 1000, 1000, 1000, 1, 1, 1, 1, 1, 1)
    seen = steps(x, params, cotangent, name, len(factors), factors)
    for out, gradients, _ in seen:
        assert np.isfinite(out.output).all()
        assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients.values())
    size = [rms(out.output) for out, _, _ in seen]
    assert size[2] < 20 * size[1]  # no number of its rows is larger than the largest before
    assert size[3] > 20 * size[1]  # their products are, and the rows of the down projection are clipped still
    assert (
        size[4] > 1e5 * size[1]
    )  # the whole layer is as large: both up projections, which are multiplied, a thousand times
    before, after = seen[1], seen[-1]  # by when all is forgotten
    assert rms(after[0].output - before[0].output) < 0.1 * size[1]
    np.testing.assert_array_equal(after[2]["amax_up"].rows, [np.abs(np.asarray(x)).max()] * LENGTH)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"recompute_dispatch": True}, {"token_chunks": 2}], ids=str)
def test_rows_that_are_gathered_again_or_come_in_chunks_have_the_same_scales(options):
    x, params, cotangent = arrays()
    ((_, _, known),) = steps(x, params, cotangent, "int8")
    out, want = layer_gradients(x, {**params, **known}, CONFIG, cotangent, execution=execution("int8"))
    again, found = layer_gradients(x, {**params, **known}, CONFIG, cotangent, execution=execution("int8", **options))
    np.testing.assert_allclose(again.output, out.output, rtol=1e-5, atol=1e-6)
    for quantity in ("x", "wi_0", "wi_1", "wo"):
        assert rms(found[quantity] - want[quantity]) <= 1e-5 * rms(want[quantity]), quantity
    assert_near({name: found[name] for name in known}, {name: want[name] for name in known}, 1e-6)


EIGHT = [
    ("fp8", {"expert": 4, "fsdp": 2}),
    pytest.param("int8", {"data": 4, "fsdp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.ci
@pytest.mark.both_ends
@pytest.mark.parametrize(("name", "degrees"), EIGHT)
def test_eight_devices_keep_the_histories_of_one(name, degrees):
    x, params, cotangent = arrays()
    plan, strategies = plan_of(**degrees), {"strategy": "all_to_all"} if "expert" in degrees else {}
    on_mesh, on_x, on_cotangent = placed(plan, CONFIG, params, x, cotangent)
    histories = histories_of(name)
    for out, want, after in steps(x, params, cotangent, name, 3):
        inputs = {**on_mesh, **histories}
        options = {"cotangent": on_cotangent, "execution": execution(name, **strategies)}
        found, gradients = gradients_on_mesh(on_x, inputs, CONFIG, plan.mesh(), **options)
        histories = {name: gradients[name] for name in histories}
        np.testing.assert_allclose(found.output, out.output, rtol=1e-5, atol=1e-5)
        # One scale for all devices: the weights' gradients agree too, but where a rounded sum decides between codes.
        for quantity in ("x", "router_kernel", "wi_0", "wi_1", "wo"):
            assert rms(np.asarray(gradients[quantity]) - want[quantity]) <= 1e-3 * rms(want[quantity]), quantity
        assert_near(histories, after, 1e-5)


def test_a_mesh_with_an_axis_that_no_role_has_is_refused():
    x, params, _ = arrays()
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    inputs = {**params, **histories_of("fp8")}
    with pytest.raises(ValueError, match="delayed scales: expected a mesh whose axes are all among mesh_axes"):
        layer(x, inputs, CONFIG, execution("fp8"), mesh=logical_mesh(mesh, {"fsdp": "a"}))


@pytest.mark.ci
def test_the_module_has_histories_whose_gradients_are_the_next_ones():
    x, params, _ = arrays()
    module = MoE(CONFIG, params=params, execution=execution("fp8"))
    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, AmaxHistory))
    gradients = nnx.grad(lambda module: module(x[None]).output.sum(), argnums=wanted)(module)
    after = {name: history.get_value() for name, history in gradients["amax_history"].items()}
    assert float(after["amax_up"].rows[0]) == float(jnp.abs(x).max())
    nnx.update(module, nnx.filter_state(gradients, AmaxHistory))
    assert float(module.amax_history["amax_up"].get_value().rows[0]) == float(jnp.abs(x).max())
