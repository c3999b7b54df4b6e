"""Muon, an optimizer of matrices: each update is the nearest orthogonal matrix to the momentum, by Newton–Schulz.

By Keller Jordan (2024), https://kellerjordan.github.io/posts/muon; the scale of an update is that of Liu et al. (2025),
https://arxiv.org/abs/2502.16982. The numbers are those of `optax.contrib.muon`, against which a test holds them. That
one makes one dimension of layers and experts, which no mesh can split: every device would gather all experts, and
compute all of them. Here layers and experts stay dimensions of their own, and a mesh splits those.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from raggedmoe.lora import RANK
from raggedmoe.params import ParamSpec, Specs, contracted_axes
from raggedmoe.sharding.axes import EXPERT, FSDP, ONE_DEVICE, TENSOR, LogicalMesh
from raggedmoe.sharding.rules import is_routed, partition
from raggedmoe.train.settings.sections import OptimizerConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic; singular values end between about 0.7 and 1.2
NUM_ITERATIONS = 5


class MuonState(NamedTuple):
    """The number of updates made, and the momentum of every matrix."""

    step: jax.Array
    mu: dict[str, jax.Array]


def takes_muon(name: str, spec: ParamSpec) -> bool:
    """Tell whether Muon trains a parameter: the weights of matmuls inside the model, routers among them.

    Embedding and head are tables with a row for each entry of the vocabulary, of which a batch moves few. They, norms,
    biases, sinks and the two matrices of an adapter, whose product is what counts, are AdamW's.
    """
    return spec.trained and spec.contracts is not None and not {"vocab", RANK} & set(spec.axes)


def scale_by_muon(
    config: OptimizerConfig, specs: Specs, mesh: LogicalMesh = ONE_DEVICE
) -> optax.GradientTransformation:
    """Make the transformation of gradients to orthogonal updates, of the matrices among these parameters.

    Without a learning rate and weight decay. On a mesh, each device computes its share of the layers and experts.
    """
    matrices = {name: spec for name, spec in specs.items() if takes_muon(name, spec)}
    beta = config.muon_beta

    def init(params: optax.Params) -> MuonState:
        dtype = None if config.mu_dtype == "float32" else config.mu_dtype
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=dtype))

    def update(
        gradients: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        step = optax.safe_increment(state.step)
        mu = optax.tree.update_moment(gradients, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(step))
        now = optax.tree.bias_correction(gradients, beta, step)
        nesterov = jax.tree.map(lambda ahead, now: beta * ahead + (1 - beta) * now, ahead, now)
        updates = {
            name: _orthogonal_update(value, name, matrices[name], config, mesh) if name in matrices else value
            for name, value in nesterov.items()
        }
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), mu, state.mu)
        return updates, MuonState(step, mu)

    return optax.GradientTransformation(init, update)


def _orthogonal_update(
    momentum: jax.Array, name: str, spec: ParamSpec, config: OptimizerConfig, mesh: LogicalMesh
) -> jax.Array:
    num_inputs, num_outputs = fans(name, spec)
    if config.muon_consistent_rms is None:
        scale = math.sqrt(max(1, num_outputs / num_inputs))
    else:
        scale = config.muon_consistent_rms * math.sqrt(max(num_inputs, num_outputs))
    shape = matrix_shape(name, spec)
    stored, whole = (rule(name, spec, mesh) for rule in (partition, batch_partition))
    # As it is stored first, or XLA would move gradient and momentum instead of what is made of them.
    momentum = mesh.constrain(mesh.constrain(momentum, stored), whole)
    update = scale * orthogonalize(momentum.reshape(shape), config.adam_eps).reshape(spec.shape)
    return mesh.constrain(mesh.constrain(update, whole), stored)


def orthogonalize(matrices: Float[Array, "*batch rows columns"], epsilon: float) -> Float[Array, "*batch rows columns"]:
    """Bring all singular values of each matrix near to one, by five steps of a Newton–Schulz iteration."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices  # products of the smaller size
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + epsilon)
    first, third, fifth = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x.mT if is_tall else x


def batch_dims(name: str, spec: ParamSpec) -> tuple[str, ...]:
    """Name the dimensions of a parameter along which there is one matrix after the other, all of them first ones."""
    batch = ("layer", "expert") if is_routed(name, spec) else ("layer",)
    return tuple(dim for dim in spec.axes if dim in batch)


def matrix_shape(name: str, spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of a parameter as matrices ``[… rows columns]``: one side of them is what a matmul sums over."""
    num_batch = len(batch_dims(name, spec))
    is_summed = [dim in contracted_axes(spec) for dim in spec.axes[num_batch:]]
    sizes = spec.shape[num_batch:]
    rows = math.prod(size for size, summed in zip(sizes, is_summed) if summed == is_summed[0])
    assert sorted(is_summed) == is_summed or sorted(is_summed, reverse=True) == is_summed, f"{name}: {spec}"
    return (*spec.shape[:num_batch], rows, math.prod(sizes) // rows)


def fans(name: str, spec: ParamSpec) -> tuple[int, int]:
    """Count the inputs and outputs of each matrix of a parameter."""
    rows, columns = matrix_shape(name, spec)[-2:]
    is_first = spec.axes[len(batch_dims(name, spec))] in contracted_axes(spec)
    return (rows, columns) if is_first else (columns, rows)


def batch_partition(name: str, spec: ParamSpec, mesh: LogicalMesh) -> PartitionSpec:
    """Say how a parameter's matrices are split for the iterations: each whole, by experts and by layers as they divide.

    Not over data: its ranks, which may be of several slices, compute the same.
    """
    num_batch = len(batch_dims(name, spec))
    entries: list[tuple[str, ...]] = [()] * len(spec.shape)
    for axis in (axis for axis in (EXPERT, FSDP, TENSOR) if mesh.size(axis) > 1):
        for dim in reversed(range(num_batch)):  # experts, then layers
            if spec.shape[dim] % mesh.size(*entries[dim], axis) == 0:
                entries[dim] = (*entries[dim], axis)
                break
    return PartitionSpec(*entries)
