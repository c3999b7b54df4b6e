"""The TPU compiler itself: what passes, what does not, and the schedules that it makes, cycle by cycle."""

import dataclasses

import pytest

from raggedmoe.aot.baselines import BaselineCall
from raggedmoe.aot.case import CRASHED, FAILED, NO_FIT, PASSED, REFUSED, TIMED_OUT, CompileCase
from raggedmoe.aot.compiled import compile_for
from raggedmoe.aot.subjects import OperationCall, TrainingStep
from raggedmoe.aot.topology import find_topology
from raggedmoe.aot.worker import compile_cases, schedule
from raggedmoe.kernels.proof import libtpu_version
from raggedmoe.train.settings.words import read_words
from tests.aot.marks import NEEDS_LIBTPU
from tests.aot.programs import Abort, Broken, Matmul, Sleep, TooLarge

pytestmark = NEEDS_LIBTPU
SHAPE = "R=8192,I=2048,O=1408,G=16"
SPLASH = OperationCall(operation="attention", call="decode", implementation="splash", dtype="float32")

# Issue cycles by the compiler's schedule, exact and repeatable: of one dense matmul, and of JAX's ragged dot (itself,
# and before it the program that finds its tiles), bfloat16, 512 rows in each group.
ISSUE = {
    "0.0.50.1": {
        ("v6e:2x2", "dense"): (100_873,),
        ("v6e:2x2", "ragged_dot"): (112_330, 1_502),
        ("tpu7x:2x2x1", "dense"): (101_197,),
        ("tpu7x:2x2x1", "ragged_dot"): (112_716, 1_614),
    },
    "0.0.42.1": {
        ("v6e:2x2", "dense"): (100_874,),
        ("v6e:2x2", "ragged_dot"): (112_655, 1_502),
        ("tpu7x:2x2x1", "dense"): (101_196,),
        ("tpu7x:2x2x1", "ragged_dot"): (113_045, 1_614),
    },
}
COUNTED = pytest.mark.skipif(libtpu_version() not in ISSUE, reason=f"counted with libtpu {' and '.join(ISSUE)}")


def case(subject, topology="v6e:2x2"):
    return CompileCase(title=type(subject).__name__, subject=subject, topology=topology)


def outcomes(*cases, timeout=600.0):
    return list(compile_cases(cases, timeout=timeout))


def peer(topology, name, call=SHAPE):
    return schedule(BaselineCall(baseline=name, call=call), topology)


@COUNTED
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v6e:2x2", "dense"),
        ("v6e:2x2", "ragged_dot"),
        pytest.param("tpu7x:2x2x1", "dense", marks=pytest.mark.slow),  # two minutes of libtpu 0.0.42.1
        ("tpu7x:2x2x1", "ragged_dot"),
    ],
)
def test_cycles_are_those_that_were_counted_before(topology, name):
    found = peer(topology, name)
    assert tuple(sorted((op.issue for op in found.ops), reverse=True)) == ISSUE[libtpu_version()][topology, name]
    assert not any(op.assumed for op in found.ops)
    rows, out = 8192 * 2048, 8192 * 1408
    if name == "dense":
        assert round(found.main.steady.mxu, 3) == {"v6e": 0.978, "tpu7x": 0.977}[topology.partition(":")[0]]
    else:  # every tile's rows once, every group's matrix once
        assert found.main.hbm_bytes == 2 * (rows + 16 * 2048 * 1408 + out)
        assert found.main.steady.runs == 32


def test_uneven_groups_cost_the_tiles_that_they_straddle():
    """There are 32 tiles of 256 rows, and one more for each bound inside of one: the executor's path, exactly."""
    sizes = [1943, 202, 300, 410, 512, 600, 288, 999, 333, 444, 555, 666, 77, 120, 400, 343]
    inside = sum(1 for i in range(1, 16) if sum(sizes[:i]) % 256)
    found = peer("v6e:2x2", "ragged_dot", f"{SHAPE},sizes={'/'.join(map(str, sizes))}")
    assert found.main.steady.runs == 32 + inside


def test_the_caller_decides_where_the_data_would():
    call = f"{SHAPE},transpose_rhs=false"
    free = peer("v6e:2x2", "ragged_dot", call)
    loop = next(section for section in free.main.sections if section.kind == "loop")
    fixed = schedule(BaselineCall(baseline="ragged_dot", call=call), "v6e:2x2", trips={loop.region: 5})
    assert next(s for s in fixed.main.sections if s.region == loop.region).runs == 5


def test_a_crash_a_time_out_and_an_error_are_outcomes_and_the_next_case_is_still_tried():
    found = outcomes(case(Abort()), case(Broken()), case(Matmul()))
    assert [outcome.verdict for outcome in found] == [CRASHED, FAILED, PASSED]
    assert "SIGABRT" in found[0].error
    assert found[1].error == "TypeError: a kernel that cannot be traced"
    assert found[2].needed == found[2].compiled.memory.total > 2 * 2 * 256 * 256
    assert found[2].compiled.cost.flops >= 2 * 256**3


def test_a_case_that_takes_too_long_is_ended():
    (found,) = outcomes(case(Sleep()), timeout=8.0)
    assert (found.verdict, found.error) == (TIMED_OUT, "not compiled after 8 seconds")


def test_what_does_not_fit_says_how_much_it_needs():
    (found,) = outcomes(case(TooLarge()))
    assert found.verdict == NO_FIT
    assert found.needed > found.available > 30 * 10**9
    assert "exceeds available HBM" in found.error


def test_an_operation_passes_in_both_directions_and_names_its_kernel():
    cases = [
        case(
            OperationCall(operation="ragged_gather", call="range-weights", direction=direction, implementation="xla"),
            "v5e:2x2",
        )
        for direction in ("forward", "backward")
    ]
    for outcome in outcomes(*cases):
        assert outcome.passed, outcome.error
        assert {kernel.name for kernel in outcome.compiled.kernels} == {"xla"}


def test_an_implementation_that_says_no_is_refused_with_its_reason():
    (found,) = outcomes(case(SPLASH))
    assert found.verdict == REFUSED
    assert "splash:" in found.error


def test_a_guard_is_lifted_for_one_case_only():
    tried, refused = outcomes(case(dataclasses.replace(SPLASH, without_guard=True)), case(SPLASH))
    assert tried.verdict != REFUSED
    assert refused.verdict == REFUSED


@pytest.mark.slow
def test_a_tiny_models_training_step_fits_a_v6e():
    step = TrainingStep(config=read_words(("deepseek-v3-tiny", "per_device_batch_size=2")))
    (found,) = outcomes(case(step), timeout=1800.0)
    assert found.passed, found.error
    assert 0 < found.needed < found.available == 32 * 10**9
    assert found.compiled.memory.aliased > 0.9 * found.compiled.memory.outputs  # the state is donated


def test_a_mesh_of_all_devices_shares_the_work():
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    topology = find_topology("v6e:2x2")
    mesh = topology.mesh(data=4)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data")))
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    alone = compile_for(jnp.matmul, (jax.ShapeDtypeStruct(x.shape, x.dtype), w), topology)
    shared = compile_for(jnp.matmul, (x, w), topology, mesh=mesh)
    assert shared.memory.outputs * 4 == alone.memory.outputs
    assert "num_partitions=4" in shared.hlo()
