"""What the kernel says that it needs of VMEM: a width that is not whole lanes takes as much as the next that is."""

import jax
import jax.numpy as jnp
import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.arrays import structs
from raggedmoe.kernels.expert_ffn.pallas_tpu import Tiles, vmem_need
from raggedmoe.kernels.registry import Call


def need(width: int, hidden: int, *, num_hidden: int = 4096) -> int:
    weight = jax.ShapeDtypeStruct((8, num_hidden, width), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1024, width), jnp.bfloat16)
    call = Call(
        operation="expert_ffn", arrays=structs(rows=rows, wi_0=weight, wi_1=weight, wo=weight), options={"biases": True}
    )
    tiles = Tiles(rows=256, chunks=(128, 64), hidden=hidden, width=512, slots=2, pack=16, cores=1)
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
