"""The run, read top to bottom: check → resume or begin → compile → steps → the trained model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from raggedmoe.hardware import target_hardware
from raggedmoe.launch.host_devices import make_cpu_devices
from raggedmoe.launch.processes import (
    CANNOT_WRITE,
    agree_to_stop,
    broadcast_from_first,
    join_processes,
    note_end,
    process_count,
    wait_for_all,
)
from raggedmoe.models.flops import train_flops
from raggedmoe.models.module import Decoder
from raggedmoe.sharding.axes import LogicalMesh
from raggedmoe.sharding.plan import count_slices
from raggedmoe.sharding.training import check_all_take_part
from raggedmoe.storage import AnyPath
from raggedmoe.train.data.batches import Data, open_data
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.loop import run_folder
from raggedmoe.train.loop.begin import (
    check_processes_agree,
    companions_of_run,
    find_start,
    kernel_summary,
    open_checkpoints,
    open_metrics,
    settings_to_resume,
    startup_summary,
)
from raggedmoe.train.loop.interruption import Interruption
from raggedmoe.train.loop.log import Callback, RunLog
from raggedmoe.train.loop.profile import Trace
from raggedmoe.train.loop.record import RunRecord, read_run
from raggedmoe.train.loop.run import Run, RunDevices
from raggedmoe.train.loop.sample import Sampler, make_sampler
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.loop.speed import Speed, peak_flops
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.model_defaults import check_data, keep_earlier_defaults
from raggedmoe.train.settings.resolve import ResolvedConfig, resolve
from raggedmoe.train.step.fit import check_compiled_fit, check_fit, memory_bytes
from raggedmoe.train.step.programs import compile_programs
from raggedmoe.train.step.state import TrainState

FINISHED, NOT_FINITE, INTERRUPTED = 0, 3, 75  # exit codes; the last is sysexits'


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended: the code with which the command exits, what there is to say, and what there is now."""

    code: int  # FINISHED, NOT_FINITE, INTERRUPTED or CANNOT_WRITE
    text: str
    folder: AnyPath
    model: Decoder | None = field(default=None, repr=False)  # the trained one, if the run finished; process 0 has it

    @cached_property
    def metrics(self) -> RunRecord:
        """The lines of the run's metrics files; `metrics.series("loss")` is a curve."""
        return read_run(self.folder)


def train(config: TrainConfig, *, callbacks: Sequence[Callback] = (), quiet: bool = False) -> RunOutcome:
    """Train, from the newest checkpoint if there is one. All that can be refused is refused before it is compiled.

    A callback is given each line of metrics.jsonl, and stops the run by returning True. ``quiet`` prints nothing.
    """
    join_processes()
    try:
        outcome = _check_and_train(config, callbacks, quiet)
    except BaseException:
        note_end(1, failed=True)
        raise
    note_end(outcome.code, failed=outcome.code == CANNOT_WRITE)
    return outcome


