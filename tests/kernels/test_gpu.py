"""What is said of the grouped matmuls on GPUs, and tokamax's kernel there: compiled for one by hand (docs/log.md)."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels import numpy_oracle
from raggedmoe import grouped_matmul
from raggedmoe.hardware import hardware_named
from raggedmoe.kernels.grouped_matmul import masked_dot, tokamax_gpu
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Call, candidates

H100 = hardware_named("h100")
needs_tokamax = pytest.mark.skipif(find_spec("tokamax") is None, reason="needs tokamax")
needs_triton = pytest.mark.skipif(
    find_spec("tokamax") is None or not tokamax_gpu.has_triton(), reason="needs a tokamax with its Triton kernel"
)


def matmul_call(rows, groups, inner, out, direction=FORWARD, transpose_rhs=False):
    arrays = {
        "lhs": jax.ShapeDtypeStruct((rows, inner), jnp.bfloat16),
        "rhs": jax.ShapeDtypeStruct((groups, out, inner) if transpose_rhs else (groups, inner, out), jnp.bfloat16),
    }
    options = {"transpose_rhs": transpose_rhs, "group_offset": False, "out_dtype": "bfloat16"}
    return Call(operation="grouped_matmul", arrays=arrays, options=options, direction=direction)


def ffn_call(rows, groups, width, hidden, direction=FORWARD):
    arrays = {name: jax.ShapeDtypeStruct((groups, hidden, width), jnp.bfloat16) for name in ("wi_0", "wi_1", "wo")}
    arrays["rows"] = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return Call(operation="expert_ffn", arrays=arrays, options={}, direction=direction)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize(
    ("direction", "elements"),
    [(FORWARD, 8192 * 32768), (BACKWARD, 16 * 8192 * (2048 + 1408))],  # as the compiler for an H100 prints them
)
def test_the_copies_of_rows_are_those_that_the_compiler_makes(direction, elements, transpose_rhs):
    call = matmul_call(8192, 16, 2048, 1408, direction, transpose_rhs)
    assert masked_dot.copied_bytes(call) == 2 * elements
    assert "16 times the work" in masked_dot.note(call, H100)
    assert f"copied 16 times ({2 * elements / 2**30:.2f} GiB)" in masked_dot.note(call, H100)


def test_the_copies_of_an_expert_are_those_of_its_widest_matmul():
    assert masked_dot.copied_bytes(ffn_call(8, 3, 16, 48)) == 2 * 8 * 3 * 48
    assert masked_dot.copied_bytes(ffn_call(8, 3, 16, 48, BACKWARD)) == 2 * 8 * 3 * (16 + 48)


@pytest.mark.parametrize("make", [matmul_call, ffn_call])
@pytest.mark.parametrize(("rows", "refused"), [(16384, False), (32768, True)])
def test_a_copy_that_does_not_fit_the_memory_is_refused_with_its_size(make, rows, refused):
    """DeepSeek-V3's 256 experts: 56 and 112 GiB."""
    call = make(rows, 256, 7168, 2048)
    found = {c.implementation.name: c.reason for c in candidates(call, ("xla", "reference"), H100)}
    assert found["reference"] is None
    if refused:
        assert found["xla"].startswith("XLA's ragged dot copies the rows once for each group on a GPU: 112 GiB")
        assert "a h100 has 75" in found["xla"]
    else:
        assert found["xla"] is None
    assert masked_dot.why_not(call, hardware_named("tpu7x")) is None


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
    found = tokamax_gpu.transposed(first, second, bounds, backend="xla")
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
