"""What the families with grouped-query attention spell alike in config.json."""

from typing import Any

from raggedmoe.interop.hf_config import ConfigReader, read_rope, written_rope
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.moe.config import MoEConfig


def read_attention(reader: ConfigReader, default_theta: float, **rest: Any) -> GroupedQueryConfig:
    """Heads and rope."""
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
    """The decoder around it."""
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


def written_model(config: ModelConfig) -> dict[str, Any]:
    """The keys of both."""
    attention = config.attention
    assert isinstance(attention, GroupedQueryConfig)
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        **written_rope(attention.rope),
    }


def one_window(config: ModelConfig) -> int | None:
    """The window of all layers, for families that have one for all or none."""
    if len(set(config.windows)) != 1:
        raise ValueError(f"expected one window for all layers in this family, got {config.windows}")
    return config.windows[0]
