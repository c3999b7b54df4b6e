"""A table of MaxText's settings and their defaults (its base.yml and types.py of August 2026), by topic.

A setting at its default never fails here. A setting without a counterpart is refused at another value, with the reason
of its topic; `raggedmoe.interop.maxtext` translates the others.
"""

# Settings that `raggedmoe.interop.maxtext` translates, and their defaults in MaxText.
COUNTERPARTS = """
run_name= model_name=default base_output_directory= load_parameters_path= load_full_state_path= decoder_block=llama2
steps=150001
learning_rate=3e-5 lr_schedule_type=cosine learning_rate_final_fraction=0.1 cosine_learning_rate_final_fraction=0.1
wsd_decay_steps_fraction=0.1 warmup_steps_fraction=0.1 learning_rate_schedule_steps=-1 wsd_decay_style=linear
adam_eps_root=0 opt_type=adamw muon_beta=0.95 muon_weight_decay=0 muon_consistent_rms=none
adam_b1=0.9 adam_b2=0.95 adam_eps=1e-8 adam_weight_decay=0.1 mu_dtype=
grad_dtype=float32 gradient_clipping_threshold=1.0 gradient_accumulation_steps=1 data_shuffle_seed=0
init_weights_seed=0 per_device_batch_size=12.0 max_target_length=2048 packing=true dataset_type=tfds dataset_path=
train_split=train train_data_columns=text hf_path= hf_data_dir= hf_train_files= hf_eval_files=
tokenizer_path= eval_interval=-1 eval_steps=-1 dtype=bfloat16 weight_dtype=float32 scan_layers=true
attention=autoselected use_tokamax_splash=false enable_checkpointing=true async_checkpointing=true
checkpoint_period=10000 max_num_checkpoints_to_keep=none profiler= profiler_steps=5 skip_first_n_steps_for_profiler=1
enable_tensorboard=true vocab_size=32000 base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 head_dim=128
base_mlp_dim=7168 base_num_decoder_layers=16 global_parameter_scale=1 mlp_activations=silu,linear mlp_bias=false
normalization_layer_epsilon=1e-5 logits_via_embedding=false attention_bias=false attention_sink=false
sliding_window_size=0 q_lora_rank=0 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128
rope_max_timescale=10000 mtp_num_layers=0 mtp_loss_scaling_factor=0.1 num_experts=1 num_experts_per_tok=1
base_moe_mlp_dim=-1 shared_experts=0 first_num_dense_layers=0 interleave_moe_layer_step=1 norm_topk_prob=false
routed_scaling_factor=1.0 routed_score_func= routed_bias=false routed_bias_update_rate=0.0 n_routing_groups=-1
topk_routing_group=-1 load_balance_loss_weight=0.0 use_random_routing=false capacity_factor=-1.0
ragged_buffer_factor=-1.0 num_moe_token_chunks=1 num_moe_emb_chunks=0 megablox=true sparse_matmul=true
use_tokamax_gmm=false use_gmm_v2=false use_ring_of_experts=false use_ragged_sort=false ragged_gather_fallback=false
ragged_gather_reduce_fallback=false remat_policy=full decoder_layer_input=device context=remat mlpwi=remat
mlpwi_0=remat mlpwi_1=remat mlpwo=remat moe_mlpwi_0=remat moe_mlpwi_1=remat moe_mlpwo=remat query_proj=remat
key_proj=remat value_proj=remat kv_proj=remat qkv_proj=remat out_proj=remat query_wa_proj=remat kv_wa_proj=remat
mla_q=remat mla_kv=remat attention_out=remat ici_data_parallelism=1 ici_fsdp_parallelism=-1 ici_tensor_parallelism=1
ici_expert_parallelism=1 dcn_data_parallelism=-1 quantization= use_qwix_quantization=false moe_fp8_weights=false
weight_quantization_calibration_method=absmax act_quantization_calibration_method=absmax
bwd_quantization_calibration_method=absmax
"""

