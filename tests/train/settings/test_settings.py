"""The words of `raggedmoe train`: every bad one is a clear error, every good one does what it says."""

import ast
import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import raggedmoe
from raggedmoe.hardware import HARDWARE
from raggedmoe.interop.maxtext import GROUPS, TRANSLATED, defaults
from raggedmoe.kernels.registry import Directions
from raggedmoe.models.presets import model_preset
from raggedmoe.moe.config import MoEConfig, strategy_name
from raggedmoe.sharding.plan import Plan
from raggedmoe.storage import as_path
from raggedmoe.train.settings.config import SETTINGS, TrainConfig, config_of, list_changes
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import (
    RECIPES,
    CheckpointConfig,
    DataConfig,
    ExecutionSettings,
    MeshSettings,
    ModelOverrides,
    OptimizerConfig,
    RunConfig,
    StepSettings,
)
from raggedmoe.train.settings.words import read_values, read_words
from tests.train.settings.resume_table import with_table

CPU = HARDWARE["cpu"]


def configured(*words, hardware=CPU):
    return resolve(read_words(words), hardware)


def strategy_of(config):
    return strategy_name(config.step.model.moe, config.step.execution.moe)


def test_without_a_word_the_demo_is_trained():
    config = configured()
    assert config.asked.model == "demo"
    assert config.step.model.moe.router.selection_bias
    assert config.step.model.moe.experts.num_shared == 1
    assert config.folder.parts == ("out", "demo")


def test_what_a_model_brings_along_gives_way_to_what_is_typed():
    assert configured("demo").step.optimizer.num_steps == RECIPES["demo"]["steps"]
    assert configured("demo", "steps=7").step.optimizer.num_steps == 7
    assert configured("olmoe-tiny").step.optimizer.num_steps == SETTINGS["steps"].otherwise
    assert all(set(brought) <= set(SETTINGS) for brought in RECIPES.values())


@pytest.mark.parametrize("key", SETTINGS.values(), ids=lambda key: key.name)
def test_every_setting_has_help_and_a_default_that_it_would_accept(key):
    assert key.help
    key.check(key.default)
    key.check(key.usual)
    if key.usual is None or key.usual == ():
        return
    shown = ",".join(key.usual) if isinstance(key.usual, tuple) else str(key.usual)
    assert key.parse(shown) == key.usual


def test_a_configuration_is_shown_as_a_user_would_write_it():
    config = TrainConfig(model="olmoe-tiny", run=RunConfig(steps=3), mesh=MeshSettings(fsdp_parallelism=2))
    written = "TrainConfig(model='olmoe-tiny', mesh=MeshSettings(fsdp_parallelism=2), run=RunConfig(steps=3))"
    assert repr(config) == written
    assert eval(written) == config


def test_another_model_brings_its_own_defaults_to_a_configuration_that_was_made_for_one():
    of_demo = TrainConfig(run=RunConfig(eval_steps=5))
    other = dataclasses.replace(of_demo, model="olmoe-tiny")
    assert other == TrainConfig(model="olmoe-tiny", run=RunConfig(eval_steps=5))
    assert resolve(other, CPU).asked.values() == configured("olmoe-tiny", "eval_steps=5").asked.values()
    again = resolve(dataclasses.replace(other, model="demo"), CPU).asked.values()
    assert again == configured("demo", "eval_steps=5").asked.values()
    assert {name: again[name] for name in RECIPES["demo"]} == {**RECIPES["demo"], "eval_steps": 5}


def test_what_is_set_to_what_another_model_would_have_stays():
    config = TrainConfig(run=RunConfig(steps=SETTINGS["steps"].otherwise), step=StepSettings(bias_update_rate=1e-3))
    asked = resolve(dataclasses.replace(config, checkpoints=CheckpointConfig(keep_last=3)), CPU).asked
    assert (asked.run.steps, asked.step.bias_update_rate, asked.run.eval_steps) == (1000, 1e-3, 32)


def test_a_balance_loss_that_is_typed_takes_the_place_of_a_files_whoever_reads_the_configuration(tmp_path):
    (tmp_path / "theirs.yml").write_text("load_balance_loss_weight: 0.25")
    config = read_words([str(tmp_path / "theirs.yml"), "mixtral-tiny", "aux_loss_weight=0.5"])
    assert (config.overrides.load_balance_loss_weight, config.overrides.aux_loss_weight) == (None, 0.5)
    assert resolve(config_of(config.changes()), CPU).step == resolve(config, CPU).step


def test_values_may_be_what_python_programs_have():
    config = TrainConfig(
        model=Path("models/mine"),
        data=DataConfig(dataset_type="text", dataset_path=[Path("a"), "b"], packing=np.bool_(False)),
        execution=ExecutionSettings(grouped_matmul="xla, cpu", remat=["full"], ragged_gather=["xla"]),
        optimizer=OptimizerConfig(learning_rate=np.float32(0.5), weight_decay=np.float64(0.25), adam_b1=0),
        run=RunConfig(steps=np.int64(7), base_output_directory=as_path("s3://bucket/runs")),
    )
    assert (config.model, config.data.dataset_path, config.data.packing) == ("models/mine", ("a", "b"), False)
    assert (config.execution.grouped_matmul, config.execution.remat) == (("xla", "cpu"), ("full",))
    assert (config.optimizer.learning_rate, config.run.base_output_directory) == (0.5, "s3://bucket/runs")
    assert {type(config.run.steps), type(config.data.packing)} == {int, bool}
    assert DataConfig(dataset_type="text", dataset_path="books/").dataset_path == ("books/",)
    assert config_of(json.loads(json.dumps(config.changes()))) == config


