"""Others' TPU kernels behind our contract: what they are given, and what they refuse. `test_interpreted` runs them."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from raggedmoe import grouped_matmul
from raggedmoe.hardware import HARDWARE, MIB
from raggedmoe.kernels.grouped_matmul import external_gmm, gmm_v2, megablox, tokamax
from raggedmoe.kernels.proof import COMPILED_CHIPS, Level
from raggedmoe.kernels.registry import CannotRunError, implementations

PEERS = {module.IMPLEMENTATION.name: module for module in (megablox, tokamax, gmm_v2)}
WIDTHS = st.integers(1, 9000)
LARGE = {"num_rows": 8192, "inner": 2048, "out": 1408, "groups": 16}


@pytest.mark.parametrize(
    ("chip", "tiles"),
    [("v5e", (512, 2048, 768)), ("v5p", (512, 2048, 768)), ("v6e", (512, 2048, 1408)), ("tpu7x", (512, 2048, 1408))],
)
def test_a_matrix_stays_whole_where_vmem_holds_it(chip, tiles):
    assert external_gmm.forward_tiles(**LARGE, sizes=(2, 2), chip=HARDWARE[chip]) == tiles


@given(rows=st.integers(1, 40_000), inner=WIDTHS, out=WIDTHS, groups=st.integers(1, 256), size=st.sampled_from((2, 4)))
def test_tiles_are_whole_lanes_or_the_whole_width_and_their_buffers_fit(rows, inner, out, groups, size):
    for chip in COMPILED_CHIPS:
        hardware = HARDWARE[chip]
        forward = external_gmm.forward_tiles(rows, inner, out, groups, (size, size), hardware)
        transposed = external_gmm.transposed_tiles(rows, inner, out, groups, size, hardware)
        for tiles in (forward, transposed):
            assert tiles.rows % 16 == 0
            assert tiles.rows <= min(512, -(-rows // 16) * 16)
            assert tiles.inner == inner or (tiles.inner % 128 == 0 and tiles.inner < inner)
            assert tiles.out == out or (tiles.out % 128 == 0 and tiles.out < out)
        limit = external_gmm.SCOPED_VMEM[chip]
        buffers = forward.rows * forward.inner + forward.inner * forward.out + forward.rows * forward.out
        assert 2 * size * buffers + 4 * forward.rows * forward.out <= limit
        buffers = transposed.rows * (transposed.inner + transposed.out) + transposed.inner * transposed.out
        assert 2 * size * buffers + 4 * transposed.inner * transposed.out <= limit


def test_a_chip_that_is_not_in_the_table_gets_the_smallest_tiles():
    small, other = HARDWARE["v5e"], HARDWARE["v4"]
    assert other.name not in external_gmm.SCOPED_VMEM
    assert external_gmm.forward_tiles(**LARGE, sizes=(2, 2), chip=other) == external_gmm.forward_tiles(
        **LARGE, sizes=(2, 2), chip=small
    )


@pytest.mark.parametrize(("num_rows", "groups", "rows"), [(5, 3, 16), (300, 2, 256), (8192, 64, 128), (8192, 1, 512)])
def test_a_tile_has_about_the_rows_of_a_group(num_rows, groups, rows):
    assert external_gmm.row_tile(num_rows, groups) == rows


@pytest.mark.parametrize("chip", COMPILED_CHIPS)
def test_pallas_is_told_of_the_chip_compiled_for(chip):
    hardware = HARDWARE[chip]
    with external_gmm.compile_target(hardware):
        info = pltpu.get_tpu_info()
        assert info.num_cores == hardware.tensor_cores // hardware.devices_per_chip
        assert info.vmem_capacity_bytes >= 64 * MIB
        with external_gmm.compile_target(HARDWARE["v5e"]):  # the mesh in use has named a chip
            assert pltpu.get_tpu_info() == info


def refused(name, chip="v6e", **call):
    shape = {"lhs": (16, 8), "rhs": (2, 8, 8)}
    dtype = call.pop("dtype", jnp.bfloat16)
    function = functools.partial(grouped_matmul, implementation=name, hardware=chip, **call)
    arrays = [jax.ShapeDtypeStruct(shape[key], dtype) for key in shape]
    with pytest.raises(CannotRunError) as error:
        jax.eval_shape(function, *arrays, jax.ShapeDtypeStruct((2,), jnp.int32))
    return str(error.value)


def installed(monkeypatch, *packages):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or None)


@pytest.mark.parametrize("name", PEERS)
def test_what_none_of_them_takes_is_known_before_tracing(name, monkeypatch):
    installed(monkeypatch, "tokamax", "tokamax._src.ops.gmm_v2")
    assert "for TPUs" in refused(name, chip="cpu")
    assert "takes bfloat16 and float32, got float16" in refused(name, dtype=jnp.float16)
    assert "gives bfloat16 and float32, not float16" in refused(name, preferred_element_type=jnp.float16)


@pytest.mark.parametrize("name", ["tokamax", "gmm_v2"])
def test_without_tokamax_it_says_what_to_install(name, monkeypatch):
    installed(monkeypatch)
    assert "tokamax is not installed; pip install raggedmoe[tokamax]" in refused(name)


def test_a_tokamax_without_the_second_kernel_is_named(monkeypatch):
    installed(monkeypatch, "tokamax")
    assert "this tokamax has no second kernel; it came with tokamax 0.0.13" in refused("gmm_v2")


def test_auto_does_not_take_a_kernel_that_nobody_has_executed():
    assert {proof.level for proof in gmm_v2.IMPLEMENTATION.proofs} == {Level.COMPILED}


def test_among_others_kernels_the_order_is_that_of_their_cycles():
    """docs/grouped_matmul.md has the figures, docs/log.md those of XLA's."""
    ranks = {name: each.rank["tpu"] for name, each in implementations("grouped_matmul").items() if "tpu" in each.rank}
    by_cycles = ["pallas_tpu", "gmm_v2", "megablox", "tokamax", "xla", "reference"]
    assert sorted(ranks, key=ranks.__getitem__) == by_cycles


@pytest.mark.parametrize("bounds", [[0, 3, 3, 9], [4, 4, 10, 11]])
def test_the_rows_before_ours_are_a_group_of_their_own(bounds):
    sizes = external_gmm.shifted_group_sizes(jnp.array(bounds, jnp.int32))
    assert sizes.tolist() == [bounds[0], *(end - start for start, end in itertools.pairwise(bounds))]
    assert jnp.cumsum(sizes)[external_gmm.FIRST_GROUP - 1] == bounds[0]


@pytest.mark.parametrize("chip", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("widths", [(7168, 2048), (4096, 14336), (2880, 7168), (8192, 1024)])
def test_swapped_widths_swap_the_tiles(widths, chip):
    """``lhsᵀ rhs`` and ``rhsᵀ lhs`` are each other's transposes: they read and hold the same."""
    one = external_gmm.transposed_tiles(4096, *widths, 8, 2, HARDWARE[chip])
    other = external_gmm.transposed_tiles(4096, *widths[::-1], 8, 2, HARDWARE[chip])
    assert (one.inner, one.out) == (other.out, other.inner)
