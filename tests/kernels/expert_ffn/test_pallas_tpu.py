"""The fused TPU kernel of `expert_ffn` on the CPU: its tiles, and calls that cut them in every ugly way.

The interpreter runs a chip's two cores one after the other.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from raggedmoe.hardware import HARDWARE, Hardware
from raggedmoe.kernels.arrays import structs
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.expert_ffn import api, matmuls, pallas_tpu, pallas_tpu_kernel, specs
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.pallas_tpu import FfnTiles, ffn_tiles_for, vmem_need
from raggedmoe.kernels.grouped_matmul import xla
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.registry import Call, CannotRunError, Kernels, select
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients
from tests.kernels.tpu_interpreter import tpu_interpreter

OPERATION = operation("expert_ffn")
SMALL = [spec for spec in OPERATION.specs if not spec.large]
CHIP = HARDWARE["v6e"]


def with_tiles(tiles, activation, matmul):
    """The operation with this kernel and these tiles, differentiable."""
    forward = functools.partial(pallas_tpu.forward, hardware=CHIP, tiles=tiles)
    static = api._StaticPart(Kernels(forward, functools.partial(matmuls.backward, matmul)), activation)

    def function(rows, wi_0, wi_1, wo, group_sizes, biases=None):
        weights = api.ExpertWeights(wi_0, wi_1, wo, biases)
        return api._expert_ffn(static, rows, weights, group_bounds(group_sizes, wi_0.shape[0], rows.shape[0]))

    return function


def beyond_rounding(function, example):
    """The quantities that differ from the reference's by more than rounding explains."""
    reference = (*example.options.items(), ("implementation", "reference"))
    expected = jitted_value_and_gradients(OPERATION.function, reference, dict(example.arrays), example.cotangent)
    found = jitted_value_and_gradients(function, (), dict(example.arrays), example.cotangent)
    bounds = OPERATION.error_bounds(example, expected)
    wrong = []
    for quantity, value in expected.items():
        difference = np.abs(np.asarray(found[quantity], np.float64) - np.asarray(value, np.float64))
        if not (difference <= bounds[quantity]).all():  # a NaN is not either
            wrong.append(quantity)
    return wrong


# `test_interpreted` runs the implementation, whose backward pass is up to nine kernels more. Here XLA's matmuls stand
# in for those, so that there is time for every call. CI has every tenth, in one of the types by turns; the short suite
# has groups that share a pack, below.
CASES = [
    pytest.param(
        spec,
        dtype,
        id=f"{spec.name}-{dtype}",
        marks=[pytest.mark.slow if place % 10 or (place + turn) % 2 else pytest.mark.ci],
    )
    for place, spec in enumerate(SMALL)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]


@pytest.mark.product
@pytest.mark.parametrize(("spec", "dtype"), CASES)
def test_values_agree_with_the_reference_and_gradients_go_through(spec, dtype):
    example = spec.example(dtype)
    with tpu_interpreter():
        function = with_tiles(None, example.options["activation"], xla)
        assert beyond_rounding(function, example) == []


# Small enough that a few rows are several tiles, of several parts of F and of D, none of which divides its size.
SMALL_TILES = {
    "float32": FfnTiles(rows=32, chunks=(32, 16, 8), hidden=128, width=128, slots=2, pack=8, cores=1),
    "bfloat16": FfnTiles(rows=64, chunks=(32, 16), hidden=128, width=256, slots=2, pack=16, cores=2),
}
ONE_PART = {  # F is whole: results are stored at once, and three tiles are in VMEM
    "float32": FfnTiles(rows=16, chunks=(16, 8), hidden=17, width=128, slots=3, pack=8, cores=2),
    "bfloat16": FfnTiles(rows=32, chunks=(32,), hidden=17, width=128, slots=3, pack=16, cores=1),
}


