"""Collectives, read from a program written by hand in the form that XLA prints."""

import pytest

from tformer_jax.lab.aot.hlo import Collective, collectives

TEXT = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%condition (state: (s32[], bf16[4,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%inner (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %reduced = f32[2]{0:T(128)} reduce-scatter(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
}

%inner_condition (state: (s32[], f32[4])) -> pred[] {
  ROOT %unknown = pred[] compare(%i, %n), direction=LT
}

%start (w: bf16[4,8]) -> bf16[16,8] {
  ROOT %begun = bf16[16,8]{1,0} all-gather(%w), channel_id=6, replica_groups=[2,4]<=[8], metadata={op_name="f/x"}
}

%end (w: bf16[4,8]) -> bf16[16,8] {
  ROOT %ended = bf16[16,8]{1,0} all-gather(%w), channel_id=6, replica_groups=[2,4]<=[8], metadata={op_name="f/x"}
}

%all-reduce-scatter.1 (input: bf16[16,8]) -> bf16[4,8] {
  %sum_of_all = bf16[16,8]{1,0} all-reduce(%input), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %own = bf16[4,8]{1,0} dynamic-slice(%sum_of_all, %start, %zero), dynamic_slice_sizes={4,8}
}

%body (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %whole = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%w), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}
  %moved = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%k)
  %there = bf16[4,8]{1,0} collective-permute-done(%moved)
  %nested = (s32[], f32[4]) while(%init), condition=%inner_condition, body=%inner
}

ENTRY %main (p: f32[2]) -> f32[] {
  %spread = bf16[16,8] fusion(%w), kind=kCustom, calls=%start
  %over = bf16[16,8] fusion(%spread), kind=kCustom, calls=%end
  %another = bf16[16,8] all-gather(%v), channel_id=6, replica_groups=[2,4]<=[8], metadata={op_name="f/y"}
  %part = bf16[4,8] fusion(%spread), kind=kCustom, calls=%all-reduce-scatter.1
  %loop = (s32[], bf16[4,8]) while(%start), condition=%condition, body=%body
  %both = (f32[10]{0}, s32[]) all-reduce(%a, %b), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %all = f32[] all-reduce(%c), channel_id=5, replica_groups={}, to_apply=%add
}
"""


def test_bytes_groups_and_repetitions():
    assert set(collectives(TEXT, 8)) == {
        Collective("all-gather", "bf16[16,8]", 256, 4, 3 + 1 + 1),
        Collective("collective-permute", "bf16[4,8]", 64, 8, 3),
        Collective("reduce-scatter", "f32[2]", 8, 4, 3),
        Collective("reduce-scatter", "bf16[4,8]", 64, 4, 1),
        Collective("all-reduce", "f32[10] + s32[]", 44, 4, 1),
        Collective("all-reduce", "f32[]", 4, 8, 1),
    }


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("all-reduce", 2 * 75),
        ("all-gather", 75),
        ("reduce-scatter", 300),
        ("all-to-all", 75),
        ("collective-permute", 100),
    ],
)
def test_bytes_sent_by_a_ring_of_four(kind, sent):
    """For a result of 100 bytes; the operand of a reduce-scatter has 400."""
    assert Collective(kind, "", 100, 4, 1).bytes_sent == sent
    assert Collective(kind, "", 100, 4, 5).bytes_sent == 5 * sent
