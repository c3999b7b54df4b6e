"""What a run's memory and speed are measured by, against arrays that were made and counts made by hand."""

import dataclasses
import math
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.hardware import GB, HARDWARE, hardware_by_name
from raggedmoe.lora import LoraConfig
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.flops import forward_flops, mean_visible_keys, train_flops
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.train.loop import speed
from raggedmoe.train.loop.speed import peak_flops
from raggedmoe.train.settings.sections import OptimizerConfig
from raggedmoe.train.step import fit, programs
from raggedmoe.train.step.fit import check_compiled_fit, check_fit, memory_bytes, state_bytes
from raggedmoe.train.step.optimizer import make_optimizer, widen_to_float32
from raggedmoe.train.step.state import init_state


def num_bytes(array):
    return array.size * array.dtype.itemsize


# --- Memory


LORA = LoraConfig(rank=2, router="trained")
MUON = {"opt_type": "muon", "mu_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("param_dtype", "settings", "lora"),
    [
        (jnp.float32, {}, None),
        (jnp.bfloat16, {}, None),
        (jnp.float32, MUON, None),
        (jnp.bfloat16, {}, LORA),
        (jnp.float32, MUON, LORA),
    ],
    ids=["float32", "bfloat16", "muon", "adapters", "adapters-muon"],
)
def test_state_bytes_are_those_of_the_state_that_a_run_begins_with(param_dtype, settings, lora):
    config = dataclasses.replace(model_preset("deepseek-v3-tiny"), param_dtype=param_dtype, lora=lora)
    settings = OptimizerConfig(schedule_steps=20, **settings)
    optimizer = make_optimizer(settings, param_specs(config))
    state = jax.eval_shape(lambda: init_state(config, optimizer, jax.random.key(0)))
    trained = [array for name, array in state.params.items() if param_specs(config)[name].trained]
    found = state_bytes(config, optimizer=settings)
    assert found.num_params == sum(array.size for array in state.model_params.values())
    assert found.params == sum(num_bytes(array) for array in state.model_params.values())
    assert found.gradients == sum(num_bytes(jax.eval_shape(widen_to_float32, array)) for array in trained)
    assert found.moments == sum(num_bytes(leaf) for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim)
    assert found.total == found.params + found.gradients + found.moments


def refusal(name, available):
    with pytest.raises(ValueError) as caught:
        check_fit(name, model_preset(name), 0, available)
    return str(caught.value)


@pytest.fixture(scope="module")
def text():
    """The refusal of a model of 16 billion parameters."""
    return refusal("deepseek2-16b", 24 * GB)


def test_a_model_that_does_not_fit_is_refused_with_the_sums(text):
    sums = ("15.7B", "251.3 GB", "parameters 62.8 GB", "gradients 62.8 GB", "moments 125.7 GB")
    for words in ("deepseek2-16b", *sums, "this machine has 24.0 GB", "227.3 GB too little"):
        assert words in text


def test_a_refusal_counts_the_chips_that_would_hold_the_state(text):
    total = state_bytes(model_preset("deepseek2-16b")).total
    chips = [chip for chip in HARDWARE.values() if chip.hbm_bytes]
    assert len(chips) > 3
    for chip in chips:
        num = next(n for n in range(1, 1000) if n * 0.75 * chip.hbm_bytes >= total)
        assert f"{num} × {chip.name}" in text


def test_a_refusal_names_the_most_layers_and_the_models_that_fit(text):
    model = model_preset("deepseek2-16b")
    layers = int(text.partition("num_layers=")[2].split()[0])
    fits = [state_bytes(dataclasses.replace(model, num_layers=n)).total <= 0.75 * 24 * GB for n in (layers, layers + 1)]
    assert fits == [True, False]
    assert f"num_layers={layers} of its 27" in text
    assert "model_name=deepseek-v2-tiny" in text


