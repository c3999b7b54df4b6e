"""The run, read top to bottom: check → compile → resume or begin → steps → the trained model."""

import time
from dataclasses import dataclass

from raggedmoe.hardware import Hardware
from raggedmoe.train import run_folder
from raggedmoe.train.begin import (
    earlier_run,
    first_state,
    given_params,
    headline,
    make_run,
    opened_checkpoints,
    opened_metrics,
)
from raggedmoe.train.data import open_data
from raggedmoe.train.fit import check_fit, memory_bytes
from raggedmoe.train.interruption import Interruption
from raggedmoe.train.profile import Trace
from raggedmoe.train.programs import compile_programs
from raggedmoe.train.run import Run, evaluate, finish, log_step, save
from raggedmoe.train.screen import Screen
from raggedmoe.train.settings import TrainConfig
from raggedmoe.train.state import TrainState
from raggedmoe.train.step import StepReport

FINISHED, NOT_FINITE, INTERRUPTED = 0, 3, 75  # exit codes; 75 is sysexits' "try again"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended, and the code with which the command exits."""

    code: int
    text: str


def train(config: TrainConfig, hardware: Hardware, screen: Screen) -> Outcome:
    """Train, from the newest checkpoint if there is one. All that can be refused is refused before it is compiled."""
    check_fit(config.settings.values["model_name"], config.step.model, memory_bytes(hardware), "this machine")
    data = open_data(config.data, config.step.model.vocab_size)
    with run_folder.locked(config.run.folder), Interruption() as interruption:
        earlier = earlier_run(config, data)
        screen.say(headline(config, data, hardware))
        for note in config.settings.notes:
            screen.say(f"  {note}")
        with opened_checkpoints(config) as checkpoints:
            given = given_params(config) if checkpoints is None or not checkpoints.steps() else None
            start = time.perf_counter()
            programs = compile_programs(config.step, next(data.train_batches()), evaluates=data.held_out is not None)
            screen.say(f"compiled in {time.perf_counter() - start:.1f} s")
            restored = None if checkpoints is None else checkpoints.restore(programs.template)
            with opened_metrics(config, restored, earlier, screen) as metrics:
                run = make_run(config, data, programs, metrics, checkpoints, screen, hardware)
                state = first_state(run, restored, given)
                if restored is None:
                    evaluate(run, state, 0)
                try:
                    return _steps(run, state, interruption)
                finally:
                    screen.stop()


def _steps(run: Run, state: TrainState, interruption: Interruption) -> Outcome:
    """Step after step. The next one is under way before the last one's report is read."""
    config, steps = run.config.run, run.config.step.optimizer.steps
    first = int(state.step)
    trace = Trace(config.profile, config.folder / run_folder.PROFILE)
    run.screen.start(first)
    pending: tuple[int, StepReport] | None = None
    run.since = time.perf_counter()
    for done in range(first + 1, steps + 1):
        state, report = run.programs.step(state, next(run.batches))
        if pending is not None:
            log_step(run, *pending)
        pending = (done, report)
        trace.step_done(report)
        stopped = interruption.signal is not None
        too_many = run.skipped_in_a_row >= config.max_skipped_steps
        evaluates = done == steps or (config.eval_interval > 0 and done % config.eval_interval == 0)
        saves = done == steps or stopped or done % config.checkpoint_period == 0
        if not (evaluates or saves or too_many):
            continue
        log_step(run, *pending)
        pending = None
        if run.skipped_in_a_row >= config.max_skipped_steps:
            return _not_finite(run, done)
        metric = evaluate(run, state, done) if evaluates else None
        if stopped and done < steps:
            run.metrics.event(done, "interrupted", str(interruption.signal))
        if saves:
            save(run, state, done, metric)
        if stopped and done < steps:
            return _interrupted(run, done, str(interruption.signal))
        run.since = time.perf_counter()
    trace.close()
    if trace.written is not None:
        run.screen.say(f"trace of {config.profile.steps if config.profile else 0} steps in {trace.written}")
    run.screen.stop()
    return Outcome(code=FINISHED, text=finish(run, state))


def _interrupted(run: Run, step: int, signal: str) -> Outcome:
    if run.checkpoints is None:
        return Outcome(
            code=INTERRUPTED, text=f"{signal}: stopped after step {step}; checkpoints are off, so it is lost"
        )
    run.checkpoints.wait()
    return Outcome(code=INTERRUPTED, text=f"{signal}: saved after step {step}; the same command goes on from there")


def _not_finite(run: Run, step: int) -> Outcome:
    text = f"stopped after step {step}: {run.skipped_in_a_row} steps in a row had a loss or gradient that is not finite"
    if run.checkpoints is None:
        return Outcome(code=NOT_FINITE, text=f"{text}; checkpoints are off, so there is none to go back to")
    run.checkpoints.wait()
    good = run.checkpoints.steps()
    last = f"the last good checkpoint is {run.config.run.folder / run_folder.CHECKPOINTS / f'step_{good[-1]:08}'}"
    return Outcome(
        code=NOT_FINITE,
        text=f"{text}; {last if good else 'there is no checkpoint yet'}. A lower learning_rate may help",
    )
