"""The settings of a run's length, folder, seed and checkpoints, and what a model brings along for settings."""

from collections.abc import Mapping
from typing import Any

from raggedmoe.train.settings.fields import Section, section_class, setting

SHORT_RUN = 20  # steps of a run that prints every one


@section_class
class RunConfig(Section):
    """A run's length, folder and seed, and what is done how often beside its steps."""

    steps: int | None = setting(
        default=None,
        otherwise=1000,
        help="Number of training steps, which the schedule spans by default",
        may_change=True,
        at_least=1,
    )
    seed: int = setting(
        default=0, help="Seed of the initial parameters and of all randomness in a step", at_least=0, below=2**32
    )
    load_parameters_path: str | None = setting(
        default=None, help="Checkpoint to start from: a Hugging Face folder or one of ours; alone, it is the model too"
    )
    from_scratch: bool = setting(
        default=False, help="Of a model's folder take architecture and tokenizer, and begin with new parameters"
    )
    base_output_directory: str = setting(default="out", help="Folder in which runs are written", may_change=True)
    run_name: str | None = setting(
        default=None, help="Name of the run and of its folder; none: the model's name", may_change=True
    )
    init_from: str | None = setting(
        default=None, help="Another run to begin with: RUN for its newest checkpoint, or RUN@STEP; see init_state"
    )
    init_state: str = setting(
        default="weights",
        help="What to take of init_from: weights (a new run, from step 0), or all, the optimizer's state too (the run "
        "goes on at that step of the schedule, and where it was in the data if they and the batch are the same)",
        choices=("weights", "all"),
    )
    line_period: int | None = setting(
        default=None,
        help="Steps between printed lines, not on a terminal; none: 10, or 1 in a run of 20 steps or fewer",
        may_change=True,
        at_least=1,
    )
    load_period: int = setting(
        default=10, help="Steps between lines of load.jsonl, the load of every expert", may_change=True, at_least=1
    )
    eval_interval: int | None = setting(
        default=None,
        otherwise=100,
        help="Steps between evaluations; 0: at the start and the end only",
        may_change=True,
        at_least=0,
    )
    eval_steps: int | None = setting(
        default=None, otherwise=16, help="Batches per evaluation", may_change=True, at_least=1
    )
    sample_tokens: int | None = setting(
        default=None,
        otherwise=0,
        help="Tokens of the text that the model writes at each evaluation, for the log and the report; 0: no text",
        may_change=True,
        at_least=0,
    )
    sample_prompt: str | None = setting(
        default=None,
        help="What that text continues; none: the beginning of the first row that is held out",
        may_change=True,
    )
    max_skipped_steps: int = setting(
        default=10,
        help="Steps in a row whose loss or gradient is not finite, each skipped, after which the run stops",
        may_change=True,
        at_least=1,
    )
    tensorboard: bool = setting(default=True, help="Write TensorBoard events as well", may_change=True)
    profiler: str = setting(
        default="none", help="xplane records a trace for xprof", choices=("none", "xplane"), may_change=True
    )
    profiler_steps: int = setting(default=3, help="Number of steps in the trace", may_change=True, at_least=1)
    skip_first_n_steps_for_profiler: int = setting(
        default=1, help="Number of steps before the trace", may_change=True, at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from is not None and self.load_parameters_path is not None:
            raise ValueError(
                f"init_from={self.init_from} and load_parameters_path={self.load_parameters_path} contradict each "
                "other: both say what the run begins with; leave one out"
            )
        if self.traces and self.steps is not None and self.steps <= self.skip_first_n_steps_for_profiler:
            raise ValueError(
                f"steps={self.steps} leaves nothing to trace after skip_first_n_steps_for_profiler="
                f"{self.skip_first_n_steps_for_profiler}; use more steps or skip fewer"
            )

    @property
    def traces(self) -> bool:
        """Whether a trace is recorded."""
        return self.profiler != "none"

    @property
    def num_steps(self) -> int:
        """Training steps."""
        return self.value_of("steps")

    @property
    def steps_between_lines(self) -> int:
        """Steps between printed lines."""
        return self.line_period or (1 if self.num_steps <= SHORT_RUN else 10)

    @property
    def steps_between_evaluations(self) -> int:
        """Steps between evaluations; 0: at the start and the end only."""
        return self.value_of("eval_interval")

    @property
    def batches_per_evaluation(self) -> int:
        """Batches that are held out for an evaluation."""
        return self.value_of("eval_steps")

    @property
    def num_sample_tokens(self) -> int:
        """Tokens that the model writes at an evaluation."""
        return self.value_of("sample_tokens")


@section_class
class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    enable_checkpointing: bool = setting(
        default=True, help="Write checkpoints, and resume from the newest", may_change=True
    )
    checkpoint_period: int | None = setting(
        default=None, otherwise=100, help="Steps between checkpoints", may_change=True, at_least=1
    )
    keep_last: int = setting(default=2, help="Number of newest checkpoints to keep", may_change=True, at_least=1)
    keep_best: bool = setting(
        default=True, help="Also keep the checkpoint with the lowest held-out loss", may_change=True
    )
    async_checkpointing: bool = setting(
        default=True, help="Write checkpoints while training continues", may_change=True
    )

    @property
    def steps_between_checkpoints(self) -> int:
        """Steps between checkpoints."""
        return self.value_of("checkpoint_period")


# What a model brings along for settings whose default is None. The demo takes about two minutes on two cores, in which
# a bias that moves by the published 0.001 a step would not balance the experts; small batches learn most in that time
# (docs/log.md).
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "demo": {
        "steps": 1200,
        "per_device_batch_size": 4,
        "final_fraction": 0.02,
        "bias_update_rate": 0.01,
        "eval_interval": 300,
        "eval_steps": 32,
        "sample_tokens": 64,
        "checkpoint_period": 300,
        "scan_layers": False,
    }
}