def test_a_model_that_does_not_fit_whole_fits_with_adapters():
    """16 billion parameters on one chip of 80 GB: 251 GB to train them, 36 GB with adapters beside them."""
    model, memory = model_preset("deepseek2-16b"), HARDWARE["h100"].hbm_bytes
    model = dataclasses.replace(model, dtype=jnp.bfloat16)
    # Frozen weights have at least the activations' type.
    offer = "lora_rank=16 beside the weights of a checkpoint in"
    for dtype, available, word in ((jnp.bfloat16, memory, "bfloat16"), (jnp.float32, 2 * memory, "float32")):
        with pytest.raises(ValueError, match=f"{offer} {word}"):
            check_fit("deepseek2-16b", dataclasses.replace(model, dtype=dtype), 0, available)
    assert "lora_rank" not in refusal("deepseek2-16b", memory)
    assert "lora_rank" not in refusal("deepseek2-16b", 24 * GB)
    beside = dataclasses.replace(model, lora=LoraConfig(rank=16), param_dtype=jnp.bfloat16)
    check_fit("deepseek2-16b", beside, 0, memory)
    adapters = sum(spec.num_elements for spec in param_specs(beside).values() if spec.trained)
    frozen = sum(spec.num_elements for spec in param_specs(model).values())
    routers = sum(spec.num_elements for name, spec in param_specs(model).items() if ".router_" in name)
    assert state_bytes(beside).total == 2 * frozen + 2 * routers + 16 * adapters


def test_a_refusal_where_nothing_fits_says_so():
    assert refusal("mixtral-tiny", 1000).endswith("Here would fit: nothing of it")


def test_a_model_of_ten_terabytes_is_refused_at_once():
    assert "10922.2 GB" in refusal("deepseek-v3", 24 * GB)


def test_a_model_fits_exactly_where_its_state_does():
    config = model_preset("mixtral-tiny")
    total = state_bytes(config).total
    check_fit("mixtral-tiny", config, 0, total)
    check_fit("mixtral-tiny", config, 0, None)
    with pytest.raises(ValueError, match="parameters do not fit"):
        check_fit("mixtral-tiny", config, 0, total - 1)


def test_a_micro_batch_whose_layer_inputs_do_not_fit_is_refused():
    config = model_preset("mixtral-tiny")
    total, tokens = state_bytes(config).total, 1000
    inputs = 2 * tokens * 64 * 4  # layers, tokens, D, float32
    check_fit("mixtral-tiny", config, tokens, total + inputs)
    with pytest.raises(ValueError, match=r"1,000 tokens at once do not fit.*smaller per_device_batch_size"):
        check_fit("mixtral-tiny", config, tokens, total + inputs - 1)


def test_a_step_that_the_compiler_counts_as_too_large_is_refused():
    check_compiled_fit(None, 10)
    check_compiled_fit(10, None)
    check_compiled_fit(10 * GB, 10 * GB)
    with pytest.raises(ValueError, match=r"a step or an evaluation needs 12.0 GB.*has 10.0 GB: 2.0 GB too little"):
        check_compiled_fit(12 * GB, 10 * GB)


def test_this_machine_says_what_it_can_hold():
    found = memory_bytes(hardware_by_name("cpu"))
    assert found is None or 10**6 < found < 10**15


# --- Operations


def test_operations_of_mixtral_by_hand():
    # D 64, 4 heads of 16 on 2 of keys and values, 8 experts of 96 of which 2, V 256, 2 layers.
    attention = 64 * 4 * 16 + 2 * 64 * 2 * 16 + 4 * 16 * 64
    experts = 64 * 8 + 2 * 3 * 64 * 96
    seen = 4 * (16 + 16) * (1 + 10) / 2
    assert forward_flops(model_preset("mixtral-tiny"), 10) == 2 * (2 * (attention + experts + seen) + 256 * 64)


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_operations_of_deepseek_v3_by_hand(mtp_layers):
    # D 64, 4 heads of 16 + 8 for keys and 16 for values, latents of 32 and 16, V 256; a dense layer of 128, then two
    # of 16 experts of 32, of which 4, and a shared one.
    queries = 64 * 32 + 32 * 4 * (16 + 8)
    keys_and_values = 64 * (16 + 8) + 16 * 4 * (16 + 16)
    attention = queries + keys_and_values + 4 * 16 * 64 + 4 * (16 + 8 + 16) * (1 + 10) / 2
    experts = 64 * 16 + (4 + 1) * 3 * 64 * 32
    head = 64 * 256
    module = 2 * 64 * 64 + attention + experts + head
    model = 3 * attention + 3 * 64 * 128 + 2 * experts + head
    config = model_preset("deepseek-v3-tiny")
    assert forward_flops(config, 10, mtp_layers=mtp_layers) == 2 * (model + mtp_layers * module)


def test_tied_embeddings_are_multiplied_once():
    config = model_preset("mixtral-tiny")
    tied = dataclasses.replace(config, tied_embeddings=True)
    assert forward_flops(tied, 10) == forward_flops(config, 10)


