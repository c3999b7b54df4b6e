"""The SparseCore kernels: run by a NumPy executor, value and gradients; the executor checked against interpret mode."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels import sparsecore_dots_kernel
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.ragged_gather import sparsecore_kernel as gather_kernel
from raggedmoe.kernels.ragged_gather_reduce import sparsecore_kernel as reduce_kernel
from raggedmoe.kernels.sparsecore import LINE, MEMORY_WORDS, RowLayout, row_layout
from raggedmoe.kernels.sparsecore_kernel import Scratch
from raggedmoe.kernels.value_and_gradients import jitted_value_and_gradients, value_and_gradients
from tests.kernels import sparsecore_executor, sparsecore_interpreted
from tests.kernels.compare import beyond_rounding
from tests.kernels.test_properties import gather_examples, reduce_examples

EXAMPLES = {"ragged_gather": gather_examples, "ragged_gather_reduce": reduce_examples}
# Every spec in one type, and in the other where there is time; on the chips by turns. The wide one takes the executor
# seconds: rows in chunks, below, are as wide.
CASES = [
    pytest.param(
        name,
        spec,
        dtype,
        "v6e" if (place + turn) % 2 else "tpu7x",
        id=f"{name}-{spec.name}-{dtype}",
        marks=[pytest.mark.slow] if (place // 2 + turn) % 2 or spec.name == "width-2880" else [],
    )
    for name in EXAMPLES
    for place, spec in enumerate(spec for spec in operation(name).specs if not spec.large)
    for turn, dtype in enumerate(("float32", "bfloat16"))
]


def launched_by(monkeypatch, run_on_subcores):
    for module in (gather_kernel, reduce_kernel, sparsecore_dots_kernel):
        monkeypatch.setattr(module, "run_on_subcores", run_on_subcores)


@pytest.mark.parametrize("width", [2048, 2880, 16_384])
@pytest.mark.parametrize("chip", MEMORY_WORDS)
def test_what_the_row_dots_hold_fits_a_subcores_memory(chip, width, monkeypatch):
    """Rows that are wider than fit are moved in chunks: for v6e from a few thousand columns on."""
    held = []

    def run_on_subcores(program, *, scratch, num_tiles, **options):
        held.append(sum(np.prod(buffer.shape) for buffer in scratch if buffer.kind == "vector"))
        return jnp.zeros((num_tiles * 8, LINE))

    launched_by(monkeypatch, run_on_subcores)
    x, rows, valid = jnp.zeros((3, width)), jnp.zeros(5, jnp.int32), jnp.ones(5, bool)
    sparsecore_dots_kernel.row_dots(x, rows, x, rows, valid, hardware=HARDWARE[chip])
    assert 0 < held[0] <= MEMORY_WORDS[chip]


@pytest.fixture
def executed(monkeypatch):
    """Programs run in NumPy, on every subcore of the chip."""
    launched_by(monkeypatch, sparsecore_executor.run_on_subcores)


@pytest.fixture
def executed_by_few(monkeypatch):
    """On three subcores, in small blocks, so that small calls too have several tiles and blocks for each of them."""
    launched_by(monkeypatch, functools.partial(sparsecore_executor.run_on_subcores, count=3))
    monkeypatch.setattr(gather_kernel, "BLOCK_TILES", 4)
    monkeypatch.setattr(reduce_kernel, "num_subcores", lambda hardware: 3)


@pytest.mark.product
@pytest.mark.parametrize(("name", "spec", "dtype", "chip"), CASES)
def test_value_and_gradients_agree_with_numpy(executed_by_few, name, spec, dtype, chip):
    example = spec.example(dtype)
    assert beyond_rounding(name, example, run(name, example, chip)) == {}


def run(name, example, chip):
    static = (("implementation", "sparsecore"), ("hardware", HARDWARE[chip]))
    return jitted_value_and_gradients(operation(name).function, static, dict(example.arrays), example.cotangent)


@pytest.mark.product
@pytest.mark.parametrize(
    ("shape", "chip"),
    [
        pytest.param((70, 4, 1, 45), "v6e", id="many-tokens", marks=pytest.mark.slow),
        pytest.param((2, 99, 70, 17), "tpu7x", id="slots-in-parts"),
        pytest.param((3, 4, 2, 2050), "v6e", id="row-in-chunks"),
    ],
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_ragged_calls_agree_with_numpy(executed, name, shape, chip):
    for example in EXAMPLES[name](np.random.default_rng(0), (*shape, 1), {"weights": True, "inverse": True}):
        assert beyond_rounding(name, example, run(name, example, chip)) == {}


@pytest.mark.product
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
def test_indices_that_point_nowhere_add_nothing(executed_by_few, name, inverse):
    rng = np.random.default_rng(0)
    for example in EXAMPLES[name](rng, (9, 4, 3, 7, 1), {"weights": True, "inverse": inverse}):
        arrays = dict(example.arrays)
        lost = rng.permutation(27)[:8]
        indices = np.array(arrays["indices"])
        indices.reshape(-1)[lost] = rng.choice([-1, -27, 27, 2**31 - 1], size=8)
        if inverse:  # a row that lost its token, or a slot that lost its row, is in no inverse either
            there = np.array(arrays["inverse"])
            there[np.isin(there, lost)] = rng.choice([-1, 27, 1000], size=8)
            arrays["inverse"] = jnp.asarray(there)
        example = dataclasses.replace(example, arrays=arrays | {"indices": jnp.asarray(indices)})
        assert beyond_rounding(name, example, run(name, example, "v6e")) == {}


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_valid_rows_are_fetched(executed, monkeypatch, name):
    """The contract's sixth point, counted: streams of rows, forward, for a quarter of the rows."""
    fetched = []
    start_fetch = sparsecore_executor.NumpySubcore.start_fetch
    monkeypatch.setattr(
        sparsecore_executor.NumpySubcore, "start_fetch", lambda *args: (fetched.append(1), start_fetch(*args))
    )
    rng = np.random.default_rng(0)
    example = next(EXAMPLES[name](rng, (64, 4, 4, 32, 1), {"weights": True, "inverse": True}))
    arrays = dict(example.arrays) | {"start": jnp.int32(64), "end": jnp.int32(128)}
    operation(name).function(**arrays, implementation="sparsecore", hardware="v6e")
    # The gather's tiles are whole; of the combine, a token with an odd number of valid slots fetches one row more.
    assert 64 <= len(fetched) <= (64 if name == "ragged_gather" else 64 + 64)


