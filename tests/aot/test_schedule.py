"""From the compiler's texts to a schedule's figures, on a stored excerpt."""

from pathlib import Path

import pytest

from raggedmoe.aot.bundles import read_program, read_utilisation, scoped_bytes
from raggedmoe.aot.clock import clock_of
from raggedmoe.aot.scalar_run import run_program
from raggedmoe.aot.schedule import Schedule, op_schedule, schedule_from_json, schedule_to_json
from raggedmoe.hardware import HARDWARE

DATA = Path(__file__).parent / "data"
DELAY = 4


def text(part):
    return (DATA / f"ragged_dot_metadata_{part}.txt").read_text()


@pytest.fixture(scope="module")
def op():
    program = read_program(text("bundles"))
    run = run_program(program, delay=DELAY, operands={0: [512] * 16})
    scoped = scoped_bytes(text("regions"))
    return op_schedule("metadata", program, read_utilisation(text("utilisation")), run, scoped, DELAY)


def test_bundles_cycles_and_memory_are_counted(op):
    assert (op.bundles, op.issue, op.mxu, op.fills, op.spills) == (131, 1502, 0.0, 0, 0)
    assert op.smem_bytes == 6 * 512  # four outputs, the prefetched sizes and a scratch
    assert op.hbm_bytes == 2 * 512  # sizes in, the number of tiles out; the other outputs stay in VMEM


def test_loops_are_found_with_their_runs_and_lengths(op):
    loops = {section.region: (section.runs, section.bundles) for section in op.sections if section.kind == "loop"}
    assert loops == {80: (16, 28), 102: (16, 21), 91: (32, 16), 113: (15, 10)}
    assert op.steady.region == 91
    assert sum(section.cycles for section in op.sections) == op.issue


def test_an_inner_loop_is_deeper_than_its_outer_one(op):
    depth = {section.region: section.depth for section in op.sections}
    assert depth[91] > depth[102] > depth[0]


def test_a_table_of_another_length_is_refused(op):
    program = read_program(text("bundles"))
    table = read_utilisation(text("utilisation").rsplit("\n", 2)[0])
    with pytest.raises(ValueError, match="131 bundles, but 130 lines of utilisation"):
        op_schedule("metadata", program, table, run_program(program, delay=DELAY), {}, DELAY)


def test_a_schedule_survives_json(op):
    schedule = Schedule(ops=(op,), sparse_core=(), clock=clock_of(HARDWARE["v6e"]))
    assert schedule_from_json(schedule_to_json(schedule)) == schedule


def test_the_estimate_is_the_larger_of_issue_and_bandwidth(op):
    clock = clock_of(HARDWARE["v6e"])
    schedule = Schedule(ops=(op,), sparse_core=(), clock=clock)
    assert schedule.hbm == round(1024 / 1638e9 * clock.hertz)
    assert schedule.estimate == schedule.issue == 1502


@pytest.mark.parametrize(("chip", "gigahertz"), [("v5e", 1.50), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.20)])
def test_clocks_follow_from_the_published_peaks(chip, gigahertz):
    assert clock_of(HARDWARE[chip]).hertz == pytest.approx(gigahertz * 1e9, rel=0.01)


def test_a_chip_without_a_schedule_is_refused():
    with pytest.raises(ValueError, match="no schedule is known for h100; expected one of v4, v5e"):
        clock_of(HARDWARE["h100"])


def test_the_share_of_the_peak_counts_useful_products():
    assert clock_of(HARDWARE["v6e"]).of_peak(8192 * 2048 * 1408, 100_873) == pytest.approx(0.893, abs=5e-4)
