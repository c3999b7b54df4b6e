"""What tells one model's weights from another's, wherever they are, however split, and in whatever type they are.

A fingerprint has a checksum of all values for each of two types, "float32:0123456789abcdef bfloat16:…": for that which
the weights have here, and rounded to bfloat16. So weights that are loaded in another type, narrower or wider, are known
again, and so are matrices that stay quantised: they count as what they stand for.
"""

import functools
import hashlib
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from raggedmoe.kernels.arrays import accumulator
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params

NARROW = jnp.dtype(jnp.bfloat16)
# Types of weights that a fingerprint without a type, as older versions wrote it, may be of.
EARLIER = ("bfloat16", "float32", "float16")


def fingerprint(params: Params, config: ModelConfig) -> str:
    """Compute the fingerprint of some of a model's parameters: of their names, shapes and all of their values."""
    held = jnp.dtype(config.param_dtype)
    types = [held, NARROW] if held != NARROW and _holds(held, NARROW) else [held]
    return " ".join(f"{dtype}:{_digest(params, config, dtype)}" for dtype in types)


def is_fingerprint_of(written: str, params: Params, config: ModelConfig) -> bool:
    """Tell whether a fingerprint that was written down, in this form or in an older one, is that of these parameters.

    They are compared in each of its types to which these can be rounded as if they had been loaded so.
    """
    held = jnp.dtype(config.param_dtype)
    if has_no_type(written):
        types = dict.fromkeys((held, *map(jnp.dtype, EARLIER)))
        # What was quantised was then rounded to bfloat16, whatever type was asked for.
        ways = [(dtype, through) for dtype in types for through in (None, NARROW)]
        return any(_digest(params, config, dtype, through) == written for dtype, through in ways)
    digests = {jnp.dtype(name): digest for name, _, digest in (part.partition(":") for part in written.split())}
    comparable = {dtype: digest for dtype, digest in digests.items() if _holds(held, dtype)}
    return bool(comparable) and all(_digest(params, config, dtype) == digest for dtype, digest in comparable.items())


def has_no_type(written: str) -> bool:
    """Tell whether a fingerprint is of a version that wrote one checksum, of the type that the weights then had."""
    return ":" not in written


def _holds(wide: Any, narrow: Any) -> bool:
    """Tell whether a type has every value of another one."""
    return jnp.promote_types(wide, narrow) == wide


def _digest(params: Params, config: ModelConfig, dtype: Any, through: Any = None) -> str:
    """Compute the checksum of parameters as they are in a model whose weights have that type, or first had another."""
    specs, narrower = (param_specs(replace(config, param_dtype=kind)) for kind in (dtype, through or dtype))
    digest = hashlib.sha256()
    for name in sorted(params):
        array, *types = params[name], *(jnp.dtype(which[name].dtype) for which in (narrower, specs))
        digest.update(f"{name} {tuple(array.shape)} {types[-1]} {int(_checksum(array, *types))}\n".encode())
    return digest.hexdigest()[:16]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _checksum(array: jax.Array | QArray, through: Any, dtype: Any) -> jax.Array:
    """Add up the bits of all elements in a type, each times an odd number of its own, modulo 2³²: no mesh changes it.

    They are rounded to the type ``through`` first. What is quantised is never dequantised whole, but an entry of its
    first dimension at a time.
    """
    if not isinstance(array, QArray):
        return _weighted_bits(array.astype(through).astype(dtype), jnp.uint32(0))
    if array.scale.shape[0] != array.shape[0]:  # one matrix, whose first dimension is rows that share scales
        array = QArray(array.qvalue[None], array.scale[None], None, array.qtype)

    def add(total: jax.Array, part: tuple[jax.Array, QArray]) -> tuple[jax.Array, None]:
        number, values = part
        wide = dequantize(values, accumulator(through))
        return total + _weighted_bits(wide.astype(through).astype(dtype), number), None

    numbers = jnp.arange(array.shape[0], dtype=jnp.uint32)
    return lax.scan(add, jnp.uint32(0), (numbers, array))[0]


def _weighted_bits(values: jax.Array, number: jax.Array) -> jax.Array:
    """Add up the bits of the ``number``-th of equal parts of an array."""
    bits = lax.bitcast_convert_type(values, {1: jnp.uint8, 2: jnp.uint16}.get(values.dtype.itemsize, jnp.uint32))
    place = number * jnp.uint32(math.prod(bits.shape) % 2**32)
    for dim in range(bits.ndim):
        stride = math.prod(bits.shape[dim + 1 :]) % 2**32
        place = place + lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride)
    return jnp.sum((bits.astype(jnp.uint32) + 1) * (2 * place + 1), dtype=jnp.uint32)
