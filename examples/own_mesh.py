"""The layer on a mesh of your own, whose axes have other names: experts are split over one, all else over the other.

    python examples/own_mesh.py            # on a CPU it makes four devices

The result and the gradients are those of one device.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # of a CPU, where it is one

import jax
import jax.numpy as jnp
from flax import nnx

from raggedmoe import MoE, MoEConfig, MoEExecution

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=128)
parser.add_argument("--experts", type=int, default=16)
parser.add_argument("--tokens", type=int, default=512, help="of each of the 8 sequences")
arguments = parser.parse_args()

config = MoEConfig(
    num_experts=arguments.experts, experts_per_token=2, model_dim=arguments.dim, expert_dim=2 * arguments.dim
)
x = jax.random.normal(jax.random.key(0), (8, arguments.tokens, arguments.dim))


def loss(layer: MoE, x: jax.Array) -> jax.Array:
    out = layer(x)
    return (out.output**2).mean() + out.aux_loss


alone = MoE(config, rngs=nnx.Rngs(0))
value, gradients = nnx.jit(nnx.value_and_grad(loss))(alone, x)

# Axes of type Auto, as XLA places what is between the layers.
mesh = jax.make_mesh(
    (2, 2), ("hosts", "chips"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2
)
split = MoE(
    config,
    execution=MoEExecution(strategy="all_to_all"),  # each token goes to where its experts are
    mesh=mesh,
    mesh_axes={"fsdp": "hosts", "expert": "chips"},  # which of the mesh's axes are ours
    rngs=nnx.Rngs(0),  # the same weights, each drawn in its place
)
print("wi_0:", split.wi_0[...].sharding.spec, "of", split.wi_0[...].shape)
value_of_mesh, gradients_of_mesh = nnx.jit(nnx.value_and_grad(loss))(split, x)

print(f"loss {value:.6f} on one device, {value_of_mesh:.6f} on {mesh.size}")
ours, theirs = jax.tree.leaves(gradients_of_mesh), jax.tree.leaves(gradients)
difference = max(float(jnp.abs(jax.device_get(a) - b).max()) for a, b in zip(ours, theirs, strict=True))
largest = max(float(jnp.abs(b).max()) for b in theirs)
print(f"largest difference of a gradient: {difference:.1e}, of up to {largest:.1e}")