def forward_calls():
    """A call of each program, small, with rows and weights that are not all valid."""
    rng = np.random.default_rng(0)
    x, rows = (jnp.asarray(rng.standard_normal((size, 40)), jnp.bfloat16) for size in (9, 27))
    index = jnp.asarray(rng.integers(-1, 10, 27), jnp.int32)
    weights = jnp.asarray(rng.standard_normal(27), jnp.float32)
    start, end = jnp.int32(3), jnp.int32(22)
    chip = {"hardware": HARDWARE["tpu7x"]}
    return {
        "gather": lambda: gather_kernel.gather(x, index, start, end, weights, **chip),
        "reduce": lambda: reduce_kernel.gather_reduce(
            rows, index.reshape(9, 3), start, end, weights.reshape(9, 3), **chip
        ),
        "dots": lambda: sparsecore_dots_kernel.row_dots(x, index, rows, jnp.arange(27), index % 9 > 2, **chip),
    }


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("program", ["gather", "reduce", "dots"])
def test_the_executor_does_what_interpret_mode_does(monkeypatch, program):
    """Streams, buffers, lists of scalars, loops and arithmetic, on one subcore, with race detection."""
    monkeypatch.setattr(gather_kernel, "BLOCK_TILES", 2)
    call = forward_calls()[program]
    launched_by(monkeypatch, sparsecore_executor.run_on_subcores)
    expected = call()
    launched_by(monkeypatch, sparsecore_interpreted.run_on_subcores)
    np.testing.assert_array_equal(np.asarray(jax.jit(call)()), np.asarray(expected))
    assert np.isfinite(np.asarray(expected, np.float32)).all()
    assert np.any(np.asarray(expected) != 0)
    races = interpret_pallas_call.races
    assert races is not None
    assert not races.races_found


LAYOUT = RowLayout(width=LINE, packing=1, chunks=1, columns=LINE)


