"""What stands between the two matmuls of an expert: ``hidden = activation(gate, up)``, in float32 at least.

Gated experts give both; an ungated one has ``up=None`` and the factor is left out. Every one maps (0, 0) to 0, so that
rows outside the valid range stay zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Callable[[Float[Array, "R F"], Float[Array, "R F"] | None], Float[Array, "R F"]]

# gpt-oss: gate is clamped above, up on both sides, and up gets +1.
CLAMP, CLAMPED_SLOPE = 7.0, 1.702


def _gated_activation(function: Callable[[jax.Array], jax.Array]) -> Activation:
    def activation(gate: jax.Array, up: jax.Array | None) -> jax.Array:
        return function(gate) if up is None else function(gate) * up

    return activation


def _clamped_swiglu(gate: jax.Array, up: jax.Array | None) -> jax.Array:
    gate = jnp.minimum(gate, CLAMP)
    hidden = gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate)
    return hidden if up is None else (jnp.clip(up, -CLAMP, CLAMP) + 1) * hidden


ACTIVATIONS: dict[str, Activation] = {
    "silu": _gated_activation(jax.nn.silu),
    "gelu": _gated_activation(lambda gate: jax.nn.gelu(gate, approximate=False)),
    "gelu_tanh": _gated_activation(lambda gate: jax.nn.gelu(gate, approximate=True)),
    "relu2": _gated_activation(lambda gate: jnp.square(jax.nn.relu(gate))),
    "clamped_swiglu": _clamped_swiglu,
}
