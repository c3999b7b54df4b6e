"""Results against the NumPy oracle, within the bound that rounding explains (see `bound.py` of an operation)."""

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import hardware_by_name
from raggedmoe.kernels.attention.bound import rounding_errors
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example
from raggedmoe.kernels.expert_ffn.bound import FFN_ROUNDINGS
from raggedmoe.kernels.native.library import why_absent
from raggedmoe.kernels.proof import Level, level_on
from raggedmoe.kernels.registry import OPERATIONS, implementations
from raggedmoe.kernels.sum_bound import SUM_ROUNDINGS
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients
from tests.kernels import numpy_oracle


def on_cpu(name: str) -> list[str]:
    """The implementations of an operation that say of themselves that the tests run them, if they are built here."""
    found = [
        i.name
        for i in implementations(name).values()
        if (i.name != "cpu_native" or why_absent() is None)
        and level_on(i.full_name, i.proofs, hardware_by_name("cpu"), JAX_VERSION, ())[0] == Level.RUN
    ]
    return sorted(found)


# Every one of those but the oracle itself, as parameters of a test.
FAST = [(name, other) for name in OPERATIONS for other in on_cpu(name) if other != "reference"]

# The kernels in C++ say that they take float32 and bfloat16 alone, and that XLA cannot divide them over a mesh.
IN_ANY_TYPE = [(name, other) for name, other in FAST if other != "cpu_native"]


def run(name: str, example: Example, implementation) -> dict[str, jax.Array]:
    """The value and all gradients, jitted: one compilation for each set of shapes, shared with those of `check`."""
    static = (*example.options.items(), ("implementation", implementation))
    return jitted_value_and_gradients(operation(name).function, static, dict(example.arrays), example.cotangent)


def oracle(name: str, example: Example, *, magnitude: bool = False) -> dict[str, np.ndarray]:
    """What NumPy says of the value and all gradients, or Σ|terms| of each."""
    options = {key: value for key, value in example.options.items() if key != "preferred_element_type"}
    cotangent = example.cotangent
    if name == "grouped_matmul":
        cotangent = cotangent.astype(example.arrays["lhs"].dtype)  # as the operation promises
    if magnitude and name == "expert_ffn":
        options["activation"] = numpy_oracle.majorant

    def exact(array):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return np.asarray(array)
        return np.abs(np.asarray(array, np.float64)) if magnitude else np.asarray(array, np.float64)

    arrays, cotangent = jax.tree.map(exact, (dict(example.arrays), cotangent))
    return getattr(numpy_oracle, name)(cotangent, **arrays, **options)


def beyond_rounding(name: str, example: Example, found: dict[str, jax.Array]) -> dict[str, float]:
    """The quantities that differ from the oracle by more than rounding, with the largest share of the bound."""
    expected = oracle(name, example)
    assert found.keys() == expected.keys()
    if name == "attention":
        errors = {quantity: np.asarray(bound, np.float64) for quantity, bound in rounding_errors(example).items()}
    else:
        errors = {quantity: SUM_ROUNDINGS * terms for quantity, terms in oracle(name, example, magnitude=True).items()}
    wrong = {}
    for quantity, array in found.items():
        out_eps = float(jnp.finfo(array.dtype).eps)
        sum_eps = 1.0 if name == "attention" else float(jnp.finfo(jnp.promote_types(array.dtype, jnp.float32)).eps)
        bound = out_eps * np.abs(expected[quantity]) + sum_eps * errors[quantity]
        if name == "expert_ffn" and example.arrays["rows"].dtype.itemsize == 2:  # hidden activations are rounded too
            hidden_eps = float(jnp.finfo(example.arrays["rows"].dtype).eps)
            bound += FFN_ROUNDINGS * hidden_eps * errors[quantity] / SUM_ROUNDINGS
        difference = np.abs(np.asarray(array, np.float64) - expected[quantity])
        share = np.divide(difference, bound, out=np.where(difference == 0, 0.0, np.inf), where=bound > 0)
        if not (share <= 1).all():  # a NaN is not either
            wrong[quantity] = float(share.max())
    return wrong


def example_of(name: str, spec_name: str, dtype: str = "float32") -> Example:
    """The example of the operation's spec that has this name."""
    return next(spec for spec in operation(name).all_specs if spec.name == spec_name).example(dtype)
