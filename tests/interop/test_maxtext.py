"""Every MoE setting of MaxText: what it is here, pinned; files in its form; and models of any size."""

from pathlib import Path

import pytest
import yaml

from raggedmoe.hardware import HARDWARE
from raggedmoe.interop.maxtext import GROUP_OF, TRANSLATED, defaults, known_maxtext_names, without_counterpart
from raggedmoe.kernels.quant_config import E4M3, E5M2, INT8, QuantConfig
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import strategy_name
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import assignments, read_words
from tests.interop.maxtext_table import page, status_of

# MaxText's MoE and quantisation settings with their defaults, August 2026, and what each is here.
TRANSLATED_KEYS = """
num_experts=1 num_experts_per_tok=1 capacity_factor=-1.0 ragged_buffer_factor=-1.0 num_moe_token_chunks=1
base_moe_mlp_dim=-1 load_balance_loss_weight=0.0 use_ring_of_experts=False use_ragged_sort=False
ragged_gather_fallback=False ragged_gather_reduce_fallback=False use_random_routing=False interleave_moe_layer_step=1
norm_topk_prob=False megablox=True sparse_matmul=True num_moe_emb_chunks=0 use_tokamax_gmm=False use_gmm_v2=False
first_num_dense_layers=0 shared_experts=0 routed_scaling_factor=1.0 routed_score_func= routed_bias=False
routed_bias_update_rate=0.0 mlp_bias=False n_routing_groups=-1 topk_routing_group=-1 quantization=
use_qwix_quantization=False weight_quantization_calibration_method=absmax
act_quantization_calibration_method=absmax bwd_quantization_calibration_method=absmax
"""
NO_EFFECT_KEYS = """
moe_chunk_barrier=False padded_base_moe_mlp_dim=None use_custom_sort_vjp=True moe_dispatch_no_expert_sharding=False
ragged_sort_use_single_sparsecore=False ragged_gather_cost_estimate_flops=-1
ragged_gather_reduce_cost_estimate_flops=-1 ragged_gather_cost_estimate_bytes_accessed=-1
ragged_gather_reduce_cost_estimate_bytes_accessed=-1 moe_fsdp_use_two_stage_all_gather=False shard_exp_on_fsdp=False
float32_weight_sum=True float32_gate_logits=False prefuse_moe_weights=False fuse_expert_scales=False
merge_gating_gmm=False log_moe_bias_norms=False
wi_tile_fwd_batch_seq=512 wi_tile_fwd_embed_dim=1024 wi_tile_fwd_mlp_dim=1024 wi_tile_dlhs_batch_seq=512
wi_tile_dlhs_embed_dim=1024 wi_tile_dlhs_mlp_dim=1024 wi_tile_drhs_batch_seq=512 wi_tile_drhs_embed_dim=1024
wi_tile_drhs_mlp_dim=1024 wo_tile_fwd_batch_seq=512 wo_tile_fwd_embed_dim=1024 wo_tile_fwd_mlp_dim=1024
wo_tile_dlhs_batch_seq=512 wo_tile_dlhs_embed_dim=1024 wo_tile_dlhs_mlp_dim=1024 wo_tile_drhs_batch_seq=512
wo_tile_drhs_embed_dim=1024 wo_tile_drhs_mlp_dim=1024
"""
REFUSED_KEYS = """
replicate_quant_scale=False quant_cfg_path= quantize_kvcache=False kv_quant_axis=heads_and_dkv
kv_quant_dtype=int8 quantization_local_shard_count=-1 use_manual_quantization=False
weight_sparsity_n=None weight_sparsity_m=None weight_sparsity_update_step=10
weight_sparsity_start_step=50 te_comm_gemm_overlap=disabled moe_expert_input_dim=-1 use_gather_mosaic_kernel=False
use_2d_fsdp_sharding=False first_num_hash_layers=0 use_batch_split_schedule=False batch_split_factor=1
"""
PINNED = {
    word.split("=")[0]: (status, word)
    for status, words in (("translated", TRANSLATED_KEYS), ("no effect", NO_EFFECT_KEYS), ("refused", REFUSED_KEYS))
    for word in words.split()
}
CPU = HARDWARE["cpu"]


@pytest.mark.parametrize("name", PINNED)
def test_what_a_key_of_maxtexts_is_here_is_pinned(name):
    assert status_of(name) == PINNED[name][0]


