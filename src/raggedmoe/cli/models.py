"""`raggedmoe models`, which lists the models that have a preset, and their sizes."""

import dataclasses
from json import dumps
from typing import Any

import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from raggedmoe.interop.named_model import named_model
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.models.config import LatentConfig
from raggedmoe.models.count import count_params
from raggedmoe.models.presets import ALIASES, PRESETS
from raggedmoe.names import check_known


def models(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    dtype: str = "bfloat16",
    json: bool = False,
) -> int:
    """List the models with their total and active parameters, experts and size, without allocating anything.

    Multi-token-prediction modules (mtp) are not part of the total, as in the models' publications.

    Args:
        names: models to list, or folders with one; all presets by default.
        dtype: type of the weights, for the size in bytes.
        json: print JSON instead of a table.
    """
    check_known("dtype", dtype, FLOATS)
    rows = [_row(name, dtype) for name in names or PRESETS]
    if json:
        print(dumps(rows, indent=1))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("model", "total", "active", "+ mtp", "layers", "D", "K of E × F", "size"):
        table.add_column(title, justify="left" if title == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            _short(row["total"]),
            _short(row["active"]),
            _short(row["mtp"]) if row["mtp"] else "",
            str(row["layers"]),
            str(row["model_dim"]),
            f"{row['experts_per_token']} of {row['experts']:3} × {row['expert_dim']:5}",
            _size(row["bytes"]),
        )
    Console().print(table)
    also = "; ".join(f"{alias} is {name}" for alias, name in ALIASES.items())
    print(f"Size: of all parameters in {dtype}, routers in float32.\nOther names: {also}.")
    return 0


def _row(name: str, dtype: str) -> dict[str, Any]:
    config = dataclasses.replace(named_model(name), param_dtype=jnp.dtype(dtype))
    count = count_params(config)
    latent = isinstance(config.attention, LatentConfig)
    return {
        "name": name,
        "family": config.family,
        **dataclasses.asdict(count),
        "layers": config.num_layers,
        "moe_layers": len(config.moe_layers),
        "model_dim": config.model_dim,
        "experts": config.moe.num_experts,
        "experts_per_token": config.moe.experts_per_token,
        "expert_dim": config.moe.expert_dim,
        "shared_experts": config.moe.experts.num_shared,
        "attention": "latent" if latent else "grouped",
        "vocab_size": config.vocab_size,
    }


def _short(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.1f}B" if number >= 10**10 else f"{number / 1e9:.2f}B"
    return f"{number / 1e6:.2f}M"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
