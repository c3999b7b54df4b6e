"""The start of a run: what its folder holds from earlier, the checkpoint to resume from, and the initial state."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from raggedmoe import compat, interop
from raggedmoe.hardware import Hardware
from raggedmoe.interop.companions import read_companions
from raggedmoe.kernels.registry import BACKWARD, DLHS, DRHS, FORWARD, Choice, KernelChoice, order_of
from raggedmoe.launch.processes import broadcast_from_first
from raggedmoe.lora import is_adapter
from raggedmoe.models.companions import AdapterBase, Companions
from raggedmoe.models.count import count_params
from raggedmoe.models.fingerprint import fingerprint
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params, Specs
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.sharding.training import put
from raggedmoe.storage import AnyPath
from raggedmoe.train.checkpoint.checkpoints import Checkpoints, RestoredCheckpoint
from raggedmoe.train.data.batches import Data
from raggedmoe.train.loop import run_folder
from raggedmoe.train.loop.metrics import MetricsWriter, NoMetrics
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.loop.start import Base, Start, branched_start, lora_settings, resumed_start
from raggedmoe.train.settings.config import TrainConfig, list_changes
from raggedmoe.train.settings.resolve import ResolvedConfig, run_folder_of
from raggedmoe.train.settings.words import read_values
from raggedmoe.train.step.programs import state_from_loaded, state_template


def startup_summary(config: ResolvedConfig, data: Data, hardware: Hardware) -> str:
    """Summarize the run that is about to start, for the screen."""
    model, count = config.step.model, count_params(config.step.model)
    trained = "" if model.lora is None else f", {count.trained / 1e6:.2f}M of them trained"
    formats = sorted({form.qtype for form in config.step.kept.values()})
    trained += f" beside matrices in {' and '.join(formats)}" if formats else ""
    degrees = ", ".join(f"{axis} {size}" for axis, size in config.plan.sizes.items() if size > 1)
    devices = f"{hardware.name} × {config.plan.num_devices} ({degrees})" if degrees else hardware.name
    return (
        f"{config.asked.model_name}: {count.total / 1e6:.2f}M parameters, {count.active / 1e6:.2f}M active{trained}"
        f", {model.moe.experts_per_token} of {model.moe.num_experts} experts in {len(model.moe_layers)} of "
        f"{model.num_layers} layers; {np.dtype(model.dtype).name} on {devices}, JAX {compat.JAX_VERSION}\n"
        f"{data.describe()}; {config.batch_size} × {config.data.sequence_length} tokens a step, "
        f"{config.run.num_steps} steps into {config.folder}"
    )


def kernel_summary(kernels: list[dict[str, Any]], choices: KernelChoice) -> list[str]:
    """List the kernels that were chosen, forward / backward, and why a kernel that the user named was not."""
    taken: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        taken.setdefault(f"{kernel['operation']} {kernel['direction']}", {})[kernel["chosen"]] = None
    parts = []
    for operation in dict.fromkeys(kernel["operation"] for kernel in kernels):
        forward, backward = (
            ", ".join(dict.fromkeys(name for direction in part for name in taken.get(f"{operation} {direction}", ())))
            for part in ((FORWARD,), (BACKWARD, DLHS, DRHS))
        )
        parts.append(f"{operation} {forward or 'none'} / {backward or 'none'}")
    lines = [f"kernels, forward / backward: {'; '.join(parts)}"] if parts else []
    skipped = {
        f"  {kernel['operation']} ({kernel['direction']}): not {other['name']}: {other['reason']}": None
        for kernel in kernels
        if _is_named(getattr(choices, kernel["operation"], "auto"), kernel["direction"])
        for other in kernel["others"]
        if not other["reason"].startswith("could run")
    }
    return [*lines, *skipped]


def _is_named(choice: Choice, direction: str) -> bool:
    return order_of(choice, direction) != "auto"


# Settings that a run of adapters may be resumed with other values of: they say how the frozen weights are held, which
# are known again in any type, and of which nothing was computed so far.
TYPES_OF_FROZEN = ("weight_dtype",)


def settings_to_resume(config: TrainConfig) -> Mapping[str, Any]:
    """Return the settings of the run that this one goes on with, as its run.json has them; none if it begins anew."""
    folder = run_folder_of(config)
    earlier = run_folder.read_description(folder) if config.checkpoints.enable_checkpointing else None
    if earlier is None or not (folder / run_folder.CHECKPOINTS).is_dir():
        return {}
    settings = earlier.get("settings", {})
    return settings if isinstance(settings, dict) else {}


def check_resumable(
    config: ResolvedConfig, data: Data, earlier: Mapping[str, Any], where: str, base: Base | None = None
) -> None:
    """Refuse to resume a run with other data, another base, or other values of settings that may not change."""
    differences = [
        *list_changes(earlier.get("settings", {}), config.asked.values(), () if base is None else TYPES_OF_FROZEN),
        *_batch_size_changes(config, earlier),
    ]
    if differences:
        raise ValueError(
            f"{where} is of a run with other settings: {'; '.join(differences)}. Use those to resume it, or another "
            "run_name to begin anew"
        )
    if earlier.get("data_fingerprint") != data.fingerprint:
        raise ValueError(
            f"{where} is of a run on other data than {data.describe()!r}; restore the files, or use another "
            "run_name to begin anew"
        )
    began_with = earlier.get("base")
    if base is not None and began_with is not None and not base.is_known_as(began_with["fingerprint"]):
        raise ValueError(
            f"{where} is of a run of adapters beside other weights than {base.origin.folder} has now; restore them, "
            "or use another run_name to begin anew"
        )


def _batch_size_changes(config: ResolvedConfig, earlier: Mapping[str, Any]) -> list[str]:
    """Say if the micro-batch changed. A run may resume on another mesh, with as many sequences in a micro-batch."""
    settings = read_values(earlier.get("settings", {}), run_folder.RUN)
    old = settings.data.sequences_per_device * earlier.get("devices", 1)
    new, num = config.micro_batch_size, config.plan.num_devices
    if old == new:
        return []
    use = f"per_device_batch_size={old // num}" if old % num == 0 else f"a number of devices that divides {old}"
    return [f"per_device_batch_size × devices={old} is now {new}: on {num} use {use}"]


def open_checkpoints(config: ResolvedConfig) -> Any:
    """Open the run's checkpoints as a context, which gives None if checkpointing is off."""
    kept = config.checkpoints
    if not kept.enable_checkpointing:
        return contextlib.nullcontext()
    return Checkpoints(config.folder / run_folder.CHECKPOINTS, kept)


