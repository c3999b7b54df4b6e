"""Derivatives beyond the first gradient: reverse mode of any order is right, forward mode is refused in a sentence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import OPERATIONS
from tests.kernels import numpy_oracle
from tests.kernels.compare import FAST, IN_ANY_TYPE

WHOLE = {  # each operation's integers
    "ragged_gather": {"indices": np.array([2, 0, 2, 9]), "inverse": np.array([[1, -1], [-1, -1], [0, 2]])},
    "ragged_gather_reduce": {"indices": np.array([[3, 1], [0, -1]]), "inverse": np.array([2, 1, -1, 0])},
    "grouped_matmul": {"group_sizes": np.array([2, 0, 1])},
    "expert_ffn": {"group_sizes": np.array([2, 0, 1])},
    "attention": {"segments": np.array([[0, 0, 1, 1]])},
}
SHAPES = {
    "ragged_gather": {"x": (3, 2), "weights": (4,), "value": (4, 2)},
    "ragged_gather_reduce": {"rows": (4, 2), "weights": (2, 2), "value": (2, 2)},
    "grouped_matmul": {"lhs": (4, 2), "rhs": (3, 2, 3), "value": (4, 3)},
    "expert_ffn": {"rows": (4, 2), "wi_0": (3, 3, 2), "wi_1": (3, 3, 2), "wo": (3, 3, 2), "value": (4, 2)},
    "attention": {"query": (1, 4, 2, 2), "key": (1, 4, 1, 2), "value": (1, 4, 1, 2), "sinks": (2,)},
}
OPTIONS = {"expert_ffn": {"activation": "silu"}}


def drawn(name, seed):
    """The operation's floating arrays, and a cotangent."""
    rng, shapes = np.random.default_rng(seed), dict(SHAPES[name])
    shape = (1, 4, 2, 2) if name == "attention" else shapes.pop("value")
    return {key: rng.standard_normal(of) for key, of in shapes.items()}, rng.standard_normal(shape)


def numpy_slope(name, point, direction, along):
    """How ``Σ along · gradients`` changes in a direction, by NumPy's gradients at two points."""

    def total(step):
        (arrays, cotangent), (turned, more) = point, direction
        moved = {key: array + step * turned[key] for key, array in arrays.items()}
        found = getattr(numpy_oracle, name)(cotangent + step * more, **moved, **WHOLE[name], **OPTIONS.get(name, {}))
        return sum((found["d" + key] * along[key]).sum() for key in arrays)

    return (total(1e-5) - total(-1e-5)) / 2e-5


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_the_gradient_of_a_gradient_agrees_with_numpys_slopes(name, implementation):
    exact = (name, implementation) in IN_ANY_TYPE  # the others compute in float32, a few dozen terms of order 1
    with jax.enable_x64(exact):
        point, along = drawn(name, 0), drawn(name, 1)[0]
        options = OPTIONS.get(name, {}) | jax.tree.map(jnp.asarray, WHOLE[name])
        function = functools.partial(operation(name).function, **options, implementation=implementation)

        @jax.jit
        @jax.grad
        def second(point):
            gradients = jax.vjp(lambda arrays: function(**arrays), point[0])[1](point[1])[0]
            return sum((gradient * along[key]).sum() for key, gradient in gradients.items())

        arrays, cotangent = second(jax.tree.map(jnp.asarray, point))
        bound = {"rtol": 1e-7, "atol": 1e-8} if exact else {"rtol": 1e-5, "atol": 1e-5}
        for seed in (2, 3):
            direction = drawn(name, seed)
            slope = sum((arrays[key] * turned).sum() for key, turned in direction[0].items())
            slope += (cotangent * direction[1]).sum()
            np.testing.assert_allclose(slope, numpy_slope(name, point, direction, along), **bound)


@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode_is_refused_in_a_sentence(name):
    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), drawn(name, 0)[0])
    options = OPTIONS.get(name, {}) | jax.tree.map(jnp.asarray, WHOLE[name])

    def call(arrays):
        return operation(name).function(**arrays, **options)

    refused = pytest.raises(NotImplementedError, match=f"{name} has no forward-mode derivative .* use reverse mode")
    with refused:
        jax.jvp(call, (arrays,), (arrays,))
    with refused:
        jax.eval_shape(lambda arrays: jax.jvp(call, (arrays,), (arrays,)), arrays)
    with refused:
        jax.eval_shape(jax.hessian(lambda arrays: call(arrays).sum()), arrays)
