"""Loading holds the parameters and little else; saving holds a piece of them."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

# One layer is the worst case: read whole, its down projections alone would be a third of all parameters.
WIDTH, EXPERT_WIDTH, NUM_EXPERTS, NUM_LAYERS = 1024, 2560, 20, 1
CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 512,
    "hidden_size": WIDTH,
    "intermediate_size": EXPERT_WIDTH,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
    "sliding_window": None,
}
# Prints the parameters' bytes and how much the process's largest size grew while it loaded, or saved.
MEASURE = r"""
import re, sys
import jax, jax.numpy as jnp
from raggedmoe import interop

def largest():
    # Not ru_maxrss, which a new process inherits from the one that started it.
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) * 1024

jnp.zeros(8).block_until_ready()
before = largest()
model = interop.load(sys.argv[1], keep_quantised="keep" in sys.argv)
params = model.params
loaded = largest()
size = sum(array.nbytes for array in jax.tree.leaves(params))
if len(sys.argv) > 3:
    interop.save(model, sys.argv[2], layout=sys.argv[3])
print(size, loaded - before, largest() - loaded)
"""


# Prints how much the largest size grew while a folder was quantised.
MEASURE_QUANTISING = (
    MEASURE[: MEASURE.index("model =")]
    + r"""
interop.quantise(sys.argv[1], sys.argv[2], sys.argv[3])
print(0, 0, largest() - before)
"""
)


def _weights(*shape):
    # Bytes that are not all alike, so that no page is shared.
    values = np.empty(shape, np.uint16)
    values[...] = np.arange(shape[-1], dtype=np.uint16) % 0x3F00
    return values.view(ml_dtypes.bfloat16)


def _layer(number, layout):
    prefix = f"model.layers.{number}."
    found = {f"{prefix}{name}_layernorm.weight": _weights(WIDTH) for name in ("input", "post_attention")}
    found |= {f"{prefix}self_attn.{name}_proj.weight": _weights(WIDTH, WIDTH) for name in "qkvo"}
    if layout == "fused":
        return found | {
            f"{prefix}mlp.gate.weight": _weights(NUM_EXPERTS, WIDTH),
            f"{prefix}mlp.experts.gate_up_proj": _weights(NUM_EXPERTS, 2 * EXPERT_WIDTH, WIDTH),
            f"{prefix}mlp.experts.down_proj": _weights(NUM_EXPERTS, WIDTH, EXPERT_WIDTH),
        }
    found[f"{prefix}block_sparse_moe.gate.weight"] = _weights(NUM_EXPERTS, WIDTH)
    for expert in range(NUM_EXPERTS):
        where = f"{prefix}block_sparse_moe.experts.{expert}."
        found |= {f"{where}{name}.weight": _weights(EXPERT_WIDTH, WIDTH) for name in ("w1", "w3")}
        found[f"{where}w2.weight"] = _weights(WIDTH, EXPERT_WIDTH)
    return found


@pytest.fixture
def large(tmp_path):
    """Writes a checkpoint of more than 300 MB in two files with the `safetensors` package."""

    def write(layout):
        whole = {name: _weights(512, WIDTH) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        files = [{**whole, "model.norm.weight": _weights(WIDTH)}] + [_layer(n, layout) for n in range(NUM_LAYERS)]
        weight_map = {}
        for number, tensors in enumerate(files):
            save_file(tensors, tmp_path / f"model-{number}.safetensors")
            weight_map.update(dict.fromkeys(tensors, f"model-{number}.safetensors"))
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return write


def measured(*arguments: Path | str, script: str = MEASURE) -> tuple[int, int, int]:
    """Bytes of the parameters, growth while they were loaded, growth while they were saved; in a new process."""
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    size, loading, saving = map(int, run.stdout.split())
    return size, loading, saving


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux keeps for each process")
@pytest.mark.parametrize("layout", ["per_expert", pytest.param("fused", marks=pytest.mark.slow)])
def test_loading_takes_at_most_1_3_times_the_parameters_and_saving_0_3_more(layout, large, tmp_path):
    size, loading, saving = measured(large(layout), tmp_path / "out", layout)
    assert size >= 300e6
    assert loading >= 0.9 * size, "the parameters themselves must be in what was measured"
    assert loading <= 1.3 * size, f"loading {loading / size:.2f} times the parameters"
    assert saving <= 0.3 * size, f"saving {saving / size:.2f} times the parameters"


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak that Linux keeps for each process")
@pytest.mark.parametrize("to", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_quantising_holds_pieces_and_loading_what_is_stored(to, large, tmp_path):
    folder, out = large("per_expert"), tmp_path / "out"
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _, _, quantising = measured(folder, out, to, script=MEASURE_QUANTISING)
    assert quantising <= 0.4 * stored, f"quantising {quantising / stored:.2f} times the model"
    in_files = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert in_files <= 0.55 * stored
    size, loading, _ = measured(out, "keep")
    # In files scales of int8, one for each row, are bfloat16, and held in float32. The rest are headers and a router.
    rows = NUM_EXPERTS * (2 * EXPERT_WIDTH + WIDTH) + 4 * WIDTH if to == "int8" else 0
    assert abs(size - in_files - 2 * rows) <= 0.001 * in_files
    assert 0.9 * size <= loading <= 1.3 * size, f"loading {loading / size:.2f} times the parameters"
