"""From what a user asks for to what runs on a machine. Every mistake is found here, before anything is made."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.interop.named_model import stored_dtype
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.lora import LoraConfig
from raggedmoe.models.config import ModelConfig, check_execution
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import check_lora, param_specs
from raggedmoe.models.sizes import FIELDS, OTHERS, resize
from raggedmoe.moe.config import RouterConfig, Selection
from raggedmoe.moe.execution import ACROSS_RANKS, MoEExecution
from raggedmoe.params import divisors
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import UnevenSplitError
from raggedmoe.storage import AnyPath, as_path
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.kept import find_kept
from raggedmoe.train.settings.model_defaults import with_model_defaults, with_recipe
from raggedmoe.train.settings.notes import LORA_SETTINGS, kernel_names, list_notes
from raggedmoe.train.settings.sections import CheckpointConfig, DataConfig, RunConfig
from raggedmoe.train.settings.step import ResolvedStep


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A run on a machine: what the user asked for, and the mesh, the model and the step that this is here."""

    asked: TrainConfig  # with what follows the model filled in
    plan: Plan
    step: ResolvedStep
    folder: AnyPath
    notes: tuple[str, ...]  # what the user should be told of the settings

    @property
    def data(self) -> DataConfig:
        """What to train on."""
        return self.asked.data

    @property
    def run(self) -> RunConfig:
        """The run's length, and what is done how often."""
        return self.asked.run

    @property
    def checkpoints(self) -> CheckpointConfig:
        """When checkpoints are written."""
        return self.asked.checkpoints

    @property
    def micro_batch_size(self) -> int:
        """Sequences that all devices together hold at once, in training and in evaluation."""
        return self.data.sequences_per_device * self.plan.num_devices

    @property
    def batch_size(self) -> int:
        """Sequences of a step, all micro-batches together."""
        return self.micro_batch_size * self.step.micro_batches


def resolve(
    config: TrainConfig, hardware: Hardware, num_devices: int = 1, num_slices: int | None = None
) -> ResolvedConfig:
    """Make what runs on that hardware, of which there are so many devices, of so many slices if they say so."""
    plan = config.mesh.plan.resolve(num_devices, num_slices)
    _check_places(config)
    model, asked = make_model(config, hardware), config
    config = with_model_defaults(with_recipe(config), model)
    execution = make_execution(config, model, plan)
    _check_divides(config, model, plan)
    kept, dequantised = find_kept(config, model, execution, plan)
    if config.optimizer.schedule_steps is None:
        config.optimizer.check_fits(config.run.num_steps, config.shown("steps"), config.shown)
    step = ResolvedStep(
        model=model,
        execution=execution,
        optimizer=config.optimizer.for_run(config.run.num_steps),
        losses=config.step,
        rerun_on_overflow=config.execution.rerun_on_overflow and execution.moe.ragged_buffer_factor is not None,
        kept=kept,
    )
    return ResolvedConfig(
        asked=config,
        plan=plan,
        step=step,
        folder=run_folder_of(config),
        notes=(*list_notes(asked, config, step, plan, num_devices), *dequantised),
    )


# What the dimensions of routed experts are called as settings.
SIZES = {"expert": "num_experts", "expert_dim": "base_moe_mlp_dim", "model_dim": "base_emb_dim"}


def _check_divides(config: TrainConfig, model: ModelConfig, plan: Plan) -> None:
    """Refuse degrees that do not divide the routed experts which they split, by the words that set them."""
    try:
        for name, spec in param_specs(model).items():
            plan.spec(name, spec)
    except UnevenSplitError as error:
        words = []
        for axis, degree in error.degrees.items():
            name = f"{axis}_parallelism"
            words.append(config.shown(name) if config.get(name) == degree else f"{config.shown(name)}, here {degree},")
        raise ValueError(
            f"{' × '.join(words)} does not divide {SIZES[error.dim]}={error.size} of {config.model_name}; use degrees "
            f"whose product is one of {error.fitting}"
        ) from None


