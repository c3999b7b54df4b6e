"""The example calls with quantised operands: what `verify` sees of them, and what a certificate then says."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.proof import PLAIN_XLA, Certificate, Level, Proof, level_on, source_digest
from raggedmoe.kernels.qarray import FORMATS, QArray
from raggedmoe.kernels.registry import implementations
from raggedmoe.kernels.value_and_gradients import value_and_gradients
from raggedmoe.verify.check import check, runnable

OPERATIONS = ("grouped_matmul", "expert_ffn")
SMALL = [(name, spec) for name in OPERATIONS for spec in operation(name).quantized_specs if not spec.large]


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_format_has_an_example_call(name):
    specs = operation(name).quantized_specs
    assert {qtype for spec in specs for qtype in spec.formats} == set(FORMATS)
    for spec in specs:
        if not spec.large:
            stored = {array.qtype for array in spec.example("float32").arrays.values() if isinstance(array, QArray)}
            assert stored == set(spec.formats)


@pytest.mark.product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "spec"), SMALL, ids=lambda case: getattr(case, "name", case))
def test_every_implementation_is_within_the_bound_in_values_and_gradients_of_scales(name, spec, dtype):
    checks = list(check(operation(name), None, spec, dtype))
    takers = {key for key, one in implementations(name).items() if one.quantized is not None}
    assert {c.implementation for c in checks} == takers & set(runnable(operation(name), spec.example(dtype)))
    assert "xla" in {c.implementation for c in checks}
    weights = "drhs" if name == "grouped_matmul" else "dwi_0"
    assert (weights in {c.quantity for c in checks}) == ("mxfp4" not in spec.formats)
    assert [c for c in checks if not c.passed] == []
    assert {c.formats for c in checks} == {spec.formats}


@pytest.mark.parametrize("part", ["values", "scales"])
def test_what_is_read_wrongly_fails(part):
    """A value that is off by one in 127 and a scale by one in a thousand are beyond rounding."""
    right = operation("grouped_matmul").function

    def function(*args, implementation, rhs, **kwargs):
        if implementation == "bad" and part == "values":
            rhs = dataclasses.replace(rhs, qvalue=rhs.qvalue.at[:, 0].add(1))
        elif implementation == "bad":
            rhs = dataclasses.replace(rhs, scale=rhs.scale * np.float32(1.001))
        return right(*args, rhs=rhs, implementation="reference", **kwargs)

    bad = dataclasses.replace(operation("grouped_matmul"), function=function)
    spec = next(spec for spec in bad.quantized_specs if spec.name == "int8-channel")
    assert not next(c for c in check(bad, ["bad"], spec, "float32") if c.quantity == "value").passed


def test_the_gradient_of_a_stored_operand_is_that_of_its_scale():
    stored = QArray(jnp.asarray([[2, -3]], jnp.int8), jnp.asarray([[0.5]]), None, "int8")
    found = value_and_gradients(
        lambda a, b: (a.qvalue * a.scale * b).sum(), {"a": stored, "b": jnp.ones((1, 2))}, jnp.ones(())
    )
    assert found["value"] == -0.5
    np.testing.assert_array_equal(found["da"], [[-1]])
    np.testing.assert_array_equal(found["db"], [[1, -1.5]])


def test_a_proof_counts_for_the_formats_that_it_names():
    cpu, version = HARDWARE["cpu"], "0.12.0"
    plain = (Proof(level=Level.RUN, platforms=("cpu",), shown_by="a test"),)
    assert level_on("x/y", plain, cpu, version, ())[0] == Level.RUN
    assert level_on("x/y", plain, cpu, version, (), ("int8",)) == (Level.UNPROVEN, "run without int8 only")
    assert level_on("x/y", PLAIN_XLA, cpu, version, (), ("int8", "mxfp4"))[0] == Level.RUN
    certificate = Certificate(
        implementation="x/y",
        source=source_digest(),
        chip="cpu",
        jax_version=version,
        libtpu_version=None,
        cases=1,
        worst_error=0.5,
        seconds=1.0,
    )
    assert level_on("x/y", (), cpu, version, (certificate,))[0] == Level.RUN
    assert level_on("x/y", (), cpu, version, (certificate,), ("int8",))[0] == Level.UNPROVEN
    seen = dataclasses.replace(certificate, formats=("int8",))
    assert level_on("x/y", (), cpu, version, (seen,), ("int8",))[0] == Level.RUN
    assert level_on("x/y", (), cpu, version, (seen,), ("int8", "mxfp4"))[0] == Level.UNPROVEN
