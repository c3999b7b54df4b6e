"""Whole models: our training step and generation, and those of `transformers` in each of its settings."""

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raggedmoe.bench.case import Case
from raggedmoe.bench.contender import OURS, Prepared, contender
from raggedmoe.bench.peers_transformers import NEEDS

EXPERTS, ATTENTION = ("eager", "grouped_mm", "batched_mm"), ("sdpa", "eager")
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # as the demo has them
CLIP_NORM = 1.0


@contender("raggedmoe auto", "train", role=OURS, process="raggedmoe train")
def train_ours(case: Case) -> Prepared:
    """Prepare forward, backward, clipping and AdamW of the run that `raggedmoe train` would make."""
    import jax

    from raggedmoe import interop
    from raggedmoe.bench.model_cases import train_config
    from raggedmoe.models.parameters import param_specs
    from raggedmoe.train.data.rows import Batch
    from raggedmoe.train.step.optimizer import make_optimizer
    from raggedmoe.train.step.programs import compile_programs
    from raggedmoe.train.step.state import state_from_params

    config = train_config(case.dtype).step
    ids = np.load(case.place / "ids.npy").astype(np.int32)
    targets, weights = np.roll(ids, -1, axis=1), np.ones(ids.shape, np.float32)
    targets[:, -1], weights[:, -1] = 0, 0  # transformers has no target for the last token either
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape).copy()
    batch = Batch(ids=ids, targets=targets, segments=np.zeros_like(ids), positions=positions, weights=weights)
    programs = compile_programs(config, batch, None)
    params = interop.load(case.place / "model").params
    specs = param_specs(config.model)
    optimizer = make_optimizer(config.optimizer, specs)
    # Copied, as a step is given its buffers to write to, and two counters would be the same one.
    state = jax.tree.map(lambda leaf: leaf.copy(), state_from_params(params, specs, optimizer, jax.random.key(0)))

    def step() -> Any:
        nonlocal state
        state, report = programs.step(state, batch)
        return jax.block_until_ready(report)

    step()  # the optimizers of others make their moments in the first step
    return Prepared(run=step, arrays=lambda report: {"loss": np.asarray(report.losses.loss).reshape(1)})


@contender("raggedmoe auto", "generate", role=OURS, process="raggedmoe generate")
def generate_ours(case: Case) -> Prepared:
    """Prepare one token after the other, as `raggedmoe generate` makes them."""
    import jax

    from raggedmoe import interop
    from raggedmoe.bench.model_cases import NEW_TOKENS
    from raggedmoe.models.generate import generate

    model = interop.load(case.place / "model", dtype=case.dtype, param_dtype=case.dtype)
    ids = np.load(case.place / "ids.npy")

    def run() -> tuple[list[int], float]:
        tokens = generate(model, ids.tolist(), max_new_tokens=NEW_TOKENS + 1)
        continuation = [next(tokens)[0]]
        start = time.perf_counter()
        continuation += [token for (token,) in tokens]
        return [token for token in continuation if token is not None], (time.perf_counter() - start) / NEW_TOKENS

    run()  # compiles

    def arrays(result: tuple[list[int], float]) -> dict[str, np.ndarray]:
        return results_of(case, result[0], np.asarray(jax.jit(model)(ids)[:, -1]))

    return Prepared(run=run, arrays=arrays, seconds=lambda result: result[1])


def results_of(case: Case, tokens: list[int], logits: np.ndarray) -> dict[str, np.ndarray]:
    """Return what is compared: the prompt's logits, and in float32, where rounding changes none, the tokens."""
    results = {"logits": logits}
    return results | {"tokens": np.asarray(tokens, np.float32)[:, None]} if case.dtype == "float32" else results


def load_transformers(case: Case, experts: str, attention: str) -> Any:
    """Load the exported folder with these settings."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if case.dtype == "bfloat16" and case.subject == "generate" else torch.float32
    return AutoModelForCausalLM.from_pretrained(
        case.place / "model", dtype=kind, attn_implementation=attention, experts_implementation=experts
    )


def train_transformers(case: Case, experts: str, attention: str) -> Prepared:
    """Prepare forward, backward, clipping and fused AdamW; in bfloat16 by autocast, with float32 weights as ours."""
    import torch

    from raggedmoe.bench.model_cases import LEARNING_RATE

    model = load_transformers(case, experts, attention).train()
    ids = torch.from_numpy(np.load(case.place / "ids.npy").astype(np.int64))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, **ADAMW, fused=True)

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    step()  # makes the moments
    return Prepared(run=step, arrays=lambda loss: {"loss": loss.float().numpy().reshape(1)})


def generate_transformers(case: Case, experts: str, attention: str) -> Prepared:
    """Prepare one token after the other with its cache, in a plain greedy loop: less around it than `generate` has."""
    import torch

    from raggedmoe.bench.model_cases import NEW_TOKENS

    model = _load_once(case.folder, case)
    ids = torch.from_numpy(np.load(case.place / "ids.npy"))

    def run() -> tuple[list[int], float]:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        with torch.inference_mode():
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            continuation = [out.logits[:, -1:].argmax(-1)]
            start = time.perf_counter()
            for _ in range(NEW_TOKENS):
                out = model(input_ids=continuation[-1], past_key_values=out.past_key_values, use_cache=True)
                continuation.append(out.logits[:, -1:].argmax(-1))
            seconds = (time.perf_counter() - start) / NEW_TOKENS
        return [int(token) for token in continuation], seconds

    def arrays(result: tuple[list[int], float]) -> dict[str, np.ndarray]:
        with torch.inference_mode():
            logits = model(input_ids=ids, logits_to_keep=1).logits[:, -1].float().numpy()
        return results_of(case, result[0], logits)

    run()
    return Prepared(run=run, arrays=arrays, seconds=lambda result: result[1])


@functools.lru_cache(maxsize=1)
def _load_once(folder: str, case: Case) -> Any:
    """Load one model for all settings: each of them has its turn in the same process."""
    return load_transformers(case, EXPERTS[0], ATTENTION[0]).eval()


def _register(subject: str, prepare: Callable[[Case, str, str], Prepared]) -> None:
    for experts in EXPERTS:
        for attention in ATTENTION:

            def prepare_with(case: Case, experts: str = experts, attention: str = attention) -> Prepared:
                return prepare(case, experts, attention)

            name = f"transformers {experts}, {attention}"
            contender(name, subject, process="transformers", needs=NEEDS)(prepare_with)


_register("train", train_transformers)
_register("generate", generate_transformers)
