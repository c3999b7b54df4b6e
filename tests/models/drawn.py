"""Models with parameters drawn by NumPy: no compilation, and norms and biases that are not their initial constants."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.execution import MoEExecution

GOLDEN = Path(__file__).parent.parent / "golden"
GOLDEN_NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
TINY = ("deepseek-v3-tiny", "deepseek-v2-tiny", "mixtral-tiny", "qwen3-tiny", "olmoe-tiny", "gpt-oss-tiny")


# Compiling is what these tests spend their time on. LLVM's effort, which this halves, changes no more than roundings.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


# Experts that compile fast, for what has nothing to do with the kernels.
EINSUM = ModelExecution(moe=MoEExecution(moe_backend="dense"))


def tiny(name: str, **changes: object) -> ModelConfig:
    """A tiny preset, changed."""
    return dataclasses.replace(model_preset(name), **changes)


def drawn_params(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Parameters that keep activations at about 1."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, spec in param_specs(config).items():
        noise = rng.standard_normal(spec.shape, dtype=np.float32)
        if spec.init == "ones":
            value = 1 + 0.1 * noise
        elif spec.init == "zeros":
            value = 0.1 * noise
        else:
            contracted = (spec.contracts,) if isinstance(spec.contracts, str) else spec.contracts
            value = noise / np.sqrt(np.prod([spec.shape[spec.axes.index(axis)] for axis in contracted]))
        params[name] = jax.device_put(np.asarray(value).astype(spec.dtype))
    return params


def drawn_ids(config: ModelConfig, rows: int, length: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length), dtype=np.int32))