def test_a_model_of_ones_own_is_a_setting_that_json_holds():
    preset = model_preset("olmoe-tiny")
    model = dataclasses.replace(preset, num_layers=3, moe=dataclasses.replace(preset.moe, experts_per_token=3))
    config = TrainConfig(model=model, overrides=ModelOverrides(vocab_size=300))
    resolved = resolve(config, CPU)
    expected = dataclasses.replace(model, vocab_size=300)
    assert resolved.step.model == expected
    assert (resolved.asked.model_folder, resolved.folder.name) == (None, "olmoe-custom")
    written = json.loads(json.dumps(resolved.asked.values()))
    assert resolve(config_of(written), CPU).step == resolved.step
    assert resolve(read_values(written, "run.json"), CPU).step == resolved.step
    assert list_changes(written, resolve(dataclasses.replace(config, model=preset), CPU).asked.values()) != []


def test_a_model_of_ones_own_that_no_run_could_train_is_refused():
    preset = model_preset("olmoe-tiny")
    slots = dataclasses.replace(preset, moe=dataclasses.replace(preset.moe, capacity_factor=1.0))
    with pytest.raises(ValueError, match=r"without a capacity factor, got 1.0; set it by overrides=ModelOverrides"):
        TrainConfig(model=slots)
    for name, override in (("dtype", "dtype"), ("param_dtype", "weight_dtype")):
        message = rf"default {name}=float32, got bfloat16; set it by overrides=ModelOverrides\({override}='bfloat16'\)"
        with pytest.raises(ValueError, match=message):
            TrainConfig(model=dataclasses.replace(preset, **{name: "bfloat16"}))
    with pytest.raises(ValueError, match=r"model_name: expected a name, a folder or a ModelConfig, got MoEConfig"):
        TrainConfig(model=preset.moe)
    with pytest.raises(ValueError, match=r"from_scratch=true: model_name=olmoe-custom is no folder"):
        TrainConfig(model=preset, run=RunConfig(from_scratch=True))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TrainConfig(run={"steps": 3}), ValueError, r"^run: expected RunConfig\(…\), got {'steps': 3}"),
        (
            lambda: TrainConfig(learning_rate=1.0),
            TypeError,
            r"^TrainConfig has no learning_rate; use optimizer=OptimizerConfig\(learning_rate=…\)$",
        ),
        (lambda: RunConfig(learning_rate=1.0), TypeError, r"RunConfig has no learning_rate; use OptimizerConfig\("),
        (lambda: TrainConfig(model_name="demo"), TypeError, r"has no model_name; use TrainConfig\(model=…\)"),
        (lambda: RunConfig(step=1), TypeError, "RunConfig has no step; did you mean steps"),
        (lambda: RunConfig(qqqqq=1), TypeError, "RunConfig has no qqqqq; expected one of steps, seed"),
        (lambda: RunConfig(steps=True), ValueError, "steps: expected a whole number, got True"),
        (lambda: RunConfig(steps=np.float64(1.5)), ValueError, "steps: expected a whole number, got 1.5"),
        (lambda: DataConfig(dataset_path=[3]), ValueError, "dataset_path: expected names separated by commas"),
    ],
)
def test_what_python_gets_wrong_is_refused_with_where_it_belongs(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "config", [TrainConfig(), TrainConfig(model="olmoe-tiny", mesh=MeshSettings(data_parallelism=2))], ids=str
)
def test_a_replaced_configuration_is_the_one_that_was_there(config):
    """There is nothing beside the values that a copy could lack."""
    again = dataclasses.replace(config, run=dataclasses.replace(config.run), data=dataclasses.replace(config.data))
    assert again == config
    assert resolve(again, CPU, 2) == resolve(config, CPU, 2)
    assert resolve(config_of(config.changes()), CPU, 2) == resolve(config, CPU, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sparse_matul=true"], "did you mean sparse_matmul"),
        (["step=5"], "did you mean steps"),
        (["qqqqq=5"], "unknown setting 'qqqqq'"),
        (["steps=ten"], "steps: expected a whole number, got 'ten'"),
        (["steps=1.5"], "steps: expected a whole number, got '1.5'"),
        (["learning_rate=fast"], "learning_rate: expected a finite number, got 'fast'"),
        (["weight_decay=nan"], "weight_decay: expected a finite number, got 'nan'"),
        (["learning_rate=inf"], "learning_rate: expected a finite number, got 'inf'"),
        (["ragged_gather="], "ragged_gather: expected names separated by commas, got ''"),
        (["dropout_rate=0.1"], "dropout is not built"),
        (["packing=maybe"], "packing: expected true or false, got 'maybe'"),
        (["schedule=linear"], "schedule: expected one of cosine, wsd, constant, got 'linear'"),
        (["dataset_type=tfds"], "dataset_type=tfds: that pipeline is not built; use dataset_type=text"),
        (["dataset_type=csv"], "dataset_type: expected one of stdlib, text, chat, hf, tokens, synthetic, got 'csv'"),
        (["steps=5", "steps=6"], "steps=5 and steps=6 contradict each other"),
        (["demo", "olmoe-tiny"], "expected one model and settings as key=value, got 'demo' and 'olmoe-tiny'"),
        (["demo", "model_name=olmoe-tiny"], "demo and model_name=olmoe-tiny contradict each other"),
        (["routing=random", "use_random_routing=true", "routing=balanced"], "contradict each other"),
        (
            ["ragged_gather.forward=reference", "ragged_gather_fallback=true"],
            r"contradict each other: both set ragged_gather\.forward",
        ),
        (["capacity_facto=1"], "did you mean capacity_factor or"),
        (["quantization=int4"], "quantization=int4: nothing is trained in 4 bits; use quantization=int8"),
        (
            ["quantization=te_fp8_delayedscaling"],
            "its delayed scales are those of quantization=fp8 quantization_history=1024",
        ),
        (["quantization=nanoo_fp8"], "AMD's fp8 is not built; use quantization=fp8"),
        (["quantization=fp9"], "quantization: expected one of none, fp8_full, fp8, int8, .*, got 'fp9'"),
        (
            ["quantization=fp8", "act_quantization_calibration_method=fixed,-1,2"],
            r"act_quantization_calibration_method=fixed,-1,2: expected absmax, or fixed,-a,a with a > 0",
        ),
        (["use_gather_mosaic_kernel=true"], "a TensorCore gather is not built; use_ragged_sort=true"),
        (["use_2d_fsdp_sharding=true"], "there is one FSDP axis; use ici_fsdp_parallelism"),
        (
            ["quantization=int4", "ici_context_parallelism=2"],
            "2 settings cannot be taken:\n  ici_.*\n  quantization=int4: ",
        ),
        (["remat_policy=custom", "out_proj=offload"], "out_proj=offload: keeping arrays in the host's memory"),
        (["remat_policy=minimal_offloaded"], "keeping arrays in the host's memory is not built; remat_policy=full"),
        (["opt_type=muon", "muon_beta=1"], "muon_beta < 1, got 1"),
        (["opt_type=sgd"], "only AdamW and Muon are built; use opt_type=adamw or muon"),
        (["decoder_block=llama2"], "decoder_block=llama2: expected one of deepseek, mixtral"),
        (["mine.yml"], "mine.yml: expected a file of settings in MaxText's form, found none"),
        (["ragged_buffer_factor=much"], "ragged_buffer_factor: expected a finite number, got 'much'"),
        (["use_random_routing=perhaps"], "use_random_routing: expected true or false, got 'perhaps'"),
        (["ici_pipeline_parallelism=4"], "ici_pipeline_parallelism=4: there is no such axis here"),
        (["attention=cudnn_flash_te"], "cuDNN's attention is not built"),
    ],
)
def test_a_bad_word_is_refused_with_what_to_do(words, message):
    with pytest.raises(ValueError, match=message):
        read_words(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model_name=gpt5"], "unknown model 'gpt5'"),
        (["ici_expert_parallelism=8"], "expert_parallelism=8 = 8 devices, but there are 1"),
        (["tensor_parallelism=0"], "expected tensor_parallelism >= 1, or -1 for the devices that are left, got 0"),
        (["moe_backend=jax", "sparse_matmul=true"], "sparse_matmul=true and moe_backend=jax contradict each other"),
        (["moe_backend=cpu", "sparse_matmul=false"], "sparse_matmul=false and moe_backend=cpu contradict each other"),
        (["moe_backend=fast"], "unknown moe_backend 'fast'"),
        (
            ["sparse_matmul=false", "ragged_gather=xla"],
            r"ragged_gather='xla' cannot.* never be read",
        ),
        (["grouped_matmul=magic"], "implementation of grouped_matmul, 'magic'"),
        (["quantization=fp8", "moe_backend=cpu_native"], "with moe_backend='cpu_native': its fused kernel rounds"),
        (["moe_fp8_weights=true", "moe_use_kernel_agent_ffn=true"], "with moe_backend='expert_ffn': its fused kernel"),
        (["quantization=int8", "moe_backend=megablox"], "megablox .forward. takes no quantised operands; use auto"),
        (["quantization=int8", "width_chunks=2"], "with width_chunks=2: what shares a scale would be cut"),
        (
            ["quantization=int8", "moe_backend=dense"],
            "quantization=int8 and moe_backend=dense .* contradict each other",
        ),
        (["dispatch_dtype=fp8"], "dispatch_dtype: expected one of float8_e4m3fn, float8_e5m2, int8, got 'fp8'"),
        (["quantization=int8", "capacity_factor=1"], "quantization=int8 and capacity_factor=1 contradict each other"),
        (
            ["quantization=fp8", "quantization_block=7"],
            "model_dim=192 is not divisible by quantization_block=7; use quantization_block in",
        ),
        (["quantization=fp8", "quantization_row_scale=0"], "expected quantization_row_scale > 0, got 0"),
        (["quantization=fp8", "quantization_history=0"], "expected quantization_history >= 1, got 0"),
        (
            ["quantization=fp8", "quantization_history=4", "quantization_block=16"],
            "quantization_history=4 makes one scale for a whole operand, and quantization_block=16 one for each block",
        ),
        (["moe_backend=ragged_dot", "grouped_matmul=cpu"], "with grouped_matmul='cpu': it names 'xla'"),
        (["steps=0"], "expected steps >= 1, got 0"),
        (["steps=10", "warmup_steps=11"], "never reach its peak"),
        (["steps=10", "warmup_steps=6", "schedule=wsd", "decay_fraction=0.5"], "together are more than steps=10"),
        (
            ["schedule_steps=10", "warmup_fraction=0.9", "schedule=wsd"],
            r"warmup_fraction=0.9 \(9 steps\) and decay_fraction=0.2 \(2 steps\) together are more than schedule_s",
        ),
        (["learning_rate=-1"], "expected learning_rate > 0, got -1.0"),
        (["adam_b2=1"], "expected 0 <= adam_b2 < 1, got 1.0"),
        (["per_device_batch_size=0"], "expected per_device_batch_size >= 1, got 0"),
        (["gradient_accumulation_steps=0"], "expected gradient_accumulation_steps >= 1, got 0"),
        (["max_target_length=1"], "expected max_target_length >= 2, got 1"),
        (["num_layers=0"], r"expected num_layers >= 1, got 0"),
        (["base_num_decoder_layers=0"], r"expected base_num_decoder_layers >= 1, got 0"),
        (["adam_weight_decay=-1"], r"expected adam_weight_decay >= 0, got -1.0"),
        (["warmup_steps_fraction=much"], r"warmup_steps_fraction: expected a finite number, got 'much'"),
        (["olmoe-tiny", "base_num_query_heads=3"], "base_num_query_heads=3 is not divisible by base_num_kv_heads=4"),
        (["olmoe-tiny", "base_num_kv_heads=0"], "expected base_num_kv_heads >= 1, got 0"),
        (["olmoe-tiny", "head_dim=7"], "expected an even head_dim"),
        (["deepseek-v3-tiny", "qk_rope_head_dim=3"], "expected an even qk_rope_head_dim"),
        (["deepseek-v3-tiny", "n_routing_groups=3"], "num_experts=16 is not divisible by n_routing_groups=3"),
        (["deepseek-v3-tiny", "topk_routing_group=9"], "expected topk_routing_group <= n_routing_groups=8, got 9"),
        (["deepseek-v3-tiny", "num_experts_per_tok=40"], "num_experts_per_tok=40 is more than num_experts=16"),
        (["first_num_dense_layers=5"], r"first_num_dense_layers: expected 0 .. 4, the layers of demo, got 5"),
        (["head_dim=8"], "head_dim=8: demo has latent attention.*use q_lora_rank"),
        (["olmoe-tiny", "kv_lora_rank=8"], "olmoe-tiny has no latent attention; use base_num_kv_heads"),
        (["olmoe-tiny", "sliding_window_size=8"], "olmoe-tiny has no layer with a window"),
        (["olmoe-tiny", "num_experts=3"], "num_experts_per_tok=4 is more than num_experts=3"),
        (["remat=everything"], "unknown remat name 'everything'"),
        (["remat=full,query"], "unknown remat name 'full'"),
        (["keep_last=0"], "expected keep_last >= 1, got 0"),
        (["line_period=0"], "expected line_period >= 1, got 0"),
        (["checkpoint_period=0"], "expected checkpoint_period >= 1, got 0"),
        (["eval_interval=-2"], "expected eval_interval >= 0, got -2"),
        (["sparse_matmul=true", "capacity_factor=1.25"], "the sparse matmul drops no token"),
        (["seed=123456789012345678901234567890"], r"expected 0 <= seed < 4294967296, got 1234567"),
        (["base_output_directory=gs://bucket/runs"], "base_output_directory: gs://bucket/runs: expected s3://"),
        (["run_name=."], "expected a folder's name inside base_output_directory"),
        (["profiler=xplane", "steps=1"], "leaves nothing to trace"),
        (["aux_loss_weight=-1"], "expected aux_loss_weight >= 0, got -1.0"),
        (["warmup_fraction=1.1"], "expected 0 <= warmup_fraction <= 1, got 1.1"),
        (["load_balance_loss_weight=-1"], "expected load_balance_loss_weight >= 0, got -1.0"),
        (["load_balance_loss_weight=0.1", "aux_loss_weight=0.2"], "contradict each other: both say what the balance"),
        (["load_balance_loss_weight=0.1", "aux_loss=batch"], "contradict each other: both say what the balance"),
        (["run_name=../elsewhere"], "expected a folder's name inside base_output_directory"),
        (["dataset_type=text"], "dataset_type=text: expected dataset_path with files or folders, got none"),
        (
            ["dataset_path=books"],
            "dataset_type=stdlib reads no dataset_path=books; leave it out, or use dataset_type=text",
        ),
        (["load_parameters_path=nowhere"], "expected a folder, found none at nowhere"),
        (["profiler=xplane", "profiler_steps=0"], "profiler_steps >= 1"),
        (
            ["mixtral-tiny", "routing=magic"],
            "routing: expected one of learned, random, hash, balanced, expert_choice, got 'magic'",
        ),
        (["routing=expert_choice"], "routing=expert_choice: expected a capacity_factor"),
        (
            ["routing=expert_choice", "capacity_factor=1", "aux_loss_weight=0.1"],
            "routing=expert_choice is balanced by construction; leave aux_loss_weight=0.1 out",
        ),
        (
            ["num_moe_emb_chunks=7"],
            r"^num_moe_emb_chunks=7 does not divide base_emb_dim=192, .* demo; use one of \[1, 2",
        ),
        (
            ["olmoe-tiny", "interleave_moe_layer_step=3"],
            "^interleave_moe_layer_step=3: olmoe-tiny has experts in every layer.*set it with base_mlp_dim",
        ),
        (["olmoe-tiny", "first_num_dense_layers=1"], "^first_num_dense_layers=1: olmoe-tiny has experts in every"),
        (
            ["learning_rate_schedule_steps=5", "warmup_steps=9"],
            "^warmup_steps=9 is more than learning_rate_schedule_steps=5: the learning rate would never",
        ),
        (["attention=fast"], "unknown implementation of attention, 'fast'"),
    ],
)
def test_a_bad_combination_is_refused_before_anything_is_made(words, message):
    with pytest.raises(ValueError, match=message):
        configured(*words)


