"""The MoE layer in an nnx model of your own, trained with optax.

python examples/layer_in_a_model.py --steps 200
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from raggedmoe import MoE, MoEConfig, RouterConfig


class Classifier(nnx.Module):
    """Points on a plane → their class: a projection, a layer of experts with a residual connection, a projection."""

    def __init__(self, dim: int, num_experts: int, num_classes: int, rngs: nnx.Rngs) -> None:
        router = RouterConfig(aux_loss_weight=1e-2)  # keeps the experts in use
        config = MoEConfig(
            num_experts=num_experts, experts_per_token=2, model_dim=dim, expert_dim=2 * dim, router=router
        )
        self.up, self.down = nnx.Linear(2, dim, rngs=rngs), nnx.Linear(dim, num_classes, rngs=rngs)
        self.experts = MoE(config, rngs=rngs)

    def __call__(self, points: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each point's logits, and the layer's own losses, already times their weights."""
        hidden = nnx.relu(self.up(points))
        out = self.experts(hidden)
        return self.down(hidden + out.output), out.aux_loss + out.z_loss


def loss_and_accuracy(model: Classifier, points: jax.Array, classes: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits, balance = model(points)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, classes).mean()
    return loss + balance, (logits.argmax(-1) == classes).mean()


@nnx.jit
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, points: jax.Array, classes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (loss, accuracy), gradients = nnx.value_and_grad(loss_and_accuracy, has_aux=True)(model, points, classes)
    optimizer.update(model, gradients)
    return loss, accuracy


def draw(key: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Draw points, whose class is the field of a chessboard that they are in."""
    points = jax.random.uniform(key, (number, 2), minval=-2, maxval=2)
    return points, jnp.floor(points).astype(int).sum(-1) % 2


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--experts", type=int, default=8)
arguments = parser.parse_args()

model = Classifier(arguments.dim, arguments.experts, num_classes=2, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
for step in range(arguments.steps):
    loss, accuracy = train_step(model, optimizer, *draw(jax.random.key(step), 512))
    if step % 50 == 0 or step == arguments.steps - 1:
        print(f"step {step}: loss {loss:.3f}, accuracy {accuracy:.1%}")
