"""What a user should be told of a run's settings: those that change nothing, and those that are not as in MaxText."""

from collections.abc import Callable

from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.moe.config import strategy_name
from raggedmoe.moe.execution import ACROSS_RANKS
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.sections import BYTES, OF_CONVERSATIONS, WITHOUT_TOKENIZER
from raggedmoe.train.settings.step import ResolvedStep

Condition = Callable[[TrainConfig, ResolvedStep], bool]


def list_notes(
    asked: TrainConfig, config: TrainConfig, step: ResolvedStep, plan: Plan, num_devices: int
) -> tuple[str, ...]:
    """List what the user should be told of the settings that were asked for, those of MaxText's words first.

    ``config`` has what follows the model as well.
    """
    return (
        *asked.source.notes,
        *_unread_settings(asked, config, step),
        *_differences(asked, config, step),
        *_remarks(config, plan, num_devices),
    )


def _remarks(config: TrainConfig, plan: Plan, num_devices: int) -> list[str]:
    """List what a user may not expect."""
    remarks, checkpoints, interval = [], config.checkpoints, config.run.steps_between_evaluations
    if plan.num_devices < num_devices:
        remarks.append(f"{plan.num_devices} of {num_devices} devices used; fsdp_parallelism=-1 takes them all")
    keeps_best = checkpoints.enable_checkpointing and checkpoints.keep_best and config.data.holds_out
    period = checkpoints.steps_between_checkpoints
    if keeps_best and (not interval or period % interval):
        remarks.append(
            f"keep_best: checkpoints every {period} steps are not all evaluated, every "
            f"{interval} steps; make checkpoint_period a multiple of eval_interval"
        )
    return remarks


def _strategy(step: ResolvedStep) -> str:
    return strategy_name(step.model.moe, step.execution.moe)


def _moves_rows(config: TrainConfig, step: ResolvedStep) -> bool:
    return _strategy(step) in ACROSS_RANKS


def _saves(config: TrainConfig, step: ResolvedStep) -> bool:
    return config.checkpoints.enable_checkpointing


def _holds_out(config: TrainConfig, step: ResolvedStep) -> bool:
    return config.data.holds_out


def _decays_at_the_end(config: TrainConfig, step: ResolvedStep) -> bool:
    return config.optimizer.schedule == "wsd"


def _has_muon(config: TrainConfig, step: ResolvedStep) -> bool:
    return config.optimizer.opt_type == "muon" and _trains_routers(step)  # adapters are AdamW's


def _trains_routers(step: ResolvedStep) -> bool:
    """Tell whether routers are trained; beside adapters they are the only weights that may be."""
    return step.model.lora is None or step.model.lora.router == "trained"


def _has_bias(config: TrainConfig, step: ResolvedStep) -> bool:
    return step.model.moe.router.selection_bias and _trains_routers(step)


def _traces(config: TrainConfig, step: ResolvedStep) -> bool:
    return config.run.traces


def _is_deepseek_v3(config: TrainConfig, step: ResolvedStep) -> bool:
    return step.model.family == "deepseek_v3"


def _quantizes(operand: str) -> Condition:
    """Make the condition that an operand of the experts' matmuls is quantised."""

    def is_quantized(config: TrainConfig, step: ResolvedStep) -> bool:
        quantization = step.execution.moe.quantization
        return quantization is not None and getattr(quantization, operand) is not None

    return is_quantized


NO_ROW_LEAVES = (
    "no row leaves its device for an expert, or in fixed slots alone: expert_parallelism is 1, sparse_matmul is false, "
    "or there is a capacity_factor"
)
NO_GROUPS = "as in MaxText, DeepSeek V3's routers alone have groups"


def kernel_names(operation: str) -> tuple[str, str, str]:
    """Name the settings that choose an operation's kernels: of both directions, and of each."""
    return operation, f"{operation}.{FORWARD}", f"{operation}.{BACKWARD}"


