"""Which stored tensor fills which parameter: every tensor and every parameter accounted for before any byte is read."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raggedmoe.interop.layout import stored_shape
from raggedmoe.interop.quantized import Readable
from raggedmoe.interop.table import Entry, Family
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.specs import param_specs
from raggedmoe.params import ParamSpec

# Buffers that old checkpoints carry and that follow from the configuration.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One stored tensor's place: the parameters that it holds, and where in their stacked arrays."""

    name: str
    entry: Entry
    params: tuple[str, ...]  # full names
    index: tuple[int, ...]  # into each of them: layer of the stack, then expert; empty: all of it
    specs: tuple[ParamSpec, ...]  # of what lies at that index
    copy: bool = False  # of a parameter that another tensor fills: it must be equal

    @property
    def shape(self) -> tuple[int, ...]:
        return stored_shape(self.entry.layout, self.specs)


def targets(family: Family, config: ModelConfig, way: str) -> Iterator[Target]:
    """All tensors of a checkpoint whose experts are stored in that way."""
    specs = param_specs(config)
    for entry in family.model:
        yield from _placed(entry, "", "", (), specs)
    entries = (*family.layer, *family.experts[way])
    for s, stack in enumerate(config.stacks):
        for repeat in range(stack.repeats):
            for position in range(len(stack.kinds)):
                prefix = f"model.layers.{stack.layer(repeat, position)}."
                for entry in entries:
                    yield from _placed(entry, prefix, f"stacks.{s}.{position}.", (repeat,), specs)
    for m in range(config.mtp_layers):
        prefix = f"model.layers.{config.num_layers + m}."
        for entry in (*family.mtp, *entries):
            yield from _placed(entry, prefix, f"mtp.{m}.", (), specs)


def copies(family: Family, config: ModelConfig) -> Iterator[Target]:
    """Tensors that a checkpoint may hold a second time."""
    specs = param_specs(config)
    head = "embedding" if config.tied_embeddings else "head"
    if config.tied_embeddings:
        lines = [e for e in family.model if e.params == ("head",)]
        for line in lines:
            yield from (replace(t, copy=True) for t in _placed(replace(line, params=(head,)), "", "", (), specs))
    for m in range(config.mtp_layers):
        for line in family.mtp_copies:
            shared = replace(line, params=(head,)) if line.params == ("head",) else line
            prefix = f"model.layers.{config.num_layers + m}."
            yield from (replace(t, copy=True) for t in _placed(shared, prefix, "", (), specs))


def _placed(
    entry: Entry, name_prefix: str, param_prefix: str, index: tuple[int, ...], specs: Mapping[str, ParamSpec]
) -> Iterator[Target]:
    """The targets of one line of a table; none if the model has no such parameter."""
    params = tuple(f"{param_prefix}{param}" for param in entry.params)
    if params[0] not in specs:
        return
    inner = tuple(_without(specs[param], len(index)) for param in params)
    if not entry.per_expert:
        yield Target(name=f"{name_prefix}{entry.name}", entry=entry, params=params, index=index, specs=inner)
        return
    of_one = tuple(_without(spec, 1) for spec in inner)
    for expert in range(inner[0].shape[0]):
        yield Target(
            name=f"{name_prefix}{entry.name.format(expert=expert)}",
            entry=entry,
            params=params,
            index=(*index, expert),
            specs=of_one,
        )


def _without(spec: ParamSpec, leading: int) -> ParamSpec:
    return replace(spec, shape=spec.shape[leading:], axes=spec.axes[leading:])


def matched(
    folder: Path, family: Family, config: ModelConfig, found: Mapping[str, Readable]
) -> list[tuple[Target, Readable]]:
    """Each target with its tensor, or one error that lists everything that is wrong."""
    ways = {way: _limited(folder, targets(family, config, way), len(found)) for way in family.experts}
    common = set.intersection(*(set(names) for names in ways.values()))
    present = [way for way, names in ways.items() if (set(names) - common) & found.keys()] or list(ways)[:1]
    wanted = ways[present[0]]
    extra = {t.name: t for t in copies(family, config)}
    problems: dict[str, list[str]] = {"missing": [], "misshapen": [], "of a wrong type": [], "twice": [], "unknown": []}
    for way in present[1:]:
        both = sorted((set(ways[way]) - common) & found.keys())
        problems["twice"] += [f"{name} (the experts are also stored as {present[0]})" for name in both]
    problems["missing"] = [f"{name} {list(t.shape)}" for name, t in wanted.items() if name not in found]
    for name, tensor in found.items():
        target = wanted.get(name) or extra.get(name)
        if target is None:
            if not IGNORED.fullmatch(name) and not any(name in names for names in ways.values()):
                problems["unknown"].append(f"{name} {list(tensor.shape)} in {tensor.path.name}")
        elif tensor.shape != target.shape:
            problems["misshapen"].append(
                f"{name} in {tensor.path.name}: expected {list(target.shape)}, found {list(tensor.shape)}"
            )
        elif not _is_float(tensor.dtype):
            problems["of a wrong type"].append(f"{name} in {tensor.path.name}: expected a float, found {tensor.dtype}")
    if any(problems.values()):
        raise ValueError(_report(folder, problems))
    pairs = [(target, found[name]) for name, target in wanted.items()]
    return pairs + [(target, found[name]) for name, target in extra.items() if name in found]


def _limited(folder: Path, wanted: Iterator[Target], num_found: int) -> dict[str, Target]:
    """The targets by name. A config.json of a line can ask for 10,000 layers of 10,000 experts: not all are listed."""
    most = 2 * num_found + 10_000
    listed = {target.name: target for target in itertools.islice(wanted, most + 1)}
    if len(listed) > most:
        raise ValueError(
            f"{folder}: its config.json describes more than {most} tensors, found {num_found}; nothing was loaded; "
            "check its numbers of layers and experts"
        )
    return listed


def _is_float(dtype: np.dtype) -> bool:
    return dtype.name in ("float64", "float32", "float16", "bfloat16")


def _report(folder: Path, problems: Mapping[str, list[str]], most: int = 20) -> str:
    lines = [f"{folder}: the tensors are not those of its config.json; nothing was loaded"]
    for kind, names in problems.items():
        if names:
            lines.append(f"  {kind} ({len(names)}):")
            lines += [f"    {name}" for name in names[:most]]
            lines += [f"    and {len(names) - most} more"] if len(names) > most else []
    return "\n".join(lines)
