"""What the experts compute on the rows that a strategy brought them. Written once; knows no strategy."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import accumulator, matmul_precision, varying_over
from raggedmoe.kernels.expert_ffn import api
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases
from raggedmoe.kernels.expert_ffn.matmuls import add_bias
from raggedmoe.kernels.grouped_matmul.api import group_bounds, grouped_matmul
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.mesh import TENSOR
from raggedmoe.moe.records import RouteMetadata, SharedParams
from raggedmoe.sharding.stage import BETWEEN_PROJECTIONS, PER_DEVICE, PER_SHARD, stage

Weights = Mapping[str, Any]  # by the names of `MoEConfig.param_specs`, those that there are
UpSums = tuple[Any, ...]  # of gate and up, [R F] each; None: there is no gate


@dataclass(frozen=True, kw_only=True)
class ExpertExecution:
    """How the experts are computed."""

    activation: str
    kernels: KernelChoice
    hardware: str | None
    tensor_axis: str | None = None  # the mesh axis of the tensor ranks; None: there is no mesh
    adds_over: str | None = None  # the mesh axis whose ranks' results are summed: its first alone adds the last bias


@stage(rows=PER_DEVICE, weights=PER_DEVICE, metadata=RouteMetadata.PLACEMENT, result=PER_DEVICE, checked=False)
def gmm_up(
    rows: Float[Array, "R columns"],
    weights: Weights,
    metadata: RouteMetadata,
    *,
    columns: slice,
    execution: ExpertExecution,
) -> UpSums:
    """What some columns of the width add to both up projections, as float32 sums without biases."""
    wide = accumulator(rows.dtype)
    return tuple(
        None
        if weights.get(name) is None
        else _matmul(rows, weights[name][:, :, columns], metadata, execution, transpose_rhs=True, result=wide)
        for name in ("wi_0", "wi_1")
    )


@stage(sums=PER_DEVICE, result=PER_SHARD)
def tp_reduce(sums: UpSums) -> UpSums:
    """The sums over the whole width, where each tensor rank has those over its own part."""
    return lax.psum(sums, TENSOR)


@stage(sums=BETWEEN_PROJECTIONS, biases=BETWEEN_PROJECTIONS, metadata=RouteMetadata.PLACEMENT, result=PER_DEVICE)
def activate(
    sums: UpSums,
    biases: Weights,
    metadata: RouteMetadata,
    *,
    dtype: jnp.dtype,
    execution: ExpertExecution,
) -> Float[Array, "R F"]:
    """The hidden rows, from complete sums."""
    if biases:
        bounds = _bounds(metadata, biases["bias_wi_0"].shape[0], sums[0].shape[0])
        names = ("bias_wi_0", "bias_wi_1")
        sums = tuple(s if s is None else _masked(add_bias(s, biases[b], bounds), metadata) for s, b in zip(sums, names))
    hidden = ACTIVATIONS[execution.activation](*sums).astype(dtype)
    # Backward, summed over the tensor ranks once for all width chunks.
    axis = execution.tensor_axis
    return hidden if axis is None else varying_over(hidden, (axis,))


@stage(hidden=PER_DEVICE, weights=PER_DEVICE, metadata=RouteMetadata.PLACEMENT, result=PER_DEVICE, checked=False)
def gmm_down(
    hidden: Float[Array, "R F"],
    weights: Weights,
    metadata: RouteMetadata,
    *,
    columns: slice,
    execution: ExpertExecution,
) -> Float[Array, "R columns"]:
    """Some columns of the down projection."""
    wo, bias = weights["wo"][:, :, columns], _down_bias(weights, execution)
    if bias is None:
        return _matmul(hidden, wo, metadata, execution, transpose_rhs=False, result=hidden.dtype)
    wide = accumulator(hidden.dtype)
    out = _matmul(hidden, wo, metadata, execution, transpose_rhs=False, result=wide)
    out = add_bias(out, bias[:, columns], _bounds(metadata, wo.shape[0], hidden.shape[0]))
    return _masked(out, metadata).astype(hidden.dtype)


@stage(
    rows=PER_DEVICE,
    weights=PER_DEVICE,
    up_biases=BETWEEN_PROJECTIONS,
    metadata=RouteMetadata.PLACEMENT,
    result=PER_DEVICE,
    checked=False,
)
def expert_ffn(
    rows: Float[Array, "R D"],
    weights: Weights,
    up_biases: Weights,
    metadata: RouteMetadata,
    *,
    execution: ExpertExecution,
) -> Float[Array, "R D"]:
    """Both projections and the activation in one operation, which never holds all hidden rows."""
    bias, biases = _down_bias(weights, execution), None
    if bias is not None:
        biases = ExpertBiases(up_biases["bias_wi_0"], up_biases.get("bias_wi_1"), bias)
    wi_0, wi_1, wo = weights["wi_0"], weights.get("wi_1"), weights["wo"]
    group_sizes = metadata.group_sizes
    if group_sizes is None:
        group_sizes = jnp.full(wi_0.shape[0], rows.shape[0] // wi_0.shape[0], jnp.int32)
    out = api.expert_ffn(
        _masked(rows, metadata),
        wi_0,
        wi_1,
        wo,
        group_sizes,
        biases=biases,
        activation=execution.activation,
        implementation=execution.kernels.expert_ffn,
        hardware=execution.hardware,
    )
    return _masked(out, metadata)


def shared_experts(x: Float[Array, "T D"], params: SharedParams, activation: str) -> Float[Array, "T D"]:
    """The MLP that every token goes through, times its sigmoid gate if there is one."""
    wide, dtype = accumulator(x.dtype), x.dtype
    matmul = functools.partial(jnp.matmul, precision=matmul_precision(dtype), preferred_element_type=wide)
    up = None if params.wi_1 is None else checkpoint_name(matmul(x, params.wi_1.astype(dtype).T), "mlp_up")
    gate = checkpoint_name(matmul(x, params.wi_0.astype(dtype).T), "mlp_up")
    hidden = ACTIVATIONS[activation](gate, up).astype(dtype)
    out = checkpoint_name(matmul(hidden, params.wo.astype(dtype)), "mlp_down")
    if params.gate is not None:
        out = out * jax.nn.sigmoid(matmul(x, params.gate.astype(dtype)))[:, None]
    return out.astype(dtype)


def _down_bias(weights: Weights, execution: ExpertExecution) -> Float[Array, "G D"] | None:
    bias, axis = weights.get("bias_wo"), execution.adds_over
    return bias if bias is None or axis is None else jnp.where(lax.axis_index(axis) == 0, bias, 0)


def _masked(rows: Float[Array, "R _"], metadata: RouteMetadata) -> Float[Array, "R _"]:
    """The rows that stand for a token's choice; the others are zero, in the gradient too."""
    return rows if metadata.used is None else jnp.where(metadata.used[:, None], rows, 0)


