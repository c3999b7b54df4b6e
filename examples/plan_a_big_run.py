"""Plan a big run: which ways to split a model over chips fit, and what each makes a device send. No chip is needed.

    python examples/plan_a_big_run.py deepseek-v3 --chip tpu7x --devices 512

`raggedmoe plan` prints one of them in detail, `raggedmoe compile` compiles it with the TPU's own compiler.
"""

import argparse

from raggedmoe import MeshSettings, TrainConfig
from raggedmoe.aot.collectives import StepSizes, layer_collectives
from raggedmoe.hardware import hardware_by_name
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.step.fit import state_bytes

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="deepseek-v3", help="a preset, or a folder with a model")
parser.add_argument("--chip", default="tpu7x")
parser.add_argument("--devices", type=int, default=512)
parser.add_argument(
    "--expert", type=int, nargs="+", default=[1, 4, 8, 16, 64], help="degrees of expert parallelism to try"
)
arguments = parser.parse_args()

chip = hardware_by_name(arguments.chip)
memory = (chip.hbm_bytes or 0) // chip.devices_per_chip
print(f"{arguments.model} on {arguments.devices} devices of {chip.name}, {memory / 1e9:.0f} GB each")
print("state: weights, gradients and the optimizer's moments; activations come on top")
for expert in arguments.expert:
    mesh = MeshSettings(expert_parallelism=expert, fsdp_parallelism=-1)
    try:
        run = resolve(TrainConfig(model=arguments.model, mesh=mesh), chip, arguments.devices)
    except ValueError as error:  # the experts, say, cannot be shared by so many devices
        print(f"expert {expert:3}: {error}")
        continue
    state = state_bytes(run.step.model, run.plan, run.step.optimizer).total
    sequences = run.micro_batch_size // run.plan.num_token_shards
    step = StepSizes(
        num_tokens=sequences * run.data.sequence_length, num_sequences=sequences, dtype="bfloat16", ragged=True
    )
    sent = sum(
        each.sent_bytes for each in layer_collectives(run.step.model.moe, run.step.execution.moe, run.plan, step)
    )
    fits = "fits" if state < memory else "does not fit"
    print(f"expert {expert:3}, fsdp {run.plan.sizes['fsdp']:3}: state {state / 1e9:6.2f} GB ({fits}), ", end="")
    print(f"sent for each MoE layer {sent / 1e9:.2f} GB, for {step.num_tokens} tokens a device")
