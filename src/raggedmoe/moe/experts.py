"""What the experts compute on the rows that a strategy brought them. Written once; knows no strategy."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases, expert_ffn
from raggedmoe.kernels.expert_ffn.matmuls import add_bias
from raggedmoe.kernels.grouped_matmul.api import group_bounds, grouped_matmul
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.records import SharedParams

Target = Hardware | str | None
GroupSizes = Int[Array, " G"] | None  # None: every group has R/G rows
UsedRows = Bool[Array, " R"] | None  # of such groups, the rows that count; None: all


def gmm_up(
    rows: Float[Array, "R D"],
    wi_0: Float[Array, "G F D"],
    wi_1: Float[Array, "G F D"] | None,
    group_sizes: GroupSizes,
    kernels: KernelChoice,
    hardware: Target = None,
    used: UsedRows = None,
) -> tuple[Float[Array, "R F"], Float[Array, "R F"] | None]:
    """Both up projections, as float32 sums without biases: parts of the width can be added up before the activation."""
    wide = accumulator(rows.dtype)
    gate = _matmul(rows, wi_0, group_sizes, used, kernels, hardware, transpose_rhs=True, result=wide)
    if wi_1 is None:
        return gate, None
    return gate, _matmul(rows, wi_1, group_sizes, used, kernels, hardware, transpose_rhs=True, result=wide)


def activate(
    gate: Float[Array, "R F"],
    up: Float[Array, "R F"] | None,
    gate_bias: Float[Array, "G F"] | None,
    up_bias: Float[Array, "G F"] | None,
    group_sizes: GroupSizes,
    activation: str,
    dtype: jnp.dtype,
    used: UsedRows = None,
) -> Float[Array, "R F"]:
    """The hidden rows, from complete sums."""
    if gate_bias is not None:
        bounds = _bounds(group_sizes, gate_bias.shape[0], gate.shape[0])
        gate = add_bias(gate, gate_bias, bounds)
        up = None if up is None else add_bias(up, up_bias, bounds)
        gate, up = _masked(gate, used), None if up is None else _masked(up, used)
    return ACTIVATIONS[activation](gate, up).astype(dtype)


def gmm_down(
    hidden: Float[Array, "R F"],
    wo: Float[Array, "G F D"],
    bias: Float[Array, "G D"] | None,
    group_sizes: GroupSizes,
    kernels: KernelChoice,
    hardware: Target = None,
    used: UsedRows = None,
) -> Float[Array, "R D"]:
    """The down projection."""
    if bias is None:
        return _matmul(hidden, wo, group_sizes, used, kernels, hardware, transpose_rhs=False, result=hidden.dtype)
    wide = accumulator(hidden.dtype)
    out = _matmul(hidden, wo, group_sizes, used, kernels, hardware, transpose_rhs=False, result=wide)
    out = add_bias(out, bias, _bounds(group_sizes, wo.shape[0], hidden.shape[0]))
    return _masked(out, used).astype(hidden.dtype)


def fused_experts(
    rows: Float[Array, "R D"],
    wi_0: Float[Array, "G F D"],
    wi_1: Float[Array, "G F D"] | None,
    wo: Float[Array, "G F D"],
    biases: ExpertBiases | None,
    group_sizes: GroupSizes,
    activation: str,
    kernels: KernelChoice,
    hardware: Target = None,
    used: UsedRows = None,
) -> Float[Array, "R D"]:
    """All of it in one operation, which never holds all hidden rows."""
    if group_sizes is None:
        group_sizes = jnp.full(wi_0.shape[0], rows.shape[0] // wi_0.shape[0], jnp.int32)
    out = expert_ffn(
        _masked(rows, used),
        wi_0,
        wi_1,
        wo,
        group_sizes,
        biases=biases,
        activation=activation,
        implementation=kernels.expert_ffn,
        hardware=hardware,
    )
    return _masked(out, used)


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


def _masked(rows, used):
    """The rows that count; the others are zero, in the gradient too."""
    return rows if used is None else jnp.where(used[:, None], rows, 0)


def _matmul(rows, weights, group_sizes, used, kernels, hardware, *, transpose_rhs, result):
    if group_sizes is None:
        # Masked before and after: what an expert's weights hold, NaN too, is for the rows of its own tokens alone.
        parts = _masked(rows, used).reshape(weights.shape[0], -1, rows.shape[1])
        contract = ((2,), (2 if transpose_rhs else 1,))
        out = lax.dot_general(
            parts,
            weights,
            (contract, ((0,), (0,))),
            precision=matmul_precision(rows.dtype),
            preferred_element_type=accumulator(rows.dtype),
        )
        return _masked(out.astype(result).reshape(rows.shape[0], out.shape[-1]), used)
    return grouped_matmul(
        rows,
        weights,
        group_sizes,
        transpose_rhs=transpose_rhs,
        preferred_element_type=result,
        implementation=kernels.grouped_matmul,
        hardware=hardware,
    )


def _bounds(group_sizes, num_groups, num_rows):
    if group_sizes is None:
        return jnp.arange(num_groups + 1, dtype=jnp.int32) * (num_rows // num_groups)
    return group_bounds(group_sizes, num_groups, num_rows)