# Settings that change no number, and why each has no effect here; the reason is shown to those who set another value.
NO_EFFECT: dict[str, str] = {
    "the gradient of a gather is always a gather, never a scatter": "use_custom_sort_vjp=true",
    "chunks are in XLA's order, which may overlap them": "moe_chunk_barrier=false",
    "kernels pad inside, and weights are stored as they are": "padded_base_moe_mlp_dim=none",
    "both up projections read the rows once where moe_backend=expert_ffn fuses them": (
        "merge_gating_gmm=false prefuse_moe_weights=false"
    ),
    "experts' scales are part of the router's weights": "fuse_expert_scales=false",
    "all SparseCores of a chip work": "ragged_sort_use_single_sparsecore=false",
    "the kernels' estimates are what they compute and move": (
        "ragged_gather_cost_estimate_flops=-1 ragged_gather_reduce_cost_estimate_flops=-1 "
        "ragged_gather_cost_estimate_bytes_accessed=-1 ragged_gather_reduce_cost_estimate_bytes_accessed=-1 "
        "cost_estimate_flops_fwd=-1 cost_estimate_flops_bwd=-1"
    ),
    "FSDP splits the experts' model width, which is as many bytes": "shard_exp_on_fsdp=false fsdp_shard_on_exp=false",
    "there is one FSDP axis, gathered in one go": (
        "moe_fsdp_use_two_stage_all_gather=false dense_fsdp_use_two_stage_all_gather=false"
    ),
    "experts on several devices are always computed where they are": "moe_dispatch_no_expert_sharding=false",
    "load.jsonl has every expert's load, from which a bias moves": "log_moe_bias_norms=false",
    "tile sizes come from a table for each chip, made by a tuner": " ".join(
        [f"{name}_tile_{pass_}_batch_seq=512" for name in ("wi", "wo") for pass_ in ("fwd", "dlhs", "drhs")]
        + [
            f"{name}_tile_{pass_}_{dim}=1024"
            for name in ("wi", "wo")
            for pass_ in ("fwd", "dlhs", "drhs")
            for dim in ("embed_dim", "mlp_dim")
        ]
        + ["tile_batch_seq=512 tile_embed_dim=1024 tile_mlp_dim=1024"]
    ),
    "attention's kernel decides on its blocks and layouts": (
        "sa_block_q=512 sa_block_kv=512 sa_block_kv_compute=512 sa_block_q_dkv=512 sa_block_kv_dkv=512 "
        "sa_block_kv_dkv_compute=512 sa_block_q_dq=512 sa_block_kv_dq=512 sa_use_fused_bwd_kernel=false "
        "sa_bwd_dkv_megacore=false sa_q_layout=HEAD_DIM_MINOR sa_k_layout=HEAD_DIM_MINOR sa_v_layout=HEAD_DIM_MINOR "
        "use_splash_scheduler=false ring_scan_unroll=1 sa_fuse_reciprocal=true sa_use_base2_exp=true "
        "local_sa_block_q=none local_sa_block_kv=none local_sa_block_kv_compute=none local_sa_block_q_dkv=none "
        "local_sa_block_kv_dkv=none local_sa_block_kv_dkv_compute=none local_sa_block_q_dq=none "
        "local_sa_block_kv_dq=none local_sa_use_fused_bwd_kernel=none local_sa_q_layout=none local_sa_k_layout=none "
        "local_sa_v_layout=none local_use_splash_scheduler=none local_sa_fuse_reciprocal=none "
        "local_sa_use_base2_exp=none use_max_logit_estimate=-1 dq_reduction_steps=0 use_jax_splash=false "
        "force_q_layout=false mla_qk_head_chunk_size=0 use_sliced_mla_proj=false fused_qkv=false fused_mlp=false "
        "prefill_cache_axis_order=1,2,0,3 ar_cache_axis_order=1,2,0,3 compute_axis_order=0,1,2,3 reshape_q=false "
        "mla_naive_kvcache=true"
    ),
    "sums, the router's logits and the logits' softmax are always float32": (
        "float32_weight_sum=true float32_gate_logits=false float32_qk_product=false float32_logits=false "
        "logits_dot_in_fp32=false cast_logits_to_fp32=true activations_in_float32=false"
    ),
    "there is no dropout to enable": "enable_dropout=true",
    "the cross-entropy is always computed for a few tokens at a time": "num_vocab_tiling=1",
    "the mesh and what lies where on it are raggedmoe's own; `raggedmoe plan` shows them": (
        "custom_mesh= custom_mesh_and_rule= custom_mesh_and_rule_for_eval= mesh_axes=* logical_axis_rules=* "
        "logical_axis_rules_for_eval=[] data_sharding=* input_data_sharding_logical_axes=* context_sharding=context "
        "ulysses_context_sharding=context_usp_ulysses sharding_tolerance=0.02 num_slices=-1 shardy=true "
        "remove_size_one_mesh_axis_from_type=true optimize_mesh_for_tpu_v6e=false check_vma=false "
        "override_logical_axis_rules=false debug_sharding=false allow_split_physical_axes=false shard_mode=auto "
        "param_scan_axis=1 subslice_shape="
    ),
    "a setting of the model's shape always overrides the model's": "override_model_config=false",
    "settings and results are files in the run's folder: run.json, metrics.jsonl, a report, TensorBoard's": (
        "log_config=true metrics_file= gcs_metrics=false save_config_to_gcs=false enable_wandb=false "
        "wandb_project_name=maxtext wandb_run_name= enable_goodput_recording=false monitor_goodput=false "
        "goodput_upload_interval_seconds=30 enable_pathways_goodput=false monitor_step_time_deviation=true "
        "step_deviation_interval_seconds=30 enable_gcp_goodput_metrics=true enable_gcp_step_deviation_metrics=true "
        "report_heartbeat_metric_for_gcp_monitoring=false heartbeat_reporting_interval_in_seconds=5 "
        "report_performance_metric_for_gcp_monitoring=false use_vertex_tensorboard=false vertex_tensorboard_project= "
        "vertex_tensorboard_region= managed_mldiagnostics=false managed_mldiagnostics_on_demand_profiling=true "
        "managed_mldiagnostics_run_group= managed_mldiagnostics_region= record_internal_nn_metrics=0 "
        "enable_checkpoint_cloud_logger=false enable_checkpoint_standard_logger=false prometheus_port=0 "
        "write_estimator_result=false collect_stack_trace=false stack_trace_to_cloud=false "
        "stack_trace_interval_seconds=600"
    ),
    "the trace has what JAX records by default, from every process": (
        "upload_all_profiler_results=false enable_tpu_profiling_options=false hide_profiler_step_metric=false "
        "profile_cleanly=true profile_periodically_period=-1 tpu_num_chips_to_profile_per_task=1 "
        "tpu_num_sparse_core_tiles_to_trace=1 tpu_num_sparse_cores_to_trace=2 xprof_tpu_power_trace_level=0 "
        "xprof_e2e_enable_fw_throttle_event=false xprof_e2e_enable_fw_power_level_event=false "
        "xprof_e2e_enable_fw_thermal_event=false profile_power_events=false enable_jax_profiler=false "
        "jax_profiler_port=9999"
    ),
    "programs are compiled and dumped by `raggedmoe compile`": (
        "dump_hlo=false dump_step=-1 dump_hlo_local_dir=/tmp/xla_dump/ dump_hlo_delete_local_after=true "
        "dump_hlo_gcs_dir= dump_hlo_local_module_name=jit_train_step dump_hlo_module_name=jit_train_step "
        "dump_hlo_xla_flags= dump_hlo_upload_all=false dump_jaxpr=false dump_jaxpr_local_dir=/tmp/jaxpr_dump/ "
        "dump_jaxpr_delete_local_after=true dump_jaxpr_gcs_dir= internal_compile=false "
        "internal_compile_num_devices=-1 compile_xla_flags= compiled_trainstep_file= compile_topology= "
        "compile_topology_num_slices=-1"
    ),
    "JAX picks the platform (JAX_PLATFORMS) and its cache (JAX_COMPILATION_CACHE_DIR)": (
        "hardware=tpu jax_cache_dir=~/jax_cache"
    ),
    "processes join each other where raggedmoe launch starts them": (
        "skip_jax_distributed_system=false jax_distributed_initialization_timeout=300 jax_debug_log_modules= "
        "enable_single_controller=false"
    ),
    "a tokenizer.json says what it is": "tokenizer_type=sentencepiece",
    "checkpoints have one form, which any mesh reads": (
        "checkpoint_storage_target_data_file_size_bytes=2147483648 checkpoint_storage_use_ocdbt=true "
        "checkpoint_storage_use_zarr3=true checkpoint_storage_concurrent_gb=96 enable_orbax_v1=false "
        "enable_single_replica_ckpt_restoring=false save_checkpoint_on_start=true save_checkpoint_on_completion=true "
        "enable_autocheckpoint=false force_unroll=false checkpoint_todelete_subdir=none "
        "checkpoint_todelete_full_path=none"
    ),
    "every step's figures are written when it is done; line_period is how often a line is printed": "log_period=100",
    "a step is under way while the last one's report is read": "max_inflight_computations=2",
    "it is how the model is written there": "enable_nnx=true pure_nnx_decoder=true pure_nnx=true use_iota_embed=false",
    "a step whose loss is not finite is skipped, and max_skipped_steps of them end the run": (
        "abort_on_nan_loss=true abort_on_inf_loss=true"
    ),
}

