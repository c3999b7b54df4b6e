"""MaxText's settings by their names, and what each one is here: a table, not code.

An entry says which of our settings a value becomes, or that it changes nothing here and why, or that it is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raggedmoe.mesh import AXES


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a setting of theirs is here: other settings, as words to parse, and a note for the user."""

    settings: Mapping[str, str]
    note: str | None = None


Entry = Callable[[str], Meaning]  # from the value as typed; ValueError: refused, with the reason

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")


def _is_true(name: str, text: str) -> bool:
    if text.lower() not in (*TRUE, *FALSE):
        raise ValueError(f"{name}: expected true or false, got {text!r}")
    return text.lower() in TRUE


def _renamed(to: str) -> Entry:
    return lambda text: Meaning(settings={to: text})


def _ignored(reason: str) -> Entry:
    return lambda text: Meaning(settings={}, note=f"ignored: {reason}")


def _switch(name: str, *, on: dict[str, str] | None, off: dict[str, str] | None, note: str | None = None) -> Entry:
    """A boolean; None: that value changes nothing here, and the note says why."""

    def entry(text: str) -> Meaning:
        found = on if _is_true(name, text) else off
        return Meaning(settings=found or {}, note=note if found is None else None)

    return entry


def _words(name: str, known: dict[str, dict[str, str]]) -> Entry:
    def entry(text: str) -> Meaning:
        if text.lower() not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {text!r}")
        return Meaning(settings=known[text.lower()])

    return entry


def _refused_unless(name: str, harmless: tuple[str, ...], reason: str) -> Entry:
    def entry(text: str) -> Meaning:
        if text.lower() not in harmless:
            raise ValueError(f"{name}={text}: {reason}; leave it out")
        return Meaning(settings={})

    return entry


def _unless_minus_one(name: str, otherwise: str | None) -> Entry:
    """Theirs is -1 for "off"."""

    def entry(text: str) -> Meaning:
        try:
            off = float(text) == -1
        except ValueError:
            off = False
        if not off:
            return Meaning(settings={name: text})
        return Meaning(settings={} if otherwise is None else {name: otherwise})

    return entry


def _tile(name: str, reason: str) -> Entry:
    def entry(text: str) -> Meaning:
        if not text.isdecimal():
            raise ValueError(f"{name}: expected a whole number, got {text!r}")
        return Meaning(settings={}, note=f"ignored: {reason}")

    return entry


def _attention(text: str) -> Meaning:
    known = {"autoselected": "auto", "flash": "splash"}
    if text.startswith("cudnn"):
        raise ValueError(f"attention={text}: cuDNN's attention is not built; use auto, dot_product or chunked")
    return Meaning(settings={"attention": known.get(text, text)})


_TILES = "tile sizes come from a table for each chip, made by a tuner"
_PLATFORM = "JAX picks the platform; set JAX_PLATFORMS to force one"

