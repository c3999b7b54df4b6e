"""Adapters as PEFT's folders have them: adapter_config.json and adapter_model.safetensors, both ways.

PEFT has two tensors for each linear layer, ``lora_A [rank inputs]`` and ``lora_B [outputs rank]``, named after it. We
write those of each expert, as they are where experts are linear layers (transformers 4); for transformers 5, whose
experts are one parameter, PEFT joins them when it loads them. Adapters that PEFT trained there are one pair for all
experts of a layer, gate and up together. They are read too.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raggedmoe.interop.arrays import fetch_to_host, to_device
from raggedmoe.interop.companions import companions_of, write_companions
from raggedmoe.interop.families.registry import family_by_model_type
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.layout import TensorLayout, axis_sizes, parameter_views, stored_shape
from raggedmoe.interop.matching import Target, targets
from raggedmoe.interop.safetensors_file import NewTensor, StoredTensor, read_header
from raggedmoe.interop.table import Family
from raggedmoe.interop.writing import new_folder, write_file, write_json
from raggedmoe.lora import GROUPS, ONE_LINEAR, RANK, A, B, LoraConfig, first_matrix, is_adapter
from raggedmoe.models.companions import AdapterBase, Companions
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.fingerprint import fingerprint
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params, ParamSpec
from raggedmoe.storage import AnyPath, ObjectPath, as_path

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
EXPERT_MATRICES = ("moe.wi_0", "moe.wi_1", "moe.wo")
EXPERTS = ".moe.w"  # in the names of what PEFT has joined on transformers 5
# Settings of PEFT that change what an adapter computes, and the values with which they do not.
PLAIN = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "arrow_config": (None,),
}
# How adapters begin beside the base as it is. Other ways, such as PiSSA, change the base's own weights first.
BESIDE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


def save_peft(
    model: Decoder, folder: str | os.PathLike[str], *, base: str | None = None, progress: bool = False
) -> None:
    """Write a model's adapters as a folder that ``PeftModel.from_pretrained(base_model, folder)`` loads.

    Args:
      model: a model with adapters.
      folder: a new or an empty folder of this machine.
      base: what the folder calls the model that the adapters are for; by default the folder that it was loaded from.
      progress: show a bar on standard error.
    """
    lora, config, path = model.config.lora, model.config, as_path(folder)
    if isinstance(path, ObjectPath):
        raise ValueError(f"{path}: expected a folder of this machine for the adapters; write there, and copy it")
    if lora is None:
        raise ValueError("expected a model with adapters, got one of weights alone; write it with interop.save")
    family = family_by_model_type(config.family, "the model")
    if "per_expert" not in family.experts and any(map(lora.has_target, EXPERT_MATRICES)):
        raise ValueError(
            f"{config.family}: PEFT's form of adapters on its experts is not known here; merge them (raggedmoe "
            "export --merge), or train with lora_targets=attention"
        )
    is_trained_router = lora.router == "trained"
    if is_trained_router and family.model_type in ("mixtral", "gpt_oss"):  # another name in each version; no mlp.gate
        raise ValueError(
            f"{config.family}: expected lora_router=frozen, got trained, whose name in PEFT's form is not that of the "
            "other families; merge the adapters (raggedmoe export --merge), or train with lora_router=frozen"
        )
    every = param_specs(replace(config, lora=replace(lora, targets=tuple(GROUPS))))
    known = None if model.companions is None else model.companions.base
    tensors, modules, parameters = [], set(), set()
    for target in linear_layers(family, config):
        if not _is_adapted(target, model.params):
            if is_trained_router and target.params[0].rpartition(".")[2].startswith("router_"):
                tensors.append(_whole_tensor(target, model.params))
            continue
        tensors += [_adapter_tensor(target, model.params, every, part) for part in (A, B)]
        leaf = target.entry.name.removesuffix(".weight").rpartition(".")[2]
        if target.params[0].rpartition(".")[0].endswith("attention") or target.entry.per_expert:
            modules.add(leaf)
        else:  # by module, PEFT would take the experts' parameters for them on transformers 5
            parameters.add(target.entry.name)
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or (known.folder if known is not None else None),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "modules_to_save": ["mlp.gate"] if is_trained_router else None,
        "inference_mode": True,
    }
    with new_folder(path) as partial:
        write_json(partial / CONFIG, description)
        write_file(partial / TENSORS, tensors, {"format": "pt"}, lambda _: None)
        write_companions(companions_of(model, None), partial)


def linear_layers(family: Family, config: ModelConfig) -> Iterator[Target]:
    """List the stored tensors of a family's model, experts one by one, by the parameters of the model without LoRA."""
    layout = "per_expert" if "per_expert" in family.experts else next(iter(family.experts))
    yield from targets(family, replace(config, lora=None), layout)


