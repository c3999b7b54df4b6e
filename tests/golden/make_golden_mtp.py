"""Writes the golden fixture of multi-token prediction: a V3 model and one module, as the published checkpoint has them.

    python -m tests.golden.make_golden_mtp

`transformers` leaves the module out. It is made here of two of its models: the second has one MoE layer, gets the
joined vectors as its input embeddings, and its final norm is the module's.
"""

import copy
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.golden.golden_cases import CASES
from tests.golden.make_golden import (
    GOLDEN,
    LEAST_MARGIN,
    fixed_ids,
    logits_and_choices,
    made_model,
    mark,
    selection_margin,
)

NAME, PREFIX = "deepseek_v3_mtp", "model.layers.2."
SEEDS = range(1000)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The two models and what joins them."""

    base: transformers.PreTrainedModel
    module: transformers.PreTrainedModel
    enorm: torch.nn.Parameter
    hnorm: torch.nn.Parameter
    eh_proj: torch.nn.Parameter


def made_parts(seed: int) -> Parts:
    base = made_model(CASES["deepseek_v3"], seed=seed, num_hidden_layers=2)
    module = made_model(CASES["deepseek_v3"], seed=seed + 10_000, num_hidden_layers=1, first_k_dense_replace=0)
    width = base.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    norms = [torch.nn.Parameter(1 + 0.1 * torch.randn(width, generator=generator)) for _ in range(2)]
    eh_proj = torch.nn.Parameter(torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5)
    return Parts(base=base, module=module, enorm=norms[0], hnorm=norms[1], eh_proj=eh_proj)


def further_logits(parts: Parts, ids: torch.Tensor) -> torch.Tensor:
    """From the states at 0 … S-2 and the tokens at 1 … S-1: logits of the tokens at 2 … S."""
    width, eps = parts.base.config.hidden_size, parts.base.config.rms_norm_eps
    hidden = parts.base.model(ids, use_cache=False).last_hidden_state[:, :-1]
    embedded = parts.base.model.embed_tokens(ids[:, 1:])
    normed = torch.nn.functional.rms_norm
    both = [normed(embedded, (width,), parts.enorm, eps), normed(hidden, (width,), parts.hnorm, eps)]
    joined = torch.cat(both, dim=-1) @ parts.eh_proj.T
    return parts.base.lm_head(parts.module.model(inputs_embeds=joined, use_cache=False).last_hidden_state)


def margin(parts: Parts, ids: torch.Tensor) -> float:
    """How far any router of the two models is from another choice."""
    margins = [logits_and_choices(parts.base, ids)[1].margin]

    def record(router, _, output):
        margins.append(selection_margin(router, parts.module.config, output[0], output[2]))

    hook = parts.module.model.layers[0].mlp.gate.register_forward_hook(record)
    further_logits(parts, ids)
    hook.remove()
    return min(margins)


def stored(parts: Parts) -> dict[str, np.ndarray]:
    """All tensors under the published names."""

    def of(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")

    tensors, module = of(parts.base), of(parts.module)
    own = {name.removeprefix("model.layers.0."): tensor for name, tensor in module.items() if "layers.0." in name}
    own |= {
        "shared_head.norm.weight": module["model.norm.weight"],
        "enorm.weight": parts.enorm.detach().numpy(),
        "hnorm.weight": parts.hnorm.detach().numpy(),
        "eh_proj.weight": parts.eh_proj.detach().numpy(),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    return tensors | {f"{PREFIX}{name}": tensor for name, tensor in own.items()}


def gradients(parts: Parts, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Compute the gradients of the mean cross-entropy of the token after the next, under the same names."""
    with torch.enable_grad():
        logits = further_logits(parts, ids)[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten()).backward()

    def of(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        filled = copy.deepcopy(model)
        for name, parameter in filled.named_parameters():
            parameter.data = torch.zeros_like(parameter) if found[name] is None else found[name]
        for buffer in filled.buffers():
            buffer.zero_()  # a selection bias gets no gradient
        return filled

    joins = {name: torch.nn.Parameter(getattr(parts, name).grad) for name in ("enorm", "hnorm", "eh_proj")}
    return stored(Parts(base=of(parts.base), module=of(parts.module), **joins))


def main() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ids = torch.from_numpy(fixed_ids(CASES["deepseek_v3"].config["vocab_size"])).long()
    seed = next(seed for seed in SEEDS if margin(made_parts(seed), ids) >= LEAST_MARGIN)
    parts = made_parts(seed)
    folder = GOLDEN / NAME
    shutil.rmtree(folder, ignore_errors=True)
    parts.base.config.num_nextn_predict_layers = 1
    parts.base.config.save_pretrained(folder)
    save_file(stored(parts), folder / "model.safetensors", metadata={"format": "pt"})
    marks = {name: mark(name, gradient) for name, gradient in sorted(gradients(parts, ids).items())}
    np.savez_compressed(
        folder / "expected.npz",
        ids=ids.numpy().astype(np.int32),
        logits=parts.base(ids, use_cache=False).logits.numpy(),
        further_logits=further_logits(parts, ids).detach().numpy(),
        gradient_names=np.asarray(list(marks)),
        gradient_marks=np.stack(list(marks.values())),
    )
    sizes = ", ".join(f"{path.name} {path.stat().st_size}" for path in sorted(folder.iterdir()))
    print(f"{NAME}: seed {seed}, margin {margin(parts, ids):.1e}; {sizes} bytes")


if __name__ == "__main__":
    main()
