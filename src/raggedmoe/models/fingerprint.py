"""A number of a few bytes that tells one model's weights from another's, wherever they are and however split."""

import hashlib
import math

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.params import Params


def fingerprint(params: Params) -> str:
    """Compute a checksum of the names, shapes and all values of parameters: integers, so no mesh changes it."""
    digest = hashlib.sha256()
    for name in sorted(params):
        array = params[name]
        digest.update(f"{name} {tuple(array.shape)} {array.dtype} {int(_checksum(array))}\n".encode())
    return digest.hexdigest()[:16]


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Add up the bits of all elements, each times an odd number of its own, modulo 2³²."""
    bits = lax.bitcast_convert_type(array, {1: jnp.uint8, 2: jnp.uint16}.get(array.dtype.itemsize, jnp.uint32))
    place = jnp.zeros((), jnp.uint32)
    for dim in range(bits.ndim):
        stride = math.prod(bits.shape[dim + 1 :]) % 2**32
        place = place + lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride)
    return jnp.sum((bits.astype(jnp.uint32) + 1) * (2 * place + 1), dtype=jnp.uint32)
