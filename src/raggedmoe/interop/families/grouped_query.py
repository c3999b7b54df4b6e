"""The keys of config.json that families with grouped-query attention have in common."""

from typing import Any

from raggedmoe.interop.hf_config import ConfigReader, read_rope, rope_to_hf
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.moe.config import MoEConfig


def read_attention(reader: ConfigReader, default_theta: float, **rest: Any) -> GroupedQueryConfig:
    """Read the heads and rope of attention."""
    num_heads, width = reader.size("num_attention_heads"), reader.size("hidden_size")
    head_dim = reader.optional_size("head_dim")
    if head_dim is None:
        if width % num_heads:
            raise ValueError(f"{reader.path}: expected head_dim, as hidden_size={width} is no multiple of {num_heads}")
        head_dim = width // num_heads
    return GroupedQueryConfig(
        num_heads=num_heads,
        num_kv_heads=reader.optional_size("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rope=read_rope(reader, default_theta),
        **rest,
    )


def read_model(
    reader: ConfigReader, *, family: str, attention: GroupedQueryConfig, moe: MoEConfig, **rest: Any
) -> ModelConfig:
    """Read the sizes of the decoder around attention and experts."""
    reader.expect("hidden_act", "silu", default="silu")
    return ModelConfig(
        family=family,
        vocab_size=reader.size("vocab_size"),
        num_layers=reader.count("num_hidden_layers"),
        model_dim=reader.size("hidden_size"),
        attention=attention,
        moe=moe,
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        max_length=reader.size("max_position_embeddings"),
        **rest,
    )


def attention_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Make the keys of the attention: heads and rope."""
    attention = config.attention
    assert isinstance(attention, GroupedQueryConfig)
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        **rope_to_hf(attention.rope),
    }


def common_window(config: ModelConfig) -> int | None:
    """Return the sliding window that all layers have, or None; a model with different ones is refused."""
    if len(set(config.windows)) != 1:
        raise ValueError(f"expected one window for all layers in this family, got {config.windows}")
    return config.windows[0]
