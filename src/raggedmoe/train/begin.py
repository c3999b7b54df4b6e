"""How a run begins: what was in its folder before, its description, and its first state."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from raggedmoe import compat, interop
from raggedmoe.hardware import Hardware
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Choice, Directions, KernelChoice
from raggedmoe.models.count import count_params
from raggedmoe.models.decoder import Params
from raggedmoe.models.flops import train_flops
from raggedmoe.models.specs import param_specs
from raggedmoe.parallel.processes import as_first_says
from raggedmoe.train import run_folder
from raggedmoe.train.checkpoint import Checkpoints, Restored
from raggedmoe.train.config import TrainConfig
from raggedmoe.train.data import Data
from raggedmoe.train.layout import Layout
from raggedmoe.train.metrics import MetricsWriter, NoMetrics
from raggedmoe.train.optimizer import make_optimizer
from raggedmoe.train.programs import Programs, places_of, state_template
from raggedmoe.train.rows import Batch
from raggedmoe.train.run import Run
from raggedmoe.train.screen import Screen
from raggedmoe.train.settings import changed, plain
from raggedmoe.train.speed import peak_flops
from raggedmoe.train.state import TrainState, state_of
from raggedmoe.version import __version__


def headline(config: TrainConfig, data: Data, hardware: Hardware) -> str:
    """What is about to happen."""
    model, count = config.step.model, count_params(config.step.model)
    degrees = ", ".join(f"{axis} {size}" for axis, size in config.plan.degrees.sizes.items() if size > 1)
    devices = f"{hardware.name} × {config.plan.degrees.num_devices} ({degrees})" if degrees else hardware.name
    return (
        f"{config.settings.values['model_name']}: {count.total / 1e6:.2f}M parameters, {count.active / 1e6:.2f}M active"
        f", {model.moe.experts_per_token} of {model.moe.num_experts} experts in {len(model.moe_layers)} of "
        f"{model.num_layers} layers; {np.dtype(model.dtype).name} on {devices}, JAX {compat.JAX_VERSION}\n"
        f"{data.describe()}; {config.data.batch_size} × {config.data.sequence_length} tokens a step, "
        f"{config.run.steps} steps into {config.run.folder}"
    )


def kernel_lines(kernels: list[dict[str, Any]], choices: KernelChoice) -> list[str]:
    """The kernels that were taken, forward / backward; and for what was asked for by name and not taken, why."""
    taken: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        taken.setdefault(f"{kernel['operation']} {kernel['direction']}", {})[kernel["chosen"]] = None
    parts = []
    for operation in dict.fromkeys(kernel["operation"] for kernel in kernels):
        both = [", ".join(taken.get(f"{operation} {direction}", {"none": None})) for direction in (FORWARD, BACKWARD)]
        parts.append(f"{operation} {both[0]} / {both[1]}")
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
    return (getattr(choice, direction) if isinstance(choice, Directions) else choice) != "auto"


def check_same_run(config: TrainConfig, data: Data, earlier: Mapping[str, Any], where: str) -> None:
    """Refuse settings and data that what an earlier run computed does not allow to change."""
    different = [
        *changed(earlier.get("settings", {}), plain(config.settings.values)),
        *_changed_batch(config, earlier),
    ]
    if different:
        raise ValueError(
            f"{where} is of a run with other settings: {'; '.join(different)}. Use those to resume it, or another "
            "run_name to begin anew"
        )
    if earlier.get("data_fingerprint") != data.fingerprint:
        raise ValueError(
            f"{where} is of a run on other data than {data.describe()!r}; restore the files, or use another "
            "run_name to begin anew"
        )


def _changed_batch(config: TrainConfig, earlier: Mapping[str, Any]) -> list[str]:
    """A run may go on on another mesh, with the same number of sequences in a micro-batch."""
    old = earlier.get("settings", {}).get("per_device_batch_size", 0) * earlier.get("devices", 1)
    new, num = config.run.micro_batch_size, config.plan.degrees.num_devices
    if old in (0, new):
        return []
    use = f"per_device_batch_size={old // num}" if old % num == 0 else f"a number of devices that divides {old}"
    return [f"per_device_batch_size × devices={old} is now {new}: on {num} use {use}"]


def opened_checkpoints(config: TrainConfig) -> Any:
    """A context with the run's checkpoints, or with None."""
    return contextlib.nullcontext() if config.checkpoints is None else Checkpoints(config.checkpoints)


def check_same_everywhere(config: TrainConfig, fingerprint: str) -> None:
    """Processes with other settings or other data would train models of their own, and nobody would see it."""
    mine = {**plain(config.settings.values), "the data": fingerprint}
    first = as_first_says(mine)
    other = [f"{name}={value} here and {first.get(name)} there" for name, value in mine.items() if first[name] != value]
    if other:
        raise ValueError(
            f"process {jax.process_index()} differs from process 0: {'; '.join(other)}; expected all processes to be "
            "started with the same words, and to find the same data"
        )