def test_biases_and_sinks_are_no_operations_and_windows_save_some():
    config = model_preset("gpt-oss-tiny")
    attention = dataclasses.replace(config.attention, biases=False, sinks=False)
    assert forward_flops(dataclasses.replace(config, attention=attention), 32) == forward_flops(config, 32)
    everywhere = forward_flops(dataclasses.replace(config, windows=(None,)), 32)
    saved = 2 * (16.5 - (8 - 8 * 7 / 64))  # in two of four layers
    assert everywhere - forward_flops(config, 32) == 2 * saved * 4 * (16 + 16)


def test_training_is_three_times_as_much():
    config = model_preset("deepseek-v3-tiny")
    assert train_flops(config, 10, mtp_layers=1) == 3 * forward_flops(config, 10, mtp_layers=1)


def test_a_frozen_weight_is_multiplied_twice_and_its_adapter_three_times():
    plain = model_preset("mixtral-tiny")
    config, tokens = dataclasses.replace(plain, lora=LoraConfig(rank=2, targets=("attention",))), 10
    adapters = forward_flops(config, tokens) - forward_flops(plain, tokens)
    products = sum(spec.num_elements for spec in param_specs(config).values() if spec.trained)
    assert adapters == 2 * products
    attention = 2 * plain.num_layers * mean_visible_keys(tokens, None) * plain.attention.num_heads * 2 * 16
    assert plain.attention.head_dim == 16
    weights = forward_flops(plain, tokens) - attention
    assert train_flops(config, tokens) == 2 * weights + 3 * (attention + adapters)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 16, 100])
def test_visible_keys_are_those_of_a_loop_over_positions(length, window):
    seen = [len(range(max(0, i + 1 - (window or length)), i + 1)) for i in range(length)]
    assert mean_visible_keys(length, window) == pytest.approx(np.mean(seen))


@pytest.mark.usefixtures("without_native_kernels")  # the compiler does not know what these multiply
def test_operations_are_about_those_that_the_compiler_counts():
    # A model of dense layers only, with the scan's body run once, whose matmuls XLA counts as they are. It multiplies
    # all pairs of tokens, not only the visible ones, and counts norms and softmax too.
    config = model_preset("mixtral-tiny")
    config = dataclasses.replace(config, num_layers=1, dense_layers=(0,), mlp_dim=96)
    length = 32

    def forward(params, ids):
        return logits(params, decode(params, ids, config).hidden, config)

    params = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in param_specs(config).items()}
    analysis = jax.jit(forward).lower(params, jnp.zeros((1, length), jnp.int32)).compile().cost_analysis()
    ratio = analysis["flops"] / (length * forward_flops(config, length))
    assert 1 < ratio < 1.2


# --- The peak


def test_the_peak_of_a_chip_is_its_tables_figure_for_one_device():
    assert peak_flops(hardware_by_name("v5e"), jnp.dtype(jnp.bfloat16)) == 197e12
    assert peak_flops(hardware_by_name("v5e"), jnp.dtype(jnp.float32)) == 197e12 / 2
    assert peak_flops(hardware_by_name("tpu7x"), jnp.dtype(jnp.bfloat16)) == 2307e12 / 2


def test_the_peak_of_a_cpu_is_the_best_of_some_matmuls(monkeypatch):
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])  # 4, 2 and 3 seconds
    monkeypatch.setattr(speed, "MATMUL_SIZE", 10)
    monkeypatch.setattr(speed, "NUM_REPEATS", 3)
    monkeypatch.setattr(speed, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    found = peak_flops(hardware_by_name("cpu"), jnp.dtype(jnp.float32))
    assert math.isclose(found, 2 * 10**3 / 2)


def test_a_program_needs_its_arguments_results_and_temporaries_and_what_lies_beside_it():
    """What is given up for a result, as a step's state is, is counted once."""
    sizes = {"argument_size_in_bytes": 1000, "output_size_in_bytes": 200, "temp_size_in_bytes": 30}
    found = types.SimpleNamespace(**sizes, alias_size_in_bytes=100)
    assert programs._bytes_needed(types.SimpleNamespace(memory_analysis=lambda: found), beside=4) == 1134
    assert programs._bytes_needed(types.SimpleNamespace(memory_analysis=lambda: None)) is None


@pytest.mark.parametrize(
    ("limit", "expected"), [("4096", 4096), ("2000000", 1024000), ("max", 1024000), (None, 1024000)]
)
def test_a_host_has_what_is_available_or_the_limit_of_its_group_if_that_is_less(monkeypatch, tmp_path, limit, expected):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(fit, "Path", lambda path: tmp_path / Path(path).name)
    assert fit._host_memory() == expected
