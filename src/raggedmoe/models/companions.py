"""What belongs to a model's checkpoint beside its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AdapterBase:
    """The folder that has the frozen weights of a model with adapters, and what tells them from others."""

    folder: str
    fingerprint: str  # by `raggedmoe.models.fingerprint`


@dataclass(frozen=True, kw_only=True, eq=False)
class Companions:
    """The files of a checkpoint that are no weights, and its config.json, whose unread keys an export keeps.

    Two of them are equal only if they are one object, so that a module that holds one can be traced.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)  # by name: tokenizer, generation settings, licence
    config_json: Mapping[str, Any] = field(default_factory=dict)  # as the checkpoint that was imported had it
    base: AdapterBase | None = None  # of a model with adapters: it need not be written where they are