def wrong_programs():
    """Programs over a table of words, rows for one stream, a tile, and a semaphore for each."""

    def push(subcore, out, tile, pushed, number=0):
        subcore.start_push(tile.at[0], out, number, 0, LAYOUT, pushed, 0)

    def finish(subcore, out, tile, pushed):
        subcore.wait_pushed(tile.at[0], out, LAYOUT, pushed, 0)
        subcore.finish_pushes(tile.at[0], out, LAYOUT, pushed)

    def reads_too_early(subcore, table, out, rows, tile, fetched, pushed):
        subcore.start_fetch(table, 0, 64, rows, 0, fetched, 0)
        subcore.load(rows, 56)

    def waits_for_less(subcore, table, out, rows, tile, fetched, pushed):
        subcore.start_fetch(table, 0, 64, rows, 0, fetched, 0)
        subcore.wait_fetched(table, 32, rows, fetched, 0)

    def fetches_past_the_table(subcore, table, out, rows, tile, fetched, pushed):
        subcore.start_fetch(table, 72, 64, rows, 0, fetched, 0)

    def fetches_unaligned(subcore, table, out, rows, tile, fetched, pushed):
        subcore.start_fetch(table, 4, 64, rows, 0, fetched, 0)

    def stores_out_of_bounds(subcore, table, out, rows, tile, fetched, pushed):
        subcore.store(rows, subcore.full(0, jnp.uint32), 60)

    def overwrites_what_leaves(subcore, table, out, rows, tile, fetched, pushed):
        push(subcore, out, tile, pushed)
        subcore.store(tile, subcore.full(0, jnp.uint32), 0, 7, 0)

    def does_not_wait_at_the_end(subcore, table, out, rows, tile, fetched, pushed):
        push(subcore, out, tile, pushed)
        subcore.finish_pushes(tile.at[0], out, LAYOUT, pushed)

    def writes_a_tile_twice(subcore, table, out, rows, tile, fetched, pushed):
        for _ in range(2):
            push(subcore, out, tile, pushed)
            finish(subcore, out, tile, pushed)

    def pushes_past_the_result(subcore, table, out, rows, tile, fetched, pushed):
        push(subcore, out, tile, pushed, number=1)

    def stores_another_type(subcore, table, out, rows, tile, fetched, pushed):
        subcore.store(rows, subcore.full(0, jnp.float32), 0)

    return [wrong for name, wrong in locals().items() if name not in ("push", "finish")]


@pytest.mark.parametrize("program", wrong_programs(), ids=lambda program: program.__name__)
def test_the_executor_refuses_a_program_that(program):
    scratch = (
        Scratch(kind="vector", shape=(64,), dtype=jnp.uint32),
        Scratch(kind="vector", shape=(1, 8, LINE), dtype=jnp.uint32),
        Scratch(kind="semaphores", shape=(1,)),
        Scratch(kind="semaphores", shape=(1,)),
    )
    with pytest.raises(sparsecore_executor.ProgramError):
        sparsecore_executor.execute(
            program,
            [np.zeros(128, np.uint32)],
            hardware=HARDWARE["v6e"],
            num_tiles=1,
            layout=LAYOUT,
            scratch=scratch,
            count=1,
        )


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("chip", MEMORY_WORDS)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EXAMPLES)
def test_value_and_gradients_lower_without_a_warning(name, dtype, chip):
    spec = next(spec for spec in operation(name).specs if spec.name in ("range-weights", "range"))
    example = spec.example(dtype)
    function = functools.partial(operation(name).function, implementation="sparsecore")
    device = jax.sharding.AbstractDevice(device_kind=HARDWARE[chip].device_kinds[0], num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(functools.partial(value_and_gradients, function)).trace(
            dict(example.arrays), example.cotangent
        )
        assert "ragged_gather_reduce" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("width", [2048, 2880, 4096, 7168])
@pytest.mark.parametrize("chip", MEMORY_WORDS)
def test_a_bfloat16_row_is_read_with_little_padding(chip, width):
    layout = row_layout(width, jnp.bfloat16, HARDWARE[chip], gather_kernel._memory, halve_rest=True)
    assert layout.padded_width == width
    assert layout.row_words * 4 == width * 2
    layout = row_layout(width, jnp.bfloat16, HARDWARE[chip], reduce_kernel._memory)
    assert width * 2 <= layout.row_words * 4 <= 1.05 * width * 2