RING = [
    "per_device_batch_size=1",
    "max_target_length=4096",
    "use_random_routing=true",
    "use_ring_of_experts=true",
    "use_ragged_sort=true",
    "debug_sharding=false",
    "profiler=xplane",
    "enable_tpu_profiling_options=true",
    "ici_expert_parallelism=1",
]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("reduce", [True, False])
def test_each_fallback_replaces_its_kernel_wherever_it_runs(gather, reduce):
    """Each kernel is the other one's backward pass."""
    words = [f"ragged_gather_fallback={gather}", f"ragged_gather_reduce_fallback={reduce}"]
    config = configured("model_name=deepseek-v2-tiny", *RING, *words)
    kernels = config.step.execution.moe.kernel_choice
    sparsecore = ("sparsecore", "xla")
    of_gather, of_reduce = "xla" if gather else sparsecore, "xla" if reduce else sparsecore
    same = of_gather == of_reduce
    assert kernels.ragged_gather == (of_gather if same else Directions(forward=of_gather, backward=of_reduce))
    assert kernels.ragged_gather_reduce == (of_reduce if same else Directions(forward=of_reduce, backward=of_gather))
    assert config.step.model.moe.router.selection == "random"
    assert config.run.traces
    notes = " ".join(config.notes)
    assert "use_ring_of_experts=true: changes nothing: no row leaves its device" in notes
    assert "enable_tpu_profiling_options=true: ignored" in notes