def _check_places(config: TrainConfig) -> None:
    """Refuse places of a kind that cannot be read or written, and a checkpoint on this machine that is not there."""
    places = {
        "base_output_directory": (config.run.base_output_directory,),
        "model_name": (None if isinstance(config.model, ModelConfig) else config.model_name,),
        "load_parameters_path": (config.run.load_parameters_path,),
        "init_from": (config.run.init_from,),
        "dataset_path": config.data.dataset_path,
        "eval_paths": tuple(path for paths in config.data.named_eval_paths.values() for path in paths),
        "tokenizer_path": (config.data.tokenizer_path,),
    }
    for name, named in places.items():
        for place in filter(None, named):
            path = _path_of(name, place)
            if name == "load_parameters_path" and isinstance(path, Path) and not path.is_dir():
                raise ValueError(f"load_parameters_path: expected a folder, found none at {place}")


def _path_of(name: str, place: str) -> AnyPath:
    try:
        return as_path(place)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def run_folder_of(config: TrainConfig) -> AnyPath:
    """Return the folder that a run is written to."""
    return _path_of("base_output_directory", config.run.base_output_directory) / _run_name(config)


def _run_name(config: TrainConfig) -> str:
    name = config.run.run_name or _model_title(config)
    if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
        raise ValueError(f"run_name: expected a folder's name inside base_output_directory, got {name!r}")
    return name


def _model_title(config: TrainConfig) -> str:
    """Return what a run is called after its model: a preset's name, a folder's, or that of the run that trained it."""
    if config.model_folder is None:
        return config.model_name
    folder = config.model_folder.absolute()
    return f"{folder.parent.name}-{folder.name}" if folder.name == "model" else folder.name


def make_model(config: TrainConfig, hardware: Hardware) -> ModelConfig:
    """Make the model: its preset, or what its folder describes, with the overrides."""
    overrides, length = config.overrides, config.data.max_target_length or 0
    sizes: dict[str, Any] = {name: getattr(overrides, name) for name in (*FIELDS, *OTHERS)}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    model = resize(config.read_base_model(), sizes, config.model_name)
    if overrides.mtp_layers is not None:
        model = replace(model, mtp_layers=overrides.mtp_layers)
    if length > model.max_length:  # trained on longer sequences, it is a model for longer ones
        model = replace(model, max_length=length)
    auto = "float32" if hardware.platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(auto if overrides.dtype == "auto" else overrides.dtype)
    router = _make_router(config, model.moe.router)
    if overrides.load_balance_loss_weight is not None:
        router = _with_load_balance_loss(config, model, router)
    lora = _make_lora(config, model.lora)
    model = replace(
        model,
        moe=replace(model.moe, router=router, capacity_factor=overrides.capacity_factor),
        dtype=dtype,
        param_dtype=_weight_dtype(config, lora, dtype),
        lora=lora,
    )
    try:
        check_lora(model)
    except ValueError as error:
        raise ValueError(f"lora_targets: {error}") from None
    return model


def _make_lora(config: TrainConfig, of_folder: LoraConfig | None) -> LoraConfig | None:
    """Make what is to be adapted; None: the weights themselves are trained. A folder with adapters says it itself."""
    overrides = config.overrides
    if of_folder is not None:
        if config.run.from_scratch:
            raise ValueError(
                f"from_scratch=true: expected a model of weights alone, got {config.model_name}, which has adapters: "
                "what they are beside does not learn; leave it out, or name the model that they are for"
            )
        named = [name for name in LORA_SETTINGS if config.is_given(name)]
        if named:
            raise ValueError(
                f"{', '.join(named)}: {config.model_name} has adapters already, which are trained on; leave it out, or "
                "name the model that they are for"
            )
        return of_folder
    if overrides.lora_rank is None:
        return None
    if config.run.from_scratch:
        raise ValueError(
            f"lora_rank={overrides.lora_rank}: expected a model with parameters, got from_scratch=true: what "
            "adapters are beside does not learn; leave one of them out"
        )
    router, rank = overrides.lora_router, overrides.lora_rank
    return LoraConfig(rank=rank, alpha=overrides.lora_alpha, targets=overrides.lora_targets, router=router)


