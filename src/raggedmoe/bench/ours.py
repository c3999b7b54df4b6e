"""Our own contenders: what `auto` takes, the implementation in pure JAX, and the fused experts."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.bench.case import BOTH, FORWARD, Case
from raggedmoe.bench.contender import OURS, Prepared, contender
from raggedmoe.bench.problem import read_array, routing_of, touch
from raggedmoe.interop.arrays import to_device
from raggedmoe.kernels.grouped_matmul.api import grouped_matmul
from raggedmoe.kernels.qarray import QArray
from raggedmoe.kernels.quantize import quantize
from raggedmoe.kernels.registry import Choice, KernelChoice, implementations, record_selections
from raggedmoe.kernels.value_and_gradients import gradients, value_and_gradients
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.layer import moe_route_and_compute

FUSED = MoEExecution(moe_backend="expert_ffn")
PURE_JAX = KernelChoice(grouped_matmul="cpu", ragged_gather="xla", ragged_gather_reduce="xla")


def device_array(case: Case, name: str) -> jax.Array:
    """Map an array of the problem into JAX's memory."""
    array = read_array(case.place, name, case.dtype)
    touch(array)
    return to_device(array)


def expert_array(case: Case, name: str, qtype: str | None) -> Any:
    """Map the experts' matrices of the problem, or quantise them one by one, to bits as loaded models have."""
    array = device_array(case, name)
    if qtype is None:
        return array
    experts, hidden, width = array.shape
    return jax.block_until_ready(_quantize(array, qtype, (experts, 1, width) if name == "wo" else (experts, hidden, 1)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(array: jax.Array, qtype: str, scale_shape: tuple[int, ...]) -> QArray:
    quantized = quantize(array, qtype, scale_shape)
    values = quantized.qvalue if qtype == "int8" else jax.lax.bitcast_convert_type(quantized.qvalue, jnp.uint8)
    return QArray(values, quantized.scale, None, qtype)


def prepare_jax(function: Callable[..., Any], arguments: tuple[Any, ...], names: Callable[[Any], Any]) -> Prepared:
    """Compile for these arguments; ``names`` makes the results' names."""
    compiled = jax.jit(function).lower(*arguments).compile()

    def arrays(result: Any) -> Mapping[str, Any]:
        return {name: jax.device_get(array) for name, array in names(result).items()}

    return Prepared(run=lambda: jax.block_until_ready(compiled(*arguments)), arrays=arrays)


def layer_config(case: Case) -> MoEConfig:
    """Make the configuration of a case's layer."""
    shape = case.sizes
    return MoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        model_dim=shape.model_dim,
        expert_dim=shape.expert_dim,
        param_dtype=jnp.dtype(case.dtype),
    )


def kernels_of(function: Callable[..., Any], *arguments: Any) -> set[tuple[str, str, str]]:
    """Say which implementation each operation and direction of a call takes here; nothing is computed."""
    with record_selections() as selections:
        jax.eval_shape(function, *arguments)
    return {(s.call.operation, s.call.direction, s.chosen.name) for s in selections}


def layer_kernels(case: Case, execution: MoEExecution) -> set[tuple[str, str, str]]:
    """Say which kernels a case's layer takes with an execution."""
    config = layer_config(case)
    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in config.param_specs().items()}
    x = jax.ShapeDtypeStruct((case.sizes.tokens, config.model_dim), jnp.dtype(case.dtype))
    return kernels_of(lambda x, params: moe_route_and_compute(x, params, config, execution).output, x, params)


def matmul_kernels(case: Case, choice: Choice) -> set[tuple[str, str, str]]:
    """Say which kernels a case's grouped matmul takes with a choice."""
    shape, dtype = case.sizes, jnp.dtype(case.dtype)
    lhs = jax.ShapeDtypeStruct((shape.rows, shape.model_dim), dtype)
    rhs = jax.ShapeDtypeStruct((shape.num_experts, shape.expert_dim, shape.model_dim), dtype)
    sizes = jax.ShapeDtypeStruct((shape.num_experts,), jnp.int32)
    call = functools.partial(grouped_matmul, transpose_rhs=True, implementation=choice)
    return kernels_of(call, lhs, rhs, sizes)


SAME_AS_AUTO = "it is what raggedmoe auto takes here"


def prepare_layer(case: Case, execution: MoEExecution, weights: str | None = None) -> Prepared:
    """Prepare the layer from the router to the combined output; backward all its gradients, the router's too.

    ``weights`` is a format of 8 bits in which its experts are, with a scale for each output channel.
    """
    config = layer_config(case)
    params = {name: expert_array(case, name, weights) for name in ("wi_0", "wi_1", "wo")}
    params["router_kernel"] = device_array(case, "router").astype(jnp.float32)
    arrays = {"x": device_array(case, "x"), **params}

    def layer(**arrays: Any) -> Any:
        x = arrays.pop("x")
        return moe_route_and_compute(x, arrays, config, execution).output

    if case.direction != BOTH:
        return prepare_jax(lambda arrays: layer(**arrays), (arrays,), lambda value: {"value": value})

    def rename_router(result: dict[str, Any]) -> dict[str, Any]:
        return {{"drouter_kernel": "drouter"}.get(name, name): array for name, array in result.items()}

    both = lambda arrays, cotangent: value_and_gradients(layer, arrays, cotangent)  # noqa: E731
    return prepare_jax(both, (arrays, device_array(case, "cotangent")), rename_router)


