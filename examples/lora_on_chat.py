"""Fine-tune a Hugging Face folder on conversations by LoRA: the weights are frozen, small adapters beside them learn.

    python examples/lora_on_chat.py path/to/Qwen3-30B-A3B talks.jsonl --rank 16 --steps 500 --out out/tuned

A line of talks.jsonl is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}, ...]}, or
{"prompt": "...", "completion": "..."}. The folder's own chat template writes them, and the answers alone are learned.
"""

import argparse
from typing import Any

import raggedmoe
from raggedmoe import DataConfig, ModelOverrides, OptimizerConfig, RunConfig, TrainConfig

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="a Hugging Face folder with a tokenizer and a chat template")
parser.add_argument("talks", help="conversations, one a line")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, help="tokens of a row; longer conversations are cut, which is counted")
parser.add_argument("--batch", type=int, help="rows for each device")
parser.add_argument("--learning-rate", type=float, default=2e-4)
parser.add_argument("--out", default="out/tuned")
arguments = parser.parse_args()


def show(line: dict[str, Any]) -> None:
    """Print what is learned; the run calls this with every line of its metrics."""
    if line["kind"] == "eval":
        print(f"after step {line['step']}: held-out loss {line['loss']:.3f}")


config = TrainConfig(
    model=arguments.folder,
    # Of attention, dense and expert matrices; lora_targets=("attention",) leaves the experts as they are.
    overrides=ModelOverrides(lora_rank=arguments.rank),
    data=DataConfig(
        dataset_type="chat",
        dataset_path=arguments.talks,
        max_target_length=arguments.length,
        per_device_batch_size=arguments.batch,
    ),
    optimizer=OptimizerConfig(learning_rate=arguments.learning_rate),
    run=RunConfig(steps=arguments.steps, run_name="lora", base_output_directory=f"{arguments.out}-run"),
)
outcome = raggedmoe.train(config, callbacks=[show], quiet=True)
if outcome.model is None:  # stopped by a signal, or as numbers were not finite
    raise SystemExit(outcome.text)
raggedmoe.interop.save(raggedmoe.merge_lora(outcome.model), arguments.out)
print(f"{outcome.folder}/model: the adapters; {arguments.out}: the model with its adapters merged, for transformers")
