"""From the words that a user typed to checked configurations. Every mistake is found here, before anything is made."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.interop.maxtext import MAXTEXT
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.config import MoEConfig, RouterConfig
from raggedmoe.train.checkpoint import CheckpointConfig
from raggedmoe.train.data import TEXT_SUFFIXES, DataConfig
from raggedmoe.train.keys import KEYS, RECIPES
from raggedmoe.train.optimizer import OptimizerConfig
from raggedmoe.train.profile import ProfileConfig
from raggedmoe.train.step import StepConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for: a value for every key, and what the user should be told."""

    values: Mapping[str, Any]
    given: Mapping[str, str]  # the keys that were set, and the word that did
    notes: tuple[str, ...]  # settings that change nothing here, and why


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run around the steps."""

    folder: Path
    seed: int
    log_period: int
    load_period: int
    eval_interval: int
    eval_steps: int
    checkpoint_period: int
    max_skipped_steps: int
    tensorboard: bool
    load_parameters_path: Path | None
    profile: ProfileConfig | None

    def __post_init__(self) -> None:
        for name in ("log_period", "load_period", "eval_steps", "checkpoint_period", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.eval_interval < 0:
            raise ValueError(f"expected eval_interval >= 0, got {self.eval_interval}")
        if self.load_parameters_path is not None and not self.load_parameters_path.is_dir():
            raise ValueError(f"load_parameters_path: expected a folder, found none at {self.load_parameters_path}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    settings: Settings
    step: StepConfig
    data: DataConfig
    run: RunConfig
    checkpoints: CheckpointConfig | None


def parse_settings(words: Sequence[str]) -> Settings:
    """``[PRESET] key=value …`` as values. Both our names and MaxText's are known; a later word never overrides."""
    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise ValueError(f"expected one model and settings as key=value, got {' and '.join(map(repr, presets))}")
    values: dict[str, Any] = {key.name: key.default for key in KEYS.values()}
    given: dict[str, str] = {}
    notes: list[str] = []
    assigned = [(f"model_name={presets[0]}", presets[0])] if presets else []
    assigned += [(word, word) for word in words if "=" in word]
    for assignment, word in assigned:
        typed, _, text = assignment.partition("=")
        typed = typed.lstrip("-")
        for name, value, note in _meanings(typed, text):
            if note is not None:
                notes.append(f"{word}: {note}")
            if name is None:
                continue
            parsed = KEYS[name].parse(value)
            if name in given and values[name] != parsed:
                raise ValueError(f"{given[name]} and {word} contradict each other: both set {name}; leave one out")
            values[name], given[name] = parsed, word
    brought = RECIPES.get(values["model_name"], {})
    values |= {name: value for name, value in brought.items() if name not in given}
    return Settings(values=values, given=given, notes=tuple(notes))


