"""The fallback flags as MaxText means them: each replaces its kernel wherever it runs, forward and backward."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from raggedmoe.hardware import HARDWARE
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words

KINDS = {"v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
GATHER, REDUCE, DOTS = "ragged_gather", "ragged_gather_reduce", "ragged_row_dots"

# For each pair (ragged_gather_fallback, ragged_gather_reduce_fallback): the SparseCore kernels in the forward pass, and
# those in the backward pass. Each of the two kernels is the other's backward pass; the row-dots beside the gather there
# are the gradient of the routing weights.
EXPECTED = {
    (False, False): ({GATHER: 1, REDUCE: 1}, {GATHER: 1, REDUCE: 1, DOTS: 1}),
    (False, True): ({GATHER: 1}, {GATHER: 1, DOTS: 1}),
    (True, False): ({REDUCE: 1}, {REDUCE: 1}),
    (True, True): ({}, {}),
}


def kernels_in(jaxpr):
    """How often each SparseCore kernel is called, wherever it stands."""
    found = Counter()
    for equation in jaxpr.eqns:
        name = str(equation.params.get("name", ""))
        if name in (GATHER, REDUCE, DOTS) and equation.primitive.name != "jit":
            found[name] += 1
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += kernels_in(inner)
    return found


@pytest.mark.both_ends
@pytest.mark.parametrize("chip", ["v6e", pytest.param("tpu7x", marks=pytest.mark.ci)])
@pytest.mark.parametrize(("gather", "reduce"), EXPECTED)
def test_a_fallback_replaces_its_kernel_in_both_directions(gather, reduce, chip, caplog):
    flags = [f"ragged_gather_fallback={gather}", f"ragged_gather_reduce_fallback={reduce}"]
    config = resolve(read_words(["mixtral-tiny", "use_ragged_sort=true", *flags]), HARDWARE[chip])
    moe, execution = config.step.model.moe, replace(config.step.execution.moe, hardware=chip)
    params = {name: jax.ShapeDtypeStruct(spec.shape, jnp.float32) for name, spec in moe.param_specs().items()}
    x = jax.ShapeDtypeStruct((64, moe.model_dim), jnp.float32)

    def loss(x, params):
        return moe_route_and_compute(x, params, moe, execution).output.sum()

    device = AbstractDevice(device_kind=KINDS[chip], num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        forward = kernels_in(jax.make_jaxpr(loss)(x, params).jaxpr)
        whole = kernels_in(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, params).jaxpr)
    assert (dict(forward), dict(whole - forward)) == EXPECTED[gather, reduce]
    assert "AsyncCopyDescriptor" not in caplog.text  # which JAX logs for a copy that was made for nothing