MUON_SETTINGS = ("muon_beta", "muon_consistent_rms", "muon_weight_decay")
LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets", "lora_router")
# Settings that are read only if something else is so: the condition, and what to say.
READ_ONLY_IF: dict[str, tuple[Condition, str]] = {
    "bias_update_rate": (_has_bias, "its routers have no selection bias, or are frozen"),
    "opt_type": (
        lambda config, step: config.optimizer.opt_type != "muon" or _trains_routers(step),
        "AdamW trains adapters, and nothing else learns",
    ),
    "mtp_loss_weight": (lambda config, step: step.model.mtp_layers > 0, "it has no multi-token prediction"),
    "dataset_suffixes": (
        lambda config, step: config.data.dataset in ("text", "chat"),
        "it belongs to dataset_type=text and chat",
    ),
    "chat_date": (
        lambda config, step: config.data.dataset in OF_CONVERSATIONS,
        "it belongs to dataset_type=chat and hf",
    ),
    **{
        name: (lambda config, step: config.data.dataset == "hf", "it belongs to dataset_type=hf")
        for name in ("dataset_split", "dataset_column")
    },
    "packing": (lambda config, step: config.data.dataset != "synthetic", "synthetic rows are no documents"),
    "add_eos": (
        lambda config, step: config.data.dataset not in WITHOUT_TOKENIZER,
        "the tokens are made already, with ends or without",
    ),
    "held_out": (
        lambda config, step: config.data.dataset not in WITHOUT_TOKENIZER or not config.data.held_out,
        "of tokens that are made already no share is taken: those of `raggedmoe tokenize` were divided there; 0 holds "
        "out nothing",
    ),
    "eos_token": (
        lambda config, step: config.data.add_eos and config.data.tokenizer_path not in (None, BYTES),
        "it belongs to add_eos=true with a tokenizer",
    ),
    "decay_fraction": (_decays_at_the_end, "it belongs to schedule=wsd"),
    "decay_style": (_decays_at_the_end, "it belongs to schedule=wsd"),
    **dict.fromkeys(
        LORA_SETTINGS[1:],
        (lambda config, step: config.overrides.lora_rank is not None, "there are no adapters: it belongs to lora_rank"),
    ),
    "keep_quantised": (
        # A run of before goes on with false, which is so without adapters in any case.
        lambda config, step: step.model.lora is not None or not config.execution.keep_quantised,
        "there are no adapters, and weights that are trained are no 8-bit numbers",
    ),
    **dict.fromkeys(MUON_SETTINGS, (_has_muon, "it belongs to opt_type=muon, which trains no adapter")),
    "weight_decay_of": (lambda config, step: config.optimizer.weight_decay > 0, "nothing decays"),
    "final_fraction": (
        lambda config, step: config.optimizer.schedule != "constant",
        "a constant learning rate stays",
    ),
    "warmup_fraction": (lambda config, step: config.optimizer.warmup_steps is None, "warmup_steps says it"),
    "init_state": (lambda config, step: config.run.init_from is not None, "it belongs to init_from"),
    "profiler_steps": (_traces, "there is no profiler"),
    "skip_first_n_steps_for_profiler": (_traces, "there is no profiler"),
    "checkpoint_period": (_saves, "there are no checkpoints"),
    "keep_last": (_saves, "there are no checkpoints"),
    "keep_best": (_saves, "there are no checkpoints"),
    "async_checkpointing": (_saves, "there are no checkpoints"),
    "eval_interval": (
        lambda config, step: _holds_out(config, step) or bool(config.run.num_sample_tokens),
        "nothing is held out",
    ),
    "sample_tokens": (
        lambda config, step: (
            config.data.dataset != "synthetic" and (config.data.holds_out or config.run.sample_prompt is not None)
        ),
        "there is no text to continue",
    ),
    "sample_prompt": (
        lambda config, step: config.data.dataset != "synthetic" and config.run.num_sample_tokens > 0,
        "it belongs to sample_tokens, of text",
    ),
    "eval_steps": (_holds_out, "nothing is held out"),
    "expert_strategy": (_moves_rows, NO_ROW_LEAVES),
    "ragged_buffer_factor": (_moves_rows, NO_ROW_LEAVES),
    "dispatch_dtype": (_moves_rows, NO_ROW_LEAVES),
    "quantization_block": (_quantizes("weights"), "nothing is quantised"),
    "quantization_history": (_quantizes("weights"), "nothing is quantised"),
    "quantization_weight_scale": (_quantizes("weights"), "no weights are quantised"),
    "quantization_row_scale": (_quantizes("rows"), "no rows are quantised"),
    "quantization_cotangent_scale": (_quantizes("cotangents"), "no gradients are quantised"),
    "stochastic_rounding": (_quantizes("cotangents"), "no gradients are quantised"),
    "rerun_on_overflow": (
        lambda config, step: step.execution.moe.ragged_buffer_factor is not None,
        "no row can be dropped",
    ),
    **{
        name: (lambda config, step: _strategy(step) not in ("dense", "capacity"), "the matmul is a dense one")
        for name in kernel_names("grouped_matmul")
    },
    **{
        name: (lambda config, step: _strategy(step) != "dense", "no rows are moved for a dense matmul")
        for operation in ("ragged_gather", "ragged_gather_reduce")
        for name in kernel_names(operation)
    },
    "routed_scaling_factor": (
        lambda config, step: step.model.family.startswith("deepseek"),
        "as in MaxText, the weights of DeepSeek's models alone are scaled",
    ),
    "n_routing_groups": (_is_deepseek_v3, NO_GROUPS),
    "topk_routing_group": (_is_deepseek_v3, NO_GROUPS),
    "aux_loss": (lambda config, step: step.model.moe.router.aux_loss_weight > 0, "its weight is 0"),
}


