"""Bugs that shipped in other libraries, one test each, numbered as in the list of traps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from kernels.compare import FAST, beyond_rounding, on_cpu, run
from raggedmoe import Directions, grouped_matmul
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example, normal, poisoned
from raggedmoe.kernels.grouped_matmul.cpu import TILE_SIZES, TRANSPOSED_TILE_SIZES, for_each_tile
from raggedmoe.kernels.proof import PLAIN_XLA
from raggedmoe.kernels.registry import (
    BACKWARD,
    FORWARD,
    OPERATIONS,
    Call,
    Implementation,
    implementations,
    recorded_selections,
    select,
)

WITH_GROUPS = ("grouped_matmul", "expert_ffn")
ALL = [(name, implementation) for name in OPERATIONS for implementation in on_cpu(name)]


def example_of(name, spec_name, dtype="float32"):
    return next(spec for spec in operation(name).specs if spec.name == spec_name).example(dtype)


@pytest.mark.product
@pytest.mark.parametrize("spec", ["plain", "every-expert", "range"])
@pytest.mark.parametrize("implementation", on_cpu("ragged_gather_reduce"))
def test_trap_01_combine_weights_get_their_gradient(implementation, spec):
    example = example_of("ragged_gather_reduce", spec, "float32")
    found = run("ragged_gather_reduce", example, implementation)
    assert (found["dweights"] != 0).any()
    # A few float32 roundings of the row-dot, not 8e-2.
    assert beyond_rounding("ragged_gather_reduce", example, found) == {}


# Where each operation's poisoned rows must not show: the result's rows, and the gradient's that has those rows.
PAST_THE_END = {
    "ragged_gather": ("range-weights", ("value", "dweights")),
    "ragged_gather_reduce": ("range", ("drows",)),
    "grouped_matmul": ("spare-rows", ("value", "dlhs")),
    "expert_ffn": ("biases", ("value", "drows")),
    "attention": ("positions", ("value", "dquery")),
}


@pytest.mark.product
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_trap_02_rows_past_the_end_are_zero_and_reach_nothing(name, implementation, dtype):
    spec, quantities = PAST_THE_END[name]
    example = example_of(name, spec, dtype)
    poison = example.cotangent if name != "ragged_gather_reduce" else example.arrays["rows"]
    past = np.isnan(np.asarray(poison, np.float32)).any(axis=(2, 3) if name == "attention" else 1)
    found = jax.device_get(run(name, example, implementation))
    assert past.any()
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found.values())
    assert {quantity: bool((found[quantity][past] == 0).all()) for quantity in quantities} == dict.fromkeys(
        quantities, True
    )


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [case for case in ALL if case[0] in WITH_GROUPS])
def test_trap_03_empty_groups_have_zero_weight_gradients(name, implementation):
    example = example_of(name, {"grouped_matmul": "empty-groups", "expert_ffn": "biases"}[name])
    empty = np.asarray(example.arrays["group_sizes"]) == 0
    gradients = {q: a for q, a in run(name, example, implementation).items() if q not in ("value", "dlhs", "drows")}
    assert empty.any()
    assert {q for q, gradient in gradients.items() if (gradient[empty] != 0).any()} == set()
    assert {q for q, gradient in gradients.items() if (gradient[~empty] == 0).all()} == set()


FINE = 1 + np.arange(1, 13, dtype=np.float32).reshape(4, 3) * np.float32(2.0**-20)  # 1 for anything coarser
EYE, GROUP, ONES = np.eye(3, dtype=np.float32)[None], np.array([4], np.int32), np.ones(4, np.float32)
ROWS = np.arange(4, dtype=np.int32)
EXACT = {
    "ragged_gather": ({"x": FINE, "indices": ROWS, "weights": ONES}, {}),
    "ragged_gather_reduce": ({"rows": FINE, "indices": ROWS[:, None], "weights": ONES[:, None]}, {}),
    "grouped_matmul": ({"lhs": FINE, "rhs": EYE, "group_sizes": GROUP}, {}),
    "expert_ffn": (
        {"rows": FINE, "wi_0": EYE, "wi_1": None, "wo": EYE, "group_sizes": GROUP},
        {"activation": "relu2"},
    ),
    "attention": (dict.fromkeys(("query", "key", "value"), FINE[None, :, None]), {"window": 1}),
}


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), ALL)
def test_trap_05_no_implementation_narrows_float32(name, implementation):
    arrays, options = EXACT[name]
    call = functools.partial(operation(name).function, **options, implementation=implementation)
    # As arguments: of constants, XLA would compute the result itself.
    out = jax.jit(lambda arrays: call(**arrays))(arrays)
    assert out.dtype == jnp.float32
    found = np.sqrt(out) if name == "expert_ffn" else np.asarray(out)
    np.testing.assert_allclose(found.reshape(FINE.shape), FINE, rtol=2.0**-22)


def test_trap_06_the_guard_reads_the_target_not_the_local_device(abstract_mesh):
    example = example_of("grouped_matmul", "even")

    def choices():
        with recorded_selections() as selections:
            jax.eval_shape(lambda arrays: grouped_matmul(**arrays), dict(example.arrays))
        return [(selection.hardware.name, selection.chosen.name) for selection in selections]

    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu", "TPU7x")):
        assert choices() == [("tpu7x", "xla")] * 2
    assert choices() == [("cpu", "cpu")] * 2


@pytest.mark.parametrize("oracle_first", [True, False])
@pytest.mark.parametrize("name", OPERATIONS)
def test_trap_06_the_choice_for_each_direction_is_honoured(name, oracle_first):
    names = ("reference", "chunked" if name == "attention" else "xla")
    forward, backward = names if oracle_first else reversed(names)
    example = operation(name).specs[0].example("float32")
    choice = Directions(forward=forward, backward=backward)
    call = functools.partial(operation(name).function, **example.options, implementation=choice)
    with recorded_selections() as selections:
        jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
    assert {s.call.direction: s.chosen.name for s in selections} == {FORWARD: forward, BACKWARD: backward}


def test_trap_07_a_width_that_a_kernel_cannot_take_is_known_before_tracing():
    def implementation(name, reason):
        return Implementation(
            operation="grouped_matmul",
            name=name,
            forward=lambda *args: pytest.fail("traced before it was decided"),
            backward=lambda *args: pytest.fail("traced before it was decided"),
            rank={"tpu": 1},
            proofs=PLAIN_XLA,
            why_not=reason,
        )

    def aligned(call, hardware):
        width = call.arrays["lhs"].shape[1]
        return f"needs a width that is a multiple of 128, got {width}" if width % 128 else None

    known = {"aligned": implementation("aligned", aligned), "plain": implementation("plain", lambda *_: None)}
    taken = {}
    for width in (2880, 2944):
        call = Call(operation="grouped_matmul", arrays={"lhs": jax.ShapeDtypeStruct((8, width), "bfloat16")})
        taken[width] = select(call, "auto", HARDWARE["tpu7x"], known=known).chosen.name
    assert taken == {2880: "plain", 2944: "aligned"}


WIDE = {
    "ragged_gather": "width-2880",
    "ragged_gather_reduce": "width-2880",
    "grouped_matmul": "width-2880",
    "expert_ffn": "gpt-oss",
    "attention": "several-chunks",
}


@pytest.mark.product
@pytest.mark.parametrize(
    "chip",
    [
        pytest.param("h100", marks=pytest.mark.ci),
        "tpu7x",
        *(pytest.param(chip, marks=pytest.mark.slow) for chip in ("cpu", "v5e")),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_trap_07_what_is_chosen_for_width_2880_lowers_there(name, chip):
    example = example_of(name, WIDE[name], "bfloat16")
    call = functools.partial(operation(name).function, **example.options, hardware=chip)
    floating = next(n for n in ("x", "rows", "lhs", "query") if n in example.arrays)
    rest = {n: a for n, a in example.arrays.items() if n != floating}

    def gradient(array):
        out, vjp = jax.vjp(lambda array: call(**{floating: array}, **rest), array)
        return vjp(jnp.ones_like(out))

    platform = {"gpu": "cuda"}.get(HARDWARE[chip].platform, HARDWARE[chip].platform)
    device = AbstractDevice(device_kind=HARDWARE[chip].device_kinds[0], num_cores=1, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.jit(gradient).trace(example.arrays[floating]).lower(lowering_platforms=(platform,))


@pytest.mark.as_shipped
@pytest.mark.parametrize(
    ("name", "tile"), [("grouped_matmul", TRANSPOSED_TILE_SIZES[0]), ("expert_ffn", TILE_SIZES[0])]
)
def test_trap_14_the_shared_test_is_large_enough_for_several_tiles(name, tile):
    assert int(example_of(name, "several-tiles").arrays["group_sizes"].max()) > 2 * tile


@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_trap_14_the_implementation_under_test_is_the_one_that_runs(name, implementation):
    example = operation(name).specs[0].example("float32")
    call = functools.partial(operation(name).function, **example.options, implementation=implementation)
    with recorded_selections() as selections:
        jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
    assert [s.chosen for s in selections] == [implementations(name)[implementation]] * 2


@pytest.mark.product
@pytest.mark.parametrize(("name", "implementation"), [case for case in FAST if case[0] in WITH_GROUPS])
def test_trap_18_many_tiles_in_a_group_are_all_complete(name, implementation):
    rng = np.random.default_rng(0)
    sizes = np.array([3, 4 * TRANSPOSED_TILE_SIZES[0] + 77, 0, 4 * TILE_SIZES[0] + 1])
    rows, width, hidden = int(sizes.sum()) + 6, 5, 3
    keep = np.arange(rows) < sizes.sum()
    first = poisoned(normal(rng, (rows, width), "float32"), keep)
    weights = [normal(rng, (4, hidden, width), "float32") for _ in range(3)]
    if name == "expert_ffn":
        arrays = {"rows": first, **dict(zip(("wi_0", "wi_1", "wo"), weights))}
        options, out = {"activation": "silu"}, width
    else:
        arrays = {"lhs": first, "rhs": weights[0]}
        options, out = {"transpose_rhs": True}, hidden
    cotangent = poisoned(normal(rng, (rows, out), "float32"), keep)
    arrays["group_sizes"] = jnp.asarray(sizes, jnp.int32)
    example = Example(arrays=arrays, options=options, cotangent=cotangent, flops=0)
    assert beyond_rounding(name, example, run(name, example, implementation)) == {}


@pytest.mark.parametrize("num_rows", [1, 5, 8, 30, 31, 100])
def test_trap_18_tiles_visit_each_row_of_a_group_once(num_rows):
    @jax.jit
    def visits(first, last):
        def one_tile(position, size, new, count):
            old = jax.lax.dynamic_slice_in_dim(count, position, size)
            return jax.lax.dynamic_update_slice_in_dim(count, old + new, position, 0)

        return for_each_tile(first, last, num_rows, (16, 8, 4), one_tile, jnp.zeros((num_rows, 1), jnp.int32))[:, 0]

    row = np.arange(num_rows)
    for first in range(num_rows + 1):
        for last in {first, min(first + 1, num_rows), (first + num_rows) // 2, num_rows}:
            expected = (row >= first) & (row < last)
            assert (visits(jnp.int32(first), jnp.int32(last)) == expected).all(), (first, last)
