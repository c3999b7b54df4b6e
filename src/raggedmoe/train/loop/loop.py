"""The run, read top to bottom: check → resume or begin → compile → steps → the trained model."""

import time
from dataclasses import dataclass, replace
from typing import Any

import jax

from raggedmoe.hardware import Hardware
from raggedmoe.launch.processes import CANNOT_WRITE, agree_to_stop, wait_for_all
from raggedmoe.sharding.training import check_all_take_part, train_sharding
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.loop import run_folder
from raggedmoe.train.loop.begin import (
    check_processes_agree,
    initial_state,
    kernel_summary,
    load_initial_params,
    make_run,
    open_checkpoints,
    open_metrics,
    restore_state,
    startup_summary,
)
from raggedmoe.train.loop.interruption import Interruption
from raggedmoe.train.loop.profile import Trace
from raggedmoe.train.loop.run import Run, evaluate, finish, log_step, save
from raggedmoe.train.loop.screen import Screen
from raggedmoe.train.settings.resolve import ResolvedConfig
from raggedmoe.train.step.fit import check_compiled_fit, check_fit, memory_bytes
from raggedmoe.train.step.programs import compile_programs
from raggedmoe.train.step.state import TrainState

FINISHED, NOT_FINITE, INTERRUPTED = 0, 3, 75  # exit codes; the last is sysexits'


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended, and the code with which the command exits."""

    code: int
    text: str


def train(config: ResolvedConfig, hardware: Hardware, screen: Screen) -> RunOutcome:
    """Train, from the newest checkpoint if there is one. All that can be refused is refused before it is compiled."""
    model, plan = config.step.model, config.plan
    available = memory_bytes(hardware, -(-plan.num_devices // jax.process_count()))
    device_tokens = config.micro_batch_size * config.data.max_target_length // plan.num_token_shards
    name, mu_dtype = config.asked.model, config.step.optimizer.mu_dtype
    check_fit(name, model, device_tokens, available, plan, mu_dtype)
    sharding = train_sharding(plan)
    check_all_take_part(sharding)
    data = open_data(config.data, model.vocab_size, config.batch_size)
    check_processes_agree(config, data.fingerprint)
    with run_folder.lock_folder(config.folder):
        screen.say(startup_summary(config, data, hardware))
        for note in config.notes:
            screen.say(f"  {note}")
        with open_checkpoints(config) as checkpoints:
            restored = restore_state(config, data, checkpoints, sharding)
            loaded_params = load_initial_params(config) if restored is None else None
            with open_metrics(config, restored, screen) as metrics:
                held_out = data.held_out_batches(config.run.eval_steps, config.micro_batch_size)
                start = time.perf_counter()
                example = held_out[0] if held_out else None
                programs = compile_programs(config.step, next(data.train_batches()), example, sharding)
                check_compiled_fit(programs.bytes_needed, available, plan)
                screen.say(f"compiled in {time.perf_counter() - start:.1f} s")
                for line in kernel_summary(programs.kernels, config.step.execution.moe.kernel_choice):
                    screen.say(line)
                wait_for_all("compiled")
                run = make_run(
                    config, data, held_out, programs, metrics, checkpoints, screen, hardware, sharding, available
                )
                state = initial_state(run, restored, loaded_params, sharding)
                if restored is None:
                    evaluate(run, state, 0)
                return _steps(run, state)


def _steps(run: Run, state: TrainState) -> RunOutcome:
    """All steps, under a trace and with signals remembered. What cannot be written ends the run with what there is."""
    profile = run.config.folder / run_folder.PROFILE
    with Interruption() as interruption, Trace(run.config.run, profile) as trace:
        run.screen.start(int(state.step))
        try:
            outcome = _step_by_step(run, state, interruption, trace)
            trace.close()
            if trace.text is not None:
                run.screen.say(trace.text)
            return outcome
        except OSError as error:
            text = f"stopped: {error}; the checkpoints before are as they were, and the same command goes on from them"
            return RunOutcome(code=CANNOT_WRITE, text=text)
        finally:
            run.screen.stop()


def _step_by_step(run: Run, state: TrainState, interruption: Interruption, trace: Trace) -> RunOutcome:
    """The next step is under way before the last one's report is read."""
    config, steps = run.config.run, run.config.run.steps
    period = run.config.checkpoints.checkpoint_period
    pending: tuple[Any, ...] | None = None
    run.since = time.perf_counter()
    for done in range(int(state.step) + 1, steps + 1):
        batch = next(run.batches)
        state, report = run.programs.step(state, batch)
        while run.config.step.rerun_on_overflow and int(report.losses.dropped) > 0:
            _make_more_room(run, done, int(report.losses.dropped))
            state, report = run.programs.step(state, batch)
        if pending is not None:
            log_step(run, *pending)
        pending = (done, report)
        trace.step_done(report)
        last, stopped = done == steps, agree_to_stop(done, interruption.signal is not None)
        evaluates = last or (config.eval_interval > 0 and done % config.eval_interval == 0)
        is_due = done % period == 0
        if not (evaluates or is_due or stopped or run.skipped_in_a_row >= config.max_skipped_steps):
            continue
        log_step(run, *pending)
        pending = None
        if run.skipped_in_a_row >= config.max_skipped_steps:
            return _not_finite_outcome(run, done)
        metric = evaluate(run, state, done) if evaluates else None
        if stopped and not last:
            run.metrics.event(done, "interrupted", interruption.reason)
        # What was there before steps began to fail is not pushed out by copies of what fails.
        if last or stopped or (is_due and not run.skipped_in_a_row):
            save(run, state, done, metric)
        if stopped and not last:
            return _interruption_outcome(run, done, interruption.reason)
    return RunOutcome(code=FINISHED, text=finish(run, state))


