"""SparseCore programs in TPU interpret mode, on one subcore, as far as it goes.

Streams, buffers, scalars, loops and lanes are the interpreter's. What it does not have (`parallel_loop`, `pack`, copies
with a semaphore for their source, and on JAX 0.10.2 the bitcast of a vector) is replaced by a plain equivalent.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from raggedmoe.kernels.sparsecore import TILE_ROWS
from raggedmoe.kernels.sparsecore_kernel import VectorSubcore, _place, _scratch_type


@dataclass(frozen=True, kw_only=True)
class InterpretedSubcore(VectorSubcore):
    """`VectorSubcore` without what interpret mode lacks."""

    def as_float(self, words):
        return lax.bitcast_convert_type(words, jnp.float32)

    def as_words(self, floats):
        return lax.bitcast_convert_type(floats, jnp.uint32)

    def round_pairs(self, low, high):
        low, high = (
            lax.bitcast_convert_type(half.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32) for half in (low, high)
        )
        return low | (high << 16)

    def for_each_vector(self, first, last, body, *, unrolled=False):
        self.loop(0, (last - first) // self.lanes, lambda i: body(first + i * self.lanes))

    def fold_vectors(self, first, last, body, initial):
        return self.fold(0, (last - first) // self.lanes, lambda i, carry: body(first + i * self.lanes, carry), initial)

    def start_push(self, tile, out, number, chunk, layout, semaphore, slot):
        pltpu.make_async_copy(tile, _place(out, number, chunk, layout), semaphore.at[slot]).start()

    def wait_pushed(self, tile, out, layout, semaphore, slot):
        pltpu.make_async_copy(tile, _place(out, 0, 0, layout), semaphore.at[slot]).wait()

    def finish_pushes(self, tile, out, layout, semaphore):
        pass


def run_on_subcores(program, *, name, hardware, operands, num_tiles, layout, dtype, scratch, **cost):
    """Interpret the call, in the place of `sparsecore_kernel`'s function. Its words are as on the chip."""
    device = jax.sharding.AbstractDevice(device_kind=hardware.device_kinds[0], num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1)

        def body(*refs):
            program(InterpretedSubcore(number=0, count=1, lanes=hardware.sparse_core_lanes), *refs)

        words = pl.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((num_tiles * layout.tile_rows, layout.padded_width), jnp.uint32),
            mesh=mesh,
            scratch_types=[_scratch_type(buffer) for buffer in scratch],
            compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
            interpret=pltpu.InterpretParams(detect_races=True),
            name=name,
        )(*operands)
    if layout.packing == 1:
        return lax.bitcast_convert_type(words, dtype)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=1).astype(jnp.uint16)
    return lax.bitcast_convert_type(halves.reshape(num_tiles * TILE_ROWS, layout.padded_width), dtype)
