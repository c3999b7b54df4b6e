"""Others' attention kernels behind our contract, as far as a CPU can run them."""

import dataclasses
import functools
import importlib.util

import jax
import pytest
from jax.sharding import PartitionSpec as P

from kernels.compare import beyond_rounding
from raggedmoe import attention
from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.attention import splash, tokamax
from raggedmoe.kernels.attention.operands import Operands
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import CannotRunError, recorded_selections, select

SPECS = {spec.name: spec for spec in operation("attention").specs}


PROVEN_HERE = pytest.mark.skipif(
    JAX_VERSION not in {proof.first_jax for proof in splash.PROOFS}, reason="splash is proven on other JAX versions"
)
WITH_TOKAMAX = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")


def both_directions(module, example, **how):
    """The value and the gradients, by their names."""
    operands = Operands(*(example.arrays.get(field) for field in Operands._fields))
    scale = example.options["scale"] or operands.query.shape[3] ** -0.5
    static = {"scale": scale, "window": example.options["window"], **how}

    @jax.jit
    def both(operands, cotangent):
        out, logsumexp = module.forward(operands, **static)
        return out, *module.backward(operands, out, logsumexp, cotangent, **static)

    named = zip(("value", "dquery", "dkey", "dvalue", "dsinks"), both(operands, example.cotangent))
    return {name: array for name, array in named if array is not None}


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


@WITH_TOKAMAX
@pytest.mark.parametrize("name", ["grouped-heads", "window-1"])
def test_what_tokamax_is_asked_for_agrees_with_numpy(name):
    """Its kernels need their chips; its plain XLA program shows that scale, mask and heads are handed over right."""
    example = SPECS[name].example("float32")
    assert beyond_rounding("attention", example, both_directions(tokamax, example, backend="xla")) == {}


@pytest.mark.parametrize("length", [1, 128, 129, 600, 1000, 2049, 4096])
def test_the_padded_length_is_whole_blocks_and_little_longer(length):
    padded, block = splash._sizes(length)
    assert padded % block == 0
    assert 0 <= padded - length < 128 + length / 8


def call_of(name, dtype="bfloat16", **changes):
    example = SPECS[name].example(dtype)
    with recorded_selections() as selections:
        jax.eval_shape(functools.partial(attention, **example.options), **example.arrays)
    return dataclasses.replace(selections[0].call, options={**selections[0].call.options, **changes})


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


@pytest.mark.parametrize(
    ("name", "installed", "reason"),
    [
        ("several-chunks", False, r"tokamax is not installed; pip install raggedmoe\[tokamax\]"),
        ("several-chunks", True, "takes no segments"),
        ("sinks", True, "takes no sinks"),
        ("decode", True, "takes no positions"),
    ],
)
def test_what_tokamax_cannot_take_is_known_before_tracing(monkeypatch, name, installed, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    with pytest.raises(CannotRunError, match=reason):
        select(call_of(name), "tokamax", HARDWARE["v6e"])


def chosen(mesh_call):
    with recorded_selections() as selections:
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
