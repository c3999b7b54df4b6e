"""Writes the golden fixtures: tiny random models of Hugging Face `transformers` and the logits it computes for them.

    python -m tests.golden.make_golden [name …]
    python -m tests.golden.make_golden --find-seed [name …]

Needs `torch` and `transformers`; the tests that read the fixtures need neither.
On one machine the same versions write the same bytes.
"""

import argparse
import copy
import itertools
import math
import shutil
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file
from torch.overrides import TorchFunctionMode

from tests.golden.golden_cases import CASES, Case

GOLDEN = Path(__file__).parent
NUM_SEQUENCES, NUM_POSITIONS = 2, 32
PROMPT_LENGTH, NUM_GENERATED = 8, 32

LEAST_MARGIN = 1e-3
LEAST_DISTINCT = 8
LEAST_EFFECT = 1e-3
LARGEST_ERROR = 5e-5


class InFloat64(TorchFunctionMode):
    """Every float32 that the model's code asks for becomes a float64: its norms and softmaxes cast explicitly."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = [torch.float64 if arg is torch.float32 else arg for arg in args]
        wide_kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wide, **wide_kwargs)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the routers did in one run.

    Attributes:
      margin: the smallest distance, over tokens and layers, between the last choice taken and the first one refused.
      all_used: whether every expert of every layer was chosen by some token.
    """

    margin: float
    all_used: bool


def fixed_ids(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocab_size, (NUM_SEQUENCES, NUM_POSITIONS), dtype=np.int32)


def standard_deviation(name: str, tensor: torch.Tensor, *, tied: bool) -> float:
    if name.endswith("embed_tokens.weight"):
        # Small, as trained ones are: the first norm's epsilon is then visible. A tied one is also the output head.
        return 1 / math.sqrt(tensor.shape[-1]) if tied else 0.02
    if name.endswith("sinks"):
        return 1.0
    if tensor.ndim == 1 or name.endswith("_bias"):
        return 0.3
    fan_in = tensor.shape[-1]
    if name.endswith(("gate.weight", "router.weight", "lm_head.weight")):
        return 2 / math.sqrt(fan_in)
    return 1.5 / math.sqrt(fan_in) if ".q" in name or ".k" in name else 1 / math.sqrt(fan_in)


def made_model(case: Case, *, seed: int, **changed: Any) -> transformers.PreTrainedModel:
    """The case's model with weights drawn from `seed`, its configuration `changed`."""
    overrides = {**case.config, **changed}
    # The configuration class fills in the dictionary that it is given.
    overrides["rope_parameters"] = dict(overrides["rope_parameters"])
    config = transformers.AutoConfig.for_model(case.model_type, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1 + 0.1 * noise)
            continue
        gain = next((gain for ending, gain in case.gains.items() if name.endswith(ending)), 1.0)
        tensor.copy_(gain * standard_deviation(name, tensor, tied=tied) * noise)
    return model


