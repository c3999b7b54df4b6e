"""Our kernels are as fast as they were, by the compiler's schedule: exact and repeatable, so a slower one fails.

Cycles of the kernel itself, beside which XLA sums the group sizes. The figures are of libtpu 0.0.42.1 and 0.0.50.1,
whichever is larger; docs/grouped_matmul.md has those of others' kernels at the same shape.
"""

import itertools

import pytest

from raggedmoe.aot.case import CompileCase
from raggedmoe.aot.subjects import OperationCall
from raggedmoe.aot.worker import compile_cases, schedule
from tests.aot.marks import NEEDS_LIBTPU
from tests.aot.programs import QuantizedTraining

pytestmark = NEEDS_LIBTPU

TOPOLOGIES = {"v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
KERNEL = "raggedmoe_grouped_matmul"
COMPULSORY = 2 * (8192 * 2048 + 16 * 2048 * 1408 + 8192 * 1408)
DENSE = {"v6e": 100_873, "tpu7x": 101_197}
EVEN = {"v6e": 102_120, "tpu7x": 103_060}


def grouped_matmul(call, chip):
    subject = OperationCall(operation="grouped_matmul", call=call, implementation="pallas_tpu")
    found = schedule(subject, TOPOLOGIES[chip])
    (kernel,) = (op for op in found.ops if op.name.startswith(KERNEL))
    assert kernel.assumed == ()
    return kernel


@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 2_172), ("tpu7x", 2_538)])
def test_a_small_ragged_matmul_takes_no_more_cycles_than_it_did(chip, cycles):
    kernel = grouped_matmul("R=1024,I=256,O=256,G=4,sizes=100/412/20/492", chip)
    assert kernel.issue <= cycles
    assert kernel.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("chip", EVEN)
def test_even_groups_take_hardly_longer_than_one_dense_matmul(chip):
    kernel = grouped_matmul("R=8192,I=2048,O=1408,G=16", chip)
    assert kernel.issue <= min(EVEN[chip], 1.02 * DENSE[chip])
    assert kernel.steady.mxu >= 0.96
    assert kernel.hbm_bytes <= 1.02 * COMPULSORY
    # libtpu 0.0.42.1 spills 2,311 registers in a pair's code on a v6e, beside an MXU that is busy 98.05 % of the time.
    assert kernel.spills == 0 or (chip == "v6e" and kernel.steady.mxu >= 0.98)


# 8-bit rows and matrices, one scale for each row and each output channel of an expert, a result in bfloat16.
NATIVE = {"v6e": "int8", "tpu7x": "float8_e4m3fn"}
QUANTISED = {"v6e": 56_560, "tpu7x": 55_580}


@pytest.mark.slow
@pytest.mark.parametrize("chip", NATIVE)
def test_8_bits_that_a_chip_multiplies_take_little_more_than_half_the_cycles_of_16(chip):
    qtype = NATIVE[chip]
    kernel = grouped_matmul(f"R=8192,I=2048,O=1408,G=16,lhs={qtype},rhs={qtype}", chip)
    assert kernel.issue <= min(QUANTISED[chip], 0.60 * EVEN[chip])
    # The result is as large as ever: 23.1 MB of 148.9 in bfloat16. What is read is halved, but for the scales.
    written = 2 * 8192 * 1408
    assert kernel.hbm_bytes - written <= 0.51 * (COMPULSORY - written)


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 158_290), ("tpu7x", 109_750)])
def test_mxfp4_is_read_as_it_is_stored_and_takes_no_more_cycles_than_it_did(chip, cycles):
    """Beside rows in bfloat16: a quarter of the matrices' bytes, and a sixteenth of that for their exponents."""
    kernel = grouped_matmul("R=8192,I=2048,O=1408,G=16,rhs=mxfp4,scale=block32", chip)
    assert kernel.issue <= cycles
    matrices = 16 * 2048 * 1408
    assert kernel.hbm_bytes <= 1.03 * (COMPULSORY - 2 * matrices + matrices / 2 * (1 + 1 / 16))


@pytest.mark.slow
def test_training_in_8_bits_compiles_natively_and_not():
    chips = {
        ("v6e:2x2", "int8"),
        ("v6e:2x2", "fp8"),
        ("tpu7x:2x2x1", "fp8"),
        ("tpu7x:2x2x1", "int8"),
        ("v5e:2x2", "int8"),
    }
    cases = [
        CompileCase(title=f"{name} on {topology}", subject=QuantizedTraining(name), topology=topology)
        for topology, name in sorted(chips)
    ]
    assert {o.case.title: o.error for o in compile_cases(cases) if not o.passed} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 111_090), ("tpu7x", 113_210)])
def test_skewed_groups_take_little_longer(chip, cycles):
    kernel = grouped_matmul("R=8192,I=2048,O=1408,G=16,sizes=skewed", chip)
    assert kernel.issue <= min(cycles, 1.10 * EVEN[chip])
    assert kernel.hbm_bytes <= 1.02 * COMPULSORY


@pytest.mark.parametrize(("chip", "width", "cycles"), [("v6e", 2880, 198), ("tpu7x", 2048, 88)])
def test_a_gathered_row_takes_one_stream_of_its_own_bytes_and_no_more_cycles_than_it_did(chip, width, cycles):
    subject = OperationCall(operation="ragged_gather", call=f"T=4096,K=8,D={width}", implementation="sparsecore")
    found = schedule(subject, TOPOLOGIES[chip])
    (program,) = (p for p in found.sparse_core if p.name.startswith("ragged_gather") and p.unit == "tec")
    tile = max((loop for loop in program.loops if len(loop.streams) == 2), key=lambda loop: loop.depth)
    rows = next(stream for stream in tile.streams if stream.kind.endswith("gather"))
    assert (rows.count, rows.num_bytes) == (8, 2 * width)
    after = program.loops[program.loops.index(tile) + 1 :]
    (words,) = itertools.takewhile(lambda loop: loop.depth > tile.depth, after)
    assert (tile.cycles + (words.limit // words.step + 1) * words.cycles) / 8 <= cycles
