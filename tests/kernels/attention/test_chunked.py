"""What the chunked attention promises beyond its values: memory, and what is not read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import attention
from raggedmoe.kernels.attention.chunked import CHUNK
from raggedmoe.kernels.value_and_gradients import value_and_gradients


def test_chunked_holds_a_small_part_of_the_scores_forward_and_backward():
    length, heads = 8192, 2
    query, key = (jax.ShapeDtypeStruct((1, length, n, 64), "float32") for n in (heads, 1))

    def both(query, key, value, cotangent):
        out, vjp = jax.vjp(functools.partial(attention, implementation="chunked"), query, key, value)
        return out, vjp(cotangent)

    memory = jax.jit(both).lower(query, key, key, query).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * length * heads * 4 / 20


@pytest.mark.parametrize("window", [None, 40])
def test_chunked_does_not_read_chunks_that_nobody_sees(window):
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, length, 1, 8), dtype=np.float32) for length in (CHUNK, 8 * CHUNK))
    first, last = (0 if window is None else 4 * CHUNK), 6 * CHUNK
    slot = np.arange(8 * CHUNK)[None, :, None, None]
    poisoned = jnp.where((slot >= first) & (slot < last), key, jnp.nan)
    positions = jnp.arange(5 * CHUNK, 6 * CHUNK, dtype=jnp.int32)[None]
    call = functools.partial(attention, positions=positions, window=window, implementation="chunked")
    found = value_and_gradients(call, {"query": query, "key": poisoned, "value": poisoned}, jnp.asarray(query))
    assert [name for name, array in found.items() if not np.isfinite(array).all()] == []