def _weight_dtype(config: TrainConfig, lora: LoraConfig | None, dtype: Any) -> Any:
    """Return the type of the weights that was asked for; of frozen ones by default that which they are stored in.

    Or that of the activations, if it is wider: the compiler would hold a widened copy of them all beside the others.
    """
    asked, folder = config.overrides.weight_dtype, config.base_folder
    if asked is None and lora is not None and folder is not None:
        wider = jnp.promote_types(stored_dtype(folder), dtype)
        if wider in (jnp.float32, jnp.bfloat16):
            return wider
    return jnp.dtype(config.overrides.value_of("weight_dtype"))


def _make_router(config: TrainConfig, router: RouterConfig) -> RouterConfig:
    """Make the routers with what the overrides change."""
    overrides = config.overrides
    if overrides.routing == "expert_choice":
        _check_expert_choice(config)
        router = replace(router, aux_loss_weight=0.0)
    if overrides.routing is not None and overrides.routing != router.selection:
        # What ranks experts means nothing where chance does.
        selection = cast(Selection, overrides.routing)
        router = replace(router, selection=selection, selection_bias=False, num_groups=1, groups_per_token=1)
    words = {name: getattr(overrides, name) for name in ("aux_loss", "aux_loss_weight", "z_loss_weight")}
    return replace(router, **{name: value for name, value in words.items() if value is not None})


def _check_expert_choice(config: TrainConfig) -> None:
    """Refuse what does not go with routing=expert_choice."""
    overrides, routing = config.overrides, config.shown("routing")
    if overrides.capacity_factor is None:
        raise ValueError(
            f"{routing}: expected a capacity_factor, as an expert takes as many tokens as it has slots, got none; 1.0 "
            "is an even share"
        )
    for name, weight in (
        ("aux_loss_weight", overrides.aux_loss_weight),
        ("load_balance_loss_weight", overrides.load_balance_loss_weight),
    ):
        if weight:
            raise ValueError(f"{routing} is balanced by construction; leave {config.shown(name)} out")


def _with_load_balance_loss(config: TrainConfig, model: ModelConfig, router: RouterConfig) -> RouterConfig:
    """Make the routers with MaxText's balance loss, in our words.

    Theirs has, in each sequence, how many of a token's K choices an expert gets where ours has the share of all
    choices, which is 1/K of it; and a run adds the mean over the layers with experts, multi-token prediction's
    included, where ours adds the sum. Its probabilities are a softmax of what ranks the experts there: the logits, or
    for DeepSeek's models and with a ``routed_score_func`` the scores made of them.
    """
    overrides = config.overrides
    weight = overrides.load_balance_loss_weight
    assert weight is not None
    for name in ("aux_loss_weight", "aux_loss"):
        if config.is_given(name):
            raise ValueError(
                f"{config.shown('load_balance_loss_weight')} and {config.shown(name)} contradict each other: both say "
                "what the balance loss is; leave one out"
            )
    num_layers = len(model.moe_layers) + (model.mtp_layers if config.step.mtp_loss_weight else 0)
    is_deepseek = model.family.startswith("deepseek")
    by_scores = router.score != "softmax" or is_deepseek or overrides.routed_score_func is not None
    return replace(
        router,
        aux_loss="sequence",
        aux_loss_probabilities="softmax" if by_scores else "normalized",
        aux_loss_weight=weight * model.moe.experts_per_token / max(num_layers, 1),
    )


def make_execution(config: TrainConfig, model: ModelConfig, plan: Plan) -> ModelExecution:
    """Make how the model runs on the plan's mesh."""
    asked, remat = config.execution, config.execution.remat
    execution = ModelExecution(
        moe=_make_moe_execution(config, model, plan),
        attention_implementation=asked.attention,
        scan_layers=asked.scans_layers,
        remat=remat[0] if remat[0] in ("none", "full") and len(remat) == 1 else remat,
    )
    check_execution(model, execution)
    return execution


SPARSE_OPERATIONS = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul")


