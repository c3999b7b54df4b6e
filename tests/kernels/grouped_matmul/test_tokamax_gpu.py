"""Tokamax's grouped matmul on GPUs: compiled for one by hand (docs/log.md)."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from raggedmoe import grouped_matmul
from raggedmoe.hardware import hardware_by_name
from raggedmoe.kernels.grouped_matmul import tokamax_gpu
from raggedmoe.kernels.registry import candidates
from tests.kernels import numpy_oracle
from tests.kernels.grouped_matmul.test_masked_dot import matmul_call

H100 = hardware_by_name("h100")
needs_tokamax = pytest.mark.skipif(find_spec("tokamax") is None, reason="needs tokamax")
needs_triton = pytest.mark.skipif(
    find_spec("tokamax") is None or not tokamax_gpu.has_triton(), reason="needs a tokamax with its Triton kernel"
)


@needs_tokamax
def test_tokamax_without_its_kernel_for_gpus_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(tokamax_gpu, "has_triton", lambda: False)
    (found,) = candidates(matmul_call(64, 4, 128, 128), "tokamax", H100)
    assert "needs jax-triton and triton; pip install jax-triton" in found.reason


@needs_triton
def test_tokamax_is_offered_on_a_gpu_and_not_taken_before_somebody_has_run_it():
    (found,) = candidates(matmul_call(64, 4, 128, 128), "tokamax", H100)
    assert found.reason is None
    automatic = candidates(matmul_call(64, 4, 128, 128), "auto", H100, jax_version="0.10.2")
    by_auto = {candidate.implementation.name: candidate.reason for candidate in automatic}
    assert by_auto["tokamax"].startswith("only compiled on h100; name it, or run `raggedmoe verify`")
    assert by_auto["gmm_v2"] == "a kernel for TPUs, not for gpu"


@needs_tokamax
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_the_adapter_of_tokamax_on_a_gpu_agrees_with_numpy(transpose_rhs):
    """With its XLA program in the place of the Triton kernel: the same call, groups that start late, empty ones."""
    rng = np.random.default_rng(0)
    lhs, cotangent = rng.standard_normal((40, 24), np.float32), rng.standard_normal((40, 16), np.float32)
    rhs = rng.standard_normal((4, 16, 24) if transpose_rhs else (4, 24, 16), np.float32)
    bounds, sizes = jnp.asarray([5, 12, 12, 30, 33], jnp.int32), [5, 7, 0, 18, 3]
    expected = numpy_oracle.grouped_matmul(cotangent, lhs, rhs, sizes, group_offset=1, transpose_rhs=transpose_rhs)
    arguments = {"transpose_rhs": transpose_rhs, "out_dtype": jnp.float32, "backend": "xla"}
    np.testing.assert_allclose(tokamax_gpu.forward(lhs, rhs, bounds, **arguments), expected["value"], atol=2e-5)
    other = {**arguments, "transpose_rhs": not transpose_rhs}
    np.testing.assert_allclose(tokamax_gpu.forward(cotangent, rhs, bounds, **other), expected["dlhs"], atol=2e-5)
    first, second = (cotangent, lhs) if transpose_rhs else (lhs, cotangent)
    found = tokamax_gpu.transposed_matmul(first, second, bounds, backend="xla")
    np.testing.assert_allclose(found, expected["drhs"], atol=2e-5)
    assert not np.asarray(found)[1].any()


@needs_triton
@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot was moved:DeprecationWarning")  # in tokamax's kernel
def test_tokamax_lowers_for_a_gpu_as_a_triton_kernel_in_both_directions():
    call = functools.partial(grouped_matmul, implementation="tokamax", hardware="h100")

    def gradients(lhs, rhs, sizes):
        out, vjp = jax.vjp(lambda lhs, rhs: call(lhs, rhs, sizes), lhs, rhs)
        return vjp(out)

    arrays = [((64, 128), jnp.bfloat16), ((4, 128, 128), jnp.bfloat16), ((4,), jnp.int32)]
    device = AbstractDevice(device_kind=H100.device_kinds[0], num_cores=1, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(gradients).trace(*(jax.ShapeDtypeStruct(*each) for each in arrays))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3