def _make_more_room(run: Run, step: int, dropped: int) -> None:
    """Give the steps a larger buffer from here on: the one that dropped rows is run again, and left no trace."""
    step_config = run.config.step
    before = step_config.execution.moe.ragged_buffer_factor
    factor = larger_buffer_factor(before, run.config.plan.expert)
    moe = replace(step_config.execution.moe, ragged_buffer_factor=factor)
    execution = replace(step_config.execution, moe=moe)
    larger = replace(step_config, execution=execution, rerun_on_overflow=factor is not None)
    text = f"{dropped} rows dropped with ragged_buffer_factor={before}: run again with {factor or 'room for all'}"
    run.metrics.event(step, "rerun", text)
    run.screen.say(f"step {step}: {text}")
    programs = compile_programs(larger, next(run.data.train_batches()), None, run.sharding)
    check_compiled_fit(programs.bytes_needed, run.memory, run.config.plan)
    run.config = replace(run.config, step=larger)
    run.programs = replace(programs, held_out=run.programs.held_out)


def larger_buffer_factor(factor: float | None, expert_parallelism: int) -> float | None:
    """Twice the room for rows, or None for all of them where no rank can be sent more than that."""
    assert factor is not None
    return None if 2 * factor >= expert_parallelism else 2 * factor


def _interruption_outcome(run: Run, step: int, signal: str) -> RunOutcome:
    if run.checkpoints is None:
        text = f"{signal}: stopped after step {step}; checkpoints are off, so it is lost"
    else:
        run.checkpoints.wait()
        text = f"{signal}: saved after step {step}; the same command goes on from there"
    return RunOutcome(code=INTERRUPTED, text=text)


def _not_finite_outcome(run: Run, step: int) -> RunOutcome:
    text = f"stopped after step {step}: {run.skipped_in_a_row} steps in a row had a loss or gradient that is not finite"
    if run.checkpoints is None:
        return RunOutcome(code=NOT_FINITE, text=f"{text}; checkpoints are off, so there is none to go back to")
    run.checkpoints.wait()
    good = run.checkpoints.steps()
    last = "there is no checkpoint yet"
    if good:
        last = f"the last good checkpoint is {run.config.folder / run_folder.CHECKPOINTS / f'step_{good[-1]:08}'}"
    return RunOutcome(code=NOT_FINITE, text=f"{text}; {last}. A lower learning_rate may help")