def _make_moe_execution(config: TrainConfig, model: ModelConfig, plan: Plan) -> MoEExecution:
    """Make how the MoE layers run on the plan's mesh."""
    asked, factor = config.execution, config.overrides.capacity_factor
    backend, is_dense = asked.moe_backend, MoEExecution(moe_backend=asked.moe_backend).backend.strategy == "dense"
    if asked.sparse_matmul is not None and config.is_given("moe_backend") and is_dense == asked.sparse_matmul:
        raise ValueError(
            f"{config.shown('sparse_matmul')} and {config.shown('moe_backend')} contradict each other: "
            "moe_backend=dense is the one without a sparse matmul; leave one out"
        )
    if asked.sparse_matmul and factor is not None:
        raise ValueError(
            f"{config.shown('sparse_matmul')} and {config.shown('capacity_factor')} contradict each other: the sparse "
            "matmul drops no token; use sparse_matmul=false for fixed slots, or leave the capacity factor out"
        )
    if asked.sparse_matmul is False and factor is None:
        backend, is_dense = "dense", True
    choices = {entry.name: asked.kernel_choice(entry.name) for entry in fields(KernelChoice)}
    dense = ("grouped_matmul",) if factor is not None else SPARSE_OPERATIONS if is_dense else ()
    for operation in dense:
        # MaxText's flags for sparse kernels may stand beside a dense matmul, which does not read them.
        names = set(kernel_names(operation)) - config.source.translated
        if not any(config.is_given(name) for name in names):
            choices[operation] = "auto"
    named = any(choice != "auto" for choice in choices.values())
    strategy = None
    if factor is None and plan.expert > 1 and not is_dense:
        strategy = "all_to_all" if asked.expert_strategy == "auto" else asked.expert_strategy
    if asked.quant_config is not None:
        _check_quantization(config, plan, "capacity" if factor is not None else "dense" if is_dense else "")
    if strategy in ACROSS_RANKS:
        _check_sent_rows(config, plan)
    if model.model_dim % asked.width_chunks:
        raise ValueError(
            f"{config.shown('width_chunks')} does not divide base_emb_dim={model.model_dim}, the width of "
            f"{config.model_name}; use one of {divisors(model.model_dim)}"
        )
    return MoEExecution(
        moe_backend=backend,
        kernels=KernelChoice(**choices) if named else None,
        strategy=strategy,
        ragged_buffer_factor=asked.ragged_buffer_factor if strategy in ACROSS_RANKS else None,
        dispatch_dtype=asked.dispatch_dtype if strategy in ACROSS_RANKS else None,
        token_chunks=asked.token_chunks,
        width_chunks=asked.width_chunks,
        recompute_dispatch=asked.recompute_dispatch,
        quantization=asked.quant_config,
        tensor_split=config.mesh.tensor_split,
    )


def _check_sent_rows(config: TrainConfig, plan: Plan) -> None:
    """Refuse to send rows to experts on other devices twice, or in 8 bits where the mesh cuts them."""
    if config.execution.recompute_dispatch:
        raise ValueError(
            f"{config.shown('recompute_dispatch')}: the rows that come from other devices would be sent a second time; "
            "leave it out, or use expert_parallelism=1"
        )
    if config.execution.dispatch_dtype is not None and plan.tensor > 1 and plan.tensor_split == "model_dim":
        raise ValueError(
            f"{config.shown('dispatch_dtype')} cannot be used with tensor_split=model_dim and tensor_parallelism="
            f"{plan.tensor}: each rank's part of a row would have a scale of its own, and results depend on the mesh; "
            "use tensor_split=expert_dim"
        )


def _check_quantization(config: TrainConfig, plan: Plan, batched: str) -> None:
    """Refuse to quantise what is split in a way that scales would show; ``batched`` names matmuls without 8 bits."""
    shown = config.shown("quantization")
    if batched:
        other = config.shown("capacity_factor") if batched == "capacity" else "moe_backend=dense or sparse_matmul=false"
        raise ValueError(
            f"{shown} and {other} contradict each other: one batched matmul of all experts is not quantised; leave one "
            "out"
        )
    if plan.tensor > 1:
        raise ValueError(
            f"{shown} cannot be used with tensor_parallelism={plan.tensor}: what shares a scale would be cut, and "
            "results depend on the mesh; use fsdp or expert parallelism"
        )
