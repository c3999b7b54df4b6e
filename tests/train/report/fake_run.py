"""Folders of runs that never ran, for tests of what is made of them."""

import json
import math
from pathlib import Path

import numpy as np

from raggedmoe.train.loop.metrics import METRICS, MetricsWriter

SKIPPED = (120, 287)
RESUMED = 200
NASTY = '<script>alert("1 & 2")</script>'
KERNELS = [
    {
        "operation": "grouped_matmul",
        "direction": direction,
        "shapes": "lhs[8192,128] rhs[16,256,128] group_sizes[16] transpose_rhs=True",
        "chosen": "cpu",
        "level": "run",
        "shown_by": "tests on this chip, JAX 0.10.2 to 0.12",
        "others": [
            {"name": "pallas_tpu", "reason": "needs a TPU, got cpu"},
            {"name": "megablox", "reason": "needs a TPU, got cpu"},
            {"name": "xla", "reason": "could run, but cpu comes first"},
        ],
    }
    for direction in ("forward", "backward")
] + [
    {
        "operation": "ragged_gather",
        "direction": "forward",
        "shapes": "x[4096,128] indices[8192]",
        "chosen": "xla",
        "level": "interpreted",
        "shown_by": "interpret mode & <compiled>",
        "others": [],
    },
    {
        "operation": "ragged_gather_reduce",
        "direction": "forward",
        "shapes": "rows[8192,128] indices[4096,2] weights[4096,2]",
        "chosen": "xla",
        "level": "run",
        "shown_by": "tests on this chip",
        "others": [{"name": "sparsecore", "reason": "only compiled so far; name it, or run raggedmoe verify"}],
    },
]
INFO = {
    "name": "tiny-moe on the standard library",
    "raggedmoe": "0.3.0",
    "jax": "0.10.2",
    "hardware": "cpu",
    "devices": 2,
    "model": {
        "name": "tiny-moe",
        "total": 12_345_678,
        "active": 3_456_789,
        "moe_layers": [1, 2, 3],
        "num_experts": 16,
        "experts_per_token": 2,
    },
    "settings": {
        "model": "tiny-moe",
        "data.dataset": "stdlib",
        "optimizer": {"name": "adamw", "learning_rate": 0.001, "betas": [0.9, 0.95]},
        "run_name": NASTY,
        "checkpoint_folder": "runs/" + "a-very-long-name-without-any-space-in-it/" * 4,
        "moe_backend": None,
        "packing": True,
    },
    "notes": [
        "megablox was accepted and is ignored: this is a CPU.",
        f"a note with {NASTY}",
    ],
    "data": "stdlib: 1,160 files, 15.3M bytes; 1,102 to train on, 58 held out",
    "kernels": KERNELS,
    "flops_per_token": 2.1e7,
    "peak_flops": 1e12,
}


def fake_run(folder: Path, *, num_steps: int = 400, layers: int = 3, experts: int = 16, dropping: bool = True) -> Path:
    """A run as the trainer would leave it: a warm-up, two skipped steps, one resume, experts that balance slowly."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    model = {**INFO["model"], "moe_layers": list(range(1, layers + 1)), "num_experts": experts}
    (folder / "run.json").write_text(json.dumps({**INFO, "model": model}))
    skew = random.normal(size=(layers, experts)) * np.linspace(1.2, 0.6, layers)[:, None]
    counts = np.zeros((layers, experts), np.int64)
    writer = MetricsWriter(folder, resume_step=None, tensorboard=False)
    for step in range(1, num_steps + 1):
        if step == RESUMED + 1:
            writer.close()
            writer = MetricsWriter(folder, resume_step=RESUMED, tensorboard=False)
            writer.event(RESUMED, "resumed", f"from step_{RESUMED:08}")
        share = np.exp(skew * (0.15 + math.exp(-step / (0.2 * num_steps))) + 0.05 * random.normal(size=skew.shape))
        share[0, 3] *= 0.0 if step > 0.6 * num_steps else 1.0  # one expert dies
        share /= share.sum(axis=1, keepdims=True)
        counts += np.stack([random.multinomial(8192, row) for row in share])
        if step % 5 == 0:
            writer.load(step, counts)
            counts[:] = 0
        writer.train(step, _step_values(step, num_steps, share, random, dropping))
        if step in SKIPPED:
            writer.event(step, "skipped", "loss is not finite: the update was left out")
        if step % 50 == 0:
            writer.held_out(step, {"loss": 1.55 + 4 * math.exp(-step / 80), "tokens": 65536})
            writer.event(step, "checkpoint", f"step_{step:08}")
    writer.close()
    return folder


def _step_values(step: int, num_steps: int, share: np.ndarray, random: np.random.Generator, dropping: bool) -> dict:
    skipped = step in SKIPPED
    seconds = 9.5 if step == 1 else 0.21 * float(random.lognormal(sigma=0.05))
    decay = 0.5 + 0.5 * math.cos(math.pi * max(0, step - 40) / (num_steps - 40))
    entropy = -(share * np.log(np.maximum(share, 1e-30))).sum(axis=1).mean()
    return {
        "loss": math.nan if skipped else 1.4 + 4.2 * math.exp(-step / 80) + 0.08 * float(random.normal()),
        "learning_rate": 1e-3 * min(step / 40, 0.1 + 0.9 * decay),
        "grad_norm": math.nan if skipped else 0.6 + 2 * math.exp(-step / 30) + 0.1 * float(random.exponential()),
        "aux_loss": 0.01 + 0.03 * math.exp(-step / 60),
        "z_loss": 0.004 + 0.01 * math.exp(-step / 60),
        "entropy": float(entropy),
        "max_violation": float(share.max() * share.shape[1] - 1),
        "dropped": int(random.poisson(30 * math.exp(-step / 40))) if dropping else 0,
        "skipped": int(skipped),
        "tokens": 4096,
        "seconds": seconds,
        "tokens_per_second": 4096 / seconds,
        "mfu": 4096 / seconds * INFO["flops_per_token"] / INFO["peak_flops"],
    }


def minimal_run(folder: Path) -> Path:
    """One step that says only what every line says."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METRICS).write_text('{"kind":"train","step":1,"loss":3.25}\n')
    return folder