def _is_adapted(target: Target, params: Params) -> bool:
    """Tell whether a linear layer has an adapter: PEFT joins gate and up, so both have one where either has."""
    names = list(target.params)
    if target.entry.per_expert:
        names += [name.replace("wi_0", "wi_1") for name in names] + [name.replace("wi_1", "wi_0") for name in names]
    return any(f"{name}{B}" in params for name in names)


def _layout(target: Target, part: str) -> TensorLayout:
    """Return the layout of an adapter's tensor: the linear layer's inputs, or its outputs, and the rank."""
    outputs, inputs = target.entry.layout.dims
    dims = ((RANK,), inputs) if part == A else (outputs, (RANK,))
    return TensorLayout(text=f"{target.name} {part}", dims=dims)


def _names_and_specs(target: Target, specs: Mapping[str, ParamSpec], part: str) -> tuple[list[str], list[ParamSpec]]:
    """Return the parameters that an adapter's tensor holds, and what lies of each at the target's index."""
    names = [first_matrix(target.params[0])] if part == A else [f"{name}{B}" for name in target.params]
    lead = len(target.index)
    inner = [replace(specs[name], shape=specs[name].shape[lead:], axes=specs[name].axes[lead:]) for name in names]
    return names, inner


def _key(target: Target, part: str) -> str:
    suffix = "lora_A.weight" if part == A else "lora_B.weight"
    return f"{PREFIX}{target.name.removesuffix('.weight')}.{suffix}"


def _adapter_tensor(target: Target, params: Params, specs_of_all: Mapping[str, ParamSpec], part: str) -> NewTensor:
    names, specs = _names_and_specs(target, specs_of_all, part)
    layout = _layout(target, part)
    shape = stored_shape(layout, specs)

    def pieces() -> Iterator[np.ndarray]:
        stored = np.zeros(shape, np.float32)
        first = specs[0].shape[specs[0].axes.index(layout.axes[0])]
        for name, view in zip(names, parameter_views(stored, layout, specs, first)):
            if name in params:
                view[...] = fetch_to_host(params[name], target.index)
        yield stored

    return NewTensor(name=_key(target, part), dtype=np.dtype(np.float32), shape=shape, pieces=pieces())


def _whole_tensor(target: Target, params: Params) -> NewTensor:
    (name,) = target.params
    values = fetch_to_host(params[name], target.index)
    return NewTensor(
        name=f"{PREFIX}{target.name}", dtype=np.dtype(np.float32), shape=target.shape, pieces=iter([values])
    )


def is_peft(folder: AnyPath) -> bool:
    """Tell whether a folder has adapters as PEFT writes them, and no model of its own."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor of an adapter, and the parameters that it goes to."""

    names: tuple[str, ...]
    index: tuple[int, ...]  # into each of them: layer of the stack, then expert; of joined experts the layer alone
    layout: TensorLayout
    tensor: StoredTensor
    rank: int
    factor: float  # what it is multiplied by, where its adapter's scale is another than the model's

    def specs(self, specs: Mapping[str, ParamSpec]) -> list[ParamSpec]:
        """Declare what the tensor holds of each parameter."""
        lead, parts = len(self.index), []
        for spec in (specs[name] for name in self.names):
            shape = [self.rank if axis == RANK else size for axis, size in zip(spec.axes, spec.shape)]
            parts.append(replace(spec, shape=tuple(shape[lead:]), axes=spec.axes[lead:]))
        return parts


