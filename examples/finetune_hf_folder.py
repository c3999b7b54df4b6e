"""Fine-tune a model in a Hugging Face folder on files of text, and write it back as such a folder.

    python examples/finetune_hf_folder.py path/to/OLMoE-1B-7B path/to/texts --steps 500 --out out/finetuned

Sizes, weights and tokenizer are those of the folder; `transformers` loads the result.
"""

import argparse
from typing import Any

import raggedmoe
from raggedmoe import DataConfig, OptimizerConfig, RunConfig, TrainConfig

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="config.json, tokenizer.json and safetensors files")
parser.add_argument("texts", help="a folder of text files, each a document")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, help="tokens of a row; by default the model's own choice, at most 2048")
parser.add_argument("--batch", type=int, help="rows for each device; by default as many as make 4096 tokens")
parser.add_argument("--learning-rate", type=float, help="by default one that suits the model's width")
parser.add_argument("--out", default="out/finetuned")
arguments = parser.parse_args()


def show(line: dict[str, Any]) -> None:
    """Print what is learned; the run calls this with every line of its metrics."""
    if line["kind"] == "eval":
        print(f"after step {line['step']}: held-out loss {line['loss']:.3f}")


config = TrainConfig(
    model=arguments.folder,
    data=DataConfig(
        dataset_type="text",
        dataset_path=arguments.texts,
        max_target_length=arguments.length,
        per_device_batch_size=arguments.batch,
    ),
    optimizer=OptimizerConfig(learning_rate=arguments.learning_rate),
    run=RunConfig(steps=arguments.steps, run_name="finetune", base_output_directory=f"{arguments.out}-run"),
)
outcome = raggedmoe.train(config, callbacks=[show], quiet=True)
if outcome.model is None:  # stopped by a signal, or as numbers were not finite
    raise SystemExit(outcome.text)
raggedmoe.interop.save(outcome.model, arguments.out)
print(f"{arguments.out}: with its tokenizer; try: raggedmoe generate {arguments.out} --prompt '...'")