def cut(total, groups, seed):
    """Sizes of groups, some of them empty, that leave some of the rows to nobody."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, total + 1, groups))
    cuts[rng.integers(1, groups)] = cuts[0]
    return tuple(int(size) for size in np.diff(np.sort(cuts), prepend=0))


def test_groups_that_share_a_pack_agree_with_the_reference():
    make = functools.partial(specs._make, sizes=(3, 1, 0, 7, 2), spare=5, width=24, hidden=17)
    with tpu_interpreter():
        function = with_tiles(ONE_PART["float32"], "silu", xla)
        assert beyond_rounding(function, make(np.random.default_rng(0), jnp.dtype("float32"))) == []


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_groups_that_share_packs_tiles_and_parts_agree_with_the_reference(dtype):
    """Groups of one to seven rows in one pack; a group of several tiles; then random ones. One compiled program."""
    function = with_tiles(SMALL_TILES[dtype], "silu", xla)
    drawn = [cut(150, 5, 0)] if dtype == "bfloat16" else [(150, 0, 0, 0, 0), cut(150, 5, 0), cut(150, 5, 1)]
    for sizes in [(3, 1, 0, 7, 2), (0, 5, 131, 0, 1), *drawn]:
        make = functools.partial(specs._make, sizes=sizes, spare=150 - sum(sizes), width=300, hidden=300)
        example = make(np.random.default_rng(0), jnp.dtype(dtype))
        with tpu_interpreter():
            assert beyond_rounding(function, example) == [], sizes


@pytest.mark.slow  # several parts, in the test above, are this and more
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_part_of_f_with_biases_agrees_with_the_reference(dtype):
    function = with_tiles(ONE_PART[dtype], "clamped_swiglu", xla)
    for sizes in [(3, 1, 0, 7, 2), (40, 0, 41, 9, 0), cut(90, 5, 0)]:
        make = functools.partial(
            specs._make, sizes=sizes, spare=90 - sum(sizes), width=24, hidden=17, biases=True,
            activation="clamped_swiglu",
        )  # fmt: skip
        example = make(np.random.default_rng(0), jnp.dtype(dtype))
        with tpu_interpreter():
            assert beyond_rounding(function, example) == [], sizes


def test_an_idle_experts_weights_reach_nothing():
    example = specs._make(np.random.default_rng(0), jnp.float32, sizes=(7, 0, 20), width=24, hidden=17, spare=6)
    arrays = dict(example.arrays)
    for name in ("wi_0", "wi_1", "wo"):
        arrays[name] = arrays[name].at[1].set(jnp.nan)
    with tpu_interpreter():
        call = functools.partial(OPERATION.function, implementation="pallas_tpu", hardware=CHIP)
        value = np.asarray(jax.jit(call)(**arrays))
    assert np.isfinite(value).all()


@pytest.mark.ci
def test_each_device_of_a_shard_map_runs_it():
    """Unchecked: interpret mode evaluates the kernel's body with the caller's axes, and refuses its constants."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    example = specs._make(np.random.default_rng(0), jnp.float32, sizes=(7, 0, 20), width=24, hidden=17, spare=6)
    arrays = dict(example.arrays)
    rows = jnp.concatenate([arrays["rows"], jnp.where(jnp.isnan(arrays["rows"]), jnp.nan, 2 * arrays["rows"])])
    del arrays["rows"]
    function = functools.partial(OPERATION.function, hardware=CHIP)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    def divided(rows, rest):
        return function(rows, **rest, implementation="pallas_tpu")

    @jax.jit
    def one_by_one(rows, rest):
        return jnp.concatenate([function(part, **rest, implementation="reference") for part in jnp.split(rows, 2)])

    with tpu_interpreter():
        found = np.asarray(jax.jit(divided)(rows, arrays))
    np.testing.assert_allclose(found, one_by_one(rows, arrays), rtol=1e-4, atol=1e-5)