@dataclass(frozen=True, kw_only=True)
class PeftAdapters:
    """What a folder of PEFT says of a model, whose tensors are not read yet."""

    base: AnyPath
    config: ModelConfig  # of the model with adapters
    parts: tuple[_Part, ...]
    routers: tuple[tuple[Target, StoredTensor], ...]  # trained whole

    def read(self) -> dict[str, np.ndarray]:
        """Read all adapters. Those of a smaller rank, and of layers that have none, are filled up with zeros."""
        specs = param_specs(self.config)
        arrays = {name: np.zeros(spec.shape, np.float32) for name, spec in specs.items() if is_adapter(name)}
        for part in self.parts:
            inner = part.specs(specs)
            stored = part.tensor.read().astype(np.float32)
            first = axis_sizes(part.layout, inner)[part.layout.axes[0]]
            for name, spec, view in zip(part.names, inner, parameter_views(stored, part.layout, inner, first)):
                place = spec.axes.index(RANK)
                at: tuple[Any, ...] = (*part.index, *[slice(None)] * place, slice(0, part.rank))
                arrays[name][at] = view * np.float32(part.factor)
        return arrays


def read_adapters(folder: AnyPath, load_config: Callable[[AnyPath], ModelConfig]) -> PeftAdapters:
    """Match every tensor of a folder of PEFT with the parameters that it is of, or raise an error that lists all wrong.

    ``load_config`` reads the configuration of the model that the folder names.
    """
    path = folder / CONFIG
    description = read_json_object(path)
    _check_plain(description, path)
    base = description.get("base_model_name_or_path")
    if not isinstance(base, str) or not as_path(base).is_dir():
        raise ValueError(
            f"{path}: expected base_model_name_or_path to be the folder of the model that the adapters are for, got "
            f"{base!r}; put the folder's path there"
        )
    config, tensors = load_config(as_path(base)), read_header(folder / TENSORS)[0]
    if config.lora is not None:
        raise ValueError(f"{path}: expected a model of weights alone at {base}, got one that has adapters itself")
    family = family_by_model_type(config.family, str(path))
    rank, scale = _Scales(description, path).common
    parts, routers = _match(family, config, dict(tensors), _Scales(description, path), folder)
    names = {first_matrix(name.removesuffix(B)) for part in parts for name in part.names if name.endswith(B)}
    if not names:
        raise ValueError(f"{folder / TENSORS}: expected adapters, found none")
    rank = max((part.rank for part in parts), default=rank)
    router = "trained" if routers else "frozen"
    lora = LoraConfig(rank=rank, alpha=scale * rank, targets=_targets_of(config, names), router=router)
    adapted = replace(config, lora=lora)
    specs = param_specs(adapted)
    wrong = [
        f"{part.tensor.name}: expected {list(shape)}, found {list(part.tensor.shape)}"
        for part in parts
        for shape in [stored_shape(part.layout, part.specs(specs))]
        if shape != part.tensor.shape
    ]
    if wrong:
        raise ValueError(_report(folder, wrong))
    return PeftAdapters(base=as_path(base), config=adapted, parts=tuple(parts), routers=tuple(routers))


