"""The histories of a layer's largest absolute values, by which delayed scales are made, and how they move on.

A layer finds them among its parameters, one array ``[history]`` for each operand that is quantised so, the newest value
first. Differentiating a layer by a history gives no gradient: it gives the history after the step.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.amax import DTYPE, Amax
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.moe.config import EXPERT_MATRICES, MoEConfig
from raggedmoe.params import Params

PREFIX = "amax_"
LargestBefore = dict[str, Float[Array, " devices"]]  # of the steps before, by the names of the operands
# Which rows each matrix multiplies.
ROWS = {"wi_0": "up_rows", "wi_1": "up_rows", "wo": "down_rows"}


def is_amax_history(name: str) -> bool:
    """Tell whether this is the name of a history among parameters, those of a layer or of a whole model."""
    return name.rpartition(".")[2].startswith(PREFIX)


def empty_histories(config: MoEConfig, quantization: QuantConfig | None) -> dict[str, Float[Array, " history"]]:
    """Make the histories of a layer before its first step, by name: all zero; none if no scale is delayed."""
    if quantization is None or quantization.history is None:
        return {}
    matrices = [name for name in EXPERT_MATRICES if name != "wi_1" or config.experts.gated]
    names = {
        "rows": list(dict.fromkeys(ROWS[matrix] for matrix in matrices)),
        "weights": matrices,
        "cotangents": [f"{matrix}_cotangent" for matrix in matrices],
    }
    zeros = jnp.zeros(quantization.history, DTYPE)
    delayed = {operand: of_operand for operand, of_operand in names.items() if quantization.is_delayed(operand)}
    return {f"{PREFIX}{name}": zeros for of_operand in delayed.values() for name in of_operand}


def largest_before(histories: Params, num_calls: int, num_devices: int) -> dict[str, Float[Array, "calls devices"]]:
    """Return the largest value of each history, a copy for each call and each device of a layer.

    Differentiated, the calls' and devices' own largest values come back, of which the largest enters the history.
    """
    return {
        name.removeprefix(PREFIX): _largest(value, num_calls, num_devices)
        for name, value in histories.items()
        if is_amax_history(name)
    }


def amax_of_call(largest: LargestBefore | None, matrices: tuple[str, ...]) -> Amax | None:
    """Return what the matmuls of rows by these matrices are given, on one device; None: no histories are kept."""
    if not largest:
        return None
    values = {name: value.reshape(()) for name, value in largest.items()}
    return Amax(
        rows=values.get(ROWS[matrices[0]]),
        weights=tuple(values.get(matrix) for matrix in matrices),
        cotangents=tuple(values.get(f"{matrix}_cotangent") for matrix in matrices),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _largest(history: Float[Array, " history"], num_calls: int, num_devices: int) -> Float[Array, "calls devices"]:
    return jnp.broadcast_to(history.max(), (num_calls, num_devices))


def _largest_forward(history: jax.Array, num_calls: int, num_devices: int) -> tuple[jax.Array, jax.Array]:
    return _largest(history, num_calls, num_devices), history


def _history_after(num_calls: int, num_devices: int, history: jax.Array, current: jax.Array) -> tuple[jax.Array]:
    """Append the largest value of this step in front, and leave out the oldest."""
    return (jnp.append(current.max(), history[:-1]),)


_largest.defvjp(_largest_forward, _history_after)