def test_the_pinned_keys_are_counted():
    statuses = [status for status, _ in PINNED.values()]
    assert {status: statuses.count(status) for status in statuses} == {"translated": 33, "no effect": 35, "refused": 18}


def test_the_docs_have_the_tables_as_they_are():
    """`python -m tests.interop.maxtext_table --write docs/maxtext.md` makes the page."""
    written = Path(__file__).parents[2] / "docs" / "maxtext.md"
    assert written.read_text() == page(list(PINNED))


def test_every_name_has_one_meaning():
    ours = set(TRANSLATED) | set(GROUP_OF)
    assert not ours & set(without_counterpart())
    assert not (set(without_counterpart()) & set(SETTINGS))
    assert set(defaults()) <= set(known_maxtext_names())


def test_every_key_at_its_default_is_taken_without_a_word():
    """But for the sizes of no model, and the data, of which MaxText's default is another than ours."""
    skipped = {"num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "routed_score_func"}
    words = [word for name, (_, word) in PINNED.items() if name not in skipped]
    settings = read_words(["mixtral-tiny", *words, "megablox=True"])
    assert settings.source.notes == ()
    step = resolve(settings, CPU).step
    assert (step.model.moe.num_experts, step.model.moe.capacity_factor) == (8, None)
    assert (strategy_name(step.model.moe, step.execution.moe), step.execution.moe.width_chunks) == ("local", 1)


@pytest.mark.parametrize("name", [name for name, (status, _) in PINNED.items() if status != "translated"])
def test_another_value_has_a_reason(name):
    words = [f"{name}=77"]
    if PINNED[name][0] == "refused":
        with pytest.raises(ValueError, match=f"{name}=77: .+"):
            read_words(words)
    else:
        (note,) = read_words(words).source.notes
        assert note.startswith(f"{name}=77: ignored: ")


def test_names_of_older_lines_are_known():
    assert "ignored: FSDP splits" in read_words(["fsdp_shard_on_exp=true"]).source.notes[0]
    assert read_words(["cosine_learning_rate_final_fraction=0.3"]).optimizer.final_fraction == 0.3


# Files


def test_base_yml_is_maxtexts_defaults_with_the_command_line_above_them():
    words = ["src/maxtext/configs/base.yml", "model_name=deepseek3-tiny", "dataset_type=synthetic", "steps=3"]
    settings = read_words([*words, "attention=dot_product", "ici_expert_parallelism=8"])
    config = resolve(settings, CPU, 8)
    assert (config.step.optimizer.learning_rate, config.step.optimizer.num_steps) == (3e-5, 3)
    assert (config.step.execution.remat, config.step.model.dtype) == ("full", "bfloat16")
    assert config.step.model.moe.num_experts == 16  # the model's own, not base.yml's 1
    assert config.step.execution.moe.kernels is None
    assert config.plan.expert == 8
    note = config.notes[0]
    assert "settings, of which 0 differ from MaxText's defaults" in note


def test_our_own_balance_loss_stands_beside_a_files_default_of_theirs():
    words = ["base.yml", "model_name=olmoe-tiny", "dataset_type=synthetic", "steps=3", "aux_loss_weight=0.02"]
    router = resolve(read_words(words), CPU).step.model.moe.router
    assert (router.aux_loss, router.aux_loss_weight) == ("batch", 0.02)
    without = resolve(read_words(words[:-1]), CPU).step.model.moe.router
    assert without.aux_loss_weight == 0  # as base.yml has it, not the model's own


def test_a_file_is_read_with_what_it_is_based_on(tmp_path):
    (tmp_path / "base.yml").write_text(
        yaml.dump(
            {
                "model_name": "default",
                "decoder_block": "llama2",
                "learning_rate": 3e-5,
                "num_experts": 1,
                "mlp_activations": ["silu", "linear"],
                "mesh_axes": ["data", "fsdp"],
                "remat_policy": "full",
                "out_proj": "remat",
                "dataset_type": "tfds",
                "load_parameters_path": "",
                "use_multimodal": False,
                "weight_sparsity_n": None,
                "megablox": True,
            }
        )
    )
    own = tmp_path / "mine.yml"
    own.write_text(
        "base_config: base.yml\ndecoder_block: mixtral\nnum_experts: 4\nbase_emb_dim: 32\nremat_policy: custom\n"
        "out_proj: device\ndataset_type: synthetic\nlearning_rate: 1.e-4\n"
    )
    settings = read_words([str(own), "query_proj=device", "learning_rate=2e-4", "base_num_decoder_layers=2"])
    config = resolve(settings, CPU)
    model = config.step.model
    assert (model.family, model.moe.num_experts, model.model_dim, model.num_layers) == ("mixtral", 4, 32, 2)
    assert set(config.step.execution.remat) == {"query", "attn_proj_out"}
    assert config.step.optimizer.learning_rate == 2e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just a word", "expected lines of `name: value`, got str"),
        ("a: [1", "expected YAML, as MaxText's base.yml is"),
        ("model_name: demo\nuse_multimodal: true", "use_multimodal=True: images and sound are not built"),
        ("model_name: demo\nnum_expert: 3", "unknown setting 'num_expert' \\(mine.yml\\): did you mean num_experts"),
        ("model_name: demo\ndataset_type: tfds", "dataset_type=tfds: that pipeline is not built"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path, text, message):
    (tmp_path / "mine.yml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_words([str(tmp_path / "mine.yml")])


# Ways to write a word


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--steps=5", "--learning_rate", "1e-3"], ["steps=5", "learning_rate=1e-3"]),
        (["--moe_use_kernel_agent_ffn", "demo"], ["moe_use_kernel_agent_ffn=true", "demo"]),
        (["--moe_use_gmm_v2", "--moe_backend=cpu"], ["moe_use_gmm_v2=true", "moe_backend=cpu"]),
        (["--packing", "false"], ["packing=false"]),
        (["--devices", "8", "--steps", "2"], ["--devices", "8", "steps=2"]),
        (["--per-device-batch-size", "2"], ["per_device_batch_size=2"]),
    ],
)
def test_words_with_dashes_are_settings(typed, meant):
    assert assignments(typed, options=("devices",)) == meant