def test_without_use_ragged_sort_the_gathers_are_chosen_as_ever():
    assert configured("mixtral-tiny", "use_ragged_sort=false").step.execution.moe.kernel_choice.ragged_gather == "auto"


def test_a_direction_of_an_operation_has_a_kernel_of_its_own():
    words = ["ragged_gather=xla", "ragged_gather.backward=sparsecore,xla", "grouped_matmul.forward=cpu"]
    kernels = configured("mixtral-tiny", *words).step.execution.moe.kernel_choice
    assert kernels.ragged_gather == Directions(forward="xla", backward=("sparsecore", "xla"))
    assert kernels.grouped_matmul == Directions(forward="cpu", backward="auto")


def test_random_routing_leaves_out_what_ranks_experts():
    router = configured("deepseek-v3-tiny", "use_random_routing=true").step.model.moe.router
    assert (router.selection, router.selection_bias, router.num_groups) == ("random", False, 1)


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (["sparse_matmul=True"], "local"),
        (["sparse_matmul=False"], "dense"),
        (["sparse_matmul=False", "capacity_factor=1.5"], "capacity"),
        (["capacity_factor=-1"], "local"),
        (["moe_backend=jax"], "dense"),
        (["moe_backend=ragged_dot"], "local"),
    ],
)
def test_sparse_matmul_and_capacity_choose_the_strategy(words, strategy):
    assert strategy_of(configured("deepseek3-tiny", *words)) == strategy