def prepare_grouped_matmul(case: Case, function: Callable[..., Any]) -> Prepared:
    """Prepare a direction of ``function(lhs, rhs, group_sizes)``, for rhs [E F D]: rows [R D] to [R F]."""
    sizes = jnp.asarray(routing_of(case.place, case.dtype).group_sizes, jnp.int32)
    arrays = {"lhs": device_array(case, "lhs"), "rhs": device_array(case, "wi_0"), "group_sizes": sizes}
    if case.direction == "forward":
        return prepare_jax(lambda arrays: function(**arrays), (arrays,), lambda value: {"value": value})
    cotangent = device_array(case, "row_cotangent")
    if case.direction == BOTH:
        both = lambda arrays, cotangent: value_and_gradients(function, arrays, cotangent)  # noqa: E731
        return prepare_jax(both, (arrays, cotangent), lambda result: result)
    of = case.direction.removeprefix("d")
    one = lambda arrays, cotangent: gradients(function, arrays, cotangent, of)  # noqa: E731
    return prepare_jax(one, (arrays, cotangent), lambda result: {f"d{of}": result[of]})


@contender("raggedmoe auto", "layer", role=OURS)
def layer_auto(case: Case) -> Prepared:
    """Prepare what a user gets without a word."""
    return prepare_layer(case, MoEExecution())


def _only_backward(case: Case) -> str | None:
    return None if case.direction == BOTH else "it differs in the backward pass alone"


@contender("raggedmoe pure JAX", "layer", role=OURS)
def layer_pure_jax(case: Case) -> Prepared:
    """Prepare the layer by the kernels that need no compiler but XLA."""
    return prepare_layer(case, MoEExecution(kernels=PURE_JAX))


@contender("raggedmoe auto, recompute_dispatch", "layer", role=OURS, process="raggedmoe auto", why_not=_only_backward)
def layer_recomputing(case: Case) -> Prepared:
    """Prepare the layer that gathers its rows again in the backward pass rather than keeping them, for its memory."""
    return prepare_layer(case, MoEExecution(recompute_dispatch=True))


def _fused_is_auto(case: Case) -> str | None:
    same = layer_kernels(case, MoEExecution()) == layer_kernels(case, FUSED)
    return SAME_AS_AUTO if same else None


@contender("raggedmoe expert_ffn", "layer", role=OURS, why_not=_fused_is_auto)
def layer_expert_ffn(case: Case) -> Prepared:
    """Prepare the layer with its experts as one fused operation, by its name."""
    return prepare_layer(case, FUSED)


def why_not_8_bits(case: Case) -> str | None:
    """Leave experts of 8 bits to the cases whose limit is to read them."""
    return None if case.reads and case.direction == FORWARD else "experts of 8 bits: where reading them is the limit"


@contender("raggedmoe int8 experts", "layer", role=OURS, weights="int8", why_not=why_not_8_bits)
def layer_int8(case: Case) -> Prepared:
    """Prepare the layer with experts in int8."""
    return prepare_layer(case, MoEExecution(), "int8")


@contender("raggedmoe fp8 experts", "layer", role=OURS, weights="float8_e4m3fn", why_not=why_not_8_bits)
def layer_fp8(case: Case) -> Prepared:
    """Prepare the layer with experts in float8."""
    return prepare_layer(case, MoEExecution(), "float8_e4m3fn")


@contender("raggedmoe auto", "grouped_matmul", role=OURS, process="raggedmoe auto")
def grouped_matmul_auto(case: Case) -> Prepared:
    """Prepare what a user gets without a word."""
    return prepare_grouped_matmul(case, lambda **arrays: grouped_matmul(**arrays, transpose_rhs=True))


@contender("raggedmoe pure JAX", "grouped_matmul", role=OURS, process="raggedmoe pure JAX")
def grouped_matmul_pure_jax(case: Case) -> Prepared:
    """Prepare the kernel that needs no compiler but XLA."""
    return prepare_grouped_matmul(
        case, lambda **arrays: grouped_matmul(**arrays, transpose_rhs=True, implementation="cpu")
    )


def _register_other_implementations() -> None:
    """Make every other implementation that runs on a CPU a contender by its name, so that a new kernel is found."""
    shown = ("cpu", "xla", "reference")  # as pure JAX, and as the peer jax.lax.ragged_dot
    for name, implementation in implementations("grouped_matmul").items():
        if name in shown or "cpu" not in implementation.rank:
            continue

        def prepare(case: Case, name: str = name) -> Prepared:
            return prepare_grouped_matmul(
                case, lambda **arrays: grouped_matmul(**arrays, transpose_rhs=True, implementation=name)
            )

        def why_not(case: Case, name: str = name) -> str | None:
            same = matmul_kernels(case, "auto") == matmul_kernels(case, name)
            return SAME_AS_AUTO if same else None

        contender(f"raggedmoe {name}", "grouped_matmul", role=OURS, why_not=why_not)(prepare)


_register_other_implementations()
