"""Whether a run's state fits in the memory there is, known from shapes alone, before anything is allocated."""

import bisect
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.hardware import GB, HARDWARE, Hardware
from raggedmoe.models.config import ModelConfig, first_layers
from raggedmoe.models.presets import PRESETS
from raggedmoe.models.specs import is_trained, param_specs
from raggedmoe.parallel.degrees import Degrees
from raggedmoe.parallel.plan import Plan
from raggedmoe.partition import num_parts

ONE_DEVICE = Plan(degrees=Degrees())


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What each device holds for as long as training runs. Activations come on top."""

    num_params: int  # of the whole model
    params: int
    gradients: int  # in float32
    moments: int  # Adam's two

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.moments


def state_bytes(config: ModelConfig, plan: Plan = ONE_DEVICE, mu_dtype: str = "float32") -> StateBytes:
    """The bytes of the state of a model that AdamW trains, with moments of ``mu_dtype`` and of float32."""
    specs = param_specs(config)
    elements = {
        name: spec.num_elements // num_parts(plan.spec(name, spec), plan.degrees.sizes) for name, spec in specs.items()
    }
    trained = sum(num for name, num in elements.items() if is_trained(name))
    return StateBytes(
        num_params=sum(spec.num_elements for spec in specs.values()),
        params=sum(num * jnp.dtype(specs[name].dtype).itemsize for name, num in elements.items()),
        gradients=4 * trained,
        moments=(4 + jnp.dtype(mu_dtype).itemsize) * trained,
    )


def least_activation_bytes(config: ModelConfig, tokens: int) -> int:
    """What the forward pass cannot but keep of so many tokens: each layer's input."""
    return config.num_layers * tokens * config.model_dim * jnp.dtype(config.dtype).itemsize


def memory_bytes(hardware: Hardware, num_devices: int = 1) -> int | None:
    """What one of so many devices of this machine can hold; None: nobody says."""
    if hardware.platform == "cpu":
        host = _host_memory()
        return None if host is None else host // num_devices
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    whole = hardware.hbm_bytes
    return stats.get("bytes_limit") or (None if whole is None else whole // hardware.devices_per_chip)


def _host_memory() -> int | None:
    """Memory that the system can hand out, or this process's own limit if that is less."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in lines:
            found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    elif {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found, default=None)


def check_fit(
    name: str,
    config: ModelConfig,
    tokens: int,
    available: int | None,
    plan: Plan = ONE_DEVICE,
    mu_dtype: str = "float32",
) -> None:
    """Refuse a run whose state alone is more than the memory; say by how much, and what would fit.

    ``tokens``: of one device's part of a micro-batch, whose activations must fit as well.
    """
    if available is None:
        return
    needed, least = state_bytes(config, plan, mu_dtype), least_activation_bytes(config, tokens)
    who = _who(plan)
    if needed.total > available:
        here = "; ".join(_here(config, available, plan)) or "nothing of it"
        raise ValueError(
            f"{name}: {needed.num_params / 1e9:.1f}B parameters do not fit: training holds {_gb(needed.total)} "
            f"(parameters {_gb(needed.params)}, gradients {_gb(needed.gradients)}, Adam's moments "
            f"{_gb(needed.moments)}), {who} {_gb(available)}: {_gb(needed.total - available)} too little, "
            f"activations not counted. It would fit {_elsewhere(config)}. Here would fit: {here}"
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
        f"a step or an evaluation needs {_gb(needed)}, by the compiler's count, {_who(plan)} {_gb(available)}: "
        f"{_gb(needed - available)} too little; use a smaller per_device_batch_size with gradient_accumulation_steps, "
        "a smaller max_target_length, or remat=full"
    )


def _who(plan: Plan) -> str:
    num = plan.degrees.num_devices
    return "this machine has" if num == 1 else f"each of {num} devices has"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GB:.1f} GB"


def _elsewhere(config: ModelConfig) -> str:
    """The number of chips of each kind that together hold the state, a quarter left for activations."""
    needed = state_bytes(config).total
    chips = [
        f"{math.ceil(needed / (0.75 * chip.hbm_bytes))} × {chip.name}"
        for chip in HARDWARE.values()
        if chip.hbm_bytes is not None
    ]
    return f"on {', '.join(chips)}, split by fsdp_parallelism and expert_parallelism"


def _here(config: ModelConfig, available: int, plan: Plan) -> list[str]:
    """What of the model would fit: fewer layers, or smaller models of the family."""
    found = []
    most = bisect.bisect_right(
        range(1, config.num_layers),
        0.75 * available,
        key=lambda layers: state_bytes(first_layers(config, layers), plan).total,
    )
    if most and first_layers(config, most).moe_layers:
        found.append(f"num_layers={most} of its {config.num_layers}")
    smaller = [
        name
        for name, other in PRESETS.items()
        if other.family == config.family and state_bytes(other).total <= 0.75 * available  # on one device alone
    ]
    if smaller:
        found.append(f"model_name={' or '.join(smaller)}")
    return found
