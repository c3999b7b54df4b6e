"""What is measured, on the example calls of a real model's size, and against what limit."""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from raggedmoe.bench.measure import best_seconds
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example, normal
from raggedmoe.kernels.value_and_gradients import value_and_gradients, value_and_pullback
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.params import init_params
from raggedmoe.verify.check import runnable

LIMIT = "limit"
MOVES = ("ragged_gather", "ragged_gather_reduce")  # of rows; the other operations are matmuls
LAYER_SHAPES = {
    "mixtral": {"T": 2048, "D": 512, "F": 1024, "E": 16, "K": 2},
    "fine-grained": {"T": 2048, "D": 512, "F": 1024, "E": 64, "K": 8},
}
# On a CPU XLA's ragged dot would need 30 GB for the fine-grained layer's backward pass: it is left out there.
LAYER_BACKENDS = {"mixtral": ("auto", "expert_ffn", "ragged_dot"), "fine-grained": ("auto", "expert_ffn")}
SWEEP_EXPERTS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One contender's best time in one case."""

    case: str
    dtype: str
    contender: str  # an implementation, a peer, or "limit"
    seconds: float
    gflops: float  # useful ones, per second
    of_limit: float  # the limit's time over this one's


def timings(case: str, dtype: str, flops: int, contenders: dict[str, Callable[[], Any]], rounds: int) -> list[Timing]:
    """Measure contenders, one of which is the limit."""
    best = best_seconds(contenders, rounds)
    return [
        Timing(
            case=case,
            dtype=dtype,
            contender=name,
            seconds=seconds,
            gflops=flops / seconds / 1e9,
            of_limit=best[LIMIT] / seconds,
        )
        for name, seconds in best.items()
    ]


def operation_timings(name: str, dtype: str, rounds: int = 7, only: str = "") -> Iterator[list[Timing]]:
    """Measure an operation, forward and with backward, in each large example whose case's name holds ``only``."""
    op = operation(name)
    for spec in (s for s in op.specs if s.large):
        example = spec.example(dtype)
        for backward in (False, True):
            case = f"{name} {spec.name} {'forward+backward' if backward else 'forward'}"
            if only not in case:
                continue
            contenders: dict[str, Callable[[], Any]] = {LIMIT: _limit(name, example, backward)}
            for implementation in runnable(op, example):
                contenders[implementation] = _call(op.function, implementation, example, backward)
            contenders.update(_peers(name, example, backward))
            passes = (2 if name in MOVES else 3) if backward else 1
            yield timings(case, dtype, passes * example.flops, contenders, rounds)


def _call(function: Any, implementation: str, example: Example, backward: bool) -> Callable[[], Any]:
    bound = functools.partial(function, **example.options, implementation=implementation)
    return _compile(bound, dict(example.arrays), example.cotangent, backward)


def _compile(function: Any, arrays: dict[str, Any], cotangent: Any, backward: bool) -> Callable[[], Any]:
    if backward:
        both = jax.jit(lambda arrays, cotangent: value_and_gradients(function, arrays, cotangent))
        return lambda: both(arrays, cotangent)
    forward = jax.jit(lambda arrays: function(**arrays))
    return lambda: forward(arrays)


def _limit(name: str, example: Example, backward: bool) -> Callable[[], Any]:
    """Make the call that is the limit: for matmuls dense ones of the same useful FLOPs and type.

    For moves of rows it copies what is written; for decoding, one query a sequence, it reads the filled slots once.
    """
    if name in MOVES:
        source = example.cotangent if name == "ragged_gather" else example.arrays["rows"]
        copy = jax.jit(lambda x: x + jnp.ones((), x.dtype))
        return lambda: [copy(source) for _ in range(2 if backward else 1)]
    if name == "attention":
        return _attention_limit(example, backward)
    rows = example.arrays["lhs" if name == "grouped_matmul" else "rows"]
    weights = example.arrays["rhs" if name == "grouped_matmul" else "wi_0"][0]
    if weights.shape[-1] != rows.shape[-1]:
        weights = weights.T
    return dense_limit(rows, weights, example.flops * (3 if backward else 1))


def _attention_limit(example: Example, backward: bool) -> Callable[[], Any]:
    query, key, value = (example.arrays[name] for name in ("query", "key", "value"))
    if query.shape[1] > 1:
        rows = jnp.resize(query, (1024, 512))
        return dense_limit(rows, rows[:512], example.flops * (3 if backward else 1))
    filled = int(example.arrays["positions"].max()) + 1
    key, value = key[:, :filled], value[:, :filled]
    read = jax.jit(lambda key, value: (key.max(-1), value.max(-1)))
    return lambda: [read(key, value) for _ in range(2 if backward else 1)]


