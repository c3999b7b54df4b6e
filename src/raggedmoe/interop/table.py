"""The types of a family's table of checkpoint tensors, and the tables that several families share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.layout import TensorLayout, parse_layout
from raggedmoe.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A stored tensor: its name (after the layer's prefix), the parameters in it, and its layout.

    ``{expert}`` in the name means one tensor for each expert. An entry whose parameters the model does not have is left
    out.
    """

    name: str
    params: tuple[str, ...]
    layout: TensorLayout

    @property
    def per_expert(self) -> bool:
        """Whether each expert has a tensor of its own."""
        return "{expert}" in self.name


def entry(name: str, params: str, text: str) -> TensorEntry:
    """Make one line of a table."""
    return TensorEntry(name=name, params=tuple(params.split()), layout=parse_layout(text))


TensorEntries = tuple[TensorEntry, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one model family's Hugging Face checkpoints are written."""

    model_type: str
    architecture: str
    layer: TensorEntries  # tensors of a layer; entries that a layer has no parameters for are left out
    experts: dict[str, TensorEntries]  # by the name of the layout; export writes the first by default
    import_only: tuple[str, ...] = ()  # layouts of the experts that export does not write
    model: TensorEntries
    mtp: TensorEntries = ()  # tensors that a multi-token-prediction module has beside those of a layer
    mtp_copies: TensorEntries = ()  # copies of the embedding and head, as some checkpoints store them
    read_config: Callable[[ConfigReader], ModelConfig]
    write_config: Callable[[ModelConfig], dict[str, Any]]


MODEL: TensorEntries = (
    entry("model.embed_tokens.weight", "embedding", "vocab model_dim"),
    entry("model.norm.weight", "final_norm", "model_dim"),
    entry("lm_head.weight", "head", "vocab model_dim"),
)
NORMS: TensorEntries = (
    entry("input_layernorm.weight", "attention_norm", "model_dim"),
    entry("post_attention_layernorm.weight", "mlp_norm", "model_dim"),
)
GROUPED_QUERY: TensorEntries = (
    *(
        line
        for name, axis in (("q", "head"), ("k", "kv_head"), ("v", "kv_head"))
        for line in (
            entry(f"self_attn.{name}_proj.weight", f"attention.w{name}", f"({axis} head_dim) model_dim"),
            entry(f"self_attn.{name}_proj.bias", f"attention.b{name}", f"({axis} head_dim)"),
        )
    ),
    entry("self_attn.o_proj.weight", "attention.wo", "model_dim (head head_dim)"),
    entry("self_attn.o_proj.bias", "attention.bo", "model_dim"),
)
LATENT: TensorEntries = (
    entry("self_attn.q_proj.weight", "attention.wq", "(head head_dim) model_dim"),
    entry("self_attn.q_a_proj.weight", "attention.q_a", "q_latent model_dim"),
    entry("self_attn.q_a_layernorm.weight", "attention.q_a_norm", "q_latent"),
    entry("self_attn.q_b_proj.weight", "attention.q_b", "(head head_dim) q_latent"),
    entry("self_attn.kv_a_proj_with_mqa.weight", "attention.kv_a", "kv_latent_and_rope model_dim"),
    entry("self_attn.kv_a_layernorm.weight", "attention.kv_a_norm", "kv_latent"),
    entry("self_attn.kv_b_proj.weight", "attention.k_b attention.v_b", "(head nope_dim+value_dim) kv_latent"),
    entry("self_attn.o_proj.weight", "attention.wo", "model_dim (head value_dim)"),
)
MLP: TensorEntries = (
    entry("mlp.gate_proj.weight", "mlp.wi_0", "mlp_dim model_dim"),
    entry("mlp.up_proj.weight", "mlp.wi_1", "mlp_dim model_dim"),
    entry("mlp.down_proj.weight", "mlp.wo", "model_dim mlp_dim"),
)
ROUTER: TensorEntries = (entry("mlp.gate.weight", "moe.router_kernel", "expert model_dim"),)
SHARED_EXPERTS: TensorEntries = (
    entry("mlp.shared_experts.gate_proj.weight", "moe.shared_wi_0", "shared_dim model_dim"),
    entry("mlp.shared_experts.up_proj.weight", "moe.shared_wi_1", "shared_dim model_dim"),
    entry("mlp.shared_experts.down_proj.weight", "moe.shared_wo", "model_dim shared_dim"),
)
FUSED: TensorEntries = (
    entry("mlp.experts.gate_up_proj", "moe.wi_0 moe.wi_1", "expert expert_dim+expert_dim model_dim"),
    entry("mlp.experts.down_proj", "moe.wo", "expert model_dim expert_dim"),
)


def experts(prefix: str, gate: str, up: str, down: str) -> TensorEntries:
    """Make the entries of experts that are stored as one tensor for each expert and projection."""
    return (
        entry(f"{prefix}.{{expert}}.{gate}.weight", "moe.wi_0", "expert_dim model_dim"),
        entry(f"{prefix}.{{expert}}.{up}.weight", "moe.wi_1", "expert_dim model_dim"),
        entry(f"{prefix}.{{expert}}.{down}.weight", "moe.wo", "model_dim expert_dim"),
    )


PER_EXPERT: TensorEntries = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
