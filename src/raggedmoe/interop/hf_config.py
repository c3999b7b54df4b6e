"""Reading config.json key by key, so that no setting that we would get wrong passes unseen."""

import json
import logging
from pathlib import Path
from typing import Any

from raggedmoe.models.config import RopeConfig, YarnConfig

logger = logging.getLogger("raggedmoe")

# They describe training, the tokenizer, or the file's origin: no logit depends on them.
HARMLESS = {
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "ep_size",
    "experts_per_token",
    "head_dim",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "moe_layer_freq",
    "num_key_value_heads",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "qk_head_dim",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
    "tie_word_embeddings",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


class ConfigReader:
    """The keys of a config.json; remembers which were read."""

    def __init__(self, path: Path | str, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key's value; the default where it is absent or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str, *others: str) -> Any:
        """The value of a key, or of one of its other spellings; an error without any."""
        for name in (key, *others):
            value = self.get(name)
            if value is not None:
                return value
        raise ValueError(f"{self.path}: expected the key {key!r}, got none; is this a {self.get('model_type')} model?")

    def size(self, key: str, *others: str) -> int:
        """A positive integer."""
        value = self.need(key, *others)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self.path}: expected {key!r} to be a positive integer, got {value!r}")
        return value

    def expect(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a setting that our decoder does not have."""
        value = self.get(key, default)
        if value not in allowed:
            raise ValueError(
                f"{self.path}: {key}={value!r} is not supported; expected {' or '.join(repr(a) for a in allowed)}"
            )

    def warn_of_unread(self) -> None:
        """Say which keys had no effect, once all that matter were read."""
        unread = sorted(self.values.keys() - self.read - HARMLESS)
        if unread:
            logger.warning("%s: these keys are not known and have no effect: %s", self.path, ", ".join(unread))


def read_config_json(folder: Path) -> ConfigReader:
    """The folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: expected a Hugging Face model's config.json, found none; check the folder")
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return ConfigReader(path, values)


def read_rope(reader: ConfigReader, default_theta: float, *, interleaved: bool = False) -> RopeConfig:
    """Both spellings: rope_theta beside rope_scaling, and rope_parameters that holds all."""
    settings = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    reader.read |= {"rope_scaling", "rope_parameters"}
    if not isinstance(settings, dict):
        raise ValueError(f"{reader.path}: expected rope_scaling to be an object or null, got {settings!r}")
    theta = float(settings.get("rope_theta") or reader.get("rope_theta", default_theta))
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    if kind != "yarn":
        raise ValueError(f"{reader.path}: rope type {kind!r} is not supported; expected 'default' or 'yarn'")
    known = {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    }  # fmt: skip
    if settings.keys() - known:
        raise ValueError(f"{reader.path}: rope settings {sorted(settings.keys() - known)} are not supported")
    if settings.get("mscale_all_dim") and not settings.get("mscale"):
        raise ValueError(f"{reader.path}: yarn with mscale_all_dim and no mscale is not supported; give both or none")
    if "factor" not in settings:
        raise ValueError(f"{reader.path}: expected a 'factor' in the yarn settings, got {sorted(settings)}")
    yarn = YarnConfig(
        factor=float(settings["factor"]),
        original_length=int(settings.get("original_max_position_embeddings") or reader.need("max_position_embeddings")),
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        # Only both together set cos and sin: alone, an mscale is not read.
        mscale=float(settings["mscale"]) if settings.get("mscale") and settings.get("mscale_all_dim") else 1.0,
        mscale_all_dim=float(settings.get("mscale_all_dim") or 0),
        truncate=bool(settings.get("truncate", True)),
    )
    return RopeConfig(theta=theta, interleaved=interleaved, yarn=yarn)


def written_rope(rope: RopeConfig) -> dict[str, Any]:
    """The spelling that all versions of `transformers` read."""
    if rope.yarn is None:
        return {"rope_theta": rope.theta, "rope_scaling": None}
    yarn = rope.yarn
    settings = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    if yarn.mscale_all_dim:
        settings |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return {"rope_theta": rope.theta, "rope_scaling": settings}