def load_peft(
    folder: AnyPath, load: Callable[..., Decoder], load_config: Callable[[AnyPath], ModelConfig], **options: Any
) -> Decoder:
    """Load a model with the adapters that a folder of PEFT has; ``load`` loads the model that it names."""
    adapters = read_adapters(folder, load_config)
    model = load(adapters.base, **options)
    config = replace(adapters.config, dtype=model.config.dtype, param_dtype=model.config.param_dtype)
    specs, params = param_specs(config), dict(model.params)
    frozen = {name: value for name, value in params.items() if specs[name].updated_by is None}
    absolute = adapters.base.absolute() if isinstance(adapters.base, Path) else adapters.base
    base = AdapterBase(folder=str(absolute), fingerprint=fingerprint(frozen, config))
    changed: dict[str, np.ndarray] = {}
    for target, tensor in adapters.routers:
        (name,) = target.params
        changed.setdefault(name, np.array(params[name]))[target.index] = tensor.read().astype(np.float32)
    arrays = {**changed, **adapters.read()}
    params |= {name: to_device(array) for name, array in arrays.items()}
    return Decoder(config, params=params, companions=replace(model.companions or Companions(), base=base))


def _check_plain(description: Mapping[str, Any], path: AnyPath) -> None:
    """Refuse what these adapters cannot be."""
    if description.get("peft_type") != "LORA":
        raise ValueError(f"{path}: expected peft_type LORA, got {description.get('peft_type')!r}")
    for name, plain in PLAIN.items():
        if description.get(name) not in plain:
            raise ValueError(f"{path}: {name}={description[name]!r} is not built; expected {plain[-1]!r}")
    if (how := description.get("init_lora_weights")) not in BESIDE_BASE:
        raise ValueError(
            f"{path}: expected init_lora_weights to be one of {BESIDE_BASE}, got {how!r}, which changes the base's own "
            "weights, so that the adapters are beside others; write them with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=…), or merge them there"
        )


class _Scales:
    """The factor of each adapter by what adapter_config.json says of its module."""

    def __init__(self, description: Mapping[str, Any], path: AnyPath) -> None:
        self.rank, self.alpha = description.get("r", 8), description.get("lora_alpha", 8)
        self.is_by_root = bool(description.get("use_rslora"))
        self.alphas, self.ranks = (description.get(f"{name}_pattern") or {} for name in ("alpha", "rank"))
        if not isinstance(self.rank, int) or self.rank < 1 or not isinstance(self.alpha, int | float):
            raise ValueError(f"{path}: expected a rank r >= 1 and lora_alpha, got {self.rank!r} and {self.alpha!r}")

    @property
    def common(self) -> tuple[int, float]:
        """The rank and the factor of a module that no pattern names."""
        return self.rank, self._factor(self.alpha, self.rank)

    def factor(self, module: str, rank: int) -> float:
        """Return an adapter's factor over the common one."""
        alpha = next((value for key, value in self.alphas.items() if re.fullmatch(rf"(.*\.)?({key})", module)), None)
        if (
            alpha is None
            and rank != self.rank
            and not any(re.fullmatch(rf"(.*\.)?({key})", module) for key in self.ranks)
        ):
            return 1.0  # joined from adapters of the common rank, as PEFT does: the factor stays
        return self._factor(self.alpha if alpha is None else alpha, rank) / self.common[1]

    def _factor(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.is_by_root else rank)


def _match(
    family: Family, config: ModelConfig, tensors: dict[str, StoredTensor], scales: _Scales, folder: AnyPath
) -> tuple[list[_Part], list[tuple[Target, StoredTensor]]]:
    """Pair the tensors with linear layers, with experts that are joined, and with routers."""
    parts: list[_Part] = []
    routers: list[tuple[Target, StoredTensor]] = []
    joined: dict[str, Target] = {}
    every = param_specs(replace(config, lora=LoraConfig(rank=1)))
    for target in linear_layers(family, config):
        if target.params[0].rpartition(".")[2].startswith("router_"):
            if f"{PREFIX}{target.name}" in tensors:
                routers.append((target, tensors.pop(f"{PREFIX}{target.name}")))
            continue
        if first_matrix(target.params[0]) not in every or len(target.entry.layout.dims) != 2:
            continue
        if target.entry.per_expert:
            joined.setdefault(target.name.rpartition(".experts.")[0], target)
        first, second = (tensors.pop(_key(target, part), None) for part in (A, B))
        if first is not None and second is not None:
            rank = first.shape[0]
            factor = scales.factor(target.name.removesuffix(".weight"), rank)
            of_second = tuple(f"{name}{B}" for name in target.params)
            common: dict[str, Any] = {"index": target.index, "rank": rank}
            inputs, outputs = _layout(target, A), _layout(target, B)
            names = (first_matrix(target.params[0]),)
            parts.append(_Part(names=names, layout=inputs, tensor=first, factor=1.0, **common))
            parts.append(_Part(names=of_second, layout=outputs, tensor=second, factor=factor, **common))
        elif first is not None or second is not None:
            lacking = _key(target, B if second is None else A)
            raise ValueError(_report(folder, [f"{lacking}: missing"]))
    for module, target in joined.items():
        parts += _match_joined(module.replace("block_sparse_moe", "mlp"), target, config, tensors, scales)
    if tensors:
        raise ValueError(_report(folder, [f"{name}: no linear layer of this model" for name in sorted(tensors)]))
    return parts, routers