def test_jax_gpts_words_are_known():
    assert read_words(["--moe_use_kernel_agent_ffn"]).execution.moe_backend == "expert_ffn"
    assert read_words(["--moe_backend=ragged_dot"]).execution.moe_backend == "ragged_dot"
    assert read_words(["--moe_fp8_weights"]).execution.quantization == "fp8_weights"


QUANTIZED = {
    "fp8_full": QuantConfig(weights=E4M3, rows=E4M3, cotangents=E5M2),
    "fp8_full act_quantization_calibration_method=fixed,-224,224 weight_quantization_calibration_method=fixed,-56,56": (
        QuantConfig(weights=E4M3, rows=E4M3, cotangents=E5M2, row_scale=0.5, weight_scale=0.125)
    ),
    "int8 use_qwix_quantization=true bwd_quantization_calibration_method=fixed,-254,254": QuantConfig(
        weights=INT8, rows=INT8, cotangents=INT8, cotangent_scale=2.0
    ),
    " use_qwix_quantization=false": None,
}


@pytest.mark.parametrize("words", QUANTIZED)
def test_formats_and_calibrations_are_translated(words):
    read = read_words(f"quantization={words}".split())
    assert read.execution.quant_config == QUANTIZED[words]
    assert any("of the experts' matmuls alone" in note for note in read.source.notes) == (QUANTIZED[words] is not None)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("te_fp8_delayedscaling", "quantization=fp8 quantization_history=1024"),
        ("te_fp8_currentscaling", "quantization=fp8"),
        ("te_mxfp8", "quantization=fp8 quantization_block=32"),
        ("te_nvfp4", "quantization=fp8"),
        ("te_nvfp4_no_rht", "quantization=fp8"),
        ("nanoo_fp8", "quantization=fp8"),
        ("fp8_nanoo", "quantization=fp8"),
        ("fp8_gpu", "quantization=fp8"),
        ("aqt_fp8_full", "quantization=fp8"),
        ("intmp", "quantization=int8"),
        ("int4", "quantization=int8"),
        ("W4A8", "quantization=int8_weights"),
    ],
)
def test_formats_that_are_refused_name_the_nearest_which_is_taken(word, nearest):
    with pytest.raises(ValueError, match=f"quantization={word.lower()}: ") as raised:
        read_words([f"quantization={word}"])
    assert str(raised.value).endswith(nearest)
    assert read_words(nearest.split()).execution.quant_config is not None