def check_processes_agree(config: ResolvedConfig, fingerprint: str) -> None:
    """Require that all processes have the settings and data of process 0; others would train another model."""
    settings = {**config.asked.values(), "the data": fingerprint}
    process_0 = broadcast_from_first(settings)
    differences = [
        f"{name}={value} here and {process_0.get(name)} there"
        for name, value in settings.items()
        if process_0[name] != value
    ]
    if differences:
        raise ValueError(
            f"process {jax.process_index()} differs from process 0: {'; '.join(differences)}; "
            "expected all processes to be started with the same words, and to find the same data"
        )


def restore_state(
    config: ResolvedConfig,
    data: Data,
    checkpoints: Checkpoints | None,
    mesh: LogicalMesh,
    base: Base | None = None,
) -> RestoredCheckpoint | None:
    """Restore the newest good checkpoint, and require that it is this run's; None if there is none."""
    if checkpoints is None or not broadcast_from_first(checkpoints.steps()):
        return None
    folder = config.folder
    earlier = run_folder.read_description(folder)
    if earlier is not None:  # before its arrays are read, whose shapes may differ
        check_resumable(config, data, earlier, f"{folder / run_folder.RUN}", base)
    restored = checkpoints.restore(replace(state_template(config.step, mesh), frozen={}))
    assert restored is not None
    check_resumable(config, data, restored.extra, str(restored.path), base)
    if base is not None:
        restored = replace(restored, state=replace(restored.state, frozen=base.frozen))
    steps = config.run.num_steps
    if restored.step > steps:
        raise ValueError(f"steps={steps} is less than the {restored.step} that {restored.path} has done; use as many")
    return restored


def find_start(config: ResolvedConfig, data: Data, checkpoints: Checkpoints | None, mesh: LogicalMesh) -> Start:
    """Find what the run begins with: its own checkpoint, that of another run, or parameters that are loaded."""
    base = load_base(config, mesh)
    origin = None if base is None else base.origin
    restored = restore_state(config, data, checkpoints, mesh, base)
    if restored is not None:
        return replace(resumed_start(config, restored), base=origin)
    if config.run.init_from is not None:
        return replace(branched_start(config, data, mesh, base), base=origin)
    if base is not None:
        placed: Params = {**base.others, **base.frozen}
    else:
        params = load_initial_params(config)
        if params is None:
            return Start()
        placed = put(params, state_template(config.step, mesh).params)
    return Start(state=state_from_loaded(config.step, mesh)(placed, jax.random.key(config.run.seed)), base=origin)