# Features that do not exist here: refused with the reason, and with what comes nearest, unless the value is harmless.
REFUSED: dict[str, str] = {
    "scales are those of a row or channel, of a history, or constant; use quantization=fp8_full or int8": (
        "use_manual_quantization=false replicate_quant_scale=false quant_cfg_path= quantization_local_shard_count=-1 "
        "constant_bound_config="
    ),
    "quantised weights are read by `raggedmoe generate --keep-quantised`, and not trained; leave it out": (
        "checkpoint_is_quantized=false save_quantized_params_path="
    ),
    "attention is not quantised; leave it out": ("experimental_sa_quant_q_fp8=false experimental_sa_quant_k_fp8=false"),
    "a quantised cache is not built; leave it out": (
        "quantize_kvcache=false kv_quant_axis=heads_and_dkv kv_quant_dtype=int8"
    ),
    "sparse weights are not built; leave it out": (
        "weight_sparsity_n=none weight_sparsity_m=none weight_sparsity_update_step=10 weight_sparsity_start_step=50"
    ),
    "Transformer Engine's kernels are not used; leave it out": (
        "te_comm_gemm_overlap=disabled enable_padding_causal_mask=true max_segments_per_seq=-1"
    ),
    "a TensorCore gather is not built; use_ragged_sort=true takes the SparseCores'": "use_gather_mosaic_kernel=false",
    "there is one FSDP axis; use ici_fsdp_parallelism for all of its devices": (
        "use_2d_fsdp_sharding=false ici_fsdp_transpose_parallelism=1|-1 dcn_fsdp_transpose_parallelism=1|-1"
    ),
    "keeping arrays in the host's memory is not built; remat_policy=full keeps the least on a device": (
        "optimizer_memory_host_offload=false parameter_memory_host_offload=false engram=remat "
        "indexer_cutoff_threshold=remat"
    ),
    "experts read the model's own width; use base_emb_dim": "moe_expert_input_dim=-1",
    "hash routing of some layers is not built; routing=hash hashes all": "first_num_hash_layers=0",
    "a schedule of half batches is not built; num_moe_token_chunks overlaps parts of a layer": (
        "use_batch_split_schedule=false batch_split_factor=1"
    ),
    "only the data axis crosses slices, as the others would send weights or tokens of every layer over a data centre's "
    "network; use dcn_data_parallelism": (
        "dcn_fsdp_parallelism=1|-1 dcn_tensor_parallelism=1|-1 dcn_expert_parallelism=1|-1"
    ),
    "there is no such axis here; use fsdp, expert or tensor parallelism": " ".join(
        f"{where}_{axis}_parallelism=1|-1"
        for where in ("ici", "dcn")
        for axis in (
            *("pipeline", "sequence", "context", "context_usp_ulysses", "context_autoregressive", "autoregressive"),
            *("tensor_transpose", "tensor_sequence", "diloco"),
        )
    ),
    "pipelines are not built; use fsdp or expert parallelism": (
        "num_layers_per_pipeline_stage=1 num_pipeline_repeats=-1 pipeline_parallel_layers=-1 "
        "num_pipeline_microbatches=-1 pipeline_delay_activation_forwarding=false pipeline_fsdp_ag_once=false "
        "pipeline_fsdp_ag_per_repeat=false scan_pipeline_iterations=true scan_pipeline_repeats=false "
        "scan_layers_per_stage=false set_remat_policy_on_pipeline_iterations=true "
        "set_remat_policy_on_layers_per_stage=false"
    ),
    "sequences are not split over devices; use fsdp": (
        "context_parallel_load_balance=true context_parallel_strategy=all_gather "
        "context_parallel_reorder_strategy=auto shard_optimizer_over_data=false"
    ),
    "the decoder has no such part; `raggedmoe models` lists those that are built": (
        "inhomogeneous_layer_cycle_interval=1 attention_output_dim=-1 global_head_dim=0 global_num_kv_heads=0 "
        "share_kv_projections=false chunk_attn_window_size=0 attn_logits_soft_cap=0.0 final_logits_soft_cap=0.0 "
        "use_post_attn_norm=false use_post_ffw_norm=false v_norm_with_scale=true qk_norm_with_scale=true "
        "hidden_size_per_layer_input=0 vocab_size_per_layer_input=0 num_kv_shared_layers=0 use_double_wide_mlp=false "
        "moba=false moba_chunk_size=1024 moba_topk=8 use_indexer=false indexer_head_dim=128 indexer_n_heads=64 "
        "indexer_topk=2048 indexer_use_approx_top_k=false indexer_approx_top_k_recall=0.95 "
        "indexer_mask_exact_topk=true indexer_sparse_training=false indexer_loss_scaling_factor=0.0 o_lora_rank=0 "
        "o_groups=0 compress_ratios=[] compressed_rope_max_timescale=160000 use_qk_clip=false qk_clip_threshold=100.0 "
        "mlp_activations_limit=-1.0 use_qk_norm=false nope_layer_interval=-1 temperature_tuning=false "
        "use_untrainable_positional_embedding=false trainable_position_size=-1 gdn_conv_kernel_dim=4 "
        "gdn_key_head_dim=128 gdn_value_head_dim=128 gdn_num_key_heads=16 gdn_num_value_heads=32 gdn_chunk_size=64 "
        "use_qk_norm_in_gdn=true partial_rotary_factor=1.0 mhc_expansion_rate=1 sinkhorn_iterations=20 "
        "enable_mhc_lite=false engram_layers=[] engram_max_ngram_size=3 engram_num_heads=8 engram_head_dim=1280 "
        "engram_vocab_bases=[] engram_kernel_size=4 engram_seed=0 normalize_embedding_logits=true "
        "dense_init_scale=1.0 causal_block_size=32 use_ragged_attention=false ragged_block_size=256 "
        "mtp_eval_target_module=0 use_mrope=false mrope_section=24,20,20 position_id_per_seconds=25"
    ),
    "a model's rope is its own; choose another model_name": (
        "rope_type=default rope_linear_scaling_factor=1.0 rope_use_scale=true rope_min_timescale=1 "
        "local_rope_max_timescale=-1 global_rope_max_timescale=-1 global_rope_proportion=0.25 "
        "local_rope_proportion=1.0 max_position_embeddings=163840 original_max_position_embeddings=4096 "
        "rope_factor=40 beta_fast=32 beta_slow=1 mscale=1.0 rope_interleave=true rope_truncate=true "
        "rope_attention_scaling=false rope_pairwise=false"
    ),
    "dropout is not built; leave it out": "dropout_rate=0.0",
    "documents are always shuffled, by data_seed; leave it out": "enable_data_shuffling=true",
    "matrices are multiplied as their type asks for; dtype=float32 is the most precise": "matmul_precision=default",
    "adam_weight_decay decays all parameters, weight_decay matrices alone; use one of them": "adamw_mask=[]",
    "attention is the model's own; choose another model_name": "attention_type=global|mla|local_sliding",
    "a z-loss of the vocabulary's logits is not built; z_loss_weight is the router's": "z_loss_multiplier=0.0",
    "every step has a batch of its own; use dataset_type=synthetic": "reuse_example_batch=0",
    "steps whose loss or gradient is not finite are skipped, and no others": (
        "skip_step_on_spikes=false skip_step_interval=128 skip_step_scaling_factor=6.0"
    ),
    "freezing parameters is not built; leave it out": "trainable_parameters_mask=[]",
    "weights are read from a Hugging Face folder or one of ours; use load_parameters_path": (
        "lora_input_adapters_path= hf_lora_adapter_path= checkpoint_conversion_fn=none "
        "source_checkpoint_layout=orbax colocated_python_checkpointing=false"
    ),
    "checkpoints go to base_output_directory; use checkpoint_period and keep_last": (
        "enable_continuous_checkpointing=false enable_multi_tier_checkpointing=false "
        "multi_tier_checkpointing_backup_interval_minutes=none multi_tier_checkpointing_backup_interval_steps=none "
        "mtc_data_parallelism=0 enable_emergency_checkpoint=false local_checkpoint_directory= local_checkpoint_period=0"
    ),
    "data are files of this machine, or synthetic; use dataset_type=text, chat or hf with dataset_path": (
        "dataset_name=c4/en:3.1.0 eval_dataset_name=c4/en:3.1.0 eval_split=validation "
        "hf_name= hf_data_files= hf_eval_split= hf_access_token= "
        "grain_train_files= grain_eval_files= grain_train_mixture_config_path= grain_file_type=arrayrecord "
        "grain_packing_type=first_fit grain_worker_count=1 grain_per_worker_buffer_size=1 grain_num_threads=16 "
        "grain_prefetch_buffer_size=500 grain_worker_count_eval=1 grain_per_worker_buffer_size_eval=1 "
        "grain_ram_budget_mb=1024 grain_num_threads_eval=16 grain_prefetch_buffer_size_eval=500 "
        "grain_data_source_max_workers=16 grain_shuffle_buffer_size=100 grain_use_elastic_iterator=false "
        "colocated_python_data_input=false olmo_index_path= olmo_path_remap_from= olmo_path_remap_to= "
        "olmo_apply_ngram_filter=true max_corpus_chars=10000000 train_image_column=image "
        "eval_data_columns=text eval_image_column=image num_epoch=1 generate_padding_batch_train=false "
        "generate_padding_batch_eval=false expansion_factor_real_data=-1 eval_per_device_batch_size=0 "
        "enable_rampup_batch_size=false per_device_batch_size_start=4.0 per_device_batch_size_increment=2.0 "
        "global_rampup_samples=500 tokenize_train_data=true tokenize_eval_data=true add_bos=true "
        "use_truncation=true"
    ),
    "conversations are dataset_type=chat, written by the tokenizer's own template; leave it out": (
        "use_dpo=false use_sft=false sft_train_on_completion_only=false use_chat_template=false chat_template_path= "
        "chat_template= training_objective=causal_lm block_diffusion_mask_id=-1 block_diffusion_min_noise=0.001 "
        "block_diffusion_logit_alignment=same_position block_diffusion_canvas_policy=all_masked distill_alpha=0.5 "
        "distill_temperature=1.0 distill_beta=0.0 distill_feature_loss_type=cosine distill_layer_indices=none "
        "distill_alpha_end=none distill_alpha_schedule=constant distill_temperature_end=none "
        "distill_temperature_schedule=constant distill_beta_end=none distill_beta_schedule=constant"
    ),
    "a run ends after its steps; leave it out": "target_eval_loss=0 eval_start_step=0",
    "a run that fails goes on from its checkpoint (raggedmoe launch); leave it out": (
        "enable_diloco=false diloco_sync_period=36 diloco_outer_lr=0.3 diloco_outer_momentum=0.9 elastic_enabled=false "
        "elastic_backup_kind=snapshot elastic_timeout_seconds=300 elastic_max_retries=10 elastic_min_slice_count=-1 "
        "dcn_bandwidth_limit= dcn_bandwidth_burst=10mb dcn_bandwidth_latency=50ms dcn_bandwidth_interface=eth0"
    ),
    "checks inside compiled programs are not built; leave it out": "max_checkify=false",
    "serving is not built; `raggedmoe generate` continues a text": (
        "model_call_mode= max_prefill_predict_length=64 prompt=* load_from_prefill_dir=false prefill_cache_dir= "
        "autoregressive_decode_assert= decode_sampling_strategy=greedy decode_sampling_nucleus_p=-1 "
        "decode_sampling_top_k=0 decode_sampling_temperature=1 inference_microbenchmark_prefill_lengths=* "
        "inference_microbenchmark_stages=prefill,generate inference_microbenchmark_loop_iters=10 "
        "inference_microbenchmark_log_file_path= inference_microbenchmark_num_samples=1,2,3,4,5 "
        "inference_metadata_file= inference_server=MaxtextInterleavedServer prefill_slice=v5e-16 generate_slice=v5e-16 "
        "inference_benchmark_test=false enable_model_warmup=false enable_llm_inference_pool=false multi_sampling=false "
        "return_log_prob=false stack_prefill_result_cache=false prefill_chunk_size=256 use_chunked_prefill=false "
        "enable_prefix_caching=false prefix_caching_hbm_byte=10000000000 prefix_caching_dram_byte=100000000000 "
        "vllm_hf_config_path= vllm_hf_overrides={} vllm_additional_config={}"
    ),
    "images and sound are not built; leave it out": (
        "use_multimodal=false use_audio=false freeze_vision_encoder_params=true freeze_audio_encoder_params=true "
        "dtype_mm=float32 remat_policy_for_vit=minimal image_size_for_vit=896 image_path= video_path= audio_path= "
        "image_placeholder=* video_placeholder=* audio_placeholder=* use_audio_in_video=false "
        "video_max_grid_t=none video_max_grid_h=none video_max_grid_w=none posemb_type_for_vit=learn "
        "max_num_images_per_example=-1 vision_output_length=-1 hidden_size_for_vit=1408 intermediate_size_for_vit=5632 "
        "num_attention_heads_for_vit=16 num_channels_for_vit=3 tile_size_for_vit=336 patch_size_for_vit=14 "
        "conv_stride_for_vit=14 num_hidden_layers_for_vit=34 projector_input_dim_for_vit=4096 "
        "projector_output_dim_for_vit=4096 rope_theta_for_vit=10000 vision_output_dim_for_vit=4096 "
        "pixel_shuffle_ratio_for_vit=0.5 projector_dropout_for_vit=0.0 spatial_merge_size_for_vit=2 "
        "out_hidden_size_for_vit=512 temporal_patch_size_for_vit=2 num_position_embeddings_for_vit=1024 "
        "deepstack_visual_indexes_for_vit=[] d_model_for_audio=256 encoder_attention_heads_for_audio=4 "
        "encoder_ffn_dim_for_audio=512 encoder_layers_for_audio=2 attention_dropout_for_audio=0.0 "
        "activation_dropout_for_audio=0.0 activation_function_for_audio=gelu num_mel_bins_for_audio=128 "
        "max_source_positions_for_audio=1500 scale_embedding_for_audio=true n_window_for_audio=50 "
        "n_window_infer_for_audio=800 conv_chunksize_for_audio=500 downsample_hidden_size_for_audio=256 "
        "output_dim_for_audio=512 num_conv_layers_for_audio=3 max_timescale_for_audio=10000 "
        "max_sample_len_for_audio=10000"
    ),
}


def pairs(text: str) -> dict[str, str]:
    """Parse a text of ``name=value`` words into names and defaults; a default of * stands for any value."""
    return dict(word.split("=", 1) for word in text.split())


def is_same(text: str, default: str) -> bool:
    """Tell whether a value, as typed or as YAML has it, equals a default: 1e-5 equals 0.00001, and none equals "".

    A default of * equals any value, and a default of a|b equals both.
    """
    return default == "*" or _plain(text) in map(_plain, default.split("|"))


def _plain(text: str) -> str | float:
    """Bring a value into the form in which values are compared."""
    text = text.strip().strip("\"'").lower().replace(" ", "_")
    if text in ("", "none", "null"):
        return ""
    if len(text) > 2 and text[0] == "[" and text[-1] == "]":
        text = ",".join(part.strip("_\"'") for part in text[1:-1].split(","))
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return text
