"""Which kernels a program uses: the recorded selections, each distinct one once, in the order of their first use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raggedmoe.kernels.registry import Selection


@dataclass(frozen=True, kw_only=True)
class ChosenKernel:
    """An implementation in a program."""

    operation: str
    direction: str
    name: str
    level: str  # how far it is proven there
    note: str | None


def chosen_kernels(selections: Sequence[Selection]) -> tuple[ChosenKernel, ...]:
    """List the implementations that were taken, whatever the calls."""
    return tuple(dict.fromkeys(map(_chosen_kernel, selections)))


def describe_choices(selections: Sequence[Selection]) -> list[dict[str, Any]]:
    """Describe the choice for each call as JSON can hold it, with the reasons why the others were not taken."""
    entries: dict[str, dict[str, Any]] = {}
    for selection in selections:
        call, kernel, taken = selection.call, _chosen_kernel(selection), selection.chosen_candidate
        after = f"could run, but {kernel.name} comes first"
        entry = {
            "operation": kernel.operation,
            "direction": kernel.direction,
            "shapes": call.shapes,
            "chosen": kernel.name,
            "level": kernel.level,
            "shown_by": taken.shown_by,
            "note": kernel.note,
            "others": [
                {"name": c.implementation.name, "reason": c.reason or after}
                for c in selection.candidates
                if c is not taken
            ],
        }
        entries.setdefault(f"{call.operation} {call.direction} {call.shapes} {sorted(call.options.items())!r}", entry)
    return list(entries.values())


def _chosen_kernel(selection: Selection) -> ChosenKernel:
    taken = selection.chosen_candidate
    return ChosenKernel(
        operation=selection.call.operation,
        direction=selection.call.direction,
        name=selection.chosen.name,
        level=taken.level.name.lower(),
        note=taken.note,
    )
