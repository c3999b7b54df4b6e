"""Settings that follow the model where they are not given: tokenizer, sequence length, batch and learning rate."""

from collections.abc import Mapping
from datetime import date
from typing import Any

import jax.numpy as jnp

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.models.config import ModelConfig
from raggedmoe.storage import AnyPath, as_path
from raggedmoe.train.settings.config import SETTINGS, TrainConfig
from raggedmoe.train.settings.sections import (
    BYTE_LENGTH,
    BYTES,
    OF_CONVERSATIONS,
    PEAK_LEARNING_RATE,
    RECIPES,
    TOKENS_PER_DEVICE,
    WITHOUT_TOKENIZER,
)

NUM_BYTES = 256
MOST_BYTES = 512  # entries of a vocabulary of bytes, at most: 256, and some special tokens
MOST_LENGTH = 2048
DEMO_WIDTH = 192
TOKENIZER = "tokenizer.json"
OTHER_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "vocab.json", "spiece.model")


def is_of_bytes(model: ModelConfig) -> bool:
    """Tell whether a model's vocabulary is so small that its tokens are bytes."""
    return model.vocab_size <= MOST_BYTES


def peak_learning_rate(model: ModelConfig, *, loaded: bool) -> float:
    """Return the learning rate for a model, which falls as its width to the power of 3/4.

    So it is 3e-3 up to the demo's width of 192, as measured with the demo, and near what was published for wider ones:
    5.1e-4 for a width of 2048 (OLMoE 4e-4, DeepSeek V2-Lite 4.2e-4) and 2.0e-4 for 7168 (DeepSeek V3 2.2e-4). A tenth
    of it goes on from parameters that are loaded without undoing what they have learned. Adapters learn best with ten
    times what the weights themselves would (https://thinkingmachines.ai/blog/lora, with alpha 32), which is the whole.
    """
    rate = PEAK_LEARNING_RATE * min(1.0, (DEMO_WIDTH / model.model_dim) ** 0.75)
    return float(f"{rate / 10 if loaded and model.lora is None else rate:.2g}")


def with_recipe(config: TrainConfig) -> TrainConfig:
    """Fill in what the model's recipe says of settings that are None."""
    recipe = RECIPES.get(config.model_name, {})
    return config.with_settings({name: value for name, value in recipe.items() if config.get(name) is None})


