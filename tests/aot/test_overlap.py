"""What a program does while devices communicate, from the text of its schedule."""
# ruff: noqa: E501

import json
from dataclasses import asdict

from raggedmoe.aot.overlap import move_from_json, moves
from raggedmoe.cli.compile_report import move_lines

# Shortened from what the compiler prints for a tpu7x; the last part is as for a v6e.
SPARSE_CORE = '"sparse_core_config":{"offload":"OFFLOAD_%s","core_type":"CORE_TYPE_SC","core_ids":[%s]}'
SENT = SPARSE_CORE % ("COLLECTIVE", '"1"')
GATHERED = SPARSE_CORE % ("GATHER", '"0","1"')
PROGRAM = f"""HloModule jit_f, is_scheduled=true

%called.1 (a: bf16[8]) -> bf16[8] {{
  %a = bf16[8] parameter(0)
  ROOT %ragged-all-to-all.1 = bf16[8]{{0}} ragged-all-to-all(%a), metadata={{op_name="jit(f)/jvp(experts)/dispatch/x"}}
}}, execution_thread="sparsecore"

%body (p: bf16[8]) -> bf16[8] {{
  %p = bf16[8] parameter(0)
  %all-gather-start = (bf16[8], bf16[16]) all-gather-start(%p), metadata={{op_name="jit(f)/jvp(route)/shard_map/all_gather"}}
  %f.0 = bf16[8]{{0}} fusion(%p), kind=kLoop, backend_config={{"estimated_cycles":"100"}}
  %all-gather-done = bf16[16] all-gather-done(%all-gather-start)
  ROOT %r = bf16[8]{{0}} reduce-scatter(%all-gather-done), metadata={{op_name="jit(f)/transpose(jvp(experts))/unpermute/y"}}
}}

ENTRY %main (p: bf16[8]) -> bf16[8] {{
  %p.1 = bf16[8] parameter(0)
  %ragged-all-to-all.1.call-start = ((), ()) call-start(), to_apply=%called.1, metadata={{op_name="jit(f)/jvp(experts)/dispatch/shard_map/ragged_all_to_all"}}, backend_config={{{SENT}}}
  %f.1 = bf16[8]{{0}} fusion(%p.1), kind=kLoop, backend_config={{"estimated_cycles":"7"}}
  %ragged-all-to-all.1.call-update = ((bf16[8]), bf16[8]) call-update(%ragged-all-to-all.1.call-start, %f.1)
  %gather_offload_async_start = ((), ()) call-start(), to_apply=%called.2, metadata={{op_name="jit(f)/jvp(experts)/dispatch/gather"}}, backend_config={{{GATHERED}}}
  %gather_offload_async_start.update = ((bf16[8]), bf16[8]) call-update(%gather_offload_async_start, %f.1)
  %matmul.3 = f32[8]{{0}} custom-call(%p.1), custom_call_target="tpu_custom_call", metadata={{op_name="x"}}
  %matmul.4 = f32[8]{{0}} custom-call(%p.1), custom_call_target="tpu_custom_call", metadata={{op_name="x"}}
  %f.2 = bf16[8]{{0}} fusion(%p.1), kind=kLoop, backend_config={{"estimated_cycles":"5"}}
  %ragged-all-to-all.1.call-done = bf16[8] call-done(%ragged-all-to-all.1.call-update)
  %gather_offload_async_done = bf16[8] call-done(%gather_offload_async_start.update)
  %later = ((), ()) call-start(), to_apply=%called.3, backend_config={{{SENT}}}
  ROOT %w = bf16[8]{{0}} while(%ragged-all-to-all.1.call-done), body=%body
}}
"""


def test_a_move_has_the_work_between_its_arguments_and_its_wait():
    (sent,) = (move for move in moves(PROGRAM) if move.kind == "ragged-all-to-all")
    assert (sent.scope, sent.backward, sent.synchronous, sent.cores) == ("experts/dispatch", False, False, (1,))
    assert (sent.kernels, sent.cycles) == (("matmul", "matmul"), 5)  # not the 7 before its arguments were there
    assert sent.beside == ("gather_offload",)


def test_loops_are_read_as_well_and_a_move_without_a_start_hides_behind_nothing():
    found = {move.kind: move for move in moves(PROGRAM) if not move.cores}
    assert set(found) == {"all-gather", "reduce-scatter"}
    assert (found["all-gather"].synchronous, found["all-gather"].cycles) == (False, 100)
    assert (found["reduce-scatter"].synchronous, found["reduce-scatter"].backward) == (True, True)


def test_moves_outlive_json():
    found = moves(PROGRAM)
    assert [move_from_json(move) for move in json.loads(json.dumps([asdict(move) for move in found]))] == found


def test_they_are_listed_with_what_is_done_meanwhile():
    lines = "\n".join(move_lines(moves(PROGRAM)))
    assert "forward  experts/dispatch: ragged-all-to-all, SparseCore 1: 2 × matmul; 5 cycles of XLA's" in lines
    assert "backward experts/unpermute: reduce-scatter, TensorCore: nothing, it is waited for at once" in lines
    assert "and 1 gathers on SparseCores, 1 of them while a move is under way on the same core" in lines