def selection_margin(router: torch.nn.Module, config: Any, logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """The smallest distance between what was selected and what was not, groups first where there are groups."""
    if config.model_type == "gpt_oss":
        scores = logits.double()
    elif config.model_type == "deepseek_v3":
        scores = logits.double().sigmoid() + router.e_score_correction_bias.double()
    else:
        scores = logits.double().softmax(dim=-1)
    margins = []
    if config.model_type == "deepseek_v3" or getattr(config, "topk_method", "") == "group_limited_greedy":
        grouped = scores.unflatten(-1, (config.n_group, -1))
        best = grouped.topk(2, dim=-1).values
        of_group = best.sum(dim=-1) if config.model_type == "deepseek_v3" else best[..., 0]
        ranked = of_group.sort(dim=-1, descending=True)
        margins.append(ranked.values[:, config.topk_group - 1] - ranked.values[:, config.topk_group])
        refused = ranked.indices[:, config.topk_group :, None]
        grouped = grouped.scatter(1, refused.expand(-1, -1, grouped.shape[-1]), -math.inf)
        scores = grouped.flatten(1)
    ranked = scores.sort(dim=-1, descending=True)
    k = config.num_experts_per_tok
    assert torch.equal(ranked.indices[:, :k].sort().values, chosen.sort().values), "the router chose otherwise"
    margins.append(ranked.values[:, k - 1] - ranked.values[:, k])
    return min(margin.min().item() for margin in margins)


def logits_and_choices(model: transformers.PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, Choices]:
    margins, used = [], []

    def record(router: torch.nn.Module, _: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, _, chosen = output
        margins.append(selection_margin(router, model.config, logits, chosen))
        used.append(chosen.unique().numel() == logits.shape[-1])

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(record) for router in routers]
    logits = model(ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    assert margins, "no router was found"
    return logits, Choices(margin=min(margins), all_used=all(used))


def greedy_continuation(model: transformers.PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """The generated ids [1 32], from the cache."""
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_GENERATED, do_sample=False, use_cache=True
    )
    return ids[:, prompt.shape[1] :]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a fixture's expected.npz holds, and how far from a tie it was computed."""

    ids: np.ndarray
    logits: np.ndarray
    greedy: np.ndarray
    routing_margin: float
    token_margin: float
    all_used: bool


def expected_of(model: transformers.PreTrainedModel) -> Expected:
    ids = fixed_ids(model.config.vocab_size)
    torch_ids = torch.from_numpy(ids).long()
    logits, choices = logits_and_choices(model, torch_ids)
    prompt = torch_ids[:1, :PROMPT_LENGTH]
    greedy = greedy_continuation(model, prompt)
    # Once more without the cache, for the margins and as a check of the cache.
    again, more_choices = logits_and_choices(model, torch.cat([prompt, greedy], dim=1))
    best = again[:, PROMPT_LENGTH - 1 : -1].topk(2, dim=-1)
    token_margin = (best.values[..., 0] - best.values[..., 1]).min().item()
    if token_margin >= LEAST_MARGIN:
        assert torch.equal(best.indices[..., 0], greedy), "generation with and without a cache differ"
    return Expected(
        ids=ids,
        logits=logits.numpy(),
        greedy=greedy.to(torch.int32).numpy(),
        routing_margin=min(choices.margin, more_choices.margin),
        token_margin=token_margin,
        all_used=choices.all_used,
    )


def flaws(expected: Expected) -> list[str]:
    """Why other weights would make a better fixture."""
    found = []
    if expected.routing_margin < LEAST_MARGIN:
        found.append(f"a router is {expected.routing_margin:.1e} from another choice")
    if expected.token_margin < LEAST_MARGIN:
        found.append(f"a greedy token is {expected.token_margin:.1e} from another choice")
    if not expected.all_used:
        found.append("an expert is never chosen")
    if np.unique(expected.greedy).size < LEAST_DISTINCT:
        found.append("the greedy continuation repeats itself")
    return found


def found_seed(case: Case) -> int:
    return next(seed for seed in itertools.count() if not flaws(expected_of(made_model(case, seed=seed))))


def float64_error(case: Case, expected: Expected) -> float:
    model = made_model(case, seed=case.seed).double()
    with InFloat64():
        logits = model(torch.from_numpy(expected.ids).long(), use_cache=False).logits
    assert logits.dtype == torch.float64
    return np.abs(logits.numpy() - expected.logits).max().item()


def effects(case: Case, expected: Expected) -> dict[str, float]:
    """For each feature, how far the logits move when it is taken away."""
    ids = torch.from_numpy(expected.ids).long()
    variants = {feature: made_model(case, seed=case.seed, **changed) for feature, changed in case.without.items()}
    for ending in case.zeroed:
        variants[ending] = made_model(case, seed=case.seed)
        touched = [tensor for name, tensor in variants[ending].state_dict().items() if name.endswith(ending)]
        assert touched, f"no tensor's name ends in {ending!r}"
        for tensor in touched:
            tensor.zero_()
    return {
        feature: np.abs(model(ids, use_cache=False).logits.numpy() - expected.logits).max().item()
        for feature, model in variants.items()
    }


def gradient_marks(model: transformers.PreTrainedModel, ids: torch.Tensor, **options: Any) -> dict[str, np.ndarray]:
    """For each stored tensor, what tells a wrong gradient from the right one: its length, and its product with noise.

    The loss is the mean cross-entropy of each token given those before it. The gradients are saved in the model's
    place, so that they have its tensors' names and layouts.
    """
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.data = gradients[name]
    for buffer in model.buffers():
        buffer.zero_()  # a selection bias gets no gradient
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        stored = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            stored.update(load_file(path))
    return {name: mark(name, gradient) for name, gradient in sorted(stored.items())}


def mark(name: str, gradient: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(gradient.shape)
    return np.asarray([np.linalg.norm(gradient.astype(np.float64)), (gradient * noise).sum()])


def save(folder: Path, model: transformers.PreTrainedModel, expected: Expected, **options: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    marks = gradient_marks(model, torch.from_numpy(expected.ids).long(), **options)
    np.savez_compressed(
        folder / "expected.npz",
        ids=expected.ids,
        logits=expected.logits,
        greedy=expected.greedy,
        gradient_names=np.asarray(list(marks)),
        gradient_marks=np.stack(list(marks.values())),
    )
    reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    logits = reloaded(torch.from_numpy(expected.ids).long(), use_cache=False).logits.numpy()
    assert np.array_equal(logits, expected.logits), f"{folder.name} does not load as it was saved"
    files = sorted(folder.iterdir())
    print(f"  {folder.name}/: {', '.join(f'{file.name} {file.stat().st_size}' for file in files)} bytes")


def write(name: str, case: Case) -> None:
    model = made_model(case, seed=case.seed)
    expected = expected_of(model)
    error = float64_error(case, expected)
    moved = effects(case, expected)
    print(
        f"{name}: logits of deviation {expected.logits.std():.2f}, float64 differs by {error:.1e}, "
        f"margins {expected.routing_margin:.1e} (routing) and {expected.token_margin:.1e} (greedy)"
    )
    for feature, effect in moved.items():
        print(f"  without {feature}: {effect:.1e}")
    assert not flaws(expected), f"{name}, seed {case.seed}: {', '.join(flaws(expected))}; --find-seed finds another"
    assert error <= LARGEST_ERROR, f"{name}: float32 and float64 differ by {error}"
    assert min(moved.values()) >= LEAST_EFFECT, f"{name}: a feature has no effect on the logits"
    save(GOLDEN / name, model, expected, **({"max_shard_size": case.shard_size} if case.shard_size else {}))
    if case.fused_as:
        save(GOLDEN / case.fused_as, model, expected, save_original_format=False)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the golden fixtures.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CASES)}; all without")
    parser.add_argument("--find-seed", action="store_true", help="print the first seed that will do")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.names) - set(CASES))
    if unknown:
        parser.error(f"no fixture is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    # One thread sums in one order.
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name in parsed.names or CASES:
        if parsed.find_seed:
            print(f"{name}: seed {found_seed(CASES[name])}")
        else:
            write(name, CASES[name])


if __name__ == "__main__":
    main()