def _match_joined(
    module: str, target: Target, config: ModelConfig, tensors: dict[str, StoredTensor], scales: _Scales
) -> list[_Part]:
    """Match the adapters of a layer's experts as PEFT trains them on transformers 5: one pair for all of them.

    ``A`` is ``[experts · rank, inputs]`` and ``B`` ``[outputs, rank · experts]``. Gate and up share the first.
    """
    parts: list[_Part] = []
    moe, experts = config.moe, config.moe.num_experts
    stem = target.params[0].rpartition(".")[0]
    for wrapper in ("experts.base_layer", "experts"):
        keys = [f"{PREFIX}{module}.{wrapper}.lora_{letter}.weight" for letter in "AB"]
        if not all(key in tensors for key in keys):
            continue
        first, second = (tensors.pop(key) for key in keys)
        is_up = (first.shape[1], second.shape[0]) == (moe.model_dim, 2 * moe.expert_dim)
        names = ("wi_0", "wi_1") if is_up else ("wo",)
        inputs, outputs = ("model_dim", "expert_dim+expert_dim") if is_up else ("expert_dim", "model_dim")
        rank = first.shape[0] // experts
        factor = scales.factor(f"{module}.experts.{'gate_up_proj' if is_up else 'down_proj'}", rank)
        layouts = [((("expert", RANK), (inputs,))), ((outputs,), (RANK, "expert"))]
        of_first, of_second = (TensorLayout(text=key, dims=dims) for key, dims in zip(keys, layouts))
        common: dict[str, Any] = {"index": target.index[:-1], "rank": rank}
        parts += [
            _Part(names=(f"{stem}.{name}{A}",), layout=of_first, tensor=first, factor=1.0, **common) for name in names
        ]
        seconds = tuple(f"{stem}.{name}{B}" for name in names)
        parts.append(_Part(names=seconds, layout=of_second, tensor=second, factor=factor, **common))
    return parts


def _targets_of(config: ModelConfig, first_matrices: set[str]) -> tuple[str, ...]:
    """Name the matrices that have adapters: by groups, where all of a group have, and the others by their own names."""
    leaves = {_in_layer(name) for name in first_matrices}
    groups: list[str] = []
    for group in GROUPS:
        specs = param_specs(replace(config, lora=LoraConfig(rank=1, targets=(group,))))
        members = {_in_layer(name) for name in specs if name.endswith(A)}
        if members and members <= leaves:
            groups.append(group)
            leaves -= members
    return (*groups, *sorted(leaves))


def _in_layer(name: str) -> str:
    """Return the name in a layer of the linear layer that a first matrix is of: ``attention.wq``."""
    part, leaf = name.removesuffix(A).split(".")[-2:]
    return f"{part}.{ONE_LINEAR.get(leaf, leaf)}"


def _report(folder: AnyPath, problems: list[str], most: int = 20) -> str:
    """Write the error that lists what is wrong with a folder's tensors."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    head = f"{folder}: the tensors are not those of adapters of its base; nothing was loaded"
    return "\n  ".join([head, *problems[:most], *more])
