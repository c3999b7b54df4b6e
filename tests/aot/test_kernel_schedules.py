"""Our kernels are as fast as they were, by the compiler's schedule: exact and repeatable, so a slower one fails.

Cycles of the kernel itself, beside which XLA sums the group sizes. The figures are of libtpu 0.0.42.1 and 0.0.50.1,
whichever is larger; docs/grouped_matmul.md has those of others' kernels at the same shape.
"""

import pytest

from aot.marks import NEEDS_LIBTPU
from raggedmoe.aot.worker import schedule

pytestmark = NEEDS_LIBTPU

TOPOLOGIES = {"v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
KERNEL = "raggedmoe_grouped_matmul"
COMPULSORY = 2 * (8192 * 2048 + 16 * 2048 * 1408 + 8192 * 1408)
DENSE = {"v6e": 100_873, "tpu7x": 101_197}


def grouped_matmul(call, chip):
    arguments = {"operation": "grouped_matmul", "call": call, "implementation": "pallas_tpu"}
    found = schedule("raggedmoe.aot.subjects:operation_call", arguments, TOPOLOGIES[chip])
    (kernel,) = (op for op in found.ops if op.name.startswith(KERNEL))
    assert kernel.assumed == ()
    return kernel


@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 2_182), ("tpu7x", 2_662)])
def test_a_small_ragged_matmul_takes_no_more_cycles_than_it_did(chip, cycles):
    kernel = grouped_matmul("R=1024,I=256,O=256,G=4,sizes=100/412/20/492", chip)
    assert kernel.issue <= cycles
    assert kernel.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 102_060), ("tpu7x", 103_180)])
def test_even_groups_take_hardly_longer_than_one_dense_matmul(chip, cycles):
    kernel = grouped_matmul("R=8192,I=2048,O=1408,G=16", chip)
    assert kernel.issue <= min(cycles, 1.02 * DENSE[chip])
    assert kernel.steady.mxu >= 0.96
    assert kernel.hbm_bytes <= 1.02 * COMPULSORY
    assert kernel.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "cycles"), [("v6e", 111_440), ("tpu7x", 113_830)])
def test_skewed_groups_take_little_longer(chip, cycles):
    kernel = grouped_matmul("R=8192,I=2048,O=1408,G=16,sizes=skewed", chip)
    assert kernel.issue <= cycles
    assert kernel.hbm_bytes <= 1.02 * COMPULSORY
