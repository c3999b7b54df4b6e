"""`raggedmoe bench`: how fast, against the limit and against others."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

from raggedmoe import compat
from raggedmoe.bench.cases import Timing, layer_timings, operation_timings, sweep_timings
from raggedmoe.bench.training import train_timings
from raggedmoe.cli.train import start_with_cpu_devices
from raggedmoe.hardware import target_hardware
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.models.presets import ALIASES
from raggedmoe.models.presets import PRESETS as MODELS
from raggedmoe.names import unknown
from raggedmoe.sharding.axes import AXES
from raggedmoe.train.settings import in_keys, parse_settings

SUBJECTS = (*OPERATIONS, "layer", "sweep", "train")


def bench(
    subjects: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SUBJECT")] = (
        "grouped_matmul",
        "layer",
    ),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    rounds: int = 7,
    case: str = "",
    json: bool = False,
    plot: Path | None = None,
    devices: int | None = None,
    tokens: int = 1024,
    compare: Path | None = None,
) -> int:
    """Time kernels and the whole layer on this machine: the best of several interleaved rounds.

    Each is held against a limit: for matmuls, dense ones of the same useful FLOPs and type; for moves of rows, a copy.
    Contenders that are slow take fewer turns. "sweep" fixes the routed rows and raises the number of experts; "train"
    is a whole training step of the default model.

    "layer [MODEL] KEY=VALUE …", with the settings of `raggedmoe train`, is a model's MoE layer on --devices devices, as
    the degrees of parallelism say: its time, and what its compiled programs cost one device, which does not depend on
    the machine: FLOPs, bytes, temporaries, what is exchanged. A CPU makes the devices. Before and after a change:

      raggedmoe bench layer olmoe-tiny fsdp_parallelism=8 --devices 8 --json > before.json
      raggedmoe bench layer olmoe-tiny fsdp_parallelism=8 --devices 8 --compare before.json
      raggedmoe bench layer olmoe-tiny fsdp_parallelism=2 expert_parallelism=4 expert_strategy=ring --devices 8

    Args:
        subjects: operations, "layer", "sweep" or "train"; or "layer" and settings.
        dtypes: types to measure.
        rounds: turns of each contender.
        case: measure only cases whose name holds this text, such as mixtral.
        json: print the figures as JSON instead of a table.
        plot: draw the shares of the limit into this PNG or SVG file.
        devices: of a layer with settings: how many. By default those that the degrees ask for.
        tokens: of a layer with settings: on each device.
        compare: of a layer with settings: what an earlier --json printed; the ratios of now to then are shown.
    """
    words = _settings_of(subjects, devices, compare)
    if words is not None:
        _check(dtypes, rounds)
        return _layer_on_devices(words, dtypes, rounds, json, devices, tokens, compare)
    for subject in subjects:
        if subject not in SUBJECTS:
            raise unknown("subject", subject, SUBJECTS)
    _check(dtypes, rounds)
    title = f"{target_hardware().name}, {os.cpu_count()} cores, JAX {compat.JAX_VERSION}"
    console = Console(stderr=json)
    console.print(f"[bold]{title}[/]; best of {rounds} interleaved rounds")
    console.print(f"[dim]{'':2}{'contender':<28} {'ms':>10} {'GFLOP/s':>8} {'of limit':>9}[/]")
    found: list[Timing] = []
    for group in _measure(subjects, dtypes, rounds, case):
        found.extend(group)
        console.print(f"[bold]{group[0].case}, {group[0].dtype}[/]", highlight=False)
        for t in group:
            gflops = f"{t.gflops:.0f}" if t.gflops else ""
            line = f"  {t.contender:<28} {t.seconds * 1e3:>10.2f} {gflops:>8} {t.of_limit:>9.2f}"
            console.print(line, highlight=False)
    if not found:
        raise ValueError(f"no case of {', '.join(subjects)} holds the text {case!r}; try 'mixtral' or 'backward'")
    if json:
        print(dumps({"title": title, "timings": [dataclasses.asdict(t) for t in found]}, indent=1))
    if plot is not None:
        from raggedmoe.bench.plot import plot_timings

        plot_timings(found, title, plot)
        console.print(f"plot: {plot.resolve()}")
    return 0


def _check(dtypes: tuple[str, ...], rounds: int) -> None:
    for dtype in dtypes:
        if dtype not in FLOATS:
            raise unknown("dtype", dtype, FLOATS)
    if rounds < 1:
        raise ValueError(f"expected rounds >= 1, got {rounds}")


def _settings_of(subjects: tuple[str, ...], devices: int | None, compare: Path | None) -> tuple[str, ...] | None:
    """Read the settings of the layer that is asked for; None: something else is."""
    rest = subjects[1:]
    is_layer = subjects[:1] == ("layer",)
    if is_layer and (devices or compare or any("=" in word or word in (*MODELS, *ALIASES) for word in rest)):
        return rest
    for option, value in (("devices", devices), ("compare", compare)):
        if value is not None:
            raise ValueError(f"--{option} belongs to layer KEY=VALUE …, got {' '.join(subjects)}; leave it out")
    return None


def _layer_on_devices(
    words: tuple[str, ...],
    dtypes: tuple[str, ...],
    rounds: int,
    json: bool,
    devices: int | None,
    tokens: int,
    compare: Path | None,
) -> int:
    from raggedmoe.bench.mesh_layer import LayerProgram, as_json, earlier_figures, layer_programs

    if tokens < 1:
        raise ValueError(f"expected --tokens >= 1, got {tokens}")
    earlier = {} if compare is None else earlier_figures(_read_json(compare), str(compare))
    words = _on_all_devices(words)
    found_devices = _devices(words, devices)
    title = f"{target_hardware().name}, {os.cpu_count()} cores, JAX {compat.JAX_VERSION}"
    console = Console(stderr=json)
    console.print(
        f"[bold]{title}[/]; layer {' '.join(words)}, {len(found_devices)} devices, {tokens} tokens on each; best of "
        f"{rounds} rounds; figures of one device's program",
        soft_wrap=True,
    )
    if earlier:
        console.print(f"[dim]{'':30} {'now':>20} {'then':>20} {'ratio':>9}[/]", soft_wrap=True)
    found: list[LayerProgram] = []
    for dtype in dtypes:
        try:
            programs = layer_programs(words, found_devices, tokens, dtype, rounds)
        except ValueError as error:
            raise ValueError(in_keys(str(error))) from error
        for program in programs:
            found.append(program)
            console.print(f"[bold]{program.case}, {dtype}[/]", highlight=False)
            now = {"ms": 1e3 * program.seconds, **program.figures}
            for line in _figure_lines(now, earlier.get((program.case, dtype))):
                console.print(line, highlight=False, soft_wrap=True)
    if json:
        print(dumps(as_json(title, words, tokens, found), indent=1))
    return 0


def _on_all_devices(words: tuple[str, ...]) -> tuple[str, ...]:
    given = parse_settings(words).given
    return words if any(f"{axis}_parallelism" in given for axis in AXES) else (*words, "fsdp_parallelism=-1")


def _devices(words: tuple[str, ...], wanted: int | None) -> Sequence[jax.Device]:
    """Take so many devices, or as many as the degrees ask for, which must use them all."""
    degrees = [parse_settings(words).values[f"{axis}_parallelism"] for axis in AXES]
    used = None if -1 in degrees else math.prod(degrees)
    if wanted is None and used is None:
        raise ValueError("expected --devices N, as the degrees do not say how many; got none")
    if wanted is not None and (wanted < 1 or used not in (None, wanted)):
        raise ValueError(f"expected degrees that use all of --devices {wanted}, got {used}; set one to -1")
    number = wanted or used or 1
    start_with_cpu_devices(number)
    if jax.device_count() < number:
        raise ValueError(f"expected {number} devices, found {jax.device_count()} of {target_hardware().name}")
    return jax.devices()[:number]


def _read_json(place: Path) -> object:
    try:
        return loads(place.read_text())
    except (OSError, JSONDecodeError) as error:
        raise ValueError(f"--compare {place}: expected a file that --json printed: {error}") from None


def _figure_lines(now: dict[str, Any], earlier: dict[str, Any] | None) -> Iterator[str]:
    """Write each figure; where there is an earlier one, beside it and with the ratio."""
    for name in dict.fromkeys((*now, *(earlier or ()))):
        value = now.get(name, 0)
        line = f"  {name:<28} {_figure(name, value):>20}"
        if earlier is not None:
            then = earlier.get(name, 0)
            ratio = "1.000" if value == then else f"{value / then:.3f}" if then else "new"
            line += f" {_figure(name, then):>20} {ratio:>9}"
        yield line


def _figure(name: str, value: Any) -> str:
    return f"{value:,.2f}" if name == "ms" else f"{value:,.0f}"


def _measure(subjects: tuple[str, ...], dtypes: tuple[str, ...], rounds: int, case: str) -> Iterator[list[Timing]]:
    for subject in subjects:
        for dtype in dtypes:
            if subject == "layer":
                yield from layer_timings(dtype, rounds, case)
            elif subject == "train":
                yield from train_timings(dtype, rounds, case)
            elif subject == "sweep":
                yield from sweep_timings(dtype, rounds, case)
            else:
                yield from operation_timings(subject, dtype, rounds, case)
