"""Checks that a run fits in memory, from shapes alone, before anything is allocated."""

import bisect
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.hardware import GB, HARDWARE, Hardware
from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.lora import LoraConfig
from raggedmoe.models.config import ModelConfig, first_layers
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import PRESETS
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.sections import OptimizerConfig
from raggedmoe.train.step.muon import takes_muon

ONE_DEVICE, ADAMW = Plan(), OptimizerConfig()
ADAPTER_RANK = 16  # of the adapters that are offered where the weights themselves cannot be trained


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The bytes of the training state on each device. Activations come on top."""

    num_params: int  # parameters of the whole model
    params: int  # frozen ones too, beside which adapters learn
    gradients: int  # held in float32
    moments: int  # Adam's two moments, or Muon's one

    @property
    def total(self) -> int:
        """All bytes of the state."""
        return self.params + self.gradients + self.moments


def state_bytes(
    config: ModelConfig,
    plan: Plan = ONE_DEVICE,
    optimizer: OptimizerConfig = ADAMW,
    kept: Mapping[str, QuantizedForm] = MappingProxyType({}),
) -> StateBytes:
    """Count the bytes of the state that an optimizer trains.

    Every trained parameter has a first moment of ``mu_dtype``, and all that AdamW trains a second of float32. ``kept``
    says which frozen ones stay quantised, and how.
    """
    specs = param_specs(config)
    elements = {name: plan.device_elements(name, spec) for name, spec in specs.items()}
    trained = sum(num for name, num in elements.items() if specs[name].trained)
    with_muon = optimizer.opt_type == "muon"
    matrices = sum(num for name, num in elements.items() if with_muon and takes_muon(name, specs[name]))
    return StateBytes(
        num_params=sum(spec.num_elements for spec in specs.values()),
        params=sum(plan.device_bytes(name, spec, kept.get(name)) for name, spec in specs.items()),
        gradients=4 * trained,
        moments=4 * (trained - matrices) + jnp.dtype(optimizer.mu_dtype).itemsize * trained,
    )


def min_activation_bytes(config: ModelConfig, tokens: int) -> int:
    """Count the bytes of each layer's input, which the forward pass of so many tokens has to save in any case."""
    return config.num_layers * tokens * config.model_dim * jnp.dtype(config.dtype).itemsize


def memory_bytes(hardware: Hardware, num_devices: int = 1) -> int | None:
    """Return the memory of one of this machine's devices, of which there are so many; None if it is not known."""
    if hardware.platform == "cpu":
        host = _host_memory()
        return None if host is None else host // num_devices
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    whole = hardware.hbm_bytes
    return stats.get("bytes_limit") or (None if whole is None else whole // hardware.devices_per_chip)


def _host_memory() -> int | None:
    """Return the memory that the system has available, or the limit of this process's cgroup if that is less."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    elif {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    cgroup_limit = Path("/sys/fs/cgroup/memory.max")
    if cgroup_limit.exists() and (text := cgroup_limit.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits, default=None)


def check_fit(
    name: str,
    config: ModelConfig,
    tokens: int,
    available: int | None,
    plan: Plan = ONE_DEVICE,
    optimizer: OptimizerConfig = ADAMW,
    kept: Mapping[str, QuantizedForm] = MappingProxyType({}),
) -> None:
    """Refuse a run whose state alone is more than the memory; say by how much, and what would fit.

    ``tokens`` is one device's part of a micro-batch, whose activations must fit as well.
    """
    if available is None:
        return
    needed, least = state_bytes(config, plan, optimizer, kept), min_activation_bytes(config, tokens)
    who = _memory_owner(plan)
    if needed.total > available:
        here = "; ".join(_fitting_alternatives(config, available, plan, optimizer)) or "nothing of it"
        raise ValueError(
            f"{name}: {needed.num_params / 1e9:.1f}B parameters do not fit: training holds {_gb(needed.total)} "
            f"(parameters {_gb(needed.params)}, gradients {_gb(needed.gradients)}, the optimizer's moments "
            f"{_gb(needed.moments)}), {who} {_gb(available)}: {_gb(needed.total - available)} too little, "
            f"activations not counted. It would fit {_chips_needed(config, optimizer)}. Here would fit: {here}"
        )
    if needed.total + least > available:
        raise ValueError(
            f"{name}: {tokens:,} tokens at once do not fit: the layers' inputs alone are {_gb(least)}, the state "
            f"{_gb(needed.total)}, {who} {_gb(available)}; use a smaller per_device_batch_size or "
            "max_target_length"
        )


def check_compiled_fit(needed: int | None, available: int | None, plan: Plan = ONE_DEVICE) -> None:
    """Refuse programs that need more memory than there is, by the compiler's count, before the state is made."""
    if needed is None or available is None or needed <= available:
        return
    raise ValueError(
        f"a step or an evaluation needs {_gb(needed)}, by the compiler's count, {_memory_owner(plan)} "
        f"{_gb(available)}: {_gb(needed - available)} too little; use a smaller per_device_batch_size with "
        "gradient_accumulation_steps, a smaller max_target_length, or remat=full"
    )


def _memory_owner(plan: Plan) -> str:
    num = plan.num_devices
    return "this machine has" if num == 1 else f"each of {num} devices has"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"


def _chips_needed(config: ModelConfig, optimizer: OptimizerConfig) -> str:
    """Say how many chips of each kind hold the state together, with a quarter left for activations."""
    needed = state_bytes(config, optimizer=optimizer).total
    chips = [
        f"{math.ceil(needed / (0.75 * chip.hbm_bytes))} × {chip.name}"
        for chip in HARDWARE.values()
        if chip.hbm_bytes is not None
    ]
    return f"on {', '.join(chips)}, split by fsdp_parallelism and expert_parallelism"


def _fitting_alternatives(config: ModelConfig, available: int, plan: Plan, optimizer: OptimizerConfig) -> list[str]:
    """List what would fit: fewer layers of the model, adapters beside it, or smaller models of the family."""
    alternatives = []
    most = bisect.bisect_right(
        range(1, config.num_layers),
        0.75 * available,
        key=lambda layers: state_bytes(first_layers(config, layers), plan, optimizer).total,
    )
    if most and first_layers(config, most).moe_layers:
        alternatives.append(f"num_layers={most} of its {config.num_layers}")
    if config.lora is None:
        frozen = jnp.promote_types(jnp.bfloat16, config.dtype)  # the wider of stored and activation type
        beside = replace(config, lora=LoraConfig(rank=ADAPTER_RANK), param_dtype=frozen)
        if state_bytes(beside, plan, optimizer).total <= 0.75 * available:
            alternatives.append(f"lora_rank={ADAPTER_RANK} beside the weights of a checkpoint in {frozen.name}")
    smaller = [
        name
        for name, other in PRESETS.items()
        if other.family == config.family
        and state_bytes(other, optimizer=optimizer).total <= 0.75 * available  # on one device alone
    ]
    if smaller:
        alternatives.append(f"model_name={' or '.join(smaller)}")
    return alternatives
