"""The experts of `transformers`, in each of its implementations: its Qwen3-MoE block, from the router to the output."""

import os
from typing import Any

from raggedmoe.bench.case import BOTH, Case
from raggedmoe.bench.contender import Prepared, contender
from raggedmoe.bench.peers_torch import tensor, to_numpy

NEEDS = ("torch", "transformers")


def prepare_block(case: Case, implementation: str) -> Prepared:
    """Prepare the block with our weights, its experts' as `gate_up_proj` [E 2F D] and `down_proj` [E D F]."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    shape = case.sizes
    config = Qwen3MoeConfig(
        hidden_size=shape.model_dim,
        moe_intermediate_size=shape.expert_dim,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_token,
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config)
    for module, name, array in (
        (block.gate, "weight", "router"),
        (block.experts, "gate_up_proj", "gate_up"),
        (block.experts, "down_proj", "down"),
    ):
        setattr(module, name, torch.nn.Parameter(tensor(case, array)))
    x = tensor(case, "x")[None]
    if case.direction != BOTH:

        def forward() -> dict[str, Any]:
            with torch.inference_mode():
                return {"value": block(x)[0]}

        return Prepared(run=forward, arrays=to_numpy)
    cotangent = tensor(case, "cotangent")[None]

    def both() -> dict[str, Any]:
        inputs = x.detach().requires_grad_()
        block.zero_grad(set_to_none=True)
        value = block(inputs)
        value.backward(cotangent)
        dwi_0, dwi_1 = block.experts.gate_up_proj.grad.chunk(2, dim=1)
        results = {
            "value": value[0].detach(),
            "dx": inputs.grad[0],
            "drouter": block.gate.weight.grad,
            "dwi_0": dwi_0,
            "dwi_1": dwi_1,
            "dwo": block.experts.down_proj.grad.transpose(1, 2),
        }
        block.zero_grad(set_to_none=True)
        return results

    return Prepared(run=both, arrays=to_numpy)


def batched_mm_reason(case: Case) -> str | None:
    """Leave out what would need too much memory: `batched_mm` copies the weights of its expert for every row."""
    shape = case.sizes
    copies = shape.weight_bytes(case.dtype, 1) * shape.rows * (2 if case.direction == BOTH else 1)
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4
    return f"would copy {copies / 1e9:.0f} GB of weights, an expert's for each row" if copies > room else None


@contender("transformers eager", "layer", needs=NEEDS)
def layer_eager(case: Case) -> Prepared:
    """Prepare a loop over the experts that have tokens."""
    return prepare_block(case, "eager")


@contender("transformers grouped_mm", "layer", needs=NEEDS)
def layer_grouped_mm(case: Case) -> Prepared:
    """Prepare PyTorch's grouped matmuls over sorted rows."""
    return prepare_block(case, "grouped_mm")


@contender("transformers batched_mm", "layer", needs=NEEDS, why_not=batched_mm_reason)
def layer_batched_mm(case: Case) -> Prepared:
    """Prepare one matrix-vector product for each row."""
    return prepare_block(case, "batched_mm")
