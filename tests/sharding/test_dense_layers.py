"""Dense weights on a mesh: what is kept for the backward pass."""

from types import SimpleNamespace

from raggedmoe.sharding.axes import EXPERT, FSDP, LogicalMesh
from raggedmoe.sharding.dense_layers import save_all_but_gathered_weights
from raggedmoe.sharding.plan import Plan

MESH = LogicalMesh(Plan(fsdp=2, tensor=2).mesh())


def test_only_what_is_gathered_over_fsdp_is_not_kept_for_the_backward_pass():
    is_saved = save_all_but_gathered_weights(MESH)
    (fsdp,), (expert,) = MESH.axes(FSDP), (EXPERT,)
    gather = SimpleNamespace(name="all_gather")
    assert not is_saved(gather, axis_name=(fsdp,))
    assert not is_saved(gather, axis_name=(expert, fsdp))
    assert is_saved(gather, axis_name=(expert,))
    assert is_saved(SimpleNamespace(name="dot_general"))
    assert not is_saved(SimpleNamespace(name="reshape"))
