"""What a run begins with: the state of its own checkpoint or of another run's, or only parameters."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from raggedmoe.lora import LoraConfig
from raggedmoe.models.companions import AdapterBase
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.fingerprint import is_fingerprint_of
from raggedmoe.params import Params
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.train.checkpoint.checkpoints import RestoredCheckpoint
from raggedmoe.train.checkpoint.stored import StoredCheckpoint
from raggedmoe.train.data.batches import Data
from raggedmoe.train.loop.record import RUN
from raggedmoe.train.loop.saved_run import RUN_FORMS, SavedRun, find_run, stored_model
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.resolve import ResolvedConfig
from raggedmoe.train.settings.words import read_values
from raggedmoe.train.step.optimizer import learning_rate_schedule
from raggedmoe.train.step.programs import state_from_loaded, state_template
from raggedmoe.train.step.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run begins with. Without any of it the run is a new one."""

    state: TrainState | None = None  # None: one of new parameters
    base: AdapterBase | None = None  # where the frozen weights are from, that adapters are trained beside
    step: int = 0  # the number of steps that had been done
    data_position: dict[str, Any] | None = None  # None: at the first row
    load: Any = None  # the tokens of every expert that are not written down yet
    resumed: bool = False  # from a checkpoint of its own
    parent: dict[str, Any] | None = None  # the checkpoint of another run that it began with, also if it is resumed
    event: tuple[str, str] | None = None  # how it began, for metrics.jsonl
    lines: tuple[str, ...] = ()  # the same for the screen


@dataclass(frozen=True, kw_only=True)
class Base:
    """The frozen weights that adapters are trained beside, in their places; and what else was loaded with them."""

    origin: AdapterBase
    model: ModelConfig
    frozen: Params
    others: Params  # routers that are trained, and adapters where the folder has them

    def is_known_as(self, written: str) -> bool:
        """Tell whether a fingerprint that an earlier run wrote down is that of these weights."""
        return written == self.origin.fingerprint or is_fingerprint_of(written, self.frozen, self.model)


def resumed_start(config: ResolvedConfig, restored: RestoredCheckpoint) -> Start:
    """Return the start of a run that goes on from its own checkpoint."""
    skipped = int(jax.device_get(restored.state.skipped))
    earlier = read_values(restored.extra["settings"], str(restored.path))
    change = schedule_change(config, earlier, restored.step, skipped)
    return Start(
        state=restored.state,
        step=restored.step,
        data_position=restored.extra["data"],
        load=restored.extra["load"],
        resumed=True,
        parent=restored.extra.get("parent"),
        event=("resumed", restored.path.name if change is None else f"{restored.path.name}; {change}"),
        lines=(f"resumed after step {restored.step} from {restored.path}", *(() if change is None else (change,))),
    )


def schedule_change(config: ResolvedConfig, earlier: TrainConfig, step: int, skipped: int = 0) -> str | None:
    """Say what another number of steps than ``earlier`` does to the schedule; None: it is the same."""
    steps, before = config.run.num_steps, earlier.run.num_steps
    if steps == before:
        return None
    asked = config.asked.optimizer
    if asked.schedule_steps is not None:
        return f"steps={steps}, before {before}: the schedule spans schedule_steps={asked.schedule_steps}, as before"
    # A skipped step moves the schedule no further.
    now, then = (float(learning_rate_schedule(asked.for_run(num))(step - skipped)) for num in (steps, before))
    rate = f"of step {step + 1} stays {now:.3g}" if now == then else f"of step {step + 1} is {now:.3g}, not {then:.3g}"
    return f"steps={steps}, before {before}: the {asked.schedule} schedule now spans {steps}; the learning rate {rate}"


