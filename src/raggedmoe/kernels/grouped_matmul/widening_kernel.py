"""How values are widened in VMEM, and the scales of blocks spread over them, on a TensorCore.

Neighbours in a row of a matrix are neighbouring lanes, between which a vector register moves nothing by itself. What is
stored once for several of them, a byte of two values of four bits or the scale of a block, is brought to each of their
lanes by a gather along the lanes (`jnp.take_along_axis`), of 32-bit words that hold several rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.kernels.grouped_matmul.tiles import LANES

# What `unpack_4_bits` gives is so many times too small: its values are float8_e5m2 by where their bits are put, whose
# exponents are 14 more, so that no value needs an arithmetic of its own. The sums are multiplied by this. A v6e widens
# 2048 × 512 of them in 1,160 cycles, of float8_e4m3fn in 2,500, and of int8, whose signs take arithmetic, in 2,000.
UNPACKED = 2.0**14


def widen(values, dtype: str):
    """Convert values of 8 or more bits to a wider type, exactly."""
    if str(values.dtype) == dtype:
        return values
    if dtype == "float32" and values.dtype != jnp.bfloat16:
        return values.astype(jnp.float32)
    return values.astype(jnp.float32).astype(dtype)


def unpack_4_bits(codes):
    """Unpack e2m1 values, two neighbours in a byte, to float8_e5m2: 1 / `UNPACKED` times what they are.

    Four rows at a time, as the bytes of a 32-bit word. Subnormals of the one are subnormals of the other.
    """
    words = spread_lanes(pltpu.bitcast(codes, jnp.int32), 2, 0, 2 * codes.shape[1])
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    words = lax.shift_right_logical(words, (lane & 1) << 2)  # the second neighbour is in the upper half
    bits = ((words & 0x08080808) << 4) | ((words & 0x07070707) << 1)
    return pltpu.bitcast(bits, jnp.float8_e5m2)


def spread_blocks(scales, block: tuple[int, int], first: int, shape: tuple[int, int], dtype):
    """Repeat the scales of blocks for an array of that shape, which begins at a block and at column ``first``."""
    rows, columns = block
    if (
        columns > 1 and rows == 1 and dtype == jnp.bfloat16 and shape[0] % 2 == 0
    ):  # two rows in a word: half the gathers
        words = pltpu.bitcast(scales.astype(jnp.bfloat16), jnp.int32)
        return pltpu.bitcast(spread_lanes(words, columns, first, shape[1]), jnp.bfloat16)
    if columns > 1:
        scales = spread_lanes(scales, columns, first, shape[1])
    else:
        scales = scales[:, first : first + shape[1]]
    if rows > 1:
        lines = scales.shape[0], rows, shape[1]
        scales = jnp.broadcast_to(scales[:, None], lines).reshape(shape)
    return scales.astype(dtype)


def spread_lanes(array, repeats: int, first: int, width: int):
    """Repeat each column of ``[rows columns]`` of 32 bits, and return so many columns from ``first`` on."""
    pieces = []
    for start in range(first, first + width, LANES):
        lanes = min(LANES, first + width - start)
        pieces.append(_spread_register(array, repeats, start, lanes)[:, :lanes])
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def _spread_register(array, repeats: int, start: int, lanes: int):
    """Fill one vector register's lanes, so many of them: a gather is inside a register of the source."""
    registers = range(start // repeats // LANES, (start + lanes - 1) // repeats // LANES + 1)
    found: list[jax.Array] = []
    for register in registers:
        source = array[:, register * LANES : (register + 1) * LANES]
        if source.shape[1] < LANES:
            source = jnp.pad(source, ((0, 0), (0, LANES - source.shape[1])))
        place = (lax.broadcasted_iota(jnp.int32, source.shape, 1) + start) // repeats - register * LANES
        here = jnp.take_along_axis(source, jnp.clip(place, 0, LANES - 1), axis=1, mode="promise_in_bounds")
        found.append(jnp.where(place >= 0, here, found[-1]) if found else here)
    return found[-1]
