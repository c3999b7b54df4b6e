"""Matching stored tensors to parameters: each of both is accounted for before any byte of a tensor is read."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from raggedmoe.interop.layout import stored_shape
from raggedmoe.interop.quantized import ReadableTensor
from raggedmoe.interop.table import Family, TensorEntry
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import ParamSpec
from raggedmoe.storage import AnyPath

# Buffers in old checkpoints that follow from the configuration.
IGNORED_TENSORS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a stored tensor goes: the parameters that it holds, and the index in their stacked arrays."""

    name: str
    entry: TensorEntry
    params: tuple[str, ...]  # full names
    index: tuple[int, ...]  # into each of them: layer of the stack, then expert; empty: all of it
    specs: tuple[ParamSpec, ...]  # declarations of what lies at that index
    copy: bool = False  # whether another tensor fills the parameter, which this one must be equal to

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the stored tensor must have."""
        return stored_shape(self.entry.layout, self.specs)


def targets(family: Family, config: ModelConfig, expert_layout: str) -> Iterator[Target]:
    """List all tensors of a checkpoint whose experts have that layout, such as "fused"."""
    specs = param_specs(config)
    for entry in family.model:
        yield from _entry_targets(entry, "", "", (), specs)
    entries = (*family.layer, *family.experts[expert_layout])
    for s, stack in enumerate(config.stacks):
        for repeat in range(stack.repeats):
            for position in range(len(stack.kinds)):
                prefix = f"model.layers.{stack.layer(repeat, position)}."
                for entry in entries:
                    yield from _entry_targets(entry, prefix, f"stacks.{s}.{position}.", (repeat,), specs)
    for m in range(config.mtp_layers):
        prefix = f"model.layers.{config.num_layers + m}."
        for entry in (*family.mtp, *entries):
            yield from _entry_targets(entry, prefix, f"mtp.{m}.", (), specs)


def copies(family: Family, config: ModelConfig) -> Iterator[Target]:
    """List the tensors that a checkpoint may hold a second time."""
    specs = param_specs(config)
    head = "embedding" if config.tied_embeddings else "head"
    if config.tied_embeddings:
        lines = [e for e in family.model if e.params == ("head",)]
        for line in lines:
            yield from (replace(t, copy=True) for t in _entry_targets(replace(line, params=(head,)), "", "", (), specs))
    for m in range(config.mtp_layers):
        for line in family.mtp_copies:
            shared = replace(line, params=(head,)) if line.params == ("head",) else line
            prefix = f"model.layers.{config.num_layers + m}."
            yield from (replace(t, copy=True) for t in _entry_targets(shared, prefix, "", (), specs))


def _entry_targets(
    entry: TensorEntry, name_prefix: str, param_prefix: str, index: tuple[int, ...], specs: Mapping[str, ParamSpec]
) -> Iterator[Target]:
    """List the targets of one entry of a table; none if the model has no such parameter."""
    params = tuple(f"{param_prefix}{param}" for param in entry.params)
    if params[0] not in specs:
        return
    inner = tuple(_drop_leading_dims(specs[param], len(index)) for param in params)
    if not entry.per_expert:
        yield Target(name=f"{name_prefix}{entry.name}", entry=entry, params=params, index=index, specs=inner)
        return
    of_one = tuple(_drop_leading_dims(spec, 1) for spec in inner)
    for expert in range(inner[0].shape[0]):
        yield Target(
            name=f"{name_prefix}{entry.name.format(expert=expert)}",
            entry=entry,
            params=params,
            index=(*index, expert),
            specs=of_one,
        )


def _drop_leading_dims(spec: ParamSpec, leading: int) -> ParamSpec:
    """Declare one slice of a parameter: what lies at an index of its leading dimensions."""
    return replace(spec, shape=spec.shape[leading:], axes=spec.axes[leading:])


def match_tensors(
    folder: AnyPath, family: Family, config: ModelConfig, tensors: Mapping[str, ReadableTensor]
) -> list[tuple[Target, ReadableTensor]]:
    """Pair each target with its tensor, or raise one error that lists everything that is wrong."""
    layouts = {name: _list_targets(folder, targets(family, config, name), len(tensors)) for name in family.experts}
    common = set.intersection(*(set(names) for names in layouts.values()))
    present = [name for name, names in layouts.items() if (set(names) - common) & tensors.keys()] or list(layouts)[:1]
    expected = layouts[present[0]]
    extra = {t.name: t for t in copies(family, config)}
    problems: dict[str, list[str]] = {"missing": [], "misshapen": [], "of a wrong type": [], "twice": [], "unknown": []}
    for expert_layout in present[1:]:
        both = sorted((set(layouts[expert_layout]) - common) & tensors.keys())
        problems["twice"] += [f"{name} (the experts are also stored as {present[0]})" for name in both]
    problems["missing"] = [f"{name} {list(t.shape)}" for name, t in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        target = expected.get(name) or extra.get(name)
        if target is None:
            if not IGNORED_TENSORS.fullmatch(name) and not any(name in names for names in layouts.values()):
                problems["unknown"].append(f"{name} {list(tensor.shape)} in {tensor.path.name}")
        elif tensor.shape != target.shape:
            problems["misshapen"].append(
                f"{name} in {tensor.path.name}: expected {list(target.shape)}, found {list(tensor.shape)}"
            )
        elif not _is_float(tensor.dtype):
            problems["of a wrong type"].append(f"{name} in {tensor.path.name}: expected a float, found {tensor.dtype}")
    if any(problems.values()):
        raise ValueError(_report(folder, problems))
    pairs = [(target, tensors[name]) for name, target in expected.items()]
    return pairs + [(target, tensors[name]) for name, target in extra.items() if name in tensors]


def _list_targets(folder: AnyPath, expected: Iterator[Target], num_tensors: int) -> dict[str, Target]:
    """List targets by name, up to a limit: a one-line config.json can ask for 10,000 layers of 10,000 experts."""
    most = 2 * num_tensors + 10_000
    listed = {target.name: target for target in itertools.islice(expected, most + 1)}
    if len(listed) > most:
        raise ValueError(
            f"{folder}: its config.json describes more than {most} tensors, found {num_tensors}; nothing was loaded; "
            "check its numbers of layers and experts"
        )
    return listed


def _is_float(dtype: np.dtype) -> bool:
    return dtype.name in ("float64", "float32", "float16", "bfloat16")


def _report(folder: AnyPath, problems: Mapping[str, list[str]], most: int = 20) -> str:
    """Write the error that lists all problems by kind."""
    lines = [f"{folder}: the tensors are not those of its config.json; nothing was loaded"]
    for kind, names in problems.items():
        if names:
            lines.append(f"  {kind} ({len(names)}):")
            lines += [f"    {name}" for name in names[:most]]
            lines += [f"    and {len(names) - most} more"] if len(names) > most else []
    return "\n".join(lines)
