"""A run under way, and what is done with it beside its steps: held-out loss, checkpoints, the trained model."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from raggedmoe import compat
from raggedmoe.hardware import Hardware
from raggedmoe.models.companions import AdapterBase, Companions
from raggedmoe.models.config_json import to_json
from raggedmoe.models.count import count_params
from raggedmoe.models.module import Decoder
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.sharding.training import local_rows, on_first_host
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from raggedmoe.train.data.batches import Batches, Data
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.loop import run_folder
from raggedmoe.train.loop.log import HeldOutLoss, RunLog, moe_layers
from raggedmoe.train.loop.record import read_run
from raggedmoe.train.loop.sample import Sampler
from raggedmoe.train.loop.speed import Speed
from raggedmoe.train.loop.start import Start
from raggedmoe.train.settings.resolve import ResolvedConfig
from raggedmoe.train.step.fit import check_compiled_fit
from raggedmoe.train.step.programs import Programs, compile_programs
from raggedmoe.train.step.state import TrainState
from raggedmoe.version import __version__


@dataclass(frozen=True, kw_only=True)
class RunDevices:
    """The devices of a run, and the mesh that they are."""

    hardware: Hardware
    mesh: LogicalMesh
    memory: int | None  # of each device, in bytes; None: nobody says


@dataclass(kw_only=True)
class Run:
    """A run under way: its configuration, devices, data and programs, where it writes, and where it is in the data."""

    config: ResolvedConfig
    devices: RunDevices
    data: Data
    held_out: dict[str, list[Batch]]  # of each set to evaluate on
    programs: Programs
    checkpoints: Checkpoints | None
    log: RunLog
    companions: Companions  # of the trained model
    parent: dict[str, Any] | None  # the checkpoint of another run that it began with
    sampler: Sampler | None = None  # None: no text is sampled
    base: AdapterBase | None = None  # where the frozen weights are from, that adapters are trained beside
    batches: Batches = field(init=False)

    def __post_init__(self) -> None:
        rows = local_rows(self.devices.mesh, self.config.batch_size, self.config.step.micro_batches)
        self.batches = self.data.train_batches(rows)

    def describe(self, speed: Speed) -> None:
        """Write run.json, which says what runs, on what and with which settings, and what belongs to the model."""
        if jax.process_index() != 0:
            return
        config, model = self.config, self.config.step.model
        count = count_params(model)
        description = {
            "name": config.folder.name,
            "raggedmoe": __version__,
            "jax": compat.JAX_VERSION,
            "hardware": self.devices.hardware.name,
            "devices": config.plan.num_devices,
            "degrees": config.plan.sizes,
            "model": {
                "name": config.asked.model_name,
                "total": count.total,
                "active": count.active,
                "moe_layers": moe_layers(config),
                "num_experts": model.moe.num_experts,
                "experts_per_token": model.moe.experts_per_token,
            },
            "settings": config.asked.values(),
            "parent": self.parent,
            "base": None if self.base is None else vars(self.base),
            "notes": list(config.notes),
            "data": self.data.describe(),
            "data_fingerprint": self.data.fingerprint,
            "kernels": self.programs.kernels,
            "flops_per_token": speed.flops_per_token,
            "peak_flops": speed.peak_flops,
        }
        run_folder.write_description(config.folder, description)
        run_folder.write_companions_of_checkpoints(config.folder, self.companions)

    def initial_state(self, start: Start) -> TrainState:
        """Return the state to train from, with the data at its position: a new one, unless the start has one."""
        if start.data_position is not None:
            self.batches.set_state(start.data_position)
        if start.load is not None:
            self.log.load = np.asarray(start.load, np.int64).reshape(self.log.load.shape)
        for line in start.lines:
            self.log.say(line)
        if start.event is not None:
            self.log.event(start.step, *start.event)
        return self.programs.init(jax.random.key(self.config.run.seed)) if start.state is None else start.state

    def step(self, state: TrainState, number: int) -> tuple[TrainState, Any]:
        """Start the next step. Where it drops rows and is to be run again, wait for it and give it more room."""
        batch = next(self.batches)
        state, report = self.programs.step(state, batch)
        while self.config.step.rerun_on_overflow and int(report.losses.dropped) > 0:
            self._make_more_room(number, int(report.losses.dropped))
            state, report = self.programs.step(state, batch)
        return state, report

    def _make_more_room(self, step: int, dropped: int) -> None:
        """Give the steps a larger buffer from here on: the one that dropped rows is run again, and left no trace."""
        config = self.config.step
        before = config.execution.moe.ragged_buffer_factor
        factor = larger_buffer_factor(before, self.config.plan.expert)
        moe = replace(config.execution.moe, ragged_buffer_factor=factor)
        execution = replace(config.execution, moe=moe)
        larger = replace(config, execution=execution, rerun_on_overflow=factor is not None)
        text = f"{dropped} rows dropped with ragged_buffer_factor={before}: run again with {factor or 'room for all'}"
        self.log.event(step, "rerun", text)
        self.log.say(f"step {step}: {text}")
        programs = compile_programs(larger, next(self.data.train_batches()), None, self.devices.mesh)
        check_compiled_fit(programs.bytes_needed, self.devices.memory, self.config.plan)
        self.config = replace(self.config, step=larger)
        self.programs = replace(programs, held_out=self.programs.held_out)

    def evaluate(self, state: TrainState, step: int) -> float | None:
        """Return the first set's held-out loss in nats per target, and write down all; None: nothing is held out.

        A sample of the model's text is written down too, if the run makes any.
        """
        loss = self._evaluate_losses(state, step)
        if self.sampler is not None:
            self.log.sample(step, self.sampler(state.model_params, state.amax_history))
        return loss

    def _evaluate_losses(self, state: TrainState, step: int) -> float | None:
        evaluate = self.programs.held_out
        if evaluate is None:
            return None
        losses = {}
        for name, batches in self.held_out.items():
            losses[name] = _mean_loss(jax.device_get([evaluate(state.layer_inputs, batch) for batch in batches]))
        self.log.held_out(step, losses)
        return next(iter(losses.values())).loss

    def save(self, state: TrainState, step: int, metric: float | None) -> None:
        """Write a checkpoint, with all that the run needs to go on exactly."""
        if self.checkpoints is None:
            return
        self.log.event(step, "checkpoint", "" if metric is None else f"held-out loss {metric:.4f}")
        self.log.flush()  # what the checkpoint covers is on disk before it is
        extra = {
            "model": to_json(self.config.step.model),
            "data": self.batches.get_state(),
            "load": self.log.load.tolist(),
            "settings": self.config.asked.values(),
            "parent": self.parent,
            "base": None if self.base is None else vars(self.base),
            "data_fingerprint": self.data.fingerprint,
            "devices": self.config.plan.num_devices,
        }
        self.checkpoints.save(step, replace(state, frozen={}), extra, metric=metric)
        self.log.restart_clock()

    def abandon(self, error: OSError) -> None:
        """Have nothing that is closed now raise another error than the one that ends the run."""
        self.log.abandon()
        if self.checkpoints is not None:
            self.checkpoints.abandon(error)

    def finish(self, state: TrainState) -> tuple[Decoder | None, str]:
        """Write the trained model, and return it with how it went. Process 0 does; all take part."""
        params = on_first_host(state.model_params)
        if params is None:
            return None, ""
        companions = replace(self.companions, base=self.base)
        model = Decoder(self.config.step.model, params=params, companions=companions)
        folder = run_folder.save_model(self.config.folder, model)
        self.log.flush()
        record = read_run(self.config.folder)
        lines = [f"finished: the model is in {folder}"]
        losses = [line["loss"] for line in record.held_out]
        if losses:
            first, last = ("not finite" if loss is None else f"{loss:.4f}" for loss in (losses[0], losses[-1]))
            lines.append(f"held-out loss {last} nats per target, from {first}")
        if record.load is not None:
            num_dead, since = len(record.load.dead_experts), record.load.dead_since
            dead = f"dead experts: {num_dead} of {self.log.load.size} (no token since step {since})"
            dropped = record.total("dropped")  # not known where somebody moved metrics.jsonl away
            lines.append(f"{dead}; dropped slots: {dropped:.0f}" if math.isfinite(dropped) else dead)
        if record.skipped_steps:
            lines.append(f"skipped steps, not finite: {len(record.skipped_steps)}")
        lines.append(f"raggedmoe report {self.config.folder} makes a page of it")
        return model, "\n".join(lines)


def _mean_loss(sums_and_counts: Any) -> HeldOutLoss:
    """Average the loss over the targets of all batches."""
    loss, num_targets = np.asarray(sums_and_counts, np.float64).sum(0)
    return HeldOutLoss(loss=float(loss / num_targets), num_targets=int(num_targets))


def larger_buffer_factor(factor: float | None, expert_parallelism: int) -> float | None:
    """Return twice the room for rows, or None for all of them where no rank can be sent more than that."""
    assert factor is not None
    return None if 2 * factor >= expert_parallelism else 2 * factor