def _unread_settings(asked: TrainConfig, config: TrainConfig, step: ResolvedStep) -> list[str]:
    """List what was typed and changes nothing, with the reason."""
    return [
        f"{asked.shown(name)}: changes nothing: {reason}"
        for name, (is_read, reason) in READ_ONLY_IF.items()
        if asked.is_typed(name) and not is_read(config, step)
    ]


def _has_padding(config: TrainConfig, step: ResolvedStep) -> bool:
    return not config.data.packing and config.data.dataset != "synthetic"


def _accumulates(config: TrainConfig, step: ResolvedStep) -> bool:
    return step.micro_batches > 1


# Where a setting that MaxText has too gives another number than there: the setting, the condition, and what to say.
DIFFERENCES: tuple[tuple[str, Condition, str], ...] = (
    (
        "opt_type",
        _has_muon,
        "AdamW, which trains the rest, has no Nesterov momentum here, and has in MaxText; the default of "
        "muon_consistent_rms is 0.2 here and none there, of muon_weight_decay weight_decay here and 0 there",
    ),
    ("load_balance_loss_weight", _has_padding, "padding does not count here, and does in MaxText"),
    (
        "load_balance_loss_weight",
        lambda config, step: step.mtp_layers > 0,
        "in the layers of multi-token prediction, positions that have no further token do not count here, and do in "
        "MaxText",
    ),
    (
        "load_balance_loss_weight",
        _accumulates,
        "its gradient is that of one large batch here; MaxText divides it by the number of targets too when it "
        "accumulates gradients",
    ),
    ("load_balance_loss_weight", _has_bias, "the selection bias has no gradient of it here, and has in MaxText"),
    ("capacity_factor", _has_padding, "padding takes no slot here, and does in MaxText"),
    (
        "mtp_loss_weight",
        lambda config, step: step.micro_batches > 1 and step.mtp_layers > 0,
        "its gradient is that of one large batch here; MaxText divides it by the number of targets too when it "
        "accumulates gradients",
    ),
    (
        "bias_update_rate",
        lambda config, step: _accumulates(config, step) and _has_bias(config, step),
        "the bias moves once a step here, by the load of the whole batch; in MaxText once for each micro-batch",
    ),
    (
        "bias_update_rate",
        lambda config, step: step.mtp_layers > 0 and _has_bias(config, step),
        "the bias of multi-token prediction's layers moves too here, and does not in MaxText",
    ),
    (
        "weight_decay_of",
        lambda config, step: config.optimizer.weight_decay_of == "all" and _has_bias(config, step),
        "the selection bias does not decay here, and does in MaxText",
    ),
)


def _differences(asked: TrainConfig, config: TrainConfig, step: ResolvedStep) -> list[str]:
    """List what was typed and gives another number than the same word in MaxText."""
    return [
        f"{asked.shown(name)}: {what}"
        for name, applies, what in DIFFERENCES
        if asked.is_given(name) and config.get(name) and applies(config, step)
    ]
