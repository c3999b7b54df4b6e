"""Reading Hugging Face's config.json key by key, so that a setting that we do not support is refused, not ignored."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.models.config import MOST_LAYERS, ModelConfig, RopeConfig, YarnConfig
from raggedmoe.storage import AnyPath

logger = logging.getLogger("raggedmoe")

# These keys describe training, the tokenizer, or the file's origin: no logit depends on them.
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
    """Reads the keys of a config.json, checks their types, and remembers which were read."""

    def __init__(self, path: AnyPath | str, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default where it is absent or null."""
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def get_required(self, key: str, *others: str) -> Any:
        """Return the value of a key, or of one of its other spellings. Raise an error if none is there."""
        for name in (key, *others):
            value = self.get(name)
            if value is not None:
                return value
        raise ValueError(f"{self.path}: expected the key {key!r}, got none; is this a {self.get('model_type')} model?")

    def require_keys(self, *keys: str) -> None:
        """Refuse a file that lacks one of these keys, as `transformers` would use one model's value. Null will do."""
        for key in keys:
            if key not in self.values:
                raise ValueError(f"{self.path}: expected the key {key!r}, got none; say what it is, or null for none")

    def size(self, key: str, *others: str) -> int:
        """Read a positive integer."""
        value = self.get_required(key, *others)
        if not _is_size(value):
            raise ValueError(f"{self.path}: expected {key!r} to be a positive integer, got {value!r}")
        return value

    def count(self, key: str, *others: str) -> int:
        """Read a number of layers or experts, which is limited, as both are listed one by one."""
        value = self.size(key, *others)
        if value > MOST_LAYERS:
            raise ValueError(f"{self.path}: expected {key!r} to be at most {MOST_LAYERS}, got {value}")
        return value

    def optional_size(self, key: str) -> int | None:
        """Read a positive integer; None where the key is absent or null."""
        return self._get_valid(key, None, "a positive integer or null", lambda value: value is None or _is_size(value))

    def non_negative_int(self, key: str, default: int) -> int:
        """Read an integer from 0 to the largest number of layers that we expect."""
        expected = f"an integer from 0 to {MOST_LAYERS}"
        return self._get_valid(key, default, expected, lambda value: type(value) is int and 0 <= value <= MOST_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a finite number."""
        return float(self._get_valid(key, default, "a number", _is_number))

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        return self._get_valid(key, default, "true or false", lambda value: isinstance(value, bool))

    def _get_valid(self, key: str, default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        """Read a value, and refuse one that is not what is expected."""
        value = self.get(key, default)
        if not is_valid(value):
            raise ValueError(f"{self.path}: expected {key!r} to be {expected}, got {value!r}")
        return value

    def expect(self, key: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a setting that our decoder does not have."""
        value = self.get(key, default)
        if value not in allowed:
            raise ValueError(
                f"{self.path}: {key}={value!r} is not supported; expected {' or '.join(repr(a) for a in allowed)}"
            )

    def warn_of_unread(self) -> None:
        """Warn of keys that were not read, once all that matter were."""
        unread = sorted(self.values.keys() - self.read - HARMLESS)
        if unread:
            logger.warning("%s: these keys are not known and have no effect: %s", self.path, ", ".join(unread))


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def read_model_config(reader: ConfigReader, read_config: Callable[[ConfigReader], ModelConfig]) -> ModelConfig:
    """Make a family's model configuration from a config.json. An error about its values names the file."""
    try:
        return read_config(reader)
    except ValueError as error:
        if str(error).startswith(f"{reader.path}: "):
            raise
        raise ValueError(f"{reader.path}: {error}") from None


def read_config_json(folder: AnyPath) -> ConfigReader:
    """Open the config.json of a folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: expected a Hugging Face model's config.json, found none; check the folder")
    return ConfigReader(path, read_json_object(path))


def read_rope(reader: ConfigReader, default_theta: float, *, interleaved: bool = False) -> RopeConfig:
    """Read the settings of rope, spelled as rope_theta beside rope_scaling, or as rope_parameters with all of them."""
    settings = reader.get("rope_scaling") or reader.get("rope_parameters") or {}
    reader.read |= {"rope_scaling", "rope_parameters"}
    if not isinstance(settings, dict):
        raise ValueError(f"{reader.path}: expected rope_scaling to be an object or null, got {settings!r}")
    rope = ConfigReader(reader.path, settings)
    theta = rope.number("rope_theta", reader.number("rope_theta", default_theta))
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
    mscale_all_dim = rope.number("mscale_all_dim", 0.0)
    yarn = YarnConfig(
        factor=rope.number("factor"),
        original_length=rope.optional_size("original_max_position_embeddings")
        or reader.size("max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        # Only both together set cos and sin: alone, an mscale is not read.
        mscale=rope.number("mscale") if settings.get("mscale") and mscale_all_dim else 1.0,
        mscale_all_dim=mscale_all_dim,
        truncate=rope.flag("truncate", True),
    )
    return RopeConfig(theta=theta, interleaved=interleaved, yarn=yarn)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Make the keys of rope for config.json, in the spelling that all versions of `transformers` read."""
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