def load_base(config: ResolvedConfig, mesh: LogicalMesh) -> Base | None:
    """Load the weights that adapters are trained beside, at every start: no checkpoint has them. None: no adapters."""
    model, folder = config.step.model, config.asked.base_folder
    if model.lora is None:
        return None
    if folder is None:
        raise ValueError(
            f"lora_rank={model.lora.rank}: expected a model with parameters, got the preset "
            f"{config.asked.model_name}, of which there are none; name the folder of a checkpoint"
        )
    types = {"dtype": model.dtype, "param_dtype": model.param_dtype}
    loaded = interop.load(folder, **types, keep_quantised=bool(config.step.kept), progress=True)
    if loaded.config.lora not in (None, model.lora):
        raise ValueError(
            f"load_parameters_path={folder}: expected no adapters, or those of {lora_settings(model.lora)}, got a "
            f"folder with adapters of {lora_settings(loaded.config.lora)}; name the folder as the model itself "
            "(model_name) without lora_rank, lora_alpha, lora_targets and lora_router, or give these its values"
        )
    specs = param_specs(model)
    new = {name for name in specs if is_adapter(name) and name not in loaded.params}
    _check_params(config, loaded.params, {name: spec for name, spec in specs.items() if name not in new}, folder)
    placed = put(loaded.params, _only(state_template(config.step, mesh).model_params, loaded.params))
    frozen = {name: value for name, value in placed.items() if specs[name].updated_by is None}
    known = None if loaded.companions is None else loaded.companions.base  # the folder has adapters itself
    absolute = folder.absolute() if isinstance(folder, Path) else folder
    origin = AdapterBase(
        folder=str(absolute) if known is None else known.folder, fingerprint=fingerprint(frozen, model)
    )
    others = {name: value for name, value in placed.items() if name not in frozen}
    return Base(origin=origin, model=model, frozen=frozen, others=others)


def _only(arrays: Params, names: Params) -> Params:
    return {name: arrays[name] for name in names}


def open_metrics(config: ResolvedConfig, start: Start, screen: Screen) -> MetricsWriter | NoMetrics:
    """Open the metrics files to continue. Results that the run does not resume from are moved aside, not lost."""
    if jax.process_index() != 0:
        return NoMetrics()
    folder = config.folder
    if start.resumed:
        aside = run_folder.set_aside_finished(folder, start.step)
    else:
        aside = run_folder.set_aside(folder, checkpoints=not config.checkpoints.enable_checkpointing)
    if aside is not None:
        screen.say(f"the results of an earlier run are now in {aside}")
    step = start.step if start.resumed else None
    return MetricsWriter(folder, resume_step=step, tensorboard=config.run.tensorboard)


def companions_of_run(config: ResolvedConfig, data: Data) -> Companions:
    """Return what belongs to the trained model: what its folder had, with the tokenizer that it was trained with."""
    folder = config.asked.model_folder
    of_model = Companions() if folder is None else read_companions(folder)
    return of_model if data.tokenizer is None else data.tokenizer.with_companions(of_model, folder)


def load_initial_params(config: ResolvedConfig) -> Params | None:
    """Load the parameters to start from, which must be this model's; None if they are drawn."""
    path, model = config.asked.parameters_folder, config.step.model
    if path is None:
        return None
    params = interop.load(path, dtype=model.dtype, param_dtype=model.param_dtype, progress=True).params
    _check_params(config, params, param_specs(model), path)
    return params


def _check_params(config: ResolvedConfig, params: Params, specs: Specs, path: AnyPath) -> None:
    """Require that a folder has exactly these parameters."""
    wrong = [
        f"{name}: expected {specs[name].shape if name in specs else 'none'}, "
        f"found {params[name].shape if name in params else 'none'}"
        for name in sorted(specs.keys() | params.keys())
        if name not in specs or name not in params or specs[name].shape != params[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{path} is no checkpoint of model_name={config.asked.model_name} as it is set; "
            f"{'; '.join(wrong[:5])}{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. "
            "Leave out the sizes, or use from_scratch=true to begin with new parameters"
        )
