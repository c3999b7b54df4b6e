"""`raggedmoe bench`: how fast, against the limit and against others."""

import os
import shlex
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from json import JSONDecodeError, dumps, loads
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.markup import escape

from raggedmoe import compat
from raggedmoe.bench.children import Children
from raggedmoe.bench.contender import OURS
from raggedmoe.bench.in_process import results_in_process
from raggedmoe.bench.machine import ISAS, Machine, isa_environment, restrict_isa, this_machine
from raggedmoe.bench.model_cases import MODEL_SUBJECTS, measure_models, model_case_name
from raggedmoe.bench.report import (
    as_json,
    by_table,
    case_reasons,
    case_table,
    from_json,
    growths,
    insert_markdown,
    merge,
)
from raggedmoe.bench.report import markdown as as_markdown
from raggedmoe.bench.run import Result, Session
from raggedmoe.bench.subjects import SHAPED, case_names, measure_shapes
from raggedmoe.hardware import target_hardware
from raggedmoe.interop.named_model import is_folder
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.kernels.registry import OPERATIONS
from raggedmoe.launch.host_devices import make_cpu_devices
from raggedmoe.models.presets import ALIASES
from raggedmoe.models.presets import PRESETS as MODELS
from raggedmoe.names import unknown
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.words import read_words

PEERED = (*SHAPED, *MODEL_SUBJECTS)  # what has peers in processes of their own, on a CPU
SUBJECTS = (*OPERATIONS, "layer", "sweep", *MODEL_SUBJECTS)


def bench(
    subjects: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SUBJECT")] = (
        "grouped_matmul",
        "layer",
    ),
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    rounds: int = 7,
    case: str = "",
    isa: str | None = None,
    json: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FILE]")] = None,
    plot: Path | None = None,
    markdown: Path | None = None,
    devices: int | None = None,
    tokens: int = 1024,
    compare: Path | None = None,
    from_: Annotated[tuple[Path, ...], tyro.conf.arg(name="from", metavar="FILE …")] = (),
) -> int:
    """Measure kernels, layers and whole models on this machine, beside the peers that you would use instead.

    Subjects: "layer" (an MoE layer, from the router to the combined output), "grouped_matmul" (both directions, each
    gradient), "sweep" (both with as many rows for 8 to 512 experts), "train" (the demo's training step), "generate"
    (decoding with a 691M Qwen3-MoE), and the other operations by their names.

      raggedmoe bench                                   layer and grouped_matmul, all shapes, float32 and bfloat16
      raggedmoe bench layer --case mixtral              one shape; also: --case "decode", --case "mixtral forward"
      raggedmoe bench layer --isa avx2                  as a machine without AVX-512 would do
      raggedmoe bench layer sweep train generate --json out.json --plot out.png --markdown docs/speed.md
      raggedmoe bench --from a.json b.json --markdown docs/speed.md     what several runs measured, as one page

    Peers are jax.lax.ragged_dot and, where torch and transformers are installed, PyTorch's grouped_mm and the experts
    of transformers in each of its implementations. Each contender has a process of its own, as thread pools fight
    otherwise; they compute from the same weights, take turns round by round, and the best turn counts. A wrong result
    has no time.

    "of limit" is the limit's time over a contender's. The limit of many tokens is the fastest dense float32 matmul of
    the same useful FLOPs that XLA, NumPy's BLAS or PyTorch reaches on all cores; of few tokens (decode-1, -8, -32), and
    of "generate", reading each active weight once. The second limit has E different matrices and R/E rows for each:
    what lies between the two is nobody's fault. "peak MB" is what a call needs above what was there before it.

    The operations without peers, and everything on a GPU or TPU, are measured in this process, beside XLA's matmul or a
    copy. "layer [MODEL] KEY=VALUE …", with the settings of `raggedmoe train`, is a model's MoE layer on --devices
    devices, as the degrees of parallelism say: its time, and what its compiled programs cost one device, which does not
    depend on the machine: FLOPs, bytes, temporaries, what is exchanged. A CPU makes the devices. Before and after a
    change:

      raggedmoe bench layer olmoe-tiny fsdp_parallelism=8 --devices 8 --json > before.json
      raggedmoe bench layer olmoe-tiny fsdp_parallelism=8 --devices 8 --compare before.json
      raggedmoe bench layer olmoe-tiny fsdp_parallelism=2 expert_parallelism=4 expert_strategy=ring --devices 8

    Args:
        subjects: operations, "layer", "sweep", "train" or "generate"; or "layer" and settings.
        dtypes: types to measure.
        rounds: turns of each contender. One that is slow takes fewer.
        case: measure only cases whose name holds this text, such as mixtral or decode.
        isa: restrict all contenders to an instruction set: avx2.
        json: write the figures to this file; without a file print them instead of tables.
        plot: draw the shares of the limit into this PNG or SVG file.
        markdown: write tables to this file; in a page with the marks of an earlier one, between them.
        devices: of a layer with settings: how many. By default those that the degrees ask for.
        tokens: of a layer with settings: on each device.
        compare: of a layer with settings: what an earlier --json printed; the ratios of now to then are shown.
        from_: measure nothing, but show what these files of --json hold, as one run; the last one's, of the same case.
    """
    if from_:
        return _report_files(from_, json, plot, markdown)
    words = _settings_of(subjects, devices, compare)
    if json is not None and len(json) > 1:
        raise ValueError(f"expected one file after --json, got {' '.join(map(str, json))}; put subjects before it")
    if words is not None:
        _check(dtypes, rounds)
        return _layer_on_devices(words, dtypes, rounds, json, devices, tokens, compare)
    for subject in subjects:
        if subject not in SUBJECTS:
            raise unknown("subject", subject, SUBJECTS)
    _check(dtypes, rounds)
    if isa is not None and isa not in ISAS:
        raise unknown("isa", isa, ISAS)
    peered = [subject for subject in subjects if target_hardware().platform == "cpu" and subject in PEERED]
    in_process = [subject for subject in subjects if subject not in peered]
    if in_process and isa is not None:
        raise ValueError(f"--isa is for what has peers, {', '.join(PEERED)}, got {in_process[0]}; leave it out")
    if not in_process and not any(case in f"{name} {dtype}" for name in _all_names(peered) for dtype in dtypes):
        raise _no_case(subjects, case)
    machine = this_machine(isa)
    console = Console(stderr=json == ())
    console.print(f"[bold]{machine.title}[/]; best of {rounds} interleaved rounds", highlight=False)
    chosen = {"--case": case, "--isa": isa}
    command = shlex.join(["raggedmoe", "bench", *subjects, *(w for o, v in chosen.items() if v for w in (o, v))])
    groups: list[list[Result]] = []
    for group in _measure(peered, in_process, dtypes, rounds, case, isa, console):
        groups.append(group)
        _print_case(group, console)
        # After every case: a long run that is interrupted keeps what it has.
        if json:
            _write_json(as_json(machine, rounds, groups), json)
        if markdown is not None:
            _write_markdown(as_markdown(machine, rounds, command, groups), markdown)
    if not groups:
        raise _no_case(subjects, case)
    if json == ():
        _write_json(as_json(machine, rounds, groups), json)
    _print_growth(groups, console)
    _plot(groups, machine, plot, console)
    return 1 if any(result.failed and result.role == OURS for group in groups for result in group) else 0