def test_a_model_keeps_all_that_no_setting_changes():
    config = configured("olmoe-tiny").step.model
    expected = model_preset("olmoe-tiny")
    same = {field.name for field in dataclasses.fields(MoEConfig)} - {"param_dtype"}
    assert all(getattr(config.moe, name) == getattr(expected.moe, name) for name in same)
    assert config.attention == expected.attention


@pytest.mark.parametrize(
    ("word", "strategy"), [("sparse_matmul=False", "dense"), ("sparse_matmul=True", "local"), ("packing=true", "local")]
)
def test_without_megablox_the_sparse_matmul_is_xlas_and_the_dense_one_stays(word, strategy):
    config = configured("mixtral-tiny", "megablox=False", word)
    assert strategy_of(config) == strategy
    assert config.step.execution.moe.kernel_choice.grouped_matmul == ("auto" if strategy == "dense" else "xla")


@pytest.mark.parametrize(
    ("words", "kernels"),
    [
        (["megablox=true"], ("megablox", "cpu", "xla")),
        (["megablox=true", "use_tokamax_gmm=true"], ("tokamax", "cpu", "xla")),
        (["use_tokamax_gmm=true", "use_gmm_v2=true"], ("gmm_v2", "tokamax", "cpu", "xla")),
        (["use_tokamax_gmm=false"], "auto"),
        (["moe_use_gmm_v2=true"], "gmm_v2"),
    ],
)
def test_each_flag_of_the_matmul_takes_its_kernel_where_it_runs(words, kernels):
    """And a gather's fallback stands beside it: the matmul's kernel leaves the others free."""
    moe = configured("mixtral-tiny", *words, "ragged_gather_fallback=true").step.execution.moe
    assert moe.kernel_choice.grouped_matmul == kernels
    assert moe.kernel_choice.ragged_gather == Directions(forward="xla", backward="auto")


