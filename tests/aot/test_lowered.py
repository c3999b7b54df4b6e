"""Matrix products counted in a lowered program, and whole steps lowered without a byte of their arrays."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from raggedmoe.aot.case import CompileCase
from raggedmoe.aot.lowered import Products, count_products, lower_here
from raggedmoe.aot.subjects import TrainingStep
from raggedmoe.models.presets import model_preset
from raggedmoe.train.settings.words import read_words

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
FLOPS = 2 * 8 * 16 * 16
BYTES = 4 * (8 * 16 + 16 * 16 + 8 * 16)


def counted(function, *args):
    return count_products(jax.jit(function).lower(*args).compiler_ir(dialect="stablehlo"))


def test_one_product():
    assert counted(lambda x, w: x @ w, X, W) == Products(written=1, executed=1, flops=FLOPS, bytes_touched=BYTES)


def test_a_scan_counts_as_often_as_it_runs():
    found = counted(lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, length=7)[0], X, W)
    assert (found.written, found.executed, found.flops, found.open_loops) == (1, 7, 7 * FLOPS, 0)


def test_loops_in_loops_multiply():
    def inner(x, w):
        return lax.fori_loop(2, 5, lambda i, x: x @ w, x)

    found = counted(lambda x, w: lax.scan(lambda x, _: (inner(x, w), None), x, length=7)[0], X, W)
    assert (found.written, found.executed, found.flops) == (1, 21, 21 * FLOPS)


def test_a_loop_whose_bound_is_data_counts_once_and_is_named():
    n = jax.ShapeDtypeStruct((), jnp.int32)
    found = counted(lambda x, w, n: lax.fori_loop(0, n, lambda i, x: x @ w, x), X, W, n)
    assert (found.executed, found.flops, found.open_loops) == (1, FLOPS, 1)


def test_the_costliest_branch_counts():
    found = counted(lambda x, w, p: lax.cond(p, lambda: x @ w @ w, lambda: x @ w), X, W, jax.ShapeDtypeStruct((), bool))
    assert (found.written, found.executed, found.flops) == (3, 2, 2 * FLOPS)


def test_a_function_called_twice_counts_twice():
    product = jax.jit(lambda x, w: x @ w)
    found = counted(lambda x, w: product(product(x, w), w), X, W)
    assert (found.executed, found.flops) == (2, 2 * FLOPS)


def step_of(backend):
    words = [
        "deepseek-v3",
        "max_target_length=4096",
        "per_device_batch_size=1",
        f"moe_backend={backend}",
        "mtp_layers=0",
    ]
    return CompileCase(
        title=backend,
        subject=TrainingStep(config=read_words((*words, "dtype=bfloat16")), num_layers=2),
        topology="cpu",
    )


@pytest.mark.ci
@pytest.mark.usefixtures("without_native_kernels")  # whose products a lowered program does not show
@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        ("auto", "cpu"),
        pytest.param("jax", None, marks=pytest.mark.slow),
        pytest.param("ragged_dot", "xla", marks=pytest.mark.slow),
        pytest.param("cpu", "cpu", marks=pytest.mark.slow),
        pytest.param("expert_ffn", "cpu", marks=pytest.mark.slow),
    ],
)
def test_two_layers_of_deepseek_v3_lower_with_every_backend_of_the_cpu(backend, kernel):
    """One dense and one MoE layer of full width: 306 GB of state, of which nothing is made."""
    lowered = lower_here(step_of(backend))
    chosen = {k.name for k in lowered.kernels if k.operation in ("grouped_matmul", "expert_ffn")}
    assert chosen == (set() if kernel is None else {kernel})
    assert lowered.argument_bytes > 150e9
    assert lowered.products.written > 40
    assert lowered.products.executed > lowered.products.written


@pytest.mark.slow
def test_every_expert_on_every_row_costs_what_it_must():
    """XLA's ragged dot on a CPU multiplies all T·K rows by all E matrices, the dense backend all T tokens."""
    rows, tokens = (lower_here(step_of(backend)).products.flops for backend in ("ragged_dot", "jax"))
    moe = model_preset("deepseek-v3").moe
    per_row = 3 * 3 * 2 * moe.num_experts * moe.model_dim * moe.expert_dim  # three products, forward and twice backward
    assert rows - tokens == pytest.approx(4096 * (moe.experts_per_token - 1) * per_row, rel=1e-3)