def _report_files(
    files: tuple[Path, ...], json: tuple[Path, ...] | None, plot: Path | None, markdown: Path | None
) -> int:
    """Print and write the results of earlier runs as those of one."""
    machine, rounds, groups = merge({str(place): from_json(_read_json(place), str(place)) for place in files})
    console = Console(stderr=json == ())
    console.print(f"[bold]{machine.title}[/]; best of {rounds} interleaved rounds", highlight=False)
    for group in groups:
        _print_case(group, console)
    _print_growth(groups, console)
    if json is not None:
        _write_json(as_json(machine, rounds, groups), json)
    if markdown is not None:
        command = shlex.join(["raggedmoe", "bench", "--from", *map(str, files)])
        _write_markdown(as_markdown(machine, rounds, command, groups), markdown)
    _plot(groups, machine, plot, console)
    return 0


def _print_growth(groups: Sequence[Sequence[Result]], console: Console) -> None:
    """Print what ever more experts cost, of a sweep."""
    for columns in by_table(groups).values():
        for growth in growths(columns):
            console.print(f"{growth.case}, {growth.dtype}: {growth.sentence}", highlight=False, soft_wrap=True)


def _plot(groups: Sequence[Sequence[Result]], machine: Machine, place: Path | None, console: Console) -> None:
    """Draw the picture, if one is wanted."""
    if place is None:
        return
    from raggedmoe.bench.plot import plot_results

    plot_results([result for group in groups for result in group], machine.title, place)
    console.print(f"plot: {place.resolve()}")


def _all_names(peered: Sequence[str]) -> list[str]:
    """List the names of all cases with peers."""
    shaped = [name for subject in peered if subject in SHAPED for name in case_names(subject)]
    return shaped + [model_case_name(subject) for subject in peered if subject in MODEL_SUBJECTS]


def _no_case(subjects: tuple[str, ...], case: str) -> ValueError:
    return ValueError(f"no case of {', '.join(subjects)} holds the text {case!r}; try 'mixtral' or 'backward'")


def _print_case(group: Sequence[Result], console: Console) -> None:
    """Print a case's table, and below it why contenders have no time."""
    console.print(case_table(group), highlight=False)
    for line in case_reasons(group):
        style = "red" if ": FAILED: " in line else "dim"
        console.print(f"  {line}", style=style, highlight=False, markup=False, soft_wrap=True)
    console.print()