def with_model_defaults(config: TrainConfig, model: ModelConfig) -> TrainConfig:
    """Fill in all settings that are None and follow the model, after its recipe."""
    data = config.data
    values: dict[str, Any] = {name: setting.otherwise for name, setting in SETTINGS.items()}
    values["model_name"] = config.model_name
    values["per_device_batch_size"] = data.sequences_per_device
    if data.max_target_length is None:
        length = BYTE_LENGTH if is_of_bytes(model) else min(MOST_LENGTH, model.max_length)
        values["max_target_length"] = length
        values["per_device_batch_size"] = max(1, TOKENS_PER_DEVICE // length)
    values["tokenizer_path"] = _tokenizer_path(config)
    if data.dataset in OF_CONVERSATIONS:
        values["chat_date"] = date.today().isoformat()
    loaded = config.parameters_folder is not None or _begins_with_weights(config)
    values["learning_rate"] = peak_learning_rate(model, loaded=loaded)
    values["weight_dtype"] = str(jnp.dtype(model.param_dtype))
    missing = {name: value for name, value in values.items() if config.get(name) is None and value is not None}
    return config.with_settings(missing)


def _begins_with_weights(config: TrainConfig) -> bool:
    """Tell whether a run begins with the weights of another, and its schedule anew."""
    return config.run.init_from is not None and config.run.init_state == "weights"


def _tokenizer_path(config: TrainConfig) -> str | None:
    """Return the tokenizer to train with: the one that was named, or that of the model's folder, if it has one."""
    data, folder = config.data, config.model_folder
    if data.tokenizer_path is None and folder is not None and data.dataset not in WITHOUT_TOKENIZER:
        return str(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None
    return data.tokenizer_path


def check_data(config: TrainConfig, model: ModelConfig) -> None:
    """Refuse bytes, or Python's sources, for a model that is not made for them, unless they were asked for."""
    missing = missing_data(config, model)
    if missing is not None:
        raise ValueError(missing)


def missing_data(config: TrainConfig, model: ModelConfig) -> str | None:
    """Say what a model lacks to be trained on, as the user asked for it: data, or a tokenizer; None: nothing."""
    data, folder = config.data, config.model_folder
    if not is_of_bytes(model) and data.dataset_type is None:
        return (
            f"{config.model_name} is no model of bytes: expected the data to train it on, got none; use "
            "dataset_type=text dataset_path=FILES_OR_FOLDERS, or dataset_type=synthetic, or dataset_type=stdlib for "
            "Python's own sources"
        )
    if data.dataset == "tokens":
        return _foreign_tokens(config, model)
    if folder is None or data.dataset in WITHOUT_TOKENIZER or _tokenizer_path(config) is not None:
        return None
    others = [name for name in OTHER_TOKENIZERS if (folder / name).is_file()]
    there, how = "none", "put it there"
    if others:
        there = f"{others[0]} alone"
        how = "write one with transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
    return (
        f"{folder}: expected the model's {TOKENIZER}, got {there}; {how}, or name another with tokenizer_path=..., or "
        f"train on bytes with tokenizer_path={BYTES}"
    )


def _foreign_tokens(config: TrainConfig, model: ModelConfig) -> str | None:
    """Say how the tokens of files differ from those that loaded parameters know; None: they do not."""
    folder, tokens = config.parameters_folder, as_path(config.data.dataset_path[0])
    if folder is None or not (tokens / TOKENIZER).is_file():
        return None  # new parameters learn any; what is missing, reading says
    theirs = token_texts(tokens / TOKENIZER)
    are_bytes = len(theirs) == NUM_BYTES
    if (folder / TOKENIZER).is_file():
        ours = token_texts(folder / TOKENIZER)
        differing = [number for number in sorted(ours | theirs) if ours.get(number) != theirs.get(number)]
        # Of bytes the last may be the end of a text, as it is in none.
        if not differing or (are_bytes and len(ours) == NUM_BYTES and differing == [NUM_BYTES - 1]):
            return None
        texts = (repr(known.get(differing[0], "none")) for known in (theirs, ours))
        what = f"token {differing[0]} is {' and not '.join(texts)}"
    elif are_bytes and not is_of_bytes(model):
        what = f"bytes for a vocabulary of {model.vocab_size}"
    else:
        return None
    return (
        f"dataset_path={tokens}: expected tokens of the tokenizer that belongs to {folder}, got others: {what}; use "
        f"`raggedmoe tokenize FILES OUT --tokenizer {folder}`, or from_scratch=true for new parameters"
    )


def token_texts(path: AnyPath) -> dict[int, str]:
    """Read which text each number of a tokenizer.json stands for."""
    described = read_json_object(path)
    vocab = described.get("model", {}).get("vocab", {})
    pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], number) for number, entry in enumerate(vocab))
    texts = {number: text for text, number in pairs}
    return texts | {added["id"]: added["content"] for added in described.get("added_tokens", ())}


# What settings that follow the model had as their default before they did.
EARLIER_DEFAULTS: Mapping[str, Any] = {
    "dataset_type": "stdlib",
    "tokenizer_path": None,
    "max_target_length": 256,
    "per_device_batch_size": 16,
    "learning_rate": 3e-3,
}
# What a setting of today that was not there stands for in runs of then.
BEFORE_IT_WAS: Mapping[str, Any] = {"add_eos": False, "keep_quantised": False}


def keep_earlier_defaults(config: TrainConfig, earlier: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration for a run that goes on, of which an older version may have written the settings.

    A setting that is not chosen, and that had its default of then, stays as the run began.
    """
    if not earlier:
        return config
    defaults = {**EARLIER_DEFAULTS, **{name: value for name, value in BEFORE_IT_WAS.items() if name not in earlier}}
    if config.run.load_parameters_path is not None:
        defaults["model_name"] = "demo"  # alone, the path was not the model too
    if earlier.get("chat_date") is not None:  # the day on which the run began
        defaults["chat_date"] = earlier["chat_date"]
    chosen = {name for name in defaults if config.get(name) != SETTINGS[name].default} | config.source.words.keys()
    kept = {
        name: value
        for name, value in defaults.items()
        if name not in chosen and (earlier[name] == value if name in earlier else name in BEFORE_IT_WAS)
    }
    return config.with_settings(kept)
