"""What the tests of the layer on a mesh share: meshes, and the layer's value and gradients as global arrays."""

import functools

import jax
from jax.sharding import NamedSharding

from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.stage import TOKENS
from tests.moe.examples import layer, scalar_loss


def plan_of(*, tensor_split="expert_dim", **degrees):
    return Plan(**degrees, tensor_split=tensor_split)


def mesh_of(**degrees):
    return plan_of(**degrees).mesh()


def placed(plan, config, params, *per_token):
    """The parameters and arrays of tokens where the plan wants them."""
    mesh = plan.mesh()
    shardings = plan.shardings(mesh, config.param_specs())
    params = {name: jax.device_put(value, shardings[name]) for name, value in params.items()}
    tokens = NamedSharding(mesh, TOKENS)
    return params, *(None if array is None else jax.device_put(array, tokens) for array in per_token)


@functools.partial(jax.jit, static_argnames=("config", "execution", "mesh", "num_sequences"))
def run_on_mesh(x, params, config, mesh, **options):
    return layer(x, params, config, mesh=mesh, **options)


@functools.partial(jax.jit, static_argnames=("config", "execution", "mesh", "num_sequences"))
def gradients_on_mesh(x, params, config, mesh, cotangent, **options):
    """The layer's result, and the gradients of the scalar loss for the tokens and every parameter."""

    def loss(x, params):
        out = layer(x, params, config, mesh=mesh, **options)
        return scalar_loss(out, cotangent), out

    (_, out), (dx, gradients) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, params)
    return out, {"x": dx, **gradients}