def _matmul(
    rows: Float[Array, "R _"],
    weights: Float[Array, "G _ _"],
    metadata: RouteMetadata,
    execution: ExpertExecution,
    *,
    transpose_rhs: bool,
    result: jnp.dtype,
) -> Float[Array, "R _"]:
    if metadata.group_sizes is None:
        # Masked before and after: what an expert's weights hold, NaN too, is for the rows of its own tokens alone.
        parts = _masked(rows, metadata).reshape(weights.shape[0], -1, rows.shape[1])
        contract = ((2,), (2 if transpose_rhs else 1,))
        out = lax.dot_general(
            parts,
            weights,
            (contract, ((0,), (0,))),
            precision=matmul_precision(rows.dtype),
            preferred_element_type=accumulator(rows.dtype),
        )
        return _masked(out.astype(result).reshape(rows.shape[0], out.shape[-1]), metadata)
    return grouped_matmul(
        rows,
        weights,
        metadata.group_sizes,
        transpose_rhs=transpose_rhs,
        preferred_element_type=result,
        implementation=execution.kernels.grouped_matmul,
        hardware=execution.hardware,
    )


def _bounds(metadata: RouteMetadata, num_groups: int, num_rows: int) -> Int[Array, " N"]:
    if metadata.group_sizes is None:
        return jnp.arange(num_groups + 1, dtype=jnp.int32) * (num_rows // num_groups)
    return group_bounds(metadata.group_sizes, num_groups, num_rows)