MAXTEXT: dict[str, Entry] = {
    # the model
    "attention": _attention,
    "base_num_decoder_layers": _renamed("num_layers"),
    "mtp_num_layers": _renamed("mtp_layers"),
    "mtp_loss_scaling_factor": _renamed("mtp_loss_weight"),
    "remat_policy": _words(
        "remat_policy",
        {
            "full": {"remat": "full"},
            "none": {"remat": "none"},
            "minimal": {"remat": "query,key,value,attn_out,attn_proj_out,moe_up,moe_down"},
            "save_out_proj": {"remat": "attn_proj_out"},
        },
    ),
    # the experts
    "megablox": _switch("megablox", on={"moe_backend": "megablox"}, off={"grouped_matmul": "xla"}),
    "use_random_routing": _switch("use_random_routing", on={"routing": "random"}, off={}),
    "use_ring_of_experts": _switch(
        "use_ring_of_experts", on={"expert_strategy": "ring"}, off={"expert_strategy": "auto"}
    ),
    "use_ragged_sort": _switch(
        "use_ragged_sort",
        on={},
        off=None,
        note="ignored: rows are always moved by ragged_gather; ragged_gather_fallback=true takes XLA's",
    ),
    "ragged_gather_fallback": _switch("ragged_gather_fallback", on={"ragged_gather": "xla"}, off={}),
    "ragged_gather_reduce_fallback": _switch(
        "ragged_gather_reduce_fallback", on={"ragged_gather_reduce": "xla"}, off={}
    ),
    "use_gather_mosaic_kernel": _refused_unless(
        "use_gather_mosaic_kernel", FALSE, "a TensorCore gather is not built yet"
    ),
    "ragged_buffer_factor": _unless_minus_one("ragged_buffer_factor", "none"),
    "capacity_factor": _unless_minus_one("capacity_factor", "none"),
    "load_balance_loss_weight": _renamed("aux_loss_weight"),
    "routed_bias_update_rate": _renamed("bias_update_rate"),
    "quantization": _refused_unless("quantization", ("", "none"), "quantised experts are not built"),
    "use_qwix_quantization": _refused_unless("use_qwix_quantization", FALSE, "quantised experts are not built"),
    "quantize_kvcache": _refused_unless("quantize_kvcache", FALSE, "a quantised cache is not built"),
    **{
        f"{matrix}_tile_{direction}_{dim}": _tile(f"{matrix}_tile_{direction}_{dim}", _TILES)
        for matrix in ("wi", "wo")
        for direction in ("fwd", "dlhs", "drhs")
        for dim in ("batch_seq", "embed_dim", "mlp_dim")
    },
    **{name: _tile(name, _TILES) for name in ("tile_batch_seq", "tile_embed_dim", "tile_mlp_dim")},
    **{
        f"sa_block_{block}": _tile(f"sa_block_{block}", "attention's block sizes are its kernel's own")
        for block in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    },
    "sa_use_fused_bwd_kernel": _ignored("attention's kernel decides"),
    "float32_gate_logits": _ignored("a router's logits are always float32"),
    "float32_weight_sum": _ignored("sums are always float32"),
    # data and learning
    "eval_interval": _unless_minus_one("eval_interval", "0"),
    "eval_steps": _unless_minus_one("eval_steps", None),
    "warmup_steps_fraction": _renamed("warmup_fraction"),
    "learning_rate_schedule_steps": _refused_unless(
        "learning_rate_schedule_steps", ("-1",), "the schedule spans the steps"
    ),
    "enable_dropout": _refused_unless("enable_dropout", FALSE, "dropout is not built"),
    "data_shuffle_seed": _renamed("data_seed"),
    "init_weights_seed": _renamed("seed"),
    "adam_weight_decay": _renamed("weight_decay"),
    "cosine_learning_rate_final_fraction": _renamed("final_fraction"),
    "learning_rate_final_fraction": _renamed("final_fraction"),
    "lr_schedule_type": _words("lr_schedule_type", {"cosine": {"schedule": "cosine"}, "wsd": {"schedule": "wsd"}}),
    "wsd_decay_steps_fraction": _renamed("decay_fraction"),
    "opt_type": _words("opt_type", {"adamw": {}}),
    "tokenizer_type": _ignored("a tokenizer.json says what it is"),
    "reuse_example_batch": _refused_unless("reuse_example_batch", ("0",), "every step has a batch of its own"),
    # the run
    "profiler": lambda text: Meaning(settings={"profiler": text or "none"}),
    "allow_split_physical_axes": _ignored("the mesh takes devices in JAX's order"),
    "shard_mode": _ignored("axes of the mesh are always of JAX's type Auto"),
    "max_num_checkpoints_to_keep": _renamed("keep_last"),
    "enable_tensorboard": _renamed("tensorboard"),
    "hardware": _ignored(_PLATFORM),
    "debug_sharding": _switch("debug_sharding", on=None, off={}, note="ignored: raggedmoe plan shows who holds what"),
    "enable_tpu_profiling_options": _switch(
        "enable_tpu_profiling_options", on=None, off={}, note="ignored: the trace has what JAX records by default"
    ),
    "upload_all_profiler_results": _ignored("every process writes its own trace"),
    "log_config": _ignored("the settings are in run.json and in the report"),
    "enable_goodput_recording": _ignored("metrics.jsonl has every step's time"),
    "monitor_goodput": _ignored("metrics.jsonl has every step's time"),
    "skip_jax_distributed_system": _ignored("processes join each other where raggedmoe launch starts them"),
    "jax_cache_dir": _ignored("set JAX_COMPILATION_CACHE_DIR"),
    # parallelism: theirs within a slice (ici) and between slices (dcn)
    **{f"ici_{axis}_parallelism": _renamed(f"{axis}_parallelism") for axis in AXES},
    **{
        f"dcn_{axis}_parallelism": _refused_unless(
            f"dcn_{axis}_parallelism", ("1", "-1"), f"there is one mesh; say ici_{axis}_parallelism for all of it"
        )
        for axis in AXES
    },
    **{
        f"{where}_{axis}_parallelism": _refused_unless(
            f"{where}_{axis}_parallelism", ("1", "-1"), f"there is no {axis} axis here; use fsdp or expert parallelism"
        )
        for where in ("ici", "dcn")
        for axis in ("pipeline", "sequence", "context", "autoregressive", "fsdp_transpose", "tensor_transpose")
    },
}
