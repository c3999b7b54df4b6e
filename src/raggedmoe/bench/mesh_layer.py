"""The MoE layer of a run's settings on several devices: its time, and what its compiled programs cost and exchange.

Time is this machine's. FLOPs, bytes and memory are the compiled program's, of one device, and the same on every machine
with this JAX: what a change of the code did can be read off them where host devices share a few cores.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax

from raggedmoe.aot.case import JitProgram
from raggedmoe.aot.compiled import cost_of, memory_of
from raggedmoe.aot.program_text import ProgramCounts, counts_of
from raggedmoe.aot.subjects import layer_on_devices
from raggedmoe.bench.measure import best_seconds
from raggedmoe.train.settings.config import TrainConfig

PASSES = {"forward": True, "forward+backward": False}  # the second with all gradients


@dataclass(frozen=True, kw_only=True)
class LayerProgram:
    """One compiled pass of the layer, and its best time."""

    case: str
    dtype: str
    seconds: float
    figures: Mapping[str, int]  # of one device, as `figures_of` names them


def layer_programs(
    config: TrainConfig, devices: Sequence[Any], tokens: int, dtype: str, rounds: int
) -> list[LayerProgram]:
    """Measure both passes of a run's layer in turns, on so many tokens of each device."""
    runs: dict[str, Callable[[], Any]] = {}
    figures = {}
    for case, forward in PASSES.items():
        program = layer_on_devices(config, devices, tokens=tokens, dtype=dtype, forward=forward)
        executable = jax.jit(program.function).lower(*program.args).compile()
        figures[case] = figures_of(executable)
        runs[case] = functools.partial(executable, *_draw_arguments(program))
    best = best_seconds(runs, rounds)
    return [LayerProgram(case=case, dtype=dtype, seconds=best[case], figures=figures[case]) for case in PASSES]


def figures_of(executable: jax.stages.Compiled) -> dict[str, int]:
    """Read what the compiler says of a program, and what its text has, of one device."""
    memory, cost, counts = memory_of(executable), cost_of(executable), counts_of(executable.as_text() or "")
    return {
        "FLOPs": round(cost.flops),
        "bytes accessed": round(cost.bytes_accessed),
        "FLOPs of dots, with loops": counts.product_flops,
        "dots in the text": counts.written,
        "loops of unknown length": counts.open_loops,
        "argument bytes": memory.arguments,
        "output bytes": memory.outputs,
        "temporary bytes": memory.temporaries,
        **_exchange_bytes(counts),
    }


def _exchange_bytes(counts: ProgramCounts) -> dict[str, int]:
    exchanged = {f"{kind} bytes": traffic.num_bytes for kind, traffic in sorted(counts.collectives.items())}
    return {**exchanged, "collective bytes": sum(exchanged.values())}


def _draw_arguments(program: JitProgram) -> tuple[Any, ...]:
    """Draw arrays for the arguments, each made where it lies, small enough that no activation is extreme."""
    leaves, tree = jax.tree.flatten(program.args)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def draw(key: jax.Array, leaf: Any) -> jax.Array:
        scale = leaf.shape[-1] ** -0.5 if leaf.shape else 1.0
        make = jax.jit(
            lambda key: (scale * jax.random.normal(key, leaf.shape)).astype(leaf.dtype), out_shardings=leaf.sharding
        )
        return make(key)

    return jax.tree.unflatten(tree, [draw(key, leaf) for key, leaf in zip(keys, leaves)])


def programs_as_json(title: str, words: Sequence[str], tokens: int, programs: Sequence[LayerProgram]) -> dict[str, Any]:
    """Describe a measurement as a file keeps it, for `earlier_figures`."""
    return {
        "title": title,
        "settings": list(words),
        "tokens_of_a_device": tokens,
        "programs": [asdict(program) for program in programs],
    }


def earlier_figures(plain: Any, source: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Read the time and the figures of a measurement that `programs_as_json` described, by pass and type."""
    try:
        return {
            (measured["case"], measured["dtype"]): {"ms": 1e3 * measured["seconds"], **measured["figures"]}
            for measured in plain["programs"]
        }
    except (KeyError, TypeError):
        raise ValueError(
            f"{source}: expected what `raggedmoe bench layer KEY=VALUE … --json` printed, got another kind of file"
        ) from None
