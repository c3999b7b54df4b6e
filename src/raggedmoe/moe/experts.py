"""What the experts compute on the rows that a strategy brought them. Written once; knows no strategy."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from raggedmoe.hardware import hardware_of_device, target_hardware
from raggedmoe.kernels.arrays import accumulator, pvary_over
from raggedmoe.kernels.batched_matmul import batched_matmul
from raggedmoe.kernels.dense_matmul import dense_matmul
from raggedmoe.kernels.expert_ffn import api
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.matmuls import add_bias
from raggedmoe.kernels.grouped_matmul.api import group_bounds, grouped_matmul
from raggedmoe.kernels.grouped_matmul.quantized_matmuls import grouped_matmuls
from raggedmoe.kernels.qarray import cast_array
from raggedmoe.lora import add_grouped_adapter, dense_adapter
from raggedmoe.moe.amax_history import DOWN, UP
from raggedmoe.moe.config import strategy_name
from raggedmoe.moe.records import RouteMetadata, StageSettings
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AXES, HIDDEN_TENSOR, TENSOR, WIDTH_TENSOR
from raggedmoe.sharding.stage import BETWEEN_PROJECTIONS, PER_DEVICE, REPLICATED, TOKENS, stage

UpSums = dict[str, Float[Array, "R F"]]  # by the names of the up projections


@stage(rows=PER_DEVICE, weights=PER_DEVICE, metadata=TOKENS, key=REPLICATED, result=PER_DEVICE, checked=False)
def gmm_up(
    rows: Float[Array, "R columns"],
    weights: Params,
    metadata: RouteMetadata,
    key: jax.Array | None = None,
    *,
    settings: StageSettings,
    columns: slice,
) -> UpSums:
    """Multiply some columns of the rows by both up projections: what they add to the float32 sums, without biases."""
    weights, lora = _take_columns(weights, columns, settings), settings.config.lora
    matrices = {name: weights[name] for name in ("wi_0", "wi_1") if name in weights}
    matmul = functools.partial(_matmul, metadata, settings, dtype=accumulator(rows.dtype))
    axes, amax = settings.on_mesh.axes(*AXES), jax.tree.map(jnp.squeeze, weights.get(UP))
    quantized = settings.execution.quantization, key, axes, amax
    sums = zip(matrices, grouped_matmuls(rows, tuple(matrices.values()), matmul(transpose_rhs=True), *quantized))
    return {name: add_grouped_adapter(out, rows, weights, name, lora, matmul) for name, out in sums}


@stage(sums=PER_DEVICE, result=BETWEEN_PROJECTIONS)
def tp_reduce(sums: UpSums, *, settings: StageSettings) -> UpSums:
    """Complete the sums over the width, of which each tensor rank has those over its own part."""
    return lax.psum(sums, settings.on_mesh.axes(WIDTH_TENSOR))


@stage(sums=BETWEEN_PROJECTIONS, biases=BETWEEN_PROJECTIONS, metadata=TOKENS, result=PER_DEVICE)
def activate(
    sums: UpSums, biases: Params, metadata: RouteMetadata, *, settings: StageSettings, dtype: jnp.dtype
) -> Float[Array, "R F"]:
    """Add the biases to the complete sums of both up projections, and apply the activation."""
    sums = {name: _add_bias(added, biases.get(f"bias_{name}"), metadata) for name, added in sums.items()}
    hidden = ACTIVATIONS[settings.config.experts.activation](sums["wi_0"], sums.get("wi_1")).astype(dtype)
    # Backward, summed over the tensor ranks once for all width chunks.
    return pvary_over(hidden, settings.on_mesh.axes(TENSOR))


@stage(hidden=PER_DEVICE, weights=PER_DEVICE, metadata=TOKENS, key=REPLICATED, result=PER_DEVICE, checked=False)
def gmm_down(
    hidden: Float[Array, "R F"],
    weights: Params,
    metadata: RouteMetadata,
    key: jax.Array | None = None,
    *,
    settings: StageSettings,
    columns: slice,
) -> Float[Array, "R columns"]:
    """Multiply the hidden rows by some columns of the down projection, and add its bias."""
    weights = _take_columns(weights, columns, settings)
    bias, lora = _down_bias(weights, settings), settings.config.lora
    wide = hidden.dtype if bias is None and lora is None else accumulator(hidden.dtype)
    matmul = functools.partial(_matmul, metadata, settings, dtype=wide)
    axes, amax = settings.on_mesh.axes(*AXES), jax.tree.map(jnp.squeeze, weights.get(DOWN))
    quantized = settings.execution.quantization, key, axes, amax
    (out,) = grouped_matmuls(hidden, (weights["wo"],), matmul(transpose_rhs=False), *quantized)
    out = add_grouped_adapter(out, hidden, weights, "wo", lora, matmul)
    return _add_bias(out, bias, metadata).astype(hidden.dtype)


@stage(rows=PER_DEVICE, weights=PER_DEVICE, metadata=TOKENS, result=PER_DEVICE, checked=False)
def expert_ffn(
    rows: Float[Array, "R D"], weights: Params, metadata: RouteMetadata, *, settings: StageSettings
) -> Float[Array, "R D"]:
    """Compute both projections and the activation in one operation, which never holds all hidden rows."""
    bias = _down_bias(weights, settings)
    out = api.expert_ffn(
        _mask_rows(rows, metadata),
        weights["wi_0"],
        weights.get("wi_1"),
        weights["wo"],
        metadata.group_sizes,
        biases=None if bias is None else api.ExpertBiases(weights["bias_wi_0"], weights.get("bias_wi_1"), bias),
        activation=settings.config.experts.activation,
        implementation=settings.execution.kernel_choice.expert_ffn,
        hardware=settings.execution.hardware,
    )
    return _mask_rows(out, metadata)


def fuses_experts(x: Float[Array, "T D"], weights: Params, settings: StageSettings) -> bool:
    """Tell whether the experts are one `expert_ffn`: if the backend says so, or for "auto" where it is the fastest."""
    config, execution = settings.config, settings.execution
    between = config.lora or execution.quantization or execution.width_chunks > 1 or settings.on_mesh.axes(WIDTH_TENSOR)
    named = execution.moe_backend != "auto" or execution.kernel_choice.grouped_matmul != "auto"
    if between or named or strategy_name(config, execution) in ("capacity", "dense"):
        return execution.backend.fused
    mesh = settings.on_mesh.mesh
    device = None if mesh is None else mesh.abstract_mesh.abstract_device
    of_mesh = None if device is None else hardware_of_device(device.platform, device.device_kind)
    hardware = target_hardware(execution.hardware or of_mesh, (x,))
    return api.is_faster_than_split(x, weights["wi_0"], config.experts.activation, "bias_wo" in weights, hardware)


def shared_experts(x: Float[Array, "T D"], params: Params, activation: str) -> Float[Array, "T D"]:
    """Compute the MLP of every token, by ``wi_0, wi_1, wo``, times the sigmoid of its ``gate`` if there is one."""
    wide, dtype = accumulator(x.dtype), x.dtype

    def multiply(rows: Float[Array, "T I"], name: str, kept: str) -> Float[Array, "T O"]:
        weight, added = cast_array(params[name], dtype), dense_adapter(rows, params, name)
        sums = dense_matmul(rows, weight, transpose_rhs=name != "wo", out_dtype=wide)
        return checkpoint_name(sums if added is None else sums + added, kept)

    up = multiply(x, "wi_1", "mlp_up") if "wi_1" in params else None
    hidden = ACTIVATIONS[activation](multiply(x, "wi_0", "mlp_up"), up).astype(dtype)
    out = multiply(hidden, "wo", "mlp_down")
    if "gate" in params:
        gate = dense_matmul(x, params["gate"].astype(dtype)[:, None], transpose_rhs=False, out_dtype=wide)
        out = out * jax.nn.sigmoid(gate)
    return out.astype(dtype)


def _take_columns(weights: Params, columns: slice, settings: StageSettings) -> Params:
    """Take some columns of the model's width, which is last, of all weights that have it."""
    widths = [name for name, spec in settings.config.param_specs().items() if spec.axes[-1] == "model_dim"]
    taken = {name: jax.tree.map(lambda part: part[..., columns], weights[name]) for name in widths if name in weights}
    return {**weights, **taken}


