"""The histories of a layer's largest absolute values, by which delayed scales are made, and how they move on.

A layer finds them among its parameters, one array ``[history]`` for each operand that is quantised so, the newest value
first. Differentiating a layer by a history gives no gradient: it gives the history after the step.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.amax import DTYPE, Amax
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.moe.config import EXPERT_MATRICES, MoEConfig
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AXES, LogicalMesh

PREFIX = "amax_"
# Which rows each matrix multiplies.
ROWS = {"wi_0": "up_rows", "wi_1": "up_rows", "wo": "down_rows"}


def is_amax_history(name: str) -> bool:
    """Tell whether this is the name of a history among parameters, those of a layer or of a whole model."""
    return name.rpartition(".")[2].startswith(PREFIX)


def empty_histories(config: MoEConfig, quantization: QuantConfig | None) -> dict[str, Float[Array, " history"]]:
    """Make the histories of a layer before its first step, by name: all zero; none if no scale is delayed."""
    if quantization is None or quantization.history is None:
        return {}
    operands: dict[str, str] = {}
    for matrix in EXPERT_MATRICES if config.experts.gated else ("wi_0", "wo"):
        operands |= {ROWS[matrix]: "rows", matrix: "weights", f"{matrix}_cotangent": "cotangents"}
    delayed = [f"{PREFIX}{name}" for name, operand in operands.items() if quantization.is_delayed(operand)]
    return dict.fromkeys(delayed, jnp.zeros(quantization.history, DTYPE))


def largest_before(params: Params, num_calls: int, mesh: LogicalMesh) -> list[dict[str, Float[Array, " devices"]]]:
    """Return the largest value of each history among a layer's parameters, for each call one on each device.

    Differentiated, the calls' and devices' own largest values come back, of which the largest enters the history.
    """
    histories = {name: value for name, value in params.items() if is_amax_history(name)}
    if histories and mesh.mesh is not None and mesh.mesh.size != mesh.size(*AXES):
        raise ValueError(
            f"delayed scales: expected a mesh whose axes are all among mesh_axes, got {dict(mesh.mesh.shape)} and "
            f"{dict(mesh.mesh_axes)}; along another axis the largest values would be added up"
        )

    @jax.custom_vjp
    def largest(history: Float[Array, " history"]) -> Float[Array, "calls devices"]:
        return jnp.broadcast_to(history.max(), (num_calls, mesh.size(*AXES)))

    def append(history: jax.Array, current: jax.Array) -> tuple[jax.Array]:
        """Put the largest value of this step in front, and leave out the oldest."""
        return (jnp.append(current.max(), history[:-1]),)

    largest.defvjp(lambda history: (largest(history), history), append)
    of_calls = {name: largest(value) for name, value in histories.items()}
    return [{name: values[call] for name, values in of_calls.items()} for call in range(num_calls)]


def amax_of_call(weights: Params, *matrices: str) -> Amax:
    """Return what the matmuls of rows by these matrices are given on one device, which has it beside its weights."""
    values = {name.removeprefix(PREFIX): value.reshape(()) for name, value in weights.items() if is_amax_history(name)}
    return Amax(
        rows=values.get(ROWS[matrices[0]]),
        weights=tuple(values.get(matrix) for matrix in matrices),
        cotangents=tuple(values.get(f"{matrix}_cotangent") for matrix in matrices),
    )
