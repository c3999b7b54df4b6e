"""The scalar unit's executor: on a real program with known results, and on small ones made for one thing each."""

from pathlib import Path

import numpy as np
import pytest

from raggedmoe.aot.bundles import read_program
from raggedmoe.aot.scalar_run import WORD, run_program

DATA = Path(__file__).parent / "data"
DELAY = 4  # of a v6e's branches


@pytest.fixture(scope="module")
def metadata():
    """The program with which XLA finds the tiles of a ragged dot of 8192 rows, in 16 groups, tiles of 256 rows."""
    return read_program((DATA / "ragged_dot_metadata_bundles.txt").read_text())


def tiles_of(sizes):
    """Each tile's group, and its place among the row tiles, written independently."""
    ends = np.cumsum(sizes)
    tiles = [
        (group, tile)
        for group, (begin, end) in enumerate(zip(ends - sizes, ends))
        if end > begin
        for tile in range(begin // 256, -(-end // 256))
    ]
    return [list(each) for each in zip(*tiles)]


@pytest.mark.parametrize(
    "sizes", [[512] * 16, [8192] + [0] * 15, [0, 1, 255, 257, 700] + [0] * 6 + [6979] + [0] * 4, [100] * 16]
)
def test_a_real_program_computes_what_it_should(metadata, sizes):
    run = run_program(metadata, delay=DELAY, operands={0: sizes})
    groups, tiles = tiles_of(np.array(sizes))
    assert run.assumed == frozenset()
    assert list(run.outputs[1]) == [0, *np.cumsum(sizes)]
    assert list(run.outputs[2])[: len(groups)] == groups
    assert list(run.outputs[3])[: len(tiles)] == tiles
    assert list(run.outputs[4]) == [len(tiles)]


def test_cycles_of_a_real_program_are_those_of_its_loops(metadata):
    """16 sizes, 16 groups, 32 tiles, and 47 - 32 places to fill, by the lengths of the loops' bodies."""
    run = run_program(metadata, delay=DELAY, operands={0: [512] * 16})
    outside = 131 - 28 - 37 - 10
    assert sum(run.counts) == outside + 16 * 28 + 16 * 21 + 32 * 16 + 15 * 10 == 1502


def test_what_is_not_known_is_assumed_and_named(metadata):
    run = run_program(metadata, delay=DELAY, operands={})
    assert {85, 91} <= run.assumed
    assert all(value is None for value in run.outputs[4])


def test_the_caller_can_say_how_often_a_loop_runs(metadata):
    run = run_program(metadata, delay=DELAY, trips={91: 3, 113: 7}, taken={85: 1.0, 107: 1.0})
    assert run.counts[0x32] == 16 * 3
    assert run.counts[0x4F] == 7
    assert run.assumed == frozenset()


def test_the_caller_can_say_how_often_a_region_is_entered(metadata):
    run = run_program(metadata, delay=DELAY, trips={91: 1, 113: 1}, taken={85: 0.25, 107: 0.0})
    assert run.counts[0x32] == 4
    assert run.counts[0x4F] == 0


def program_of(*bundles):
    return read_program("\n".join(f"{at:#6x}   :  {{ {body} }}" for at, body in enumerate(bundles)))


def result_of(instruction, **values):
    """What one instruction gives, written to SMEM and out."""
    out = "%o_s9 = inlined_call_operand.hbm [shape: s32[8], index: 0, kind: output, shape index: {}]"
    setup = " ;; ".join(f"%{name} = smov {value}" for name, value in values.items())
    run = run_program(
        program_of(
            f"{setup} ;; {out} ;; %b_s8 = smov [#allocation1]",
            f"%r_s1 = {instruction}",
            "%1 = sst [smem:[#allocation1]] %r_s1",
            "%2 = dma.smem_to_hbm /*smem=*/%b_s8, /*size_in_granules=*/1, /*hbm=*/%o_s9, [#allocation2]",
        ),
        delay=DELAY,
    )
    return run.outputs[0][0]


@pytest.mark.parametrize(
    ("instruction", "values", "expected"),
    [
        ("sadd.s32 4294967295, %a_s2", {"a_s2": 5}, 4),
        ("ssub.s32 %a_s2, %b_s3", {"a_s2": 3, "b_s3": 5}, WORD - 2),
        ("smul.u32 65536, %a_s2", {"a_s2": 65537}, 65536),
        ("sshra.s32 %a_s2, 1", {"a_s2": WORD - 4}, WORD - 2),
        ("sshrl.u32 %a_s2, 28", {"a_s2": WORD - 4}, 15),
        ("sshll.u32 %a_s2, 31", {"a_s2": 3}, WORD // 2),
        ("sand.u32 12, %a_s2", {"a_s2": 10}, 8),
        ("sor.u32 12, %a_s2", {"a_s2": 10}, 14),
        ("sxor.u32 12, %a_s2", {"a_s2": 10}, 6),
        ("smin.u32 %a_s2, %b_s3", {"a_s2": WORD - 1, "b_s3": 5}, 5),
        ("smin.s32 %a_s2, %b_s3", {"a_s2": WORD - 1, "b_s3": 5}, WORD - 1),
        ("smax.s32 %a_s2, %b_s3", {"a_s2": WORD - 1, "b_s3": 5}, 5),
        ("scmp.lt.s32.totalorder %a_s2, 0", {"a_s2": WORD - 1}, 1),
        ("scmp.lt.u32.totalorder %a_s2, 1", {"a_s2": WORD - 1}, 0),
        ("scmp.ge.s32.totalorder %a_s2, 5", {"a_s2": 5}, 1),
        ("pnand %a_s2, %b_s3", {"a_s2": 1, "b_s3": 1}, 0),
        ("por %a_s2, %b_s3", {"a_s2": 0, "b_s3": 1}, 1),
        ("pneg %a_s2", {"a_s2": 0}, 1),
        ("scalar_select /*predicate=*/%a_s2, /*on_true=*/7, /*on_false=*/8", {"a_s2": 0}, 8),
        ("smov (%a_s2, %b_s3), 9", {"a_s2": 0, "b_s3": 4}, 4),
        ("smov (!%a_s2, %b_s3), 9", {"a_s2": 0, "b_s3": 4}, 9),
        ("spop %unknown", {"a_s2": 0}, None),
        (
            "sld [smem:[%p_s4]]",
            {"a_s2": "6 ;; %p_s4 = smov [#allocation7 + $0x2] ;; %3 = sst [smem:[#allocation7 + $0x2]] %a_s2"},
            6,
        ),
    ],
)
def test_instructions_give_what_the_unit_gives(instruction, values, expected):
    assert result_of(instruction, **values) == expected


def test_a_predicate_is_known_if_the_unknown_part_does_not_matter():
    assert result_of("por %unknown_p1, %a_p2", a_p2=1) == 1
    assert result_of("pnand %unknown_p1, %a_p2", a_p2=0) == 1
    assert result_of("por %unknown_p1, %a_p2", a_p2=0) is None


def test_bundles_after_a_branch_still_run_as_many_as_the_delay():
    bundles = ["%p_p1 = smov 1", "%1 = sbr.rel (%p_p1) target bundleno = 6 (0x6), region = 3", "", "", "", "", ""]
    assert run_program(program_of(*bundles), delay=2).counts == (1, 1, 1, 1, 0, 0, 1)
    assert run_program(program_of(*bundles), delay=3).counts == (1, 1, 1, 1, 1, 0, 1)


def test_a_transfer_is_counted_as_often_as_it_happens():
    run = run_program(
        program_of(
            "%i_s1 = smov 0",
            "%n_s2 = sphi %i_s1, %m_s2",
            "%m_s2 = sadd.s32 1, %n_s2 ;; %odd_s4 = sand.u32 1, %n_s2",
            "%9 = dma.general (%odd_s4), /*src=*/%h_s5, /*size_in_granules=*/64, /*dst=*/%v_s6 /* hbm-to-vmem */",
            "%p_p1 = scmp.lt.s32.totalorder %m_s2, 7",
            "%1 = sbr.rel (%p_p1) target bundleno = 1 (0x1), region = 3",
        ),
        delay=0,
    )
    (transfer,) = run.transfers
    assert (transfer.kind, transfer.num_bytes, transfer.runs) == ("hbm_to_vmem", 2048, 3)
    assert run.counts == (1, 7, 7, 7, 7, 7)


def test_a_program_that_does_not_end_is_an_error_that_says_what_to_give(monkeypatch):
    monkeypatch.setattr("raggedmoe.aot.scalar_run.MAX_STEPS", 100)
    endless = program_of("%p_p1 = smov 1", "%1 = sbr.rel (%p_p1) target bundleno = 0 (0x0), region = 3", "")
    with pytest.raises(ValueError, match="did not end within 100 steps; give --trip"):
        run_program(endless, delay=0)
