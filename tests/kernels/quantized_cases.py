"""Calls with quantised operands: random codes with random scales, what comes out, and what NumPy says of it."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe import ExpertBiases
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.expert_ffn.bound import FFN_ROUNDINGS
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.sum_bound import DEQUANTIZE_ROUNDINGS, SUM_ROUNDINGS
from tests.kernels import numpy_oracle
from tests.kernels.quantized_oracle import VALUES, block_sums, scales_of, spread, values_of

# The blocks of a scale in the two dimensions after experts or rows, 0 being all of it; "exponents" in blocks of 32.
GRANULARITIES = {"channel": (1, 0), "other-channel": (0, 1), "block": (8, 16), "narrow": (1, 32), "expert": (0, 0)}
ROW_BLOCKS = {"row": 0, "row-block": 16}


@dataclass(frozen=True)
class Stored:
    """Codes and scales of an operand in NumPy."""

    codes: np.ndarray
    scale: np.ndarray  # float32, or uint8 for shared exponents
    qtype: str

    @property
    def values(self) -> np.ndarray:
        return values_of(self.codes, self.qtype)

    @property
    def exact(self) -> np.ndarray:
        return self.values * spread(scales_of(self.scale), self.values.shape)


Operand = np.ndarray | Stored | None


def draw_stored(rng, shape, qtype, scale_shape, *, exponents=False, poisoned=None, scale_dtype=np.float32, size=1.0):
    """Every finite code is as likely; what is stored is about as large as ``size``.

    What is poisoned, in the first dimension, is NaN in its scales, and in its values if the format has it.
    """
    finite = np.flatnonzero(np.isfinite(VALUES[qtype]))
    if qtype == "mxfp4":
        codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
    else:
        codes = finite[rng.integers(0, len(finite), shape)].astype(np.uint8)
    factor = size / np.abs(VALUES[qtype][finite]).mean()
    if exponents:
        scale = (127 + round(np.log2(factor)) + rng.integers(-2, 3, scale_shape)).astype(np.uint8)
    else:
        scale = (rng.uniform(0.5, 2, scale_shape) * factor).astype(scale_dtype)
    if poisoned is not None and poisoned.any():
        scale = scale.repeat(shape[0], axis=0) if scale.shape[0] == 1 else scale
        scale[poisoned] = 255 if exponents else np.nan
        if qtype.startswith("float8"):
            codes[poisoned] = 0x7F
    return Stored(codes, scale, qtype)


def _scale_shape(shape, blocks) -> tuple[int, ...]:
    return (shape[0], *(size // block if block else 1 for size, block in zip(shape[1:], blocks)))


def on_device(operand: Operand) -> Any:
    """An operand as a user gives it."""
    if not isinstance(operand, Stored):
        return None if operand is None else jnp.asarray(operand)
    if operand.qtype == "mxfp4":
        return QArray(jnp.asarray(operand.codes), jnp.asarray(operand.scale), None, "mxfp4")
    return QArray(jnp.asarray(operand.codes.view(operand.qtype)), jnp.asarray(operand.scale))


@dataclass(frozen=True)
class Call:
    """A call of an operation, whose operands may be stored."""

    operation: str
    operands: Mapping[str, Operand]  # arrays are in the type of the call
    group_sizes: np.ndarray
    options: Mapping[str, Any]
    cotangent: np.ndarray
    biases: tuple[np.ndarray | None, ...] | None = None

    @property
    def dtype(self) -> Any:
        return self.cotangent.dtype


def draw_matmul(seed, *, rhs=None, rhs_scale="channel", lhs=None, lhs_scale="row", dtype="float32", transpose=False):
    """A grouped matmul with idle groups and spare rows, all poisoned. ``rhs`` and ``lhs``: a format, or None."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    sizes, inner, out, spare = np.asarray([3, 0, 21, 9, 0]), 64, 96, 4
    row = np.arange(sizes.sum() + spare)
    shape = (len(sizes), out, inner) if transpose else (len(sizes), inner, out)
    past, idle = row >= sizes.sum(), sizes == 0
    if lhs is None:
        left: Operand = rng.standard_normal((row.size, inner)).astype(dtype)
        left[past] = np.nan
    else:
        scales = (row.size, inner // ROW_BLOCKS[lhs_scale] if ROW_BLOCKS[lhs_scale] else 1)
        left = draw_stored(rng, (row.size, inner), lhs, scales, poisoned=past, scale_dtype=dtype)
    if rhs is None:
        right: Operand = rng.standard_normal(shape).astype(dtype)
        right[idle] = np.nan
    else:
        exponents = rhs_scale == "exponents"
        blocks = GRANULARITIES["narrow" if exponents else rhs_scale]
        blocks = blocks if transpose else blocks[::-1]
        scale_dtype = jnp.promote_types(dtype, jnp.float32)
        right = draw_stored(
            rng, shape, rhs, _scale_shape(shape, blocks), exponents=exponents, poisoned=idle, scale_dtype=scale_dtype
        )
    cotangent = rng.standard_normal((row.size, out)).astype(dtype)
    cotangent[past] = np.nan
    options = {"transpose_rhs": transpose}
    return Call("grouped_matmul", {"lhs": left, "rhs": right}, sizes, options, cotangent)


def draw_ffn(seed, *, weights, scale="channel", rows=None, dtype="float32", biases=False, gated=True):
    """A call of `expert_ffn` whose three weights are stored, of idle experts and spare rows poisoned."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    sizes, width, hidden, spare = np.asarray([3, 0, 11]), 64, 32, 2
    row = np.arange(sizes.sum() + spare)
    past, idle = row >= sizes.sum(), sizes == 0
    shape, exponents = (len(sizes), hidden, width), scale == "exponents"
    operands: dict[str, Operand] = {}
    for name in ("wi_0", "wi_1", "wo"):
        blocks = GRANULARITIES["narrow" if exponents else scale]
        blocks = blocks[::-1] if name == "wo" else blocks  # the dimension that is summed over comes first there
        shapes = _scale_shape(shape, blocks)
        # The bound squares the sums of absolute values before the activation: it is tight where they are about 1.
        operands[name] = draw_stored(
            rng,
            shape,
            weights,
            shapes,
            exponents=exponents,
            poisoned=idle,
            scale_dtype=jnp.promote_types(dtype, jnp.float32),
            size=1 / width,
        )
    if not gated:
        operands["wi_1"] = None
    if rows is None:
        operands["rows"] = rng.standard_normal((row.size, width)).astype(dtype)
        operands["rows"][past] = np.nan
    else:
        operands["rows"] = draw_stored(rng, (row.size, width), rows, (row.size, 1), poisoned=past, scale_dtype=dtype)
    added = None
    if biases:
        added = tuple(rng.standard_normal((len(sizes), n)).astype(dtype) for n in (hidden, hidden, width))
        added = added if gated else (added[0], None, added[2])
    cotangent = rng.standard_normal((row.size, width)).astype(dtype)
    cotangent[past] = np.nan
    return Call("expert_ffn", operands, sizes, {"activation": "silu"}, cotangent, added)


def positive(call: Call) -> Call:
    """The call with all signs dropped: sums are as large as those of absolute values, which bounds are made of."""

    def without_signs(operand: Operand) -> Operand:
        if not isinstance(operand, Stored):
            return None if operand is None else np.abs(operand)
        if operand.qtype == "int8":
            return replace(operand, codes=np.abs(operand.codes.view(np.int8)).view(np.uint8))
        return replace(operand, codes=operand.codes & (0x77 if operand.qtype == "mxfp4" else 0x7F))

    operands = {name: without_signs(operand) for name, operand in call.operands.items()}
    return replace(call, operands=operands, cotangent=np.abs(call.cotangent))


def run(call: Call, implementation: str, hardware: str | None = None) -> dict[str, np.ndarray]:
    """The value and the gradient of every array and of every floating scale, by the names of the oracle."""
    operands = {name: on_device(operand) for name, operand in call.operands.items()}
    constant = {name: (o.qvalue, o.qtype) for name, o in operands.items() if isinstance(o, QArray)}
    floating = {name: o.scale if isinstance(o, QArray) else o for name, o in operands.items() if o is not None}
    fixed = {name: scale for name, scale in floating.items() if scale.dtype == jnp.uint8}
    floating = {name: scale for name, scale in floating.items() if name not in fixed}
    if call.biases is not None:
        floating["biases"] = ExpertBiases(*(None if bias is None else jnp.asarray(bias) for bias in call.biases))
    qtypes = tuple((name, qtype) for name, (_, qtype) in constant.items())
    codes = {name: values for name, (values, _) in constant.items()}
    options = (*call.options.items(), ("implementation", implementation), ("hardware", hardware))
    sizes, cotangent = jnp.asarray(call.group_sizes, jnp.int32), jnp.asarray(call.cotangent)
    value, gradients = _value_and_gradients(call.operation, options, qtypes, codes, fixed, floating, sizes, cotangent)
    biases = gradients.pop("biases", None)
    found = {"value": value} | {f"d{name}": gradient for name, gradient in gradients.items()}
    if biases is not None:
        found |= {f"dbiases.{name}": bias for name, bias in biases._asdict().items() if bias is not None}
    return jax.device_get(found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _value_and_gradients(name, options, qtypes, codes, fixed, floating, sizes, cotangent):
    def function(floating):
        scales, arrays = {**fixed, **floating}, dict(floating)
        for operand, qtype in qtypes:
            arrays[operand] = QArray(codes[operand], scales[operand], None, qtype)
        if name == "expert_ffn":
            arrays.setdefault("wi_1", None)
        return operation(name).function(**arrays, group_sizes=sizes, **dict(options))

    value, vjp = jax.vjp(function, floating)
    return value, *vjp(cotangent.astype(value.dtype))


def expected(call: Call, *, magnitude: bool = False) -> dict[str, np.ndarray]:
    """What NumPy says of the same quantities in float64, or Σ|terms| of each."""

    def exact(operand: Any) -> Any:
        array = operand.exact if isinstance(operand, Stored) else np.asarray(operand, np.float64)
        return np.abs(array) if magnitude else array

    arrays = {name: None if operand is None else exact(operand) for name, operand in call.operands.items()}
    options = dict(call.options)
    if magnitude and call.operation == "expert_ffn":
        options["activation"] = numpy_oracle.majorant
    if call.biases is not None:
        options["biases"] = tuple(None if bias is None else exact(bias) for bias in call.biases)
    # An operation whose idle experts hold NaN gives them no gradient: 0 in the oracle, and nothing times NaN.
    results = getattr(numpy_oracle, call.operation)(
        exact(call.cotangent), **arrays, group_sizes=call.group_sizes, **options
    )
    for name, operand in call.operands.items():
        if isinstance(operand, Stored):
            if operand.scale.dtype == np.uint8:
                del results[f"d{name}"]
                continue
            values = np.abs(operand.values) if magnitude else operand.values
            gradient = results[f"d{name}"]
            terms = np.multiply(values, gradient, out=np.zeros_like(gradient), where=gradient != 0)
            results[f"d{name}"] = block_sums(terms, operand.scale.shape)
    return results


def shares_of_bound(call: Call, found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest share of its bound that the error of each quantity uses: rounding explains up to 1."""
    want, terms = expected(call), expected(call, magnitude=True)
    assert found.keys() == want.keys()
    stored = [operand for operand in call.operands.values() if isinstance(operand, Stored)]
    accumulator = jnp.finfo(jnp.promote_types(call.dtype, jnp.float32)).eps
    shares = {}
    for quantity, array in found.items():
        of_scale = isinstance(call.operands.get(quantity[1:]), Stored)
        roundings = SUM_ROUNDINGS * (2 if of_scale else 1) + DEQUANTIZE_ROUNDINGS * len(stored)
        bound = float(jnp.finfo(array.dtype).eps) * np.abs(want[quantity]) + roundings * accumulator * terms[quantity]
        if call.operation == "expert_ffn":  # hidden rows are rounded to the type of the call
            bound += FFN_ROUNDINGS * float(jnp.finfo(call.dtype).eps) * terms[quantity]
        error = np.abs(np.asarray(array, np.float64) - want[quantity])
        share = np.divide(error, bound, out=np.where(error == 0, 0.0, np.inf), where=bound > 0)
        shares[quantity] = float("inf") if np.isnan(share).any() else float(share.max())
    return shares