def _meanings(typed: str, text: str) -> list[tuple[str | None, str, str | None]]:
    """Our settings, as words, that a word stands for, with a note; a name of None: only the note."""
    if typed in MAXTEXT:
        meaning = MAXTEXT[typed](text)
        found: list[tuple[str | None, str, str | None]] = [
            (name, word, None) for name, word in meaning.settings.items()
        ]
        return found + ([(None, "", meaning.note)] if meaning.note else [])
    if typed in KEYS:
        return [(typed, text, None)]
    near = difflib.get_close_matches(typed.lower(), [*KEYS, *MAXTEXT], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "nothing is named like it."
    raise ValueError(f"unknown setting {typed!r}: {hint} `raggedmoe train --help` lists them all")


def make_config(settings: Settings, hardware: Hardware) -> TrainConfig:
    """The configurations of a run on that hardware."""
    v = settings.values
    _check_degrees(settings)
    model = make_model(settings, hardware)
    warmup = max(v["steps"] // 50, 1) if v["warmup_steps"] is None else v["warmup_steps"]
    optimizer = OptimizerConfig(
        steps=v["steps"],
        learning_rate=v["learning_rate"],
        schedule=v["schedule"],
        warmup_steps=min(warmup, v["steps"] - 1) if v["warmup_steps"] is None else warmup,
        decay_fraction=v["decay_fraction"],
        final_fraction=v["final_fraction"],
        b1=v["adam_b1"],
        b2=v["adam_b2"],
        epsilon=v["adam_eps"],
        weight_decay=v["weight_decay"],
        clip_norm=v["gradient_clipping_threshold"] or None,
    )
    step = StepConfig(
        model=model,
        optimizer=optimizer,
        micro_batches=v["gradient_accumulation_steps"],
        bias_update_rate=v["bias_update_rate"],
        mtp_loss_weight=v["mtp_loss_weight"],
    )
    if v["per_device_batch_size"] < 1:
        raise ValueError(f"expected per_device_batch_size >= 1, got {v['per_device_batch_size']}")
    data = DataConfig(
        dataset=v["dataset_type"],
        paths=v["dataset_path"],
        suffixes=v["dataset_suffixes"] or TEXT_SUFFIXES,
        tokenizer=v["tokenizer_path"],
        sequence_length=v["max_target_length"],
        batch_size=v["per_device_batch_size"] * v["gradient_accumulation_steps"],
        packing=v["packing"],
        held_out=v["held_out"],
        seed=v["data_seed"],
    )
    folder = Path(v["base_output_directory"]) / _run_name(v)
    run = RunConfig(
        folder=folder,
        **{name: v[name] for name in ("seed", "log_period", "load_period", "eval_interval", "eval_steps")},
        checkpoint_period=v["checkpoint_period"],
        max_skipped_steps=v["max_skipped_steps"],
        tensorboard=v["tensorboard"],
        load_parameters_path=None if v["load_parameters_path"] is None else Path(v["load_parameters_path"]),
        profile=ProfileConfig(skip=v["skip_first_n_steps_for_profiler"], steps=v["profiler_steps"])
        if v["profiler"] == "xplane"
        else None,
    )
    checkpoints = None
    if v["enable_checkpointing"]:
        checkpoints = CheckpointConfig(
            folder=folder / "checkpoints",
            keep_last=v["keep_last"],
            keep_best=v["keep_best"],
            asynchronous=v["async_checkpointing"],
        )
    return TrainConfig(settings=settings, step=step, data=data, run=run, checkpoints=checkpoints)


def _run_name(values: Mapping[str, Any]) -> str:
    name = values["run_name"] or values["model_name"]
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"run_name: expected a folder's name inside base_output_directory, got {name!r}")
    return name


def _check_degrees(settings: Settings) -> None:
    for name in ("data", "fsdp", "expert", "tensor"):
        degree = settings.values[f"{name}_parallelism"]
        if degree not in (1, -1):
            word = settings.given[f"{name}_parallelism"]
            raise ValueError(
                f"{word}: training on several devices is not built yet, expected {name}_parallelism=1 or -1 (what "
                f"there is), got {degree}; with 1 the same model trains on one device"
            )


def make_model(settings: Settings, hardware: Hardware) -> ModelConfig:
    """The model with what the settings change."""
    v = settings.values
    model = model_preset(v["model_name"])
    if v["num_layers"] is not None:
        layers = v["num_layers"]
        if not 1 <= layers <= model.num_layers:
            raise ValueError(f"num_layers: expected 1 .. {model.num_layers} of {v['model_name']}, got {layers}")
        dense = tuple(layer for layer in model.dense_layers if layer < layers)
        model = replace(model, num_layers=layers, dense_layers=dense)
    if v["mtp_layers"] is not None:
        model = replace(model, mtp_layers=v["mtp_layers"])
    if v["max_target_length"] > model.max_length:  # trained on longer sequences, it is a model for longer ones
        model = replace(model, max_length=v["max_target_length"])
    auto = "float32" if hardware.platform == "cpu" else "bfloat16"
    remat = v["remat"]
    return replace(
        model,
        moe=make_moe(settings, model.moe),
        dtype=jnp.dtype(auto if v["dtype"] == "auto" else v["dtype"]),
        param_dtype=jnp.dtype(v["weight_dtype"]),
        attention_implementation=v["attention"],
        remat=remat[0] if remat[0] in ("none", "full") and len(remat) == 1 else remat,
    )


def make_moe(settings: Settings, moe: MoEConfig) -> MoEConfig:
    """The MoE layers with what the settings change."""
    v, given = settings.values, settings.given
    backend, factor = v["moe_backend"], v["capacity_factor"]
    if v["sparse_matmul"] is not None and "moe_backend" in given and (backend == "jax") == v["sparse_matmul"]:
        raise ValueError(
            f"{given['sparse_matmul']} and {given['moe_backend']} contradict each other: moe_backend=jax is the one "
            "without a sparse matmul; leave one out"
        )
    if v["sparse_matmul"] is False and factor is None:
        backend = "jax"
    choices = {
        operation: v[operation][0] if len(v[operation]) == 1 else v[operation]
        for operation in ("ragged_gather", "ragged_gather_reduce", "grouped_matmul")
    }
    named = any(choice != "auto" for choice in choices.values())
    return replace(
        moe,
        router=make_router(settings, moe.router),
        moe_backend=backend,
        kernels=KernelChoice(**choices) if named else None,
        strategy="capacity" if factor is not None else moe.strategy,
        capacity_factor=factor,
        width_chunks=v["width_chunks"],
    )


def make_router(settings: Settings, router: RouterConfig) -> RouterConfig:
    """The routers with what the settings change."""
    v = settings.values
    if v["routing"] is not None and v["routing"] != router.selection:
        # What ranks experts means nothing where chance does.
        router = replace(router, selection=v["routing"], selection_bias=False, num_groups=1, groups_per_token=1)
    for key, name in (("aux_loss_weight", "aux_loss_weight"), ("z_loss_weight", "z_loss_weight")):
        if v[key] is not None:
            router = replace(router, **{name: v[key]})
    return router


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The settings of a run, as JSON holds them, that differ and that a resumed run must not change."""
    return [
        f"{name}={old[name]} is now {new.get(name)}"
        for name in KEYS
        if not KEYS[name].may_change and name in old and old[name] != new.get(name)
    ]


# What a configuration calls a value, and the key that sets it.
SET_BY = {
    "sequence_length": "max_target_length",
    "batch_size": "per_device_batch_size",
    "micro_batches": "gradient_accumulation_steps",
    "dataset": "dataset_type",
    "tokenizer": "tokenizer_path",
    "paths": "dataset_path",
    "suffixes": "dataset_suffixes",
    "clip_norm": "gradient_clipping_threshold",
    "b1": "adam_b1",
    "b2": "adam_b2",
    "epsilon": "adam_eps",
}


def in_keys(message: str) -> str:
    """An error's text with the names that the user types: where a name is assigned or compared, not in paths."""
    names = "|".join(SET_BY)
    return re.sub(rf"(?<![\w/.])({names})(?==| [<>])", lambda found: SET_BY[found[1]], message)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
