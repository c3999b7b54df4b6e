"""From settings to checked configurations. Every mistake is found here, before anything is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Choice, Directions, KernelChoice, Ordered
from raggedmoe.models.config import ModelConfig, check_execution
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import param_specs
from raggedmoe.models.presets import model_preset
from raggedmoe.models.sizes import FIELDS, OTHERS, resize
from raggedmoe.moe.config import RouterConfig, strategy_name
from raggedmoe.moe.execution import ACROSS_RANKS, MoEExecution
from raggedmoe.sharding.axes import AXES
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.checkpoint.checkpoints import CheckpointConfig
from raggedmoe.train.data.batches import TEXT_SUFFIXES, DataConfig
from raggedmoe.train.loop.profile import ProfileConfig
from raggedmoe.train.settings.keys import KERNEL_KEYS
from raggedmoe.train.settings.settings import Settings
from raggedmoe.train.step.optimizer import OptimizerConfig
from raggedmoe.train.step.step import StepConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run that its steps do not read: the folder, its length, and what is done how often."""

    folder: Path
    steps: int  # of the run; the optimizer's are those that its schedule spans
    seed: int
    micro_batch_size: int  # sequences that all devices together hold at once, in training and in evaluation
    line_period: int
    load_period: int
    eval_interval: int
    eval_steps: int
    checkpoint_period: int
    max_skipped_steps: int
    tensorboard: bool
    load_parameters_path: Path | None
    profile: ProfileConfig | None

    def __post_init__(self) -> None:
        for name in ("steps", "line_period", "load_period", "eval_steps", "checkpoint_period", "max_skipped_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"expected 0 <= seed < 2**32, got {self.seed}")
        if self.eval_interval < 0:
            raise ValueError(f"expected eval_interval >= 0, got {self.eval_interval}")
        if self.load_parameters_path is not None and not self.load_parameters_path.is_dir():
            raise ValueError(f"load_parameters_path: expected a folder, found none at {self.load_parameters_path}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    settings: Settings
    notes: tuple[str, ...]  # what the user should be told of them
    plan: Plan
    step: StepConfig
    data: DataConfig
    run: RunConfig
    checkpoints: CheckpointConfig | None


def make_config(settings: Settings, hardware: Hardware, num_devices: int = 1) -> TrainConfig:
    """The configurations of a run on that hardware, of which there are so many devices."""
    v = settings.values
    plan = make_plan(settings, num_devices)
    for name in ("base_output_directory", "load_parameters_path", "tokenizer_path"):
        if "://" in (v[name] or ""):
            raise ValueError(f"{name}: expected a place on this machine, got {v[name]!r}; mount it, or copy it")
    model = make_model(settings, hardware)
    execution = make_execution(settings, model, plan)
    for name, spec in param_specs(model).items():
        plan.spec(name, spec)  # what does not divide is found here
    step = StepConfig(
        model=model,
        execution=execution,
        optimizer=make_optimizer_config(settings),
        micro_batches=v["gradient_accumulation_steps"],
        bias_update_rate=v["bias_update_rate"],
        mtp_loss_weight=v["mtp_loss_weight"],
        rerun_on_overflow=v["rerun_on_overflow"] and execution.moe.ragged_buffer_factor is not None,
    )
    if v["per_device_batch_size"] < 1:
        raise ValueError(f"expected per_device_batch_size >= 1, got {v['per_device_batch_size']}")
    data = DataConfig(
        dataset=v["dataset_type"],
        paths=v["dataset_path"],
        suffixes=v["dataset_suffixes"] or TEXT_SUFFIXES,
        tokenizer=v["tokenizer_path"],
        sequence_length=v["max_target_length"],
        batch_size=v["per_device_batch_size"] * plan.num_devices * v["gradient_accumulation_steps"],
        packing=v["packing"],
        held_out=v["held_out"],
        seed=v["data_seed"],
    )
    folder = Path(v["base_output_directory"]) / _run_name(v)
    checkpoints = None
    if v["enable_checkpointing"]:
        checkpoints = CheckpointConfig(
            folder=folder / "checkpoints",
            keep_last=v["keep_last"],
            keep_best=v["keep_best"],
            asynchronous=v["async_checkpointing"],
        )
    return TrainConfig(
        settings=settings,
        notes=(
            *settings.notes,
            *unread_settings(settings, step),
            *differences(settings, step),
            *_remarks(settings, plan, num_devices),
        ),
        plan=plan,
        step=step,
        data=data,
        run=make_run_config(settings, folder, plan),
        checkpoints=checkpoints,
    )


def make_optimizer_config(settings: Settings) -> OptimizerConfig:
    """Make the optimizer's configuration from the settings."""
    v = settings.values
    steps = v["steps"] if v["schedule_steps"] is None else v["schedule_steps"]
    warmup = v["warmup_steps"]
    if warmup is None:
        if not 0 <= v["warmup_fraction"] <= 1:
            raise ValueError(f"expected 0 <= warmup_fraction <= 1, got {v['warmup_fraction']}")
        warmup = int(v["warmup_fraction"] * steps)
    return OptimizerConfig(
        steps=steps,
        learning_rate=v["learning_rate"],
        schedule=v["schedule"],
        warmup_steps=warmup,
        warmup_from=v["warmup_from"],
        decay_fraction=v["decay_fraction"],
        decay_style=v["decay_style"],
        final_fraction=v["final_fraction"],
        b1=v["adam_b1"],
        b2=v["adam_b2"],
        epsilon=v["adam_eps"],
        epsilon_root=v["adam_eps_root"],
        weight_decay=v["weight_decay"],
        weight_decay_of=v["weight_decay_of"],
        clip_norm=v["gradient_clipping_threshold"] or None,
        grad_dtype=v["grad_dtype"],
        mu_dtype=v["mu_dtype"],
    )


SHORT_RUN = 20  # steps of a run that prints every one


def make_run_config(settings: Settings, folder: Path, plan: Plan) -> RunConfig:
    """Make from the settings the part of the configuration that the steps do not read."""
    v = settings.values
    profile = None
    if v["profiler"] == "xplane":
        profile = ProfileConfig(skip=v["skip_first_n_steps_for_profiler"], steps=v["profiler_steps"])
        if v["steps"] <= profile.skip:
            raise ValueError(
                f"steps={v['steps']} leaves nothing to trace after skip_first_n_steps_for_profiler={profile.skip}; use "
                "more steps or skip fewer"
            )
    line_period = v["line_period"]
    if line_period is None:
        line_period = 1 if v["steps"] <= SHORT_RUN else 10
    return RunConfig(
        folder=folder,
        **{name: v[name] for name in ("steps", "seed", "load_period", "eval_interval", "eval_steps")},
        line_period=line_period,
        micro_batch_size=v["per_device_batch_size"] * plan.num_devices,
        checkpoint_period=v["checkpoint_period"],
        max_skipped_steps=v["max_skipped_steps"],
        tensorboard=v["tensorboard"],
        load_parameters_path=None if v["load_parameters_path"] is None else Path(v["load_parameters_path"]),
        profile=profile,
    )


def _run_name(values: Mapping[str, Any]) -> str:
    name = values["run_name"] or values["model_name"]
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
        raise ValueError(f"run_name: expected a folder's name inside base_output_directory, got {name!r}")
    return name


def make_plan(settings: Settings, num_devices: int) -> Plan:
    """The mesh that the degrees ask for, of so many devices."""
    v = settings.values
    degrees = {axis: v[f"{axis}_parallelism"] for axis in AXES}
    return Plan(**degrees, tensor_split=v["tensor_split"]).resolve(num_devices)


def _remarks(settings: Settings, plan: Plan, num_devices: int) -> list[str]:
    """What a user may not expect."""
    v, remarks = settings.values, []
    if plan.num_devices < num_devices:
        remarks.append(f"{plan.num_devices} of {num_devices} devices used; fsdp_parallelism=-1 takes them all")
    saves = v["enable_checkpointing"] and v["keep_best"] and v["held_out"]
    if saves and (not v["eval_interval"] or v["checkpoint_period"] % v["eval_interval"]):
        remarks.append(
            f"keep_best: checkpoints every {v['checkpoint_period']} steps are not all evaluated, every "
            f"{v['eval_interval']} steps; make checkpoint_period a multiple of eval_interval"
        )
    return remarks


def _strategy(step: StepConfig) -> str:
    return strategy_name(step.model.moe, step.execution.moe)


def _moves_rows(step: StepConfig) -> bool:
    return _strategy(step) in ACROSS_RANKS


NO_ROW_LEAVES = (
    "no row leaves its device for an expert, or in fixed slots alone: expert_parallelism is 1, sparse_matmul is false, "
    "or there is a capacity_factor"
)

SPARSE_OPERATIONS = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul")


def _kernel_keys(operation: str) -> tuple[str, str, str]:
    return operation, f"{operation}.{FORWARD}", f"{operation}.{BACKWARD}"


NO_GROUPS = "as in MaxText, DeepSeek V3's routers alone have groups"

# Settings that are read only if something else is so: the condition, and what to say.
READ_ONLY_IF: dict[str, tuple[Callable[[Mapping[str, Any], StepConfig], bool], str]] = {
    "bias_update_rate": (lambda v, step: step.model.moe.router.selection_bias, "its routers have no selection bias"),
    "mtp_loss_weight": (lambda v, step: step.model.mtp_layers > 0, "it has no multi-token prediction"),
    "dataset_suffixes": (lambda v, step: v["dataset_type"] == "text", "it belongs to dataset_type=text"),
    "packing": (lambda v, step: v["dataset_type"] != "synthetic", "synthetic rows are no documents"),
    "decay_fraction": (lambda v, step: v["schedule"] == "wsd", "it belongs to schedule=wsd"),
    "decay_style": (lambda v, step: v["schedule"] == "wsd", "it belongs to schedule=wsd"),
    "weight_decay_of": (lambda v, step: v["weight_decay"] > 0, "nothing decays"),
    "final_fraction": (lambda v, step: v["schedule"] != "constant", "a constant learning rate stays"),
    "warmup_fraction": (lambda v, step: v["warmup_steps"] is None, "warmup_steps says it"),
    "profiler_steps": (lambda v, step: v["profiler"] != "none", "there is no profiler"),
    "skip_first_n_steps_for_profiler": (lambda v, step: v["profiler"] != "none", "there is no profiler"),
    "checkpoint_period": (lambda v, step: v["enable_checkpointing"], "there are no checkpoints"),
    "keep_last": (lambda v, step: v["enable_checkpointing"], "there are no checkpoints"),
    "keep_best": (lambda v, step: v["enable_checkpointing"], "there are no checkpoints"),
    "async_checkpointing": (lambda v, step: v["enable_checkpointing"], "there are no checkpoints"),
    "eval_interval": (lambda v, step: v["held_out"] > 0, "nothing is held out"),
    "eval_steps": (lambda v, step: v["held_out"] > 0, "nothing is held out"),
    "expert_strategy": (lambda v, step: _moves_rows(step), NO_ROW_LEAVES),
    "ragged_buffer_factor": (lambda v, step: _moves_rows(step), NO_ROW_LEAVES),
    "rerun_on_overflow": (lambda v, step: step.execution.moe.ragged_buffer_factor is not None, "no row can be dropped"),
    **{
        key: (lambda v, step: _strategy(step) not in ("dense", "capacity"), "the matmul is a dense one")
        for key in _kernel_keys("grouped_matmul")
    },
    **{
        key: (lambda v, step: _strategy(step) != "dense", "no rows are moved for a dense matmul")
        for operation in ("ragged_gather", "ragged_gather_reduce")
        for key in _kernel_keys(operation)
    },
    "routed_scaling_factor": (
        lambda v, step: step.model.family.startswith("deepseek"),
        "as in MaxText, the weights of DeepSeek's models alone are scaled",
    ),
    "n_routing_groups": (lambda v, step: step.model.family == "deepseek_v3", NO_GROUPS),
    "topk_routing_group": (lambda v, step: step.model.family == "deepseek_v3", NO_GROUPS),
    "aux_loss": (lambda v, step: step.model.moe.router.aux_loss_weight > 0, "its weight is 0"),
}


def unread_settings(settings: Settings, step: StepConfig) -> list[str]:
    """What was typed and changes nothing, with the reason."""
    return [
        f"{settings.given[name]}: changes nothing: {reason}"
        for name, (is_read, reason) in READ_ONLY_IF.items()
        if name in settings.typed and not is_read(settings.values, step)
    ]


def _has_padding(values: Mapping[str, Any], step: StepConfig) -> bool:
    return not values["packing"] and values["dataset_type"] != "synthetic"


# Where a setting that MaxText has too gives another number than there: the setting, the condition, and what to say.
DIFFERENCES: tuple[tuple[str, Callable[[Mapping[str, Any], StepConfig], bool], str], ...] = (
    ("load_balance_loss_weight", _has_padding, "padding does not count here, and does in MaxText"),
    (
        "load_balance_loss_weight",
        lambda v, step: step.mtp_layers > 0,
        "in the layers of multi-token prediction, positions that have no further token do not count here, and do in "
        "MaxText",
    ),
    (
        "load_balance_loss_weight",
        lambda v, step: step.micro_batches > 1,
        "its gradient is that of one large batch here; MaxText divides it by the number of targets too when it "
        "accumulates gradients",
    ),
    (
        "load_balance_loss_weight",
        lambda v, step: step.model.moe.router.selection_bias,
        "the selection bias has no gradient of it here, and has in MaxText",
    ),
    ("capacity_factor", _has_padding, "padding takes no slot here, and does in MaxText"),
    (
        "mtp_loss_weight",
        lambda v, step: step.micro_batches > 1 and step.mtp_layers > 0,
        "its gradient is that of one large batch here; MaxText divides it by the number of targets too when it "
        "accumulates gradients",
    ),
    (
        "bias_update_rate",
        lambda v, step: step.micro_batches > 1 and step.model.moe.router.selection_bias,
        "the bias moves once a step here, by the load of the whole batch; in MaxText once for each micro-batch",
    ),
    (
        "bias_update_rate",
        lambda v, step: step.mtp_layers > 0 and step.model.moe.router.selection_bias,
        "the bias of multi-token prediction's layers moves too here, and does not in MaxText",
    ),
    (
        "weight_decay_of",
        lambda v, step: v["weight_decay_of"] == "all" and step.model.moe.router.selection_bias,
        "the selection bias does not decay here, and does in MaxText",
    ),
)


def differences(settings: Settings, step: StepConfig) -> list[str]:
    """What was typed and gives another number than the same word in MaxText."""
    return [
        f"{settings.given[name]}: {what}"
        for name, applies, what in DIFFERENCES
        if name in settings.given and settings.values[name] and applies(settings.values, step)
    ]


def make_model(settings: Settings, hardware: Hardware) -> ModelConfig:
    """The model with what the settings change."""
    v = settings.values
    sizes = {name: v[name] for name in (*FIELDS, *OTHERS) if v[name] is not None}
    model = resize(model_preset(v["model_name"]), sizes, v["model_name"])
    if v["mtp_layers"] is not None:
        model = replace(model, mtp_layers=v["mtp_layers"])
    if v["max_target_length"] > model.max_length:  # trained on longer sequences, it is a model for longer ones
        model = replace(model, max_length=v["max_target_length"])
    auto = "float32" if hardware.platform == "cpu" else "bfloat16"
    moe = replace(model.moe, router=make_router(settings, model.moe.router), capacity_factor=v["capacity_factor"])
    ours_typed = bool({"aux_loss", "aux_loss_weight"} & settings.typed)  # before what a file has
    if v["load_balance_loss_weight"] is not None and not (
        ours_typed and "load_balance_loss_weight" not in settings.typed
    ):
        moe = replace(moe, router=with_load_balance_loss(settings, model, moe.router))
    return replace(
        model,
        moe=moe,
        dtype=jnp.dtype(auto if v["dtype"] == "auto" else v["dtype"]),
        param_dtype=jnp.dtype(v["weight_dtype"]),
    )


def make_execution(settings: Settings, model: ModelConfig, plan: Plan) -> ModelExecution:
    """How the settings run a model on the plan's mesh."""
    v, remat = settings.values, settings.values["remat"]
    execution = ModelExecution(
        moe=make_moe_execution(settings, plan),
        attention_implementation=v["attention"],
        scan_layers=v["scan_layers"],
        remat=remat[0] if remat[0] in ("none", "full") and len(remat) == 1 else remat,
    )
    check_execution(model, execution)
    return execution


def make_moe_execution(settings: Settings, plan: Plan) -> MoEExecution:
    """How the settings run the MoE layers on the plan's mesh."""
    v, given = settings.values, settings.given
    backend, factor = v["moe_backend"], v["capacity_factor"]
    is_dense = MoEExecution(moe_backend=backend).backend.strategy == "dense"
    if v["sparse_matmul"] is not None and "moe_backend" in given and is_dense == v["sparse_matmul"]:
        raise ValueError(
            f"{given['sparse_matmul']} and {given['moe_backend']} contradict each other: moe_backend=dense is the one "
            "without a sparse matmul; leave one out"
        )
    if v["sparse_matmul"] and factor is not None:
        raise ValueError(
            f"{given['sparse_matmul']} and {given['capacity_factor']} contradict each other: the sparse matmul drops "
            "no token; use sparse_matmul=false for fixed slots, or leave the capacity factor out"
        )
    if v["sparse_matmul"] is False and factor is None:
        backend, is_dense = "dense", True
    choices = {operation: kernel_choice(v, operation) for operation in KERNEL_KEYS}
    dense = ("grouped_matmul",) if factor is not None else SPARSE_OPERATIONS if is_dense else ()
    for operation in dense:
        # MaxText's flags for sparse kernels may stand beside a dense matmul, which does not read them.
        if not any(given.get(key, "").split("=")[0] == key for key in _kernel_keys(operation)):
            choices[operation] = "auto"
    named = any(choice != "auto" for choice in choices.values())
    strategy = None
    if factor is None and plan.expert > 1 and not is_dense:
        strategy = "all_to_all" if v["expert_strategy"] == "auto" else v["expert_strategy"]
    return MoEExecution(
        moe_backend=backend,
        kernels=KernelChoice(**choices) if named else None,
        strategy=strategy,
        ragged_buffer_factor=v["ragged_buffer_factor"] if strategy in ACROSS_RANKS else None,
        token_chunks=v["token_chunks"],
        width_chunks=v["width_chunks"],
        tensor_split=v["tensor_split"],
    )


def kernel_choice(values: Mapping[str, Any], operation: str) -> Choice:
    """The implementation of an operation that settings ask for, one for each direction where they differ."""

    def unpack_single(names: tuple[str, ...]) -> Ordered:
        return names[0] if len(names) == 1 else names

    forward, backward = (
        unpack_single(values[f"{operation}.{direction}"] or values[operation]) for direction in (FORWARD, BACKWARD)
    )
    return forward if forward == backward else Directions(forward=forward, backward=backward)


def make_router(settings: Settings, router: RouterConfig) -> RouterConfig:
    """The routers with what the settings change."""
    v = settings.values
    if v["routing"] is not None and v["routing"] != router.selection:
        # What ranks experts means nothing where chance does.
        router = replace(router, selection=v["routing"], selection_bias=False, num_groups=1, groups_per_token=1)
    for name in ("aux_loss", "aux_loss_weight", "z_loss_weight"):
        if v[name] is not None:
            router = replace(router, **{name: v[name]})
    return router


def with_load_balance_loss(settings: Settings, model: ModelConfig, router: RouterConfig) -> RouterConfig:
    """The routers with MaxText's balance loss, in our words.

    Theirs has, in each sequence, how many of a token's K choices an expert gets where ours has the share of all
    choices, which is 1/K of it; and a run adds the mean over the layers with experts, multi-token prediction's
    included, where ours adds the sum. Its probabilities are a softmax of what ranks the experts there: the logits, or
    for DeepSeek's models and with a ``routed_score_func`` the scores made of them.
    """
    v, given = settings.values, settings.given
    for name in ("aux_loss_weight", "aux_loss"):
        if name in given:
            raise ValueError(
                f"{given['load_balance_loss_weight']} and {given[name]} contradict each other: both say what the "
                "balance loss is; leave one out"
            )
    if v["load_balance_loss_weight"] < 0:
        raise ValueError(f"expected load_balance_loss_weight >= 0, got {v['load_balance_loss_weight']}")
    num_layers = len(model.moe_layers) + (model.mtp_layers if v["mtp_loss_weight"] else 0)
    by_scores = router.score != "softmax" or model.family.startswith("deepseek") or v["routed_score_func"] is not None
    return replace(
        router,
        aux_loss="sequence",
        aux_loss_probabilities="softmax" if by_scores else "normalized",
        aux_loss_weight=v["load_balance_loss_weight"] * model.moe.experts_per_token / max(num_layers, 1),
    )