def test_flags_for_sparse_kernels_beside_a_dense_matmul_change_nothing_and_say_so():
    words = ["sparse_matmul=False", "megablox=True", "use_ragged_sort=true", "ragged_gather_fallback=true"]
    config = configured("mixtral-tiny", *words)
    assert config.step.execution.moe.kernels is None
    for word in words[1:]:
        assert any(note.startswith(f"{word}: changes nothing: ") for note in config.notes), word


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval_interval=-1"], {"eval_interval": 0}),
        (["eval_steps=-1"], {"eval_steps": None}),
        (["profiler="], {"profiler": "none"}),
        (["per_device_batch_size=1.0"], {"per_device_batch_size": 1}),
        (["capacity_factor=-1.00"], {"capacity_factor": None}),
        (["capacity_factor=0"], {"capacity_factor": None}),
        (["ragged_buffer_factor=0.0"], {"ragged_buffer_factor": None}),
        (["warmup_steps_fraction=0.1"], {"warmup_fraction": 0.1, "warmup_from": "zero"}),
        (["adam_weight_decay=0.2"], {"weight_decay": 0.2, "weight_decay_of": "all"}),
        (["learning_rate_schedule_steps=-1"], {"schedule_steps": None}),
        (["learning_rate_schedule_steps=7"], {"schedule_steps": 7}),
        (["wsd_decay_style=cosine"], {"decay_style": "cosine"}),
        (["load_full_state_path=runs/a@100"], {"init_from": "runs/a@100", "init_state": "all"}),
        (["load_full_state_path="], {"init_from": None, "init_state": "weights"}),
        (["load_balance_loss_weight=0.02"], {"load_balance_loss_weight": 0.02, "aux_loss_weight": None}),
    ],
)
def test_values_as_maxtext_has_them(words, expected):
    values = read_words(words).values()
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        ["olmoe-tiny", "bias_update_rate=0.5"],
        ["olmoe-tiny", "mtp_loss_weight=0.7"],
        ["dataset_suffixes=.txt"],
        ["dataset_type=synthetic", "packing=false"],
        ["decay_fraction=0.5"],
        ["decay_style=cosine"],
        ["weight_decay=0", "weight_decay_of=all"],
        ["schedule=constant", "final_fraction=0.5"],
        ["profiler_steps=4"],
        ["enable_checkpointing=false", "checkpoint_period=7"],
        ["held_out=0", "eval_steps=3"],
    ],
)
def test_a_setting_that_this_run_does_not_read_says_so(words):
    assert any(note.startswith(f"{words[-1]}: changes nothing: ") for note in configured(*words).notes)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["use_random_routing=true"], "use_random_routing=true: a token's experts are drawn without replacement"),
        (["packing=false", "capacity_factor=2"], "capacity_factor=2: padding takes no slot here"),
        (["packing=false", "load_balance_loss_weight=0.1"], "load_balance_loss_weight=0.1: padding does not count"),
        (["load_balance_loss_weight=0.1"], "load_balance_loss_weight=0.1: the selection bias has no gradient"),
        (["load_balance_loss_weight=0.1"], "load_balance_loss_weight=0.1: in the layers of multi-token prediction"),
        (
            ["gradient_accumulation_steps=2", "load_balance_loss_weight=0.1"],
            "load_balance_loss_weight=0.1: its gradient is that of one large batch",
        ),
        (["routed_bias_update_rate=0.1"], "routed_bias_update_rate=0.1: the bias of multi-token prediction's layers"),
        (
            ["gradient_accumulation_steps=2", "routed_bias_update_rate=0.1"],
            "routed_bias_update_rate=0.1: the bias moves once a step",
        ),
        (
            ["gradient_accumulation_steps=2", "mtp_loss_scaling_factor=0.1"],
            "mtp_loss_scaling_factor=0.1: its gradient is that of one large batch",
        ),
        (["adam_weight_decay=0.1"], "adam_weight_decay=0.1: the selection bias does not decay here"),
    ],
)
def test_a_word_whose_number_is_not_maxtexts_says_so(words, note):
    assert any(found.startswith(note) for found in configured("deepseek-v3-tiny", *words).notes)
    unconcerned = configured("mixtral-tiny", "dataset_type=synthetic", *words[-1:]).notes
    assert words[-1].startswith("use_random") or not any(found.startswith(note) for found in unconcerned)