def dense_limit(rows: Any, weights: Any, flops: int) -> Callable[[], Any]:
    """Make a call of as many dense matmuls ``rows [R I] @ weights [O I]ᵀ`` as make up the FLOPs."""
    times = round(flops / (2 * rows.shape[0] * weights.size))
    wide = jnp.float32

    @jax.jit
    def dense(rows: Any, weights: Any) -> Any:
        return jnp.matmul(rows, weights.T, preferred_element_type=wide).astype(rows.dtype)

    rows = jnp.nan_to_num(rows)
    return lambda: [dense(rows, weights) for _ in range(times)]


def _peers(name: str, example: Example, backward: bool) -> dict[str, Callable[[], Any]]:
    """Make the calls that others offer for the same."""
    if name == "attention":
        return _attention_peers(example, backward)
    if name != "grouped_matmul":
        return {}
    arrays = {key: example.arrays[key] for key in ("lhs", "rhs", "group_sizes")}
    if example.options["transpose_rhs"]:
        arrays["rhs"] = jnp.swapaxes(arrays["rhs"], 1, 2)
    peers = {"jax.lax.ragged_dot": jax.lax.ragged_dot}
    if importlib.util.find_spec("tokamax") is not None:
        import tokamax

        peers["tokamax.ragged_dot"] = tokamax.ragged_dot
    return {peer: _compile(f, arrays, example.cotangent, backward) for peer, f in peers.items()}


def _attention_peers(example: Example, backward: bool) -> dict[str, Callable[[], Any]]:
    """Make the call of `jax.nn.dot_product_attention`, where it takes the arguments."""
    arrays = dict(example.arrays)
    if arrays.keys() != {"query", "key", "value"} or arrays["query"].shape[3] != arrays["value"].shape[3]:
        return {}
    peer = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return {"jax.nn.dot_product_attention": _compile(peer, arrays, example.cotangent, backward)}


def layer_timings(dtype: str, rounds: int = 7, only: str = "") -> Iterator[list[Timing]]:
    """Measure the whole layer, forward and forward with backward (all gradients), under several backends."""
    for shape_name, sizes in LAYER_SHAPES.items():
        for backward in (False, True):
            case = f"layer {shape_name} {'forward+backward' if backward else 'forward'}"
            if only not in case:
                continue
            flops = 6 * sizes["T"] * sizes["K"] * sizes["D"] * sizes["F"] * (3 if backward else 1)
            rng = np.random.default_rng(0)
            x = normal(rng, (sizes["T"], sizes["D"]), dtype)
            rows = normal(rng, (sizes["T"] * sizes["K"], sizes["D"]), dtype)
            weights = normal(rng, (sizes["F"], sizes["D"]), dtype)
            contenders: dict[str, Callable[[], Any]] = {LIMIT: dense_limit(rows, weights, flops)}
            for backend in LAYER_BACKENDS[shape_name]:
                contenders[backend] = _layer(sizes, backend, x, dtype, backward)
            yield timings(case, dtype, flops, contenders, rounds)


def _layer(sizes: dict[str, int], backend: str, x: Any, dtype: str, backward: bool) -> Callable[[], Any]:
    config = MoEConfig(
        num_experts=sizes["E"],
        experts_per_token=sizes["K"],
        model_dim=sizes["D"],
        expert_dim=sizes["F"],
        param_dtype=jnp.dtype(dtype),
    )
    execution = MoEExecution(moe_backend=backend)
    params = init_params(config.param_specs(), jax.random.key(0))

    def layer(x: Any, params: Any) -> Any:
        return moe_route_and_compute(x, params, config, execution).output

    if not backward:
        forward = jax.jit(layer)
        return lambda: forward(x, params)
    both = jax.jit(functools.partial(value_and_pullback, layer))
    return lambda: both((x, params), x)


def sweep_timings(dtype: str, rounds: int = 5, only: str = "") -> Iterator[list[Timing]]:
    """Measure `grouped_matmul` forward with T·K fixed and ever more experts, and reading their weights once."""
    rng = np.random.default_rng(0)
    num_rows, inner, out = 16384, 512, 1024
    op = operation("grouped_matmul")
    lhs = normal(rng, (num_rows, inner), dtype)
    for num_experts in SWEEP_EXPERTS:
        if only not in f"E={num_experts}":
            continue
        sizes = np.bincount(rng.integers(0, num_experts, num_rows), minlength=num_experts)
        rhs = normal(rng, (num_experts, out, inner), dtype)
        call = jax.jit(functools.partial(op.function, transpose_rhs=True))
        read = jax.jit(lambda w: w.max(-1))  # the fastest of several ways to touch everything once (docs/log.md)
        group_sizes = jnp.asarray(sizes, jnp.int32)
        contenders: dict[str, Callable[[], Any]] = {
            LIMIT: dense_limit(lhs, rhs[0], 2 * num_rows * inner * out),
            "auto": functools.partial(call, lhs, rhs, group_sizes),
            "reading the weights": functools.partial(read, rhs),
        }
        yield timings(f"E={num_experts}", dtype, 2 * num_rows * inner * out, contenders, rounds)
