"""The settings of a run's optimizer and of its schedule, and how long that is."""

from collections.abc import Callable
from dataclasses import replace

from raggedmoe.train.settings.fields import TYPES, Section, section_class, setting

PEAK_LEARNING_RATE = 3e-3  # the demo's


@section_class
class OptimizerConfig(Section):
    """The settings of the optimizer, AdamW or Muon, and of its schedule."""

    opt_type: str = setting(
        default="adamw",
        help="Optimizer: adamw; muon trains matrices of the layers by Muon, and the rest by AdamW",
        choices=("adamw", "muon"),
    )
    learning_rate: float | None = setting(
        default=None,
        help="Peak learning rate; none: 3e-3, less for models wider than the demo, a tenth for loaded parameters",
        above=0,
    )
    schedule: str = setting(
        default="cosine", help="Learning-rate schedule after the warm-up", choices=("cosine", "wsd", "constant")
    )
    warmup_steps: int | None = setting(
        default=None, help="Steps of linear warm-up; none: set by warmup_fraction", at_least=0
    )
    warmup_fraction: float = setting(
        default=0.02, help="Warm-up as a share of the steps, if warmup_steps is none", at_least=0, at_most=1
    )
    warmup_from: str = setting(
        default="first",
        help="Learning rate of warm-up step i of n, counted from 0: first has (i + 1)/n of the peak, zero has i/n, so "
        "that the first step changes nothing",
        choices=("first", "zero"),
    )
    schedule_steps: int | None = setting(
        default=None, help="Steps that the schedule spans, then the rate is 0; none: all steps", at_least=1
    )
    decay_fraction: float = setting(
        default=0.2, help="Share of the steps over which schedule=wsd decays", at_least=0, at_most=1
    )
    decay_style: str = setting(
        default="linear", help="Shape of the decay of schedule=wsd", choices=("linear", "cosine")
    )
    final_fraction: float | None = setting(
        default=None, otherwise=0.1, help="Final learning rate as a share of the peak", at_least=0, at_most=1
    )
    adam_b1: float = setting(default=0.9, help="Adam's beta1, decay of the first moment", at_least=0, below=1)
    adam_b2: float = setting(default=0.95, help="Adam's beta2, decay of the second moment", at_least=0, below=1)
    # A gradient whose norm is finite in float32 is at most 1.8e19, and over this still a number.
    adam_eps: float = setting(default=1e-8, help="Adam's epsilon, added outside the square root", at_least=1e-15)
    adam_eps_root: float = setting(default=0.0, help="Adam's epsilon inside the square root", at_least=0)
    muon_beta: float = setting(default=0.95, help="Decay of Muon's momentum", at_least=0, below=1)
    muon_consistent_rms: float | None = setting(
        default=0.2,
        help="Root mean square of Muon's updates before the learning rate, 0.2 being about AdamW's; none: each "
        "singular value is about one, or the root of outputs/inputs where there are more outputs",
        above=0,
    )
    muon_weight_decay: float | None = setting(
        default=None, help="Weight decay of the parameters that Muon trains; none: weight_decay", at_least=0
    )
    weight_decay: float = setting(default=0.1, help="Weight decay", at_least=0)
    weight_decay_of: str = setting(
        default="matrices", help="Parameters that decay: matrices, or all", choices=("matrices", "all")
    )
    grad_dtype: str = setting(
        default="float32", help="Type that gradients are rounded to before clipping", choices=TYPES
    )
    mu_dtype: str = setting(
        default="float32",
        help="Type of Adam's first moment and of Muon's momentum; Adam's second is float32",
        choices=TYPES,
    )
    gradient_clipping_threshold: float = setting(
        default=1.0, help="Largest global norm of the gradients; 0: no clipping", at_least=0
    )

    def for_run(self, steps: int) -> "OptimizerConfig":
        """Return the configuration for a run of so many steps, which the schedule spans if it is not told otherwise."""
        made = replace(self, schedule_steps=steps) if self.schedule_steps is None else self
        made.check_fits(made.num_steps, f"{'schedule_' if made is self else ''}steps={made.num_steps}")
        return made

    def check_fits(self, steps: int, of: str, shown: Callable[[str], str] | None = None) -> None:
        """Refuse a warm-up and a decay that are longer than so many steps of a schedule, which ``of`` calls them.

        ``shown`` is how the user wrote a setting, if it was not in Python.
        """
        shown = shown or (lambda name: f"{name}={getattr(self, name)}")
        warmup, decay = self._warmup_steps_of(steps), int(self.decay_fraction * steps)
        asked = shown("warmup_steps")
        if self.warmup_steps is None:
            asked = f"{shown('warmup_fraction')} ({warmup} steps)"
        if warmup > steps:
            raise ValueError(
                f"{asked} is more than {of}: the learning rate would never reach its peak; use fewer warm-up steps or "
                "more steps"
            )
        if self.schedule == "wsd" and warmup + decay > steps:
            raise ValueError(
                f"{asked} and {shown('decay_fraction')} ({decay} steps) together are more than {of}; use less of either"
            )

    def _warmup_steps_of(self, steps: int) -> int:
        return int(self.warmup_fraction * steps) if self.warmup_steps is None else self.warmup_steps

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up; without a model to follow, the demo's."""
        return PEAK_LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def final_share(self) -> float:
        """The final learning rate as a share of the peak."""
        return self.value_of("final_fraction")

    @property
    def num_steps(self) -> int:
        """Steps that the schedule spans."""
        if self.schedule_steps is None:
            raise ValueError("expected schedule_steps, got None: the schedule's length; `for_run` fills it in")
        return self.schedule_steps

    @property
    def num_warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return self._warmup_steps_of(self.num_steps)

    @property
    def decay_steps(self) -> int:
        """Steps over which "wsd" decays."""
        return int(self.decay_fraction * self.num_steps)
