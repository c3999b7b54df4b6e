"""The splash attention kernel behind our contract, as far as a CPU can run it."""

import functools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from raggedmoe import attention
from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.attention import splash
from raggedmoe.kernels.registry import CannotRunError, record_selections, select
from tests.kernels.attention.calls import SPECS, both_directions, call_of
from tests.kernels.compare import beyond_rounding

PROVEN_HERE = pytest.mark.skipif(
    JAX_VERSION not in {proof.first_jax for proof in splash.PROOFS}, reason="splash is proven on other JAX versions"
)


@pytest.mark.product
@PROVEN_HERE
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("several-chunks", "bfloat16"),
        pytest.param("grouped-heads", "bfloat16", marks=pytest.mark.ci),
        pytest.param("sinks", "float32", marks=pytest.mark.ci),
        pytest.param("several-chunks-window", "float32", marks=pytest.mark.ci),
    ],
)
def test_the_interpreted_splash_kernel_agrees_with_numpy(name, dtype):
    example = SPECS[name].example(dtype)
    assert beyond_rounding("attention", example, both_directions(splash, example, interpret=True)) == {}


@pytest.mark.parametrize("length", [1, 128, 129, 600, 1000, 2049, 4096])
def test_the_padded_length_is_whole_blocks_and_little_longer(length):
    padded, block = splash._sizes(length)
    assert padded % block == 0
    assert 0 <= padded - length < 128 + length / 8


@pytest.mark.parametrize(
    ("call", "chip", "reason"),
    [
        (call_of("several-chunks"), "cpu", "a kernel for TPUs, not for cpu"),
        (call_of("positions"), "v6e", "its mask is static: it takes no positions"),
        (call_of("several-chunks", "float16"), "v6e", "takes bfloat16 and float32, got float16"),
        (call_of("several-chunks", divided_by_xla=True), "v6e", "XLA cannot divide its kernel over a mesh"),
        (
            call_of("several-chunks", checked_shard_map=True),
            "v6e",
            "does not say over which mesh axes its results vary",
        ),
    ],
)
def test_what_splash_cannot_take_is_known_before_tracing(call, chip, reason):
    with pytest.raises(CannotRunError, match=reason):
        select(call, "splash", HARDWARE[chip])


def chosen(mesh_call):
    with record_selections() as selections:
        mesh_call()
    return {selection.chosen.name for selection in selections}


@PROVEN_HERE
def test_auto_takes_it_on_a_tpu_only_where_the_mesh_allows(abstract_mesh):
    example = SPECS["several-chunks"].example("bfloat16")
    arrays = [example.arrays[name] for name in ("query", "key", "value")]
    assert chosen(lambda: jax.eval_shape(functools.partial(attention, hardware="v6e"), *arrays)) == {"splash"}
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU v6e")):
        assert chosen(lambda: jax.eval_shape(attention, *arrays)) == {"chunked"}
        for check, name in ((True, "chunked"), (False, "splash")):
            divided = jax.shard_map(
                attention, in_specs=P(None, None, "x"), out_specs=P(None, None, "x"), check_vma=check
            )
            heads = [jax.ShapeDtypeStruct((1, 601, 4, 8), "bfloat16")] * 3
            assert chosen(functools.partial(jax.eval_shape, divided, *heads)) == {name}