def _check_and_train(config: TrainConfig, callbacks: Sequence[Callback], quiet: bool) -> RunOutcome:
    """Find the devices, resolve the settings, refuse what cannot be run, and train."""
    num_made = make_cpu_devices(config.mesh.num_devices, process_count())
    hardware = target_hardware()
    config = keep_earlier_defaults(config, settings_to_resume(config))
    resolved = resolve(config, hardware, jax.device_count(), count_slices(jax.devices()))
    check_data(config, resolved.step.model)
    run, plan, model = resolved.run, resolved.plan, resolved.step.model
    silent = quiet or jax.process_index() != 0  # only process 0 prints
    screen = Screen(run.num_steps, run.steps_between_lines, Console(quiet=True) if silent else None)
    if num_made and hardware.platform == "cpu":
        where = "in each process, " if jax.process_count() > 1 else ""
        screen.say(f"made {num_made} host devices of this CPU, {where}as the degrees ask for so many")
    memory = memory_bytes(hardware, -(-plan.num_devices // jax.process_count()))
    device_tokens = resolved.micro_batch_size * resolved.data.sequence_length // plan.num_token_shards
    step = resolved.step
    check_fit(config.model_name, model, device_tokens, memory, plan, step.optimizer, step.kept)
    devices = RunDevices(hardware=hardware, mesh=plan.logical_mesh(), memory=memory)
    check_all_take_part(devices.mesh)
    return _train(resolved, devices, screen, callbacks)


def _train(config: ResolvedConfig, devices: RunDevices, screen: Screen, callbacks: Sequence[Callback]) -> RunOutcome:
    """Open the data and the folder, resume or begin, compile, and take the steps."""
    step, mesh = config.step, devices.mesh
    data = open_data(config.data, step.model.vocab_size, config.batch_size)
    check_processes_agree(config, data.fingerprint)
    with run_folder.lock_folder(config.folder):
        screen.say(startup_summary(config, data, devices.hardware))
        for note in config.notes:
            screen.say(f"  {note}")
        with open_checkpoints(config) as checkpoints:
            start = find_start(config, data, checkpoints, mesh)
            with open_metrics(config, start, screen) as metrics:
                held_out = data.held_out_batches(config.run.batches_per_evaluation, config.micro_batch_size)
                began = time.perf_counter()
                example = next(iter(held_out.values()))[0] if held_out else None
                programs = compile_programs(step, next(data.train_batches()), example, mesh)
                check_compiled_fit(programs.bytes_needed, devices.memory, config.plan)
                screen.say(f"compiled in {time.perf_counter() - began:.1f} s")
                for line in kernel_summary(programs.kernels, step.execution.moe.kernel_choice):
                    screen.say(line)
                wait_for_all("compiled")
                speed = _speed(config, devices)
                run = Run(
                    config=config,
                    devices=devices,
                    data=data,
                    held_out=held_out,
                    programs=programs,
                    checkpoints=checkpoints,
                    log=RunLog(config, metrics, screen, speed, callbacks),
                    sampler=_make_sampler(config, data, held_out, mesh, screen),
                    companions=companions_of_run(config, data),
                    parent=start.parent,
                    base=start.base,
                )
                run.describe(speed)
                state = run.initial_state(start)
                if not start.resumed:
                    run.evaluate(state, start.step)
                return _steps(run, state)


def _make_sampler(
    config: ResolvedConfig, data: Data, held_out: dict[str, list[Batch]], mesh: LogicalMesh, screen: Screen
) -> Sampler | None:
    """Make what the run samples its text with, and say where it cannot."""
    if config.run.num_sample_tokens and jax.process_count() > 1:
        screen.say(f"sample_tokens={config.run.num_sample_tokens}: no text is sampled in a run of several processes")
        return None
    return make_sampler(config, data, next(iter(held_out.values()), []), mesh)


def _speed(config: ResolvedConfig, devices: RunDevices) -> Speed:
    """Find what the run's speed is measured by, which on a CPU takes a second."""
    model, length = config.step.model, config.data.sequence_length
    return Speed(
        flops_per_token=train_flops(model, length, mtp_layers=config.step.mtp_layers),
        peak_flops=peak_flops(devices.hardware, jnp.dtype(model.dtype), config.plan.num_devices),
    )


def _steps(run: Run, state: TrainState) -> RunOutcome:
    """Run all steps, traced, with signals remembered. What cannot be written ends the run with what there is."""
    folder = run.config.folder
    with Interruption() as interruption, Trace(run.config.run, folder / run_folder.PROFILE) as trace:
        run.log.start(int(state.step))
        try:
            outcome = _step_by_step(run, state, interruption, trace)
            trace.close()
            if trace.text is not None:
                run.log.say(trace.text)
            return outcome
        except OSError as error:
            run.abandon(error)
            text = f"stopped: {error}; the checkpoints before are as they were, and the same command goes on from them"
            return RunOutcome(code=CANNOT_WRITE, text=text, folder=folder)
        finally:
            run.log.stop()


def _step_by_step(run: Run, state: TrainState, interruption: Interruption, trace: Trace) -> RunOutcome:
    """Run one step after the other; the next one is under way before the last one's report is read."""
    config, log = run.config.run, run.log
    evaluation_period, checkpoint_period = (
        config.steps_between_evaluations,
        run.config.checkpoints.steps_between_checkpoints,
    )
    pending: tuple[Any, ...] | None = None
    for done in range(int(state.step) + 1, config.num_steps + 1):
        state, report = run.step(state, done)
        if pending is not None:
            log.step(*pending)
        pending = (done, report)
        trace.step_done(report)
        stopped = agree_to_stop(done, interruption.signal is not None or log.stop_requested)
        last = done == config.num_steps or (stopped and _ends_with_model(interruption, log))
        evaluates = last or (evaluation_period > 0 and done % evaluation_period == 0)
        is_due = done % checkpoint_period == 0
        if not (evaluates or is_due or stopped or log.skipped_in_a_row >= config.max_skipped_steps):
            continue
        log.step(*pending)
        pending = None
        if log.skipped_in_a_row >= config.max_skipped_steps:
            return _not_finite_outcome(run, done)
        metric = run.evaluate(state, done) if evaluates else None
        if stopped and not last:
            log.event(done, "interrupted", interruption.reason)
        # What was there before steps began to fail is not pushed out by copies of what fails.
        if last or stopped or (is_due and not log.skipped_in_a_row):
            run.save(state, done, metric)
        if stopped and not last:
            return _interruption_outcome(run, done, interruption.reason)
        if last:
            break
    model, text = run.finish(state)
    return RunOutcome(code=FINISHED, text=text, folder=run.config.folder, model=model)


def _ends_with_model(interruption: Interruption, log: RunLog) -> bool:
    """Tell whether a run that stops is to be finished, as a callback asks, and not only saved, as a signal does."""
    return broadcast_from_first(log.stop_requested and interruption.signal is None)


def _interruption_outcome(run: Run, step: int, signal: str) -> RunOutcome:
    if run.checkpoints is None:
        text = f"{signal}: stopped after step {step}; checkpoints are off, so it is lost"
    else:
        run.checkpoints.wait()
        text = f"{signal}: saved after step {step}; the same command goes on from there"
    return RunOutcome(code=INTERRUPTED, text=text, folder=run.config.folder)


def _not_finite_outcome(run: Run, step: int) -> RunOutcome:
    skipped, folder = run.log.skipped_in_a_row, run.config.folder
    text = f"stopped after step {step}: {skipped} steps in a row had a loss or gradient that is not finite"
    if run.checkpoints is None:
        text = f"{text}; checkpoints are off, so there is none to go back to"
        return RunOutcome(code=NOT_FINITE, text=text, folder=folder)
    run.checkpoints.wait()
    good = run.checkpoints.steps()
    last = "there is no checkpoint yet"
    if good:
        last = f"the last good checkpoint is {folder / run_folder.CHECKPOINTS / f'step_{good[-1]:08}'}"
    return RunOutcome(code=NOT_FINITE, text=f"{text}; {last}. A lower learning_rate may help", folder=folder)
