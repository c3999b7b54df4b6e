"""The compiled programs of a run, and which kernels are in them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from raggedmoe.kernels.registry import Selection, recorded_selections
from raggedmoe.models.specs import param_specs
from raggedmoe.train.optimizer import make_optimizer
from raggedmoe.train.rows import Batch
from raggedmoe.train.state import TrainState, new_state
from raggedmoe.train.step import StepConfig, held_out_loss, train_step


@dataclass(frozen=True, kw_only=True)
class Programs:
    """What a run calls. Compiled before the first step, so that no step's time holds a compilation."""

    template: TrainState  # the state's shapes
    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState, Batch], Any]
    held_out: Callable[[Any, Batch], Any] | None  # None: nothing is held out
    kernels: list[dict[str, Any]]  # what was chosen for each operation, and why not the others, for run.json


def compile_programs(config: StepConfig, batch: Batch, *, evaluates: bool) -> Programs:
    """Trace and compile for batches like that one."""
    optimizer = make_optimizer(config.optimizer, param_specs(config.model))
    init = jax.jit(lambda key: new_state(config.model, optimizer, key))
    template = jax.eval_shape(init, jax.random.key(0))
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch)
    step = jax.jit(functools.partial(train_step, config=config), donate_argnums=0)
    with recorded_selections() as selections:
        lowered = step.lower(template, shapes)
    held_out = None
    if evaluates:
        held_out = (
            jax.jit(functools.partial(held_out_loss, config=config.model)).lower(template.params, shapes).compile()
        )
    return Programs(
        template=template, init=init, step=lowered.compile(), held_out=held_out, kernels=described_kernels(selections)
    )


def described_kernels(selections: list[Selection]) -> list[dict[str, Any]]:
    """Each distinct choice once, as JSON can hold it."""
    found: dict[str, dict[str, Any]] = {}
    for selection in selections:
        call = selection.call
        shapes = " ".join(f"{name}[{','.join(map(str, array.shape))}]" for name, array in call.arrays.items())
        taken = next(c for c in selection.candidates if c.implementation is selection.chosen)
        after = f"could run, but {selection.chosen.name} comes first"
        entry = {
            "operation": call.operation,
            "direction": call.direction,
            "shapes": shapes,
            "chosen": selection.chosen.name,
            "level": taken.level.name.lower(),
            "shown_by": taken.shown_by,
            "note": taken.note,
            "others": [
                {"name": c.implementation.name, "reason": c.reason or after}
                for c in selection.candidates
                if c is not taken
            ],
        }
        found.setdefault(f"{call.operation} {call.direction} {shapes} {sorted(call.options.items())!r}", entry)
    return list(found.values())