def branched_start(config: ResolvedConfig, data: Data, mesh: LogicalMesh, base: Base | None) -> Start:
    """Read the start of a run from the checkpoint of another that ``init_from`` names."""
    run, whole = _parent(config), config.run.init_state == "all"
    stored = run.open_checkpoint()
    _check_adapters(config, stored, base)
    steps, template = config.run.num_steps, replace(state_template(config.step, mesh), frozen={})
    if whole and stored.step >= steps:
        raise ValueError(
            f"steps={steps}: expected more than the {stored.step} that {run} has done, as init_state=all counts on "
            "from there; use more steps, or init_state=weights, which begins at step 0"
        )
    try:
        state = stored.read(template) if whole else _with_weights(config, stored, template, mesh, base)
    except ValueError as error:
        settings = f"`raggedmoe train {run.folder / RUN} init_from={run} run_name=…` takes the settings of that run"
        raise ValueError(f"init_from={config.run.init_from}: {error}\n{settings}") from None
    if base is not None:
        state = replace(state, frozen=base.frozen)
    parent = {"run": str(run.folder), "step": stored.step, "state": config.run.init_state}
    said = f"begins with the {'whole state' if whole else 'weights'} of step {stored.step} of {run.folder}"
    if not whole:
        said = f"{said}; optimizer, schedule and data begin anew"
        return Start(state=state, parent=parent, event=("branched", said), lines=(said,))
    same_data = stored.manifest.extra.get("data_fingerprint") == data.fingerprint
    where = "go on where they were" if same_data else "begin at the first row, as they or the batch are others"
    said = f"{said}; the schedule is at that step, the data {where}"
    return Start(
        state=state,
        step=stored.step,
        data_position=stored.manifest.extra["data"] if same_data else None,
        parent=parent,
        event=("branched", said),
        lines=(said,),
    )


def _parent(config: ResolvedConfig) -> SavedRun:
    """Find the run that ``init_from`` names."""
    place = config.run.init_from
    assert place is not None
    run = find_run(place)
    if run is None:
        raise ValueError(
            f"init_from={place}: expected {RUN_FORMS}, found no run there; load_parameters_path takes a model's folder"
        )
    if run.folder.resolve() == config.folder.resolve():
        raise ValueError(
            f"init_from={place} is the folder that this run writes to; use another run_name, or leave out init_from to "
            "resume the run"
        )
    return run


def _check_adapters(config: ResolvedConfig, stored: StoredCheckpoint, base: Base | None) -> None:
    """Require that both runs train adapters of one base, or that neither trains any."""
    named, theirs = f"init_from={config.run.init_from}", stored.manifest.extra.get("base")
    if base is None and theirs is not None:
        raise ValueError(
            f"{named}: expected a run of whole weights, got one of adapters; `raggedmoe export RUN FOLDER --merge` "
            "makes a model of it, for load_parameters_path=FOLDER"
        )
    if base is not None and theirs is None:
        raise ValueError(
            f"{named}: expected a run of adapters beside {base.origin.folder}, got one of whole weights; to train "
            f"adapters beside those, use load_parameters_path={stored.path.parent.parent / 'model'} without init_from"
        )
    if base is not None and theirs is not None:
        ours, lora = config.step.model.lora, stored_model(stored.manifest.extra, str(stored.path)).lora
        assert ours is not None
        assert lora is not None
        if replace(ours, targets=lora.targets) != lora:  # other targets have other arrays, which are compared
            raise ValueError(
                f"{named}: expected a run of adapters of {lora_settings(ours)}, got one of {lora_settings(lora)}, "
                "which learned with another factor, size or router; give lora_rank, lora_alpha and lora_router its "
                "values"
            )
    if base is not None and theirs is not None and not base.is_known_as(theirs["fingerprint"]):
        raise ValueError(
            f"{named}: expected a run of adapters beside {base.origin.folder}, got one beside other weights, those of "
            f"{theirs['folder']}"
        )


def lora_settings(lora: LoraConfig) -> str:
    """Say what adapters are, in the words of the settings."""
    return (
        f"lora_rank={lora.rank} lora_alpha={lora.alpha} lora_targets={','.join(lora.targets)} lora_router={lora.router}"
    )


def _with_weights(
    config: ResolvedConfig, stored: StoredCheckpoint, template: TrainState, mesh: LogicalMesh, base: Base | None
) -> TrainState:
    """Make the state of a new run with the parameters of a checkpoint."""
    params = stored.read({"params": template.params})["params"]
    frozen = {} if base is None else base.frozen
    return state_from_loaded(config.step, mesh)({**params, **frozen}, jax.random.key(config.run.seed))
