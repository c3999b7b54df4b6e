"""An operation's call from sizes in the legend's letters, ``R=8192,I=2048,O=1408,G=16``, without its arrays."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.kernels.example import Example, routing
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.qarray import FORMATS, LHS_FORMATS, QArray
from raggedmoe.names import check_known

# How uneven the groups of `sizes=skewed` are: group g has a share like (g + 1) to the power of minus this. Of 8192 rows
# in 16 groups the largest then has about ten times the rows of the smallest.
SKEW = 0.82


class Sizes:
    """The parts of a shape's text, each to be asked for once."""

    def __init__(self, operation: str, text: str, form: str) -> None:
        self._form = f"{operation}: expected a shape like {form}"
        self._text = text
        pairs = [part.partition("=") for part in text.replace(" ", "").split(",") if part]
        if not pairs or any(not name or not equals or not value for name, equals, value in pairs):
            raise ValueError(f"{self._form}, got {text!r}")
        self._parts = {name: value for name, _, value in pairs}

    def number(self, letter: str, default: int | None = None) -> int:
        text = self._parts.pop(letter, None)
        if text is None and default is not None:
            return default
        if text is None or not re.fullmatch(r"\d+", text):
            raise ValueError(f"{self._form}, with a number for {letter}, got {self._text!r}")
        return int(text)

    def word(self, name: str, default: str) -> str:
        return self._parts.pop(name, default)

    def flag(self, name: str, default: bool) -> bool:
        text = self._parts.pop(name, str(default).lower())
        if text not in ("true", "false"):
            raise ValueError(f"{self._form}; {name} is true or false, got {text!r}")
        return text == "true"

    def end(self) -> None:
        if self._parts:
            raise ValueError(f"{self._form}; got {', '.join(self._parts)} as well, which mean nothing here")


def read_group_sizes(sizes: Sizes, num_rows: int, num_groups: int) -> np.ndarray:
    """Read the rows of each group: even, skewed, or listed as in ``sizes=202/0/1943``."""
    text = sizes.word("sizes", "even")
    if text == "even":
        bounds = np.arange(num_groups + 1) * num_rows // num_groups
    elif text == "skewed":
        share = np.arange(1, num_groups + 1) ** -SKEW
        bounds = np.concatenate([[0], np.rint(np.cumsum(share) / share.sum() * num_rows)])
    else:
        if not re.fullmatch(r"\d+(/\d+)*", text):
            raise ValueError(f"sizes: expected even, skewed, or rows of each group as 202/0/1943, got {text!r}")
        listed = np.array([int(size) for size in text.split("/")], np.int32)
        if len(listed) != num_groups or listed.sum() > num_rows:
            raise ValueError(f"sizes: expected {num_groups} groups with at most {num_rows} rows together, got {text!r}")
        return listed
    return np.diff(bounds).astype(np.int32)


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# What shares a scale in the two dimensions that are summed and kept, 0 being all of it, by the word after `scale=`.
SCALES = {"channel": (0, 1), "block": (128, 128), "block32": (32, 1), "expert": (0, 0)}


def _read_format(sizes: Sizes, word: str, dtype: str) -> tuple[str, str]:
    """Read the format of weights, ``word=int8``, and what shares a scale."""
    return sizes.word(word, dtype), sizes.word("scale", "channel")