def test_slots_of_a_capacity_factor_can_be_on_several_devices():
    words = ["deepseek-v3-tiny", "expert_parallelism=2", "capacity_factor=1.5", "ragged_buffer_factor=2"]
    config = resolve(read_words([*words, "expert_strategy=ring", "dispatch_dtype=int8"]), CPU, 2)
    assert (strategy_of(config), config.step.model.moe.capacity_factor) == ("capacity", 1.5)
    assert config.step.execution.moe.ragged_buffer_factor is None
    for word in ("ragged_buffer_factor=2", "expert_strategy=ring", "dispatch_dtype=int8"):
        assert any(note.startswith(f"{word}: changes nothing") for note in config.notes)


def test_a_longer_schedule_makes_no_longer_run():
    config = configured("olmoe-tiny", "steps=3", "learning_rate_schedule_steps=100", "warmup_steps_fraction=0.5")
    assert (config.run.num_steps, config.step.optimizer.num_steps, config.step.optimizer.num_warmup_steps) == (
        3,
        100,
        50,
    )


@pytest.mark.parametrize(("steps", "period"), [(20, 1), (21, 10)])
def test_a_short_run_prints_every_step(steps, period):
    assert configured(f"steps={steps}").run.steps_between_lines == period
    assert configured(f"steps={steps}", "line_period=7").run.steps_between_lines == 7


def test_devices_that_stay_idle_are_mentioned():
    assert "1 of 4 devices used" in " ".join(resolve(read_words(["demo"]), CPU, 4).notes)
    assert "devices used" not in " ".join(resolve(read_words(["fsdp_parallelism=-1"]), CPU, 4).notes)


def test_degrees_make_the_plan_and_every_device_brings_its_sequences():
    words = ["deepseek-v3-tiny", "ici_fsdp_parallelism=-1", "tensor_parallelism=2", "per_device_batch_size=3"]
    config = resolve(read_words([*words, "gradient_accumulation_steps=2"]), CPU, 8)
    assert config.plan == Plan(fsdp=4, tensor=2)
    assert (config.micro_batch_size, config.batch_size) == (24, 48)
    assert strategy_of(config) == "local"


@pytest.mark.parametrize(
    ("words", "strategy"),
    [([], "all_to_all"), (["use_ring_of_experts=true"], "ring"), (["expert_strategy=all_to_all"], "all_to_all")],
)
def test_experts_on_several_devices_have_a_strategy_and_a_buffer(words, strategy):
    words = ["deepseek-v3-tiny", "expert_parallelism=4", "ragged_buffer_factor=1.5", "token_chunks=2", *words]
    config = resolve(read_words(words), CPU, 4)
    moe = config.step.execution.moe
    assert (strategy_of(config), moe.ragged_buffer_factor, moe.token_chunks) == (strategy, 1.5, 2)
    assert not any("ragged_buffer_factor" in note for note in config.notes)
    sent = resolve(read_words([*words, "dispatch_dtype=int8"]), CPU, 4)
    assert sent.step.execution.moe == dataclasses.replace(moe, dispatch_dtype="int8")
    worst = resolve(read_words([*words[:2], "ragged_buffer_factor=-1"]), CPU, 4).step.execution.moe
    assert worst.ragged_buffer_factor is None