def test_a_calibration_that_nothing_reads_is_said():
    (note,) = read_words(["act_quantization_calibration_method=fixed,-1,1"]).source.notes
    assert "ignored: act_quantization_calibration_method is read with quantization alone" in note


def test_a_value_that_stands_for_any_default_is_a_value():
    assert read_words(["dataset_type=text", "dataset_path=*"]).data.dataset_path == ("*",)


# Sizes


def test_a_model_of_any_size_has_the_parameters_that_its_sizes_say():
    """Counted by hand, for a decoder of OLMoE's form."""
    width, heads, head, experts, hidden, layers, vocab = 24, 3, 8, 5, 7, 3, 11
    words = [
        *("olmoe", f"base_emb_dim={width}", f"base_num_query_heads={heads}", f"base_num_kv_heads={heads}"),
        *(f"head_dim={head}", f"num_experts={experts}", "num_experts_per_tok=2", f"base_moe_mlp_dim={hidden}"),
        *(f"base_num_decoder_layers={layers}", f"vocab_size={vocab}", "max_target_length=8"),
    ]
    model = resolve(read_words(words), CPU).step.model
    attention = 4 * width * heads * head + 2 * heads * head  # four projections and the two norms of queries and keys
    layer = attention + experts * 3 * width * hidden + experts * width + 2 * width
    total = layers * layer + 2 * vocab * width + width
    assert sum(spec.num_elements for spec in param_specs(model).values()) == total


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["deepseek-v3-tiny", "routed_scaling_factor=1.5"], lambda m: m.moe.router.scale == 1.5),
        (["deepseek-v3-tiny", "n_routing_groups=-1"], lambda m: m.moe.router.num_groups == 1),
        (["deepseek-v3-tiny", "routed_bias=false"], lambda m: not m.moe.router.selection_bias),
        (["gpt-oss-tiny", "routed_bias=false"], lambda m: not m.moe.router.logit_bias),
        (["olmoe-tiny", "norm_topk_prob=true"], lambda m: m.moe.router.normalize == "sum"),
        (["olmoe-tiny", "norm_topk_prob=false"], lambda m: m.moe.router.normalize == "none"),
        (["olmoe-tiny", "routed_score_func=sigmoid"], lambda m: m.moe.router.score == "sigmoid"),
        (["olmoe-tiny", "mlp_bias=true"], lambda m: m.moe.experts.biases),
        (["olmoe-tiny", "shared_experts=2"], lambda m: m.moe.experts.num_shared == 2),
        (["olmoe-tiny", "first_num_dense_layers=1", "base_mlp_dim=9"], lambda m: m.dense_layers == (0,)),
        (
            ["mixtral-tiny", "base_num_decoder_layers=6", "interleave_moe_layer_step=3", "base_mlp_dim=9"],
            lambda m: m.dense_layers == (0, 1, 3, 4),
        ),
        (["deepseek-v3-tiny", "q_lora_rank=0"], lambda m: m.attention.q_lora_rank is None),
        (["deepseek-v3-tiny", "v_head_dim=10"], lambda m: m.attention.value_dim == 10),
        (["mixtral-tiny", "rope_max_timescale=5e5"], lambda m: m.attention.rope.theta == 5e5),
        (["mixtral-tiny", "logits_via_embedding=true"], lambda m: m.tied_embeddings),
        (["gpt-oss-tiny", "sliding_window_size=3"], lambda m: set(m.windows) == {3, None}),
        (["mixtral-tiny", "num_layers=9"], lambda m: m.num_layers == 9),
    ],
)
def test_a_size_changes_what_it_names(words, seen):
    assert seen(resolve(read_words(words), CPU).step.model)


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["remat_policy=full"], "full"),
        (["remat_policy=none"], "none"),
        (["remat_policy=save_out_proj"], ("attn_proj_out",)),
        (["remat_policy=save_qkv_proj"], ("query", "key", "value")),
        (["remat_policy=save_dot_except_mlp"], ("query", "key", "value", "attn_proj_out")),
        (["remat_policy=custom", "moe_mlpwi_0=device", "context=device"], ("moe_up", "attn_out")),
        (["remat_policy=custom", "moe_mlpwo=device", "mla_kv=remat"], ("moe_down",)),
        (["remat_policy=custom"], "full"),
    ],
)
def test_a_policy_keeps_what_it_keeps_there(words, kept):
    assert resolve(read_words(["mixtral-tiny", *words]), CPU).step.execution.remat == kept