def restored_state(config: TrainConfig, data: Data, checkpoints: Checkpoints | None, layout: Layout) -> Restored | None:
    """What the newest good checkpoint holds, if there is one and it is this run's."""
    if checkpoints is None or not as_first_says(checkpoints.steps()):
        return None
    folder = config.run.folder
    earlier = run_folder.described(folder)
    if earlier is not None:  # before its arrays are read, whose shapes may differ
        check_same_run(config, data, earlier, f"{folder / run_folder.RUN}")
    restored = checkpoints.restore(state_template(config.step, layout))
    assert restored is not None
    check_same_run(config, data, restored.extra, str(restored.path))
    steps = config.run.steps
    if restored.step > steps:
        raise ValueError(f"steps={steps} is less than the {restored.step} that {restored.path} has done; use as many")
    return restored


def opened_metrics(config: TrainConfig, restored: Restored | None, screen: Screen) -> MetricsWriter | NoMetrics:
    """The files to go on with. Results that the run does not go on from are moved aside, not overwritten."""
    if jax.process_index() != 0:
        return NoMetrics()
    folder = config.run.folder
    if restored is None:
        aside = run_folder.set_aside(folder, checkpoints=config.checkpoints is None)
    else:
        aside = run_folder.set_aside_finished(folder, restored.step)
    if aside is not None:
        screen.say(f"the results of an earlier run are now in {aside}")
    step = None if restored is None else restored.step
    return MetricsWriter(folder, resume_step=step, tensorboard=config.run.tensorboard)


def make_run(
    config: TrainConfig,
    data: Data,
    held_out: list[Batch],
    programs: Programs,
    metrics: MetricsWriter | NoMetrics,
    checkpoints: Checkpoints | None,
    screen: Screen,
    hardware: Hardware,
    layout: Layout,
    memory: int | None,
) -> Run:
    """All parts together, described in run.json."""
    model, mtp_layers = config.step.model, config.step.mtp_layers
    layers = [*model.moe_layers, *range(model.num_layers, model.num_layers + mtp_layers)]
    run = Run(
        config=config,
        data=data,
        held_out=held_out,
        programs=programs,
        metrics=metrics,
        checkpoints=checkpoints,
        screen=screen,
        layout=layout,
        memory=memory,
        batches=data.train_batches(layout.own_rows(config.data.batch_size, config.step.micro_batches)),
        flops_per_token=train_flops(model, config.data.sequence_length, mtp_layers=mtp_layers),
        peak_flops=peak_flops(hardware, model.dtype, config.plan.degrees.num_devices),
        load=np.zeros((len(layers), model.moe.num_experts), np.int64),
    )
    count = count_params(model)
    description = {
        "name": config.run.folder.name,
        "raggedmoe": __version__,
        "jax": compat.JAX_VERSION,
        "hardware": hardware.name,
        "devices": config.plan.degrees.num_devices,
        "degrees": config.plan.degrees.sizes,
        "model": {
            "name": config.settings.values["model_name"],
            "total": count.total,
            "active": count.active,
            "moe_layers": layers,
            "num_experts": model.moe.num_experts,
            "experts_per_token": model.moe.experts_per_token,
        },
        "settings": plain(config.settings.values),
        "notes": list(config.notes),
        "data": data.describe(),
        "data_fingerprint": data.fingerprint,
        "kernels": programs.kernels,
        "flops_per_token": run.flops_per_token,
        "peak_flops": run.peak_flops,
    }
    if jax.process_index() == 0:
        run_folder.describe(config.run.folder, description)
    return run


def first_state(run: Run, restored: Restored | None, given: Params | None, layout: Layout) -> TrainState:
    """The state to go on from, with the data at its place."""
    if restored is not None:
        run.batches.set_state(restored.extra["data"])
        run.load = np.asarray(restored.extra["load"], np.int64).reshape(run.load.shape)
        run.screen.say(f"resumed after step {restored.step} from {restored.path}")
        run.metrics.event(restored.step, "resumed", restored.path.name)
        return restored.state
    key = jax.random.key(run.config.run.seed)
    if given is None:
        return run.programs.init(key)
    optimizer = make_optimizer(run.config.step.optimizer, param_specs(run.config.step.model))
    template = state_template(run.config.step, layout)
    begin = jax.jit(
        lambda params: state_of(params, optimizer, jax.random.split(key)[1]), out_shardings=places_of(template)
    )
    return begin(layout.put_params(given, template.params))


def given_params(config: TrainConfig) -> Params | None:
    """The parameters of `load_parameters_path`, required to be this model's; None: the run makes its own."""
    path, wanted = config.run.load_parameters_path, config.step.model
    if path is None:
        return None
    found = interop.load(path, dtype=wanted.dtype, param_dtype=wanted.param_dtype, progress=True).params
    specs = param_specs(wanted)
    wrong = [
        f"{name}: expected {specs[name].shape if name in specs else 'none'}, "
        f"found {found[name].shape if name in found else 'none'}"
        for name in sorted(specs.keys() | found.keys())
        if name not in specs or name not in found or specs[name].shape != found[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{path} is no checkpoint of model_name={config.settings.values['model_name']} as it is set; "
            f"{'; '.join(wrong[:5])}{f'; and {len(wrong) - 5} more' if len(wrong) > 5 else ''}"
        )
    return found