def test_a_checked_shard_map_lowers_it_for_a_tpu(abstract_mesh):
    example = specs._make(np.random.default_rng(0), jnp.bfloat16, sizes=(7, 0, 20), width=24, hidden=17, spare=5)

    def divided(rows, rest):
        return OPERATION.function(rows, **rest, implementation="pallas_tpu")

    arrays = structs(**{**example.arrays, "rows": jnp.zeros((128, 24), jnp.bfloat16)})
    rows = arrays.pop("rows")
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU v6e")):
        function = jax.jit(jax.shard_map(divided, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}))
        lowered = function.trace(rows, arrays).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_lowers_for_a_tpu(activation):
    """Mosaic has not every function that the interpreter has."""
    example = specs._make(np.random.default_rng(0), jnp.float32, sizes=(7, 0), width=24, hidden=17, spare=1)
    call = functools.partial(OPERATION.function, activation=activation, implementation="pallas_tpu", hardware=CHIP)
    device = AbstractDevice(device_kind="TPU v6e", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(lambda arrays: call(**arrays)).trace(structs(**example.arrays))
        lowered = traced.lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


@pytest.mark.parametrize("seed", range(8))
def test_the_tiles_cover_every_groups_rows_and_no_idle_group(seed):
    tiles = SMALL_TILES["bfloat16"]
    sizes = np.array(cut(700, 6, seed))
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    group, first, ranges = map(np.asarray, pallas_tpu_kernel.row_tiles(jnp.asarray(bounds, jnp.int32), 704, tiles))
    expected = [
        (g, start)
        for g in range(6)
        for start in range(bounds[g] // tiles.pack * tiles.pack, bounds[g + 1], tiles.rows)
        if sizes[g]
    ]
    number = ranges[-1]
    assert list(zip(group, first))[:number] == expected
    assert first[number] == -(-bounds[-1] // tiles.pack) * tiles.pack
    # Two cores: the second starts where no pack is shared, as near to the middle as there is.
    alone = [tile for tile in range(number) if first[tile] >= bounds[group[tile]]]
    assert ranges[1] in alone
    assert abs(2 * ranges[1] - number) == min(abs(2 * tile - number) for tile in alone)


# R, G, D, F, gated, biases
MODELS = {
    "deepseek3": (16384, 64, 7168, 2048),
    "deepseek3, a shard of F": (16384, 64, 7168, 128),
    "mixtral": (16384, 8, 4096, 14336),
    "qwen3": (16384, 128, 2048, 768),
    "gpt-oss": (16384, 32, 2880, 2880),
    "olmoe": (16384, 64, 2048, 1024),
    "decoding": (64, 64, 7168, 2048),
    "odd": (37, 3, 45, 17),
}


def call_of(shape, dtype):
    num_rows, groups, width, hidden = shape
    weight = jax.ShapeDtypeStruct((groups, hidden, width), dtype)
    arrays = structs(rows=jax.ShapeDtypeStruct((num_rows, width), dtype), wi_0=weight, wi_1=weight, wo=weight)
    return Call(operation="expert_ffn", arrays=arrays, options={"activation": "silu", "biases": True})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("model", MODELS)
def test_the_models_tiles_fit_vmem(model, chip, dtype):
    call = call_of(MODELS[model], jnp.dtype(dtype))
    tiles = ffn_tiles_for(call, HARDWARE[chip])
    assert vmem_need(call, tiles, HARDWARE[chip]) <= HARDWARE[chip].vmem_bytes
    assert tiles.rows % tiles.chunks[0] == tiles.rows % tiles.pack == 0
    assert list(tiles.chunks) == sorted(tiles.chunks, reverse=True)
    assert all(chunk % tiles.pack == 0 for chunk in tiles.chunks)
    assert tiles.hidden == MODELS[model][3] or tiles.hidden % 128 == 0
    assert select(call, "auto", HARDWARE[chip]).chosen.name == "pallas_tpu"


def test_the_largest_model_computes_512_rows_at_once():
    tiles = ffn_tiles_for(call_of(MODELS["deepseek3"], jnp.dtype("bfloat16")), HARDWARE["tpu7x"])
    assert tiles == FfnTiles(rows=512, chunks=(512, 384, 256), hidden=256, width=512, slots=2, pack=16, cores=1)


@pytest.mark.parametrize(
    ("shape", "dtype", "chip", "reason"),
    [
        ((64, 4, 64, 64), "float32", CHIP.name, None),
        ((64, 4, 64, 64), "float32", "cpu", "a kernel for TPUs, not for cpu"),
        ((64, 4, 64, 64), "float16", CHIP.name, "takes bfloat16 and float32, got float16"),
        ((64, 4, 10**6, 512), "bfloat16", CHIP.name, "a tile of D 1000000 in bfloat16 does not fit the VMEM of v6e"),
    ],
)
def test_what_it_cannot_take_is_known_before_tracing(shape, dtype, chip, reason):
    call = call_of(shape, jnp.dtype(dtype))
    if reason is None:
        assert select(call, "pallas_tpu", HARDWARE[chip]).chosen.name == "pallas_tpu"
    else:
        with pytest.raises(CannotRunError, match=reason):
            select(call, "pallas_tpu", HARDWARE[chip])


def test_a_chip_without_figures_is_refused():
    unknown = Hardware(name="tpu:TPU v9", platform="tpu")
    with pytest.raises(CannotRunError, match="does not fit the VMEM of tpu:TPU v9"):
        select(call_of((64, 4, 64, 64), jnp.dtype("float32")), "pallas_tpu", unknown)


def test_the_kernels_gelu_is_that_of_the_error_function():
    """By Python's own erf; a kernel has no erfc, by which JAX writes it: 1 + erf is rounded to a part of 1."""
    gate, up = np.linspace(-6, 6, 49, dtype=np.float32), np.linspace(2, -1, 49, dtype=np.float32)
    expected = np.asarray([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in gate.astype(float)])
    bound = 4 * np.finfo(np.float32).eps * np.abs(gate)
    assert (np.abs(np.asarray(pallas_tpu_kernel._gelu(jnp.asarray(gate), None)) - expected) <= bound).all()
    found = np.asarray(pallas_tpu_kernel._gelu(jnp.asarray(gate), jnp.asarray(up)))
    assert (np.abs(found - expected * up) <= bound * np.abs(up)).all()


def need(width: int, hidden: int, *, num_hidden: int = 4096) -> int:
    weight = jax.ShapeDtypeStruct((8, num_hidden, width), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1024, width), jnp.bfloat16)
    call = Call(
        operation="expert_ffn", arrays=structs(rows=rows, wi_0=weight, wi_1=weight, wo=weight), options={"biases": True}
    )
    tiles = FfnTiles(rows=256, chunks=(128, 64), hidden=hidden, width=512, slots=2, pack=16, cores=1)
    return vmem_need(call, tiles, HARDWARE["v6e"])


@pytest.mark.parametrize(("width", "padded"), [(2817, 2944), (2880, 2944), (2944, 2944)])
def test_a_row_takes_whole_lanes(width, padded):
    assert need(width, 256) == need(padded, 256) < need(padded + 128, 256)


def test_what_is_held_is_counted_by_hand():
    rows = (2 * 256 + 16) * 1024 * 2 + 256 * 1024 * 4  # two tiles and what the next one shares; float32 sums
    weights = 2 * 3 * 256 * 1024 * 2  # two buffers of three matrices
    biases = 2 * 8 * (1024 + 2 * 256) * 4
    chunk = 128 * 1024 * 2 + 128 * 256 * (4 + 4 + 2)  # copied rows; gate, up and their product
    assert need(1024, 256) == rows + weights + biases + chunk + 2 * 2**20
    assert need(1024, 256) - need(1024, 256, num_hidden=256) == 256 * 1024 * 4  # one part of F needs no sums