def _weights(shape: tuple[int, ...], dtype: str, stored_as: tuple[str, str], *, sum_dim: int) -> Any:
    """Describe weights: an array, or values and scales."""
    qtype, granularity = stored_as
    if qtype == dtype:
        return _array(dtype, *shape)
    check_known("format of weights,", qtype, FORMATS)
    check_known("scale", granularity, SCALES)
    summed, kept = SCALES[granularity]
    blocks = (1, summed, kept) if sum_dim == 1 else (1, kept, summed)
    if any(block and size % block for size, block in zip(shape, blocks)):
        raise ValueError(f"scale={granularity}: expected sizes that blocks of {blocks} divide, got {list(shape)}")
    scale = _array("float32", *(size // (block or size) for size, block in zip(shape, blocks)))
    if qtype == "mxfp4":
        shape, scale = (*shape[:-1], shape[-1] // 2), _array("uint8", *scale.shape)
    return QArray(_array("uint8" if qtype == "mxfp4" else qtype, *shape), scale, None, qtype)


def _rows(shape: tuple[int, int], dtype: str, qtype: str) -> Any:
    """Describe rows: an array, or values with a scale for each row."""
    if qtype == dtype:
        return _array(dtype, *shape)
    check_known("format of rows,", qtype, LHS_FORMATS)
    return QArray(_array(qtype, *shape), _array(dtype, shape[0], 1), None, qtype)


def _grouped_matmul(sizes: Sizes, dtype: str) -> Example:
    rows, inner, out, groups = (sizes.number(letter) for letter in "RIOG")
    transpose = sizes.flag("transpose_rhs", False)
    per_group = read_group_sizes(sizes, rows, groups)
    arrays = {
        "lhs": _rows((rows, inner), dtype, sizes.word("lhs", dtype)),
        "rhs": _weights(
            (groups, out, inner) if transpose else (groups, inner, out),
            dtype,
            _read_format(sizes, "rhs", dtype),
            sum_dim=2 if transpose else 1,
        ),
        "group_sizes": per_group,
    }
    flops = 2 * int(per_group.sum()) * inner * out
    return Example(arrays=arrays, options={"transpose_rhs": transpose}, cotangent=_array(dtype, rows, out), flops=flops)


def _expert_ffn(sizes: Sizes, dtype: str) -> Example:
    rows, width, hidden, groups = (sizes.number(letter) for letter in "RDFG")
    activation = sizes.word("activation", "silu")
    check_known("activation", activation, ACTIVATIONS)
    per_group = read_group_sizes(sizes, rows, groups)
    stored_as, shape = _read_format(sizes, "weights", dtype), (groups, hidden, width)
    weights = {
        name: _weights(shape, dtype, stored_as, sum_dim=dim) for name, dim in (("wi_0", 2), ("wi_1", 2), ("wo", 1))
    }
    return Example(
        arrays={"rows": _array(dtype, rows, width), **weights, "group_sizes": per_group},
        options={"activation": activation},
        cotangent=_array(dtype, rows, width),
        flops=6 * int(per_group.sum()) * width * hidden,
    )


def _read_routing(sizes: Sizes) -> tuple[int, int, int, np.ndarray]:
    """Read T, K and D, and draw for each sorted row the slot t·K + k that it serves."""
    tokens, per_token, width = (sizes.number(letter) for letter in "TKD")
    experts = sizes.number("E", 64)
    if per_token > experts:
        raise ValueError(f"expected K <= E, got K={per_token} and E={experts}")
    chosen = routing(np.random.default_rng(0), tokens, experts, per_token)
    return tokens, per_token, width, np.argsort(chosen.reshape(-1), kind="stable").astype(np.int32)


def _ragged_gather(sizes: Sizes, dtype: str) -> Example:
    tokens, per_token, width, slots = _read_routing(sizes)
    arrays: dict[str, Any] = {"x": _array(dtype, tokens, width), "indices": slots // np.int32(per_token)}
    if sizes.flag("weights", False):
        arrays["weights"] = _array("float32", slots.size)
    if sizes.flag("inverse", True):
        arrays["inverse"] = np.argsort(slots).reshape(tokens, per_token).astype(np.int32)
    return Example(arrays=arrays, options={}, cotangent=_array(dtype, slots.size, width), flops=0)


def _ragged_gather_reduce(sizes: Sizes, dtype: str) -> Example:
    tokens, per_token, width, slots = _read_routing(sizes)
    inverse = np.argsort(slots).reshape(tokens, per_token).astype(np.int32)
    arrays: dict[str, Any] = {"rows": _array(dtype, slots.size, width), "indices": inverse}
    if sizes.flag("weights", True):
        arrays["weights"] = _array("float32", tokens, per_token)
    if sizes.flag("inverse", True):
        arrays["inverse"] = slots
    flops = 2 * slots.size * width
    return Example(arrays=arrays, options={}, cotangent=_array(dtype, tokens, width), flops=flops)


def _attention(sizes: Sizes, dtype: str) -> Example:
    batch, length, heads, key_heads, width = (sizes.number(letter) for letter in "BSNMH")
    shapes = {"query": heads, "key": key_heads, "value": key_heads}
    arrays = {name: _array(dtype, batch, length, number, width) for name, number in shapes.items()}
    flops = 2 * batch * heads * length * (length + 1) * width
    return Example(arrays=arrays, options={}, cotangent=_array(dtype, batch, length, heads, width), flops=flops)


SHAPE_FORMS: dict[str, tuple[str, Callable[[Sizes, str], Example]]] = {
    "grouped_matmul": (
        "R=8192,I=2048,O=1408,G=16[,sizes=skewed][,transpose_rhs=true][,rhs=int8[,scale=block][,lhs=int8]]",
        _grouped_matmul,
    ),
    "expert_ffn": (
        "R=8192,D=7168,F=2048,G=64[,sizes=skewed][,activation=silu][,weights=int8[,scale=block]]",
        _expert_ffn,
    ),
    "ragged_gather": ("T=4096,K=8,D=2048[,E=64][,weights=true][,inverse=false]", _ragged_gather),
    "ragged_gather_reduce": ("T=4096,K=8,D=2048[,E=64][,weights=false][,inverse=false]", _ragged_gather_reduce),
    "attention": ("B=1,S=4096,N=32,M=8,H=128", _attention),
}


def example_of_shape(operation: str, text: str, dtype: str) -> Example:
    """Make the call with those sizes. Floating arrays are shapes alone; integers have values, as they steer kernels."""
    form, make = SHAPE_FORMS[operation]
    sizes = Sizes(operation, text, form)
    example = make(sizes, dtype)
    sizes.end()
    return example
