"""Checks of arguments, and the few array facts, that all operations share."""

import contextlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOATS = ("bfloat16", "float16", "float32", "float64")
LEAST, MOST = -(2**31), 2**31 - 1  # of int32


def accumulator(*dtypes: Any) -> jnp.dtype:
    """Return the type in which sums are kept: float32 at least, float64 if any input is."""
    return jnp.result_type(jnp.float32, *dtypes)


def matmul_precision(dtype: Any) -> lax.Precision | None:
    """Ask for full precision for float32, which TPUs and GPUs would otherwise narrow."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def full_precision(dtype: Any) -> contextlib.AbstractContextManager[Any]:
    """Set `matmul_precision` inside a ``with``, for others' kernels, whose matmuls say no precision."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def pad_rows(array: jax.Array, multiple: int) -> jax.Array:
    """Append zero rows to an array, up to a multiple."""
    spare = -array.shape[0] % multiple
    return jnp.pad(array, ((0, spare), (0, 0))) if spare else array


def pvary_like(value: jax.Array, *arrays: Any) -> jax.Array:
    """Type ``value``, a loop's first carry, in `shard_map` as varying over every mesh axis that an array does."""
    return pvary_over(value, {axis for array in arrays for axis in jax.typeof(array).manual_axis_type.varying})


def pvary_over(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Type ``value`` in `shard_map` as varying, each device with its own, over these mesh axes.

    Backward, the devices' gradients are summed there.
    """
    missing = set(axes) - jax.typeof(value).manual_axis_type.varying
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def check_array(operation: str, name: str, array: Any, dims: str, *, integer: bool = False) -> None:
    """Require an array of the rank that the legend's letters spell ("T D"), floating or integer."""
    expected = f"{operation}: expected {name} [{dims}] of {'an integer type' if integer else 'a floating type'}"
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{expected}, got {type(array).__name__}; pass a jax or numpy array")
    got = f"got {array.dtype}{list(array.shape)}"
    if len(array.shape) != len(dims.split()):
        raise ValueError(f"{expected}, {got}; reshape it to {len(dims.split())} dimension(s)")
    kind_is_right = jnp.issubdtype(array.dtype, jnp.integer) if integer else str(array.dtype) in FLOATS
    if not kind_is_right:
        wanted = "int32" if integer else "one of " + ", ".join(FLOATS)
        raise TypeError(f"{expected}, {got}; cast it to {wanted}")


def check_size(operation: str, what: str, expected: int, got: int, remedy: str) -> None:
    """Require two sizes to agree."""
    if expected != got:
        raise ValueError(f"{operation}: expected {what} to be {expected}, got {got}; {remedy}")


def check_sizes_fit(operation: str, group_sizes: Any, num_rows: int) -> None:
    """Require group sizes whose values are known now to be non-negative and to sum to at most the rows there are."""
    if isinstance(group_sizes, jax.core.Tracer):
        return
    values = np.asarray(jax.device_get(group_sizes))
    total = sum(values.tolist())  # of Python's integers, which hold any sum
    if values.size and values.min() < 0:
        raise ValueError(f"{operation}: expected group_sizes >= 0, got {int(values.min())} at {int(values.argmin())}")
    if total > num_rows:
        raise ValueError(
            f"{operation}: expected group_sizes to sum to at most the {num_rows} rows given, got {total}; "
            "count only the rows that are in the buffer"
        )


def structs(**arrays: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays that are not None by shape and dtype, for a `Call`."""
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in arrays.items() if a is not None}


def int32(array: Any) -> jax.Array:
    """Convert integers of any type to int32, in which all sizes, indices and sums of them are computed.

    What int32 cannot hold becomes its last value, or its first: no array is as long, so what is out of range stays so.
    """
    # NumPy's are cut before JAX sees them: without x64 it would wrap their values into 32 bits.
    numpy = np if isinstance(array, np.ndarray | np.generic) else jnp
    limits = jnp.iinfo(array.dtype)
    if limits.max > MOST:
        array = numpy.minimum(array, numpy.asarray(MOST, array.dtype))
    if limits.min < LEAST:
        array = numpy.maximum(array, numpy.asarray(LEAST, array.dtype))
    return jnp.asarray(array).astype(jnp.int32)


def scalar(value: Any, default: int) -> jax.Array:
    """Make an int32 scalar from an optional Python or traced integer."""
    value = default if value is None else value
    if isinstance(value, int) and not isinstance(value, bool):
        return jnp.int32(min(max(value, LEAST), MOST))
    array = value if hasattr(value, "dtype") else jnp.asarray(value)
    if array.shape != () or not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"expected an integer scalar, got {array.dtype}{list(array.shape)}; pass an int or an int32[]")
    return int32(array)
