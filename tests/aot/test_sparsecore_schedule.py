"""SparseCore bundles: loops, delays, streams and their bytes, on a program made for it."""

import pytest

from raggedmoe.aot.sparsecore_schedule import Stream, program_cycles, read_sparse_core

TEXT = """scs
__scs_entry:
0x0: {  \t_ = \tsnop  }
tec
.L_overlay_start_1:
0x0: {  \ts1 =\tsimm.s32 $0x0  }
.LBB2_1:
0x1: {  \t[tilespmem:s4], [sflag:$0x5] =\tstream.linear.gather [hbm4b:s0+s3], $0x80, $0x38;
\ts2 =\tsimm.s32 $0x0  }
.LBB2_2:
0x2: {  \t[tilespmem:s4], [sflag:s7] =\tstream.indirect.gather @!p0 [hbm4b:s0+s3], $0x400, v1, $0x38  }
0x3: {  \ts2 =\tsadd.s32 $0x10, s2;
\t_ =\tsdelay $0x3  }
0x4: {  \tp1 =\tsne.s32 s2, $0x40  }
.Ltmp1:
0x5: {  \t(pc) =\tsbr.rel @p1 .LBB2_2-.Ltmp1, $2  }
0x6: {  \t_ = \tsnop  }
0x7: {  \t_ = \tsnop  }
0x8: {  \ts1 =\tsadd.s32 $0x1, s1  }
0x9: {  \tp2 =\tsne.s32 s1, s9  }
.Ltmp2:
0xa: {  \t(pc) =\tsbr.rel @p2 .LBB2_1-.Ltmp2, $1  }
0xb: {  \t[hbm4b:s6+s3] =\tstream.linear.scatter [tilespmem:s13], [sflag:s7], $0x2000, $0x38  }
0xc: {  \t_ = \tsnop  }
"""


@pytest.fixture
def programs():
    return read_sparse_core("gather", TEXT)


def test_units_and_their_cycles_are_found(programs):
    assert [(program.unit, program.cycles) for program in programs] == [("scs", 1), ("tec", 16)]


def test_a_loop_has_its_own_cycles_delays_included_and_inner_ones_not(programs):
    outer, inner = programs[1].loops
    assert (outer.label, outer.depth, outer.cycles) == (".LBB2_1", 0, 5)
    assert (inner.label, inner.depth, inner.cycles) == (".LBB2_2", 1, 9)


def test_a_branch_whose_delay_is_not_printed_has_the_one_of_a_v6e():
    """The two bundles behind it hold the loop's last stores: one of them is no part of what follows."""
    (program,) = read_sparse_core(
        "gather",
        """tec
.LBB2_8:
0x0: {  \ts21 =\tsadd.s32 $0x8, s21;
\t[tilespmem:s14+$0x100] =\tvst v10  }
0x1: {  \tp0 =\tslt.u32 s21, $0x3F8  }
.Ltmp7:
0x2: {  \t(pc) =\tsbr.rel @p0 .LBB2_8-.Ltmp7  }
0x3: {  \t[tilespmem:s8+$0x80] =\tvst v10  }
0x4: {  \t[tilespmem:s17+$0x1080] =\tvst v11  }
0x5: {  \ts10 =\tsadd.s32 $0x20, s26  }
""",
    )
    (loop,) = program.loops
    assert (loop.label, loop.cycles, loop.limit, loop.step) == (".LBB2_8", 5, 0x3F8, 8)


def test_streams_are_counted_in_bytes(programs):
    outer, inner = programs[1].loops
    assert inner.streams == (Stream(kind="stream.indirect.gather", num_bytes=4096, count=1),)
    assert outer.streams == (
        Stream(kind="stream.linear.gather", num_bytes=512, count=1),
        Stream(kind="stream.linear.scatter", num_bytes=32768, count=1),
    )
    assert outer.stream_bytes == 512 + 32768


def test_a_counter_is_shown_where_it_is_compared_with_a_constant(programs):
    outer, inner = programs[1].loops
    assert (inner.limit, inner.step) == (64, 16)
    assert (outer.limit, outer.step) == (None, None)


def test_cycles_follow_from_the_runs_of_each_loop(programs):
    tec = programs[1]
    assert program_cycles(tec, {".LBB2_1": 3, ".LBB2_2": 4}) == 2 + 3 * (5 + 4 * 9)
    with pytest.raises(ValueError, match=r"no count for the loop \.LBB2_2"):
        program_cycles(tec, {".LBB2_1": 3})
