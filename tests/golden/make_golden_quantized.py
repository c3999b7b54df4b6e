"""Writes the golden fixtures of quantised models: a DeepSeek-V3 in blocks of fp8, and a gpt-oss with mxfp4 experts.

    python -m tests.golden.make_golden_quantized [--find-seed] [name …]

fp8 is quantised and stored by `transformers`. Its quantiser of mxfp4 runs a kernel that it downloads and that needs
Triton (docs/log.md), so those experts are quantised by qwix and stored under its names. Both folders are read and
dequantised by `transformers`, whose logits and greedy text are what is expected.

The largest weight of each block is moved up to where its scale is a power of two: then bfloat16 holds every weight
exactly, and the quantised model and the dequantised one are the same function.
"""

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import qwix
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.golden.golden_cases import CASES, Case
from tests.golden.make_golden import GOLDEN, Expected, expected_of, flaws, made_model
from tests.interop.fp8_by_transformers import save_in_fp8

BLOCK = (16, 16)
LARGEST_FP8 = 448.0
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


def store_fp8(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Have `transformers` quantise a model whose scales are powers of two."""
    for tensor in model.state_dict().values():
        if tensor.ndim > 1 and not any(size % step for size, step in zip(tensor.shape[-2:], BLOCK)):
            raise_largest(tensor)
    save_in_fp8(model, folder, BLOCK)


def raise_largest(tensor: torch.Tensor) -> None:
    """Raise the largest value of each block to the format's largest times a power of two."""
    rows, columns = tensor.shape[-2:]
    blocks = tensor.view(-1, rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1]).transpose(2, 3)
    for index in np.ndindex(*blocks.shape[:3]):
        block = blocks[index]
        largest = block.flatten()[block.abs().argmax()]
        raised = LARGEST_FP8 * 2.0 ** torch.ceil(torch.log2(largest.abs() / LARGEST_FP8))
        block[block == largest] = raised * largest.sign()


def store_mxfp4(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Store the experts' matrices in mxfp4, outputs first as the published ones are, and the rest in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(EXPERTS)]:
        weight = tensors.pop(name).transpose(1, 2).float().numpy()
        quantised = qwix.quantize(weight, "mxfp4", channelwise_axes=(0, 1), tiled_axes={2: 32})
        codes = np.asarray(quantised.qvalue).view(np.uint8)  # of four bits, each in a byte
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        exponents = np.asarray(quantised.scale, np.float32).view(np.uint32) >> 23  # of powers of two
        tensors[f"{name}_blocks"] = torch.from_numpy(packed).unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = torch.from_numpy(exponents.astype(np.uint8))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = transformers.Mxfp4Config().to_dict()
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """One fixture: a golden case with sizes that blocks divide, and what stores it."""

    case: Case
    store: Callable[[transformers.PreTrainedModel, Path], None]


def _resized(name: str, seed: int, **sizes: int) -> Case:
    case = CASES[name]
    return replace(case, seed=seed, config={**case.config, **sizes})


FIXTURES: Mapping[str, Quantized] = {
    "deepseek_v3_fp8": Quantized(
        # Vocabulary and experts are no multiple of a block's side: embedding, head and routers stay as they are.
        case=_resized(
            "deepseek_v3",
            seed=3,
            vocab_size=72,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            v_head_dim=16,
            intermediate_size=48,
            moe_intermediate_size=32,
        ),
        store=store_fp8,
    ),
    "gpt_oss_mxfp4": Quantized(case=_resized("gpt_oss", seed=1, intermediate_size=32), store=store_mxfp4),
}


def loaded(folder: Path) -> transformers.PreTrainedModel:
    """Have `transformers` read a folder and dequantise it to bfloat16, as it does on a CPU; it computes in float32."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values()), report
    return model.to(torch.float32).eval()


def write(fixture: Quantized, seed: int, folder: Path) -> Expected:
    """Write a model with weights drawn from a seed, and return what `transformers` reads and computes of it."""
    fixture.store(made_model(fixture.case, seed=seed), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return expected_of(loaded(folder))


def found_seed(fixture: Quantized) -> int:
    for seed in itertools.count():
        with tempfile.TemporaryDirectory() as folder:
            if not flaws(write(fixture, seed, Path(folder))):
                return seed
    raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden fixtures of quantised models.")
    parser.add_argument("names", nargs="*", metavar="name", choices=[*FIXTURES, []], help="all without")
    parser.add_argument("--find-seed", action="store_true", help="print the first seed that will do")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in parsed.names or FIXTURES:
        fixture, folder = FIXTURES[name], GOLDEN / "quantised" / name
        if parsed.find_seed:
            print(f"{name}: seed {found_seed(fixture)}")
            continue
        shutil.rmtree(folder, ignore_errors=True)
        expected = write(fixture, fixture.case.seed, folder)
        assert not flaws(expected), f"{name}: {', '.join(flaws(expected))}; --find-seed finds another"
        np.savez_compressed(folder / "expected.npz", ids=expected.ids, logits=expected.logits, greedy=expected.greedy)
        files = sorted(folder.iterdir())
        print(
            f"{name}: margins {expected.routing_margin:.1e} (routing) and {expected.token_margin:.1e} (greedy); "
            f"{', '.join(f'{file.name} {file.stat().st_size}' for file in files)} bytes"
        )


if __name__ == "__main__":
    main()
