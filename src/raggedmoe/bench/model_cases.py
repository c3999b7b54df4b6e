"""The cases with whole models: a training step of the demo, and decoding with a Qwen3-MoE of 691M parameters.

The weights are random, and written once as `raggedmoe export` would, so that transformers and we load the same folder.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from raggedmoe.bench.case import Case
from raggedmoe.bench.run import Result, Session
from raggedmoe.hardware import target_hardware
from raggedmoe.models.config import GroupedQueryConfig, ModelConfig
from raggedmoe.models.count import count_params
from raggedmoe.models.flops import train_flops
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.config import MoEConfig
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import ResolvedConfig, resolve
from raggedmoe.train.settings.sections import DataConfig, ModelOverrides, OptimizerConfig, StepSettings

MODEL_SUBJECTS = ("train", "generate")
MODEL_NAMES = {"train": "demo", "generate": "qwen3-691m"}
MEASURED_UNITS = {"train": "step", "generate": "token"}
PROMPT_TOKENS, NEW_TOKENS = 16, 32
LEARNING_RATE = 3e-4  # the results that are compared are of the second step
# A Qwen3-MoE of 690.8M parameters, of which a token reads 129.5M.
DECODED = replace(
    model_preset("qwen3-30b-a3b"),
    vocab_size=32000,
    num_layers=8,
    model_dim=1024,
    attention=GroupedQueryConfig(
        num_heads=16, num_kv_heads=4, head_dim=64, qk_norm="head", rope=model_preset("qwen3-30b-a3b").attention.rope
    ),
    moe=MoEConfig(num_experts=32, experts_per_token=4, model_dim=1024, expert_dim=768),
    mlp_dim=None,
    max_length=4096,
)


def train_config(dtype: str) -> ResolvedConfig:
    """Make the demo's run, with 2048 tokens a step and one learning rate for all of them.

    transformers moves no selection biases, so here they stay.
    """
    config = TrainConfig(
        model="demo",
        overrides=ModelOverrides(dtype=dtype),
        data=DataConfig(per_device_batch_size=8),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=0),
        step=StepSettings(bias_update_rate=0.0),
    )
    return resolve(config, target_hardware())


def read_parameters(config: ModelConfig) -> int:
    """Count the parameters that a token reads: of the embedding one row, unless it is the head as well."""
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.model_dim
    return count_params(config).active - embedding


def model_case_name(subject: str) -> str:
    """Name a subject's case."""
    return f"{subject} {MODEL_NAMES[subject]} {MEASURED_UNITS[subject]}"


def measure_models(subjects: Iterable[str], session: Session, decoded: ModelConfig = DECODED) -> Iterator[list[Result]]:
    """Measure the subjects in each type, where the session wants it."""
    for subject in subjects:
        for dtype in session.dtypes:
            if not session.wants(model_case_name(subject), dtype):
                continue
            with tempfile.TemporaryDirectory(prefix="raggedmoe-bench-") as folder:
                session.say(f"writing {MODEL_NAMES[subject]}, {dtype}")
                if subject == "train":
                    case = write_train_case(Path(folder), dtype)
                else:
                    case = write_generate_case(Path(folder), dtype, decoded)
                yield session.measure(case)


def write_train_case(folder: Path, dtype: str) -> Case:
    """Export the demo's starting weights, and store one batch of its data."""
    from raggedmoe.train.data.batches import open_data  # grain is an extra

    config = train_config(dtype)
    model, data = config.step.model, config.data
    _export(replace(model, dtype=jnp.dtype("float32")), folder / "model", "float32")
    ids = np.asarray(next(open_data(data, model.vocab_size, config.batch_size).train_batches()).ids)
    np.save(folder / "ids.npy", ids)
    per_token = train_flops(model, data.sequence_length, mtp_layers=config.step.mtp_layers)
    return _model_case("train", dtype, folder, flops=round(ids.size * per_token), tokens=ids.size)


def write_generate_case(folder: Path, dtype: str, config: ModelConfig = DECODED) -> Case:
    """Export random weights in that type, and store a prompt."""
    _export(replace(config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype)), folder / "model", dtype)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, config.vocab_size, (1, PROMPT_TOKENS)))
    read = read_parameters(config) * jnp.dtype(dtype).itemsize
    return _model_case("generate", dtype, folder, read_bytes=read, reads=True, tokens=1)


def _model_case(subject: str, dtype: str, folder: Path, **rest: Any) -> Case:
    name, direction = MODEL_NAMES[subject], MEASURED_UNITS[subject]
    return Case(subject=subject, shape=None, model=name, dtype=dtype, direction=direction, folder=str(folder), **rest)


def _export(config: ModelConfig, folder: Path, dtype: str) -> None:
    from flax import nnx

    from raggedmoe import interop
    from raggedmoe.models.module import Decoder

    interop.save(Decoder(config, rngs=nnx.Rngs(0)), folder, dtype=dtype)