def _write_markdown(tables: str, place: Path) -> None:
    """Write the tables to a page, in place of those of an earlier run if it has any."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(insert_markdown(place.read_text() if place.exists() else None, tables))


def _write_json(plain: object, json: tuple[Path, ...]) -> None:
    """Write to the file, or print where there is none."""
    if json:
        json[0].parent.mkdir(parents=True, exist_ok=True)
        json[0].write_text(dumps(plain, indent=1) + "\n")
    else:
        print(dumps(plain, indent=1))


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
    if is_layer and (devices or compare or any(_is_setting(word) for word in rest)):
        return rest
    for option, value in (("devices", devices), ("compare", compare)):
        if value is not None:
            raise ValueError(f"--{option} belongs to layer KEY=VALUE …, got {' '.join(subjects)}; leave it out")
    return None


def _is_setting(word: str) -> bool:
    """Tell whether a word is a setting or a model of `raggedmoe train`, and not another subject."""
    return "=" in word or word in (*MODELS, *ALIASES) or (word not in SUBJECTS and is_folder(word))


def _layer_on_devices(
    words: tuple[str, ...],
    dtypes: tuple[str, ...],
    rounds: int,
    json: tuple[Path, ...] | None,
    devices: int | None,
    tokens: int,
    compare: Path | None,
) -> int:
    from raggedmoe.bench.mesh_layer import LayerProgram, earlier_figures, layer_programs, programs_as_json

    if tokens < 1:
        raise ValueError(f"expected --tokens >= 1, got {tokens}")
    earlier = {} if compare is None else earlier_figures(_read_json(compare), str(compare))
    config = read_words(words)
    on_all = config.on_all_devices()
    if on_all != config:
        words, config = (*words, "fsdp_parallelism=-1"), on_all
    found_devices = _devices(config, devices)
    title = f"{target_hardware().name}, {os.cpu_count()} cores, JAX {compat.JAX_VERSION}"
    console = Console(stderr=json == ())
    console.print(
        f"[bold]{title}[/]; layer {' '.join(words)}, {len(found_devices)} devices, {tokens} tokens on each; best of "
        f"{rounds} rounds; figures of one device's program",
        soft_wrap=True,
    )
    if earlier:
        console.print(f"[dim]{'':30} {'now':>20} {'then':>20} {'ratio':>9}[/]", soft_wrap=True)
    programs: list[LayerProgram] = []
    for dtype in dtypes:
        for program in layer_programs(config, found_devices, tokens, dtype, rounds):
            programs.append(program)
            console.print(f"[bold]{program.case}, {dtype}[/]", highlight=False)
            now = {"ms": 1e3 * program.seconds, **program.figures}
            for line in _figure_lines(now, earlier.get((program.case, dtype))):
                console.print(line, highlight=False, soft_wrap=True)
    if json is not None:
        _write_json(programs_as_json(title, words, tokens, programs), json)
    return 0


def _devices(config: TrainConfig, wanted: int | None) -> Sequence[jax.Device]:
    """Take so many devices, or as many as the degrees ask for, which must use them all."""
    plan = config.mesh.plan
    used = None if plan.open else plan.least.num_devices
    if wanted is None and used is None:
        raise ValueError("expected --devices N, as the degrees do not say how many; got none")
    if wanted is not None and (wanted < 1 or used not in (None, wanted)):
        raise ValueError(f"expected degrees that use all of --devices {wanted}, got {used}; set one to -1")
    number = wanted or used or 1
    make_cpu_devices(number)
    if jax.device_count() < number:
        raise ValueError(f"expected {number} devices, found {jax.device_count()} of {target_hardware().name}")
    return jax.devices()[:number]


def _read_json(place: Path) -> object:
    try:
        return loads(place.read_text())
    except (OSError, JSONDecodeError) as error:
        raise ValueError(f"{place}: expected a file that --json printed: {error}") from None


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


def _measure(
    peered: Sequence[str],
    in_process: Sequence[str],
    dtypes: tuple[str, ...],
    rounds: int,
    case: str,
    isa: str | None,
    console: Console,
) -> Iterator[list[Result]]:
    """Measure what has peers in processes of their own, and the rest in this one."""
    if "train" in peered and find_spec("grain") is None:
        raise ValueError("training needs more packages: pip install 'raggedmoe[train]'")
    with restrict_isa(isa), Children(isa_environment(isa)) as children, console.status("") as status:
        session = Session(
            children=children,
            rounds=rounds,
            dtypes=dtypes,
            only=case,
            say=lambda text: status.update(escape(text)),
        )
        yield from measure_shapes([s for s in peered if s in SHAPED], session)
        yield from measure_models([s for s in peered if s in MODEL_SUBJECTS], session)
    for subject in in_process:
        for dtype in dtypes:
            yield from results_in_process(subject, dtype, rounds, case)
