"""What is counted in an optimised program's text."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from raggedmoe.aot.program_text import LOWERED, OPTIMIZED, Traffic, counts_from_json, counts_of, write_programs

# A loop of five turns with a product and an exchange in it, a loop of unknown length, and what runs once.
PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p0: f32[8,16], p1: f32[16,4]) -> f32[8,4] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,4]{1,0} parameter(1)
  ROOT %dot.3 = f32[8,4]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (t: (s32[], f32[8,16], f32[16,4])) -> (s32[], f32[8,16], f32[16,4]) {
  %t = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) parameter(0)
  %x = f32[8,16]{1,0} get-tuple-element(%t), index=1
  %w = f32[16,4]{1,0} get-tuple-element(%t), index=2
  %y = f32[8,4]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused
  %all = f32[8,4]{1,0} all-reduce(%y), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %next = (s32[], f32[8,16]{1,0}, f32[16,4]{1,0}) tuple(%n, %x, %w)
}

%open_body (t: (s32[], bf16[32])) -> (s32[], bf16[32]) {
  %t.1 = (s32[], bf16[32]{0}) parameter(0)
  %r = bf16[32]{0} get-tuple-element(%t.1), index=1
  ROOT %next.1 = (s32[], bf16[32]{0}) tuple(%m, %r)
}

ENTRY %main (x: f32[8,16], w: f32[16,4], r: bf16[32]) -> f32[8,4] {
  %x.1 = f32[8,16]{1,0} parameter(0)
  %w.1 = f32[16,4]{1,0} parameter(1)
  %rows = bf16[32]{0} parameter(2)
  %loop = (s32[], f32[8,16]) while(%init), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %open = (s32[], bf16[32]{0}) while(%init.1), condition=%cond.1, body=%open_body
  %whole = bf16[64]{0} all-gather(%rows), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %part = bf16[8]{0} reduce-scatter(%rows), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %alone = bf16[32]{0} all-reduce(%rows), channel_id=4, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %k = f32[8,4]{1,0} custom-call(%x.1, %w.1), custom_call_target="tpu_custom_call"
  %k.1 = f32[8,4]{1,0} custom-call(%x.1, %w.1), custom_call_target="tpu_custom_call"
  ROOT %out = f32[8,4]{1,0} add(%k, %k.1)
}
"""


ACROSS_SLICES = """HloModule jit_f

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %x.1 = bf16[4,8]{1,0} parameter(0)
  %send = (bf16[4,8]{1,0}, u32[], token[]) send(%x.1, %a), attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %to_host = (bf16[4,8]{1,0}, u32[], token[]) send(%x.1, %a), is_host_transfer=true
  %sum = f32[8]{0} all-reduce(%y), replica_groups=mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}, to_apply=%add
  ROOT %y = bf16[4,8]{1,0} copy(%x.1)
}
"""


def test_what_hosts_send_to_other_slices_is_counted_apart():
    assert counts_of(ACROSS_SLICES).collectives == {
        "all-reduce across slices": Traffic(number=1, num_bytes=64),
        "all-reduce": Traffic(number=1, num_bytes=32),
    }


def test_loops_of_known_length_count_as_often_as_they_run():
    found = counts_of(PROGRAM)
    assert (found.written, found.executed) == (1, 5)
    assert found.product_flops == 5 * 2 * 8 * 4 * 16
    assert (found.loops, found.open_loops) == (2, 1)
    assert found.kernels == {"tpu_custom_call": 2}


def test_bytes_of_collectives_are_those_of_what_is_gathered_scattered_or_summed():
    """One device alone exchanges nothing."""
    assert counts_of(PROGRAM).collectives == {
        "all-reduce": Traffic(number=5, num_bytes=5 * 8 * 4 * 4),
        "all-gather": Traffic(number=1, num_bytes=64 * 2),
        "reduce-scatter": Traffic(number=1, num_bytes=4 * 8 * 2),
    }


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes"),
    [
        (
            "%s = (bf16[8]{0:T(256)}, bf16[32]{0:T(256)}) all-gather-start(%r), replica_groups={{0,1,2,3}}",
            "all-gather",
            64,
        ),
        (
            "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%r), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            32,
        ),
        ("%s = (s8[8]{0}, f32[8]{0}) all-reduce(%r, %q), replica_groups=[1,8]<=[8]", "all-reduce", 40),
        ("%s = f32[64]{0} ragged-all-to-all(%r, %o, %a), replica_groups=[1,8]<=[8]", "ragged-all-to-all", 16),
        ("%s = f32[8]{0} all-to-all(%r), replica_groups=mesh['a'=2,'b'=4] {'a','b'}", "all-to-all", 32),
    ],
)
def test_every_way_to_write_a_collective(line, kind, num_bytes):
    text = f"ENTRY %main (r: bf16[8]) -> f32[] {{\n  %r = bf16[8]{{0}} parameter(0)\n  {line}\n}}\n"
    assert counts_of(text).collectives == {kind: Traffic(number=1, num_bytes=num_bytes)}


def test_a_real_program_of_this_jax_is_read():
    def f(x, w):
        return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x)

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = counts_of(jax.jit(f).lower(x, w).compile().as_text())
    assert (found.written, found.executed, found.loops, found.open_loops) == (1, 3, 1, 0)
    assert found.product_flops == 3 * 2 * 8 * 16 * 16


def test_counts_survive_json():
    found = counts_of(PROGRAM)
    assert counts_from_json(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_both_programs_are_written(tmp_path):
    write_programs(tmp_path / "new" / "folder", "module {}", PROGRAM)
    assert (tmp_path / "new" / "folder" / LOWERED).read_text() == "module {}"
    assert (tmp_path / "new" / "folder" / OPTIMIZED).read_text() == PROGRAM