def _down_bias(weights: Params, settings: StageSettings) -> Float[Array, "G D"] | None:
    """Return the bias of the down projection; of ranks whose results are summed, the first alone adds it."""
    bias, axes = weights.get("bias_wo"), settings.on_mesh.axes(HIDDEN_TENSOR)
    if bias is None or not axes:
        return bias
    return jnp.where(lax.axis_index(axes) == 0, bias, 0)


def _mask_rows(rows: Float[Array, "R _"], metadata: RouteMetadata) -> Float[Array, "R _"]:
    """Keep the rows that stand for a token's choice; the others are zero, in the gradient too."""
    return rows if metadata.used is None else jnp.where(metadata.used[:, None], rows, 0)


def _add_bias(rows: Float[Array, "R _"], bias: Float[Array, "G _"] | None, metadata: RouteMetadata) -> jax.Array:
    """Add its expert's bias, if there is one, to every row that stands for a token's choice."""
    if bias is None:
        return rows
    return _mask_rows(add_bias(rows, bias, group_bounds(metadata.group_sizes, bias.shape[0], rows.shape[0])), metadata)


def _matmul(
    metadata: RouteMetadata, settings: StageSettings, *, transpose_rhs: bool, dtype: jnp.dtype
) -> Callable[[jax.Array, Any], jax.Array]:
    """Choose what multiplies rows by their experts' weights: a grouped matmul, or a batched one for equal groups."""
    if metadata.used is not None:
        sums = "grd,gfd->grf" if transpose_rhs else "grf,gfd->grd"
        return functools.partial(batched_matmul, metadata.used, sums, dtype)
    return functools.partial(
        grouped_matmul,
        group_sizes=metadata.group_sizes,
        transpose_rhs=transpose_rhs,
        preferred_element_type=dtype,
        implementation=settings.execution.kernel_choice.grouped_matmul,
        hardware=settings.execution.hardware,
    )