def test_without_a_sparse_matmul_every_expert_computes_every_token_on_a_mesh_too():
    words = ["deepseek-v3-tiny", "ici_expert_parallelism=4", "sparse_matmul=False", "use_ring_of_experts=true"]
    config = resolve(read_words(words), CPU, 4)
    assert strategy_of(config) == "dense"
    assert any("use_ring_of_experts=true: changes nothing" in note for note in config.notes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["expert_parallelism=5"],
            r"^expert_parallelism=5 does not divide num_experts=16 of deepseek-v3-tiny; .* \[1, 2, 4, 8, 16\]",
        ),
        (["fsdp_parallelism=3"], r"^fsdp_parallelism=3 does not divide base_emb_dim=64"),
        (["tensor_parallelism=3"], r"^tensor_parallelism=3 does not divide base_moe_mlp_dim=32"),
        (["ici_fsdp_parallelism=3"], r"^ici_fsdp_parallelism=3 does not divide base_emb_dim=64"),
        (
            ["ici_fsdp_parallelism=3", "tensor_parallelism=2", "tensor_split=model_dim"],
            "^tensor_parallelism=2 × ici_fsdp_parallelism=3 does not divide base_emb_dim=64",
        ),
        (
            ["recompute_dispatch=true", "expert_parallelism=2"],
            "^recompute_dispatch=true: the rows that come from other devices .* use expert_parallelism=1",
        ),
        (
            ["dispatch_dtype=int8", "expert_parallelism=2", "tensor_parallelism=2", "tensor_split=model_dim"],
            "^dispatch_dtype=int8 cannot be used with tensor_split=model_dim and tensor_parallelism=2: each rank's",
        ),
        (["fsdp_parallelism=-1", "expert_parallelism=-1"], "expected one degree of -1 at most"),
        (["fsdp_parallelism=4", "data_parallelism=4"], "= 16 devices, but there are 8"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_with_what_would(words, message):
    with pytest.raises(ValueError, match=message):
        resolve(read_words(["deepseek-v3-tiny", *words]), CPU, 8)


def test_a_trained_model_is_one_for_one_device():
    words = ["deepseek-v3-tiny", "expert_parallelism=4", "ragged_buffer_factor=1.5"]
    assert resolve(read_words(words), CPU, 4).step.model == configured(*words[:1]).step.model


def test_auto_computes_in_float32_on_a_cpu_and_in_bfloat16_on_a_tpu():
    assert configured().step.model.dtype == jnp.float32
    tpu = configured(hardware=HARDWARE["tpu7x"]).step.model
    assert (tpu.dtype, tpu.param_dtype) == (jnp.bfloat16, jnp.float32)


def test_a_batch_is_all_micro_batches_together():
    config = configured("per_device_batch_size=3", "gradient_accumulation_steps=4")
    assert (config.batch_size, config.step.micro_batches) == (12, 4)


def test_longer_sequences_make_a_model_for_longer_ones():
    assert configured("deepseek-v2-tiny", "max_target_length=4096").step.model.max_length == 4096


def test_fewer_layers_keep_the_dense_ones_among_them():
    model = configured("deepseek3-tiny", "base_num_decoder_layers=4").step.model
    assert (model.num_layers, model.dense_layers) == (4, (0, 1, 2))


@pytest.mark.parametrize(
    "name", [name for name in SETTINGS if name in TRANSLATED and SETTINGS[name].usual not in (None, ())]
)
def test_no_setting_of_ours_is_shadowed_by_a_different_one_of_theirs(name):
    key = SETTINGS[name]
    assert TRANSLATED[name](str(key.usual)).settings == {name: str(key.usual)}


def test_what_every_maxtext_name_stands_for_is_a_setting_of_ours():
    for name, entry in TRANSLATED.items():
        default = defaults().get(name, "true")
        for text in (default, "1", "true", "text", "mixtral"):
            try:
                assert set(entry(text).settings) <= set(SETTINGS), name
            except ValueError:
                continue
            break
        else:
            pytest.fail(f"{name} does not take {default}")
    for group in GROUPS:
        assert set(group.translate({name: defaults()[name] for name in group.names}).settings) <= set(SETTINGS)


@pytest.mark.parametrize("name", ["wi_tile_fwd_batch_seq", "wo_tile_drhs_mlp_dim", "goodput_upload_interval_seconds"])
def test_a_setting_that_changes_nothing_says_so(name):
    settings = read_words([f"{name}=2"])
    assert len(settings.source.notes) == 1
    assert settings.source.notes[0].startswith(f"{name}=2: ignored: ")


# Keys of other tables that have the name of a setting: what run.json says of the model, a step's figures, programs.
READERS = {"get", "pop", "is_given", "is_typed", "shown"}
OTHER_TABLES = {"model", "run.model", "fetched", "lowered", "compiled", "plain", "measured", "tokenizer_config"}


def test_no_setting_is_read_by_a_string_outside_settings():
    """They are attributes of `TrainConfig`'s sections everywhere else."""
    sources = Path(raggedmoe.__file__).parent
    read = []
    for folder in ("train", "cli", "launch", "aot", "bench", "verify"):
        for path in (sources / folder).rglob("*.py"):
            if "settings" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                table, key = None, None
                if isinstance(node, ast.Subscript):
                    table, key = node.value, node.slice
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                    table, key = (node.func.value, node.args[0]) if node.func.attr in READERS else (None, None)
                if isinstance(key, ast.Constant) and key.value in SETTINGS and ast.unparse(table) not in OTHER_TABLES:
                    read.append(f"{path.relative_to(sources)}: {ast.unparse(node)}")
    assert read == []


def test_the_docs_list_what_a_resumed_run_may_change():
    """`python -m tests.train.settings.resume_table --write docs/train.md` makes the table."""
    page = (Path(__file__).parents[3] / "docs" / "train.md").read_text()
    assert page == with_table(page), "run python -m tests.train.settings.resume_table --write docs/train.md"


def test_only_what_matters_to_the_steps_done_counts_as_changed():
    old = read_words(["steps=10", "learning_rate=1e-3", "line_period=3"]).values()
    new = read_words(["steps=20", "learning_rate=2e-3", "line_period=4"]).values()
    assert list_changes(old, new) == ["learning_rate=0.001 is now 0.002"]
