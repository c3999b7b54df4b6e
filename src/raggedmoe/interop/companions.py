"""The files that belong to a model beside its weights, read and written so that none is lost between folders."""

import json
from collections.abc import Mapping
from typing import Any

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.writing import write_json
from raggedmoe.models.companions import Companions
from raggedmoe.models.module import Decoder
from raggedmoe.storage import AnyPath
from raggedmoe.storage.trees import find_files, make_folder, map_files

CONFIG = "config.json"
KEPT_CONFIG = "hf_config.json"  # in a folder of ours: the config.json of the checkpoint that was imported
GENERATION = "generation_config.json"
# Patterns of the files that are copied with a model from folder to folder.
PATTERNS = (
    "tokenizer*.json",  # tokenizer.json, tokenizer_config.json
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION,
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",  # of sentencepiece and tiktoken
    "*.tiktoken",
    "tokenization_*.py",
    "LICENSE*",
    "NOTICE*",
)
TOKEN_KEYS = ("bos_token_id", "eos_token_id")


def read_companions(folder: AnyPath) -> Companions:
    """Read what belongs to the model in a folder. Where texts end is always said in generation_config.json."""
    names = [name for pattern in PATTERNS for name in sorted(find_files(folder, pattern))]
    files = dict(zip(names, map_files(lambda name: (folder / name).read_bytes(), names, folder)))
    kept = next((folder / name for name in (KEPT_CONFIG, CONFIG) if (folder / name).is_file()), None)
    config_json = {} if kept is None else read_json_object(kept)
    if GENERATION not in files:
        ends = {key: config_json[key] for key in TOKEN_KEYS if config_json.get(key) is not None}
        files |= {GENERATION: as_json(ends)} if ends else {}
    return Companions(files=files, config_json=config_json)


def companions_of(model: Decoder, companions: Companions | AnyPath | None) -> Companions:
    """Return what is written beside a model: what was asked for, a folder's, or what the model was loaded with."""
    if isinstance(companions, Companions | None):
        return companions or model.companions or Companions()
    return read_companions(companions)


def write_companions(companions: Companions, folder: AnyPath) -> None:
    """Write the files into a folder."""
    for name, content in companions.files.items():
        path = folder / name
        make_folder(path.parent)
        path.write_bytes(content)


def write_kept_config(companions: Companions, folder: AnyPath) -> None:
    """Write the config.json of an imported checkpoint into a folder of ours, for an export to read."""
    if companions.config_json:
        write_json(folder / KEPT_CONFIG, dict(companions.config_json))


def as_json(value: Mapping[str, Any]) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
