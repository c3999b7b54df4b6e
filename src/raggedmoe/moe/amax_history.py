"""The histories of a layer's largest absolute values, by which delayed scales are made, and how they move on.

A layer finds them among its parameters: for the up projections and the down projection an `Amax` with an array
``[history]`` for each operand that is quantised so, the newest value first. Differentiating a layer by a history gives
no gradient: it gives the history after the step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.amax import DTYPE, Amax, delayed_operands
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.moe.config import MoEConfig
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AXES, LogicalMesh

UP, DOWN = "amax_up", "amax_down"


def is_amax_history(name: str) -> bool:
    """Tell whether this is the name of histories among parameters, those of a layer or of a whole model."""
    return name.rpartition(".")[2] in (UP, DOWN)


def empty_histories(config: MoEConfig, quantization: QuantConfig | None) -> dict[str, Amax]:
    """Make the histories of a layer before its first step, by name: all zero; none if no scale is delayed."""
    if quantization is None or quantization.history is None:
        return {}
    up, down = (delayed_operands(quantization, None, num) for num in (1 + config.experts.gated, 1))
    return jax.tree.map(lambda _: jnp.zeros(quantization.history, DTYPE), {UP: up, DOWN: down})


def largest_before(params: Params, num_calls: int, mesh: LogicalMesh) -> list[dict[str, Any]]:
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
    of_calls = jax.tree.map(largest, histories)
    return [jax.tree.map(lambda values, call=call: values[call], of_calls) for call in range(num_calls)]
