"""`raggedmoe compile`: does it compile for a chip that is not here, does it fit, what does it cost, how fast is it."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import Progress

from raggedmoe import compat
from raggedmoe.aot.baselines import BASELINES, OPERATION, BaselineCall, ExampleCall
from raggedmoe.aot.case import CompileCase, CompileOutcome, Subject, case_to_json, outcome_to_json
from raggedmoe.aot.lowered import lower_here
from raggedmoe.aot.shapes import SHAPE_FORMS
from raggedmoe.aot.subjects import (
    ModelForward,
    MoELayer,
    MoELayerOnMesh,
    OperationCall,
    SplitOverDevices,
    TrainingStep,
    find_example,
    layer_config,
)
from raggedmoe.aot.topology import HOST, check_compiler, check_topology_name
from raggedmoe.aot.whole_model import can_extrapolate, resolve_on, whole_model
from raggedmoe.aot.worker import compile_cases
from raggedmoe.cli.compile_report import (
    lowered_lines,
    move_lines,
    outcome_lines,
    schedule_lines,
    schedule_table,
    whole_model_line,
)
from raggedmoe.interop.named_model import is_folder
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.kernels.catalog import operation as operation_named
from raggedmoe.kernels.proof import libtpu_version
from raggedmoe.kernels.registry import BACKWARD, FORWARD, OPERATIONS, implementations
from raggedmoe.kernels.value_and_gradients import differentiable
from raggedmoe.models.presets import ALIASES
from raggedmoe.models.presets import PRESETS as MODELS
from raggedmoe.moe.execution import OLDER_BACKENDS
from raggedmoe.names import check_known, unknown
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.files import is_file
from raggedmoe.train.settings.words import read_words

DIRECTION_WORDS = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, BACKWARD)}
WHOLES = ("layer", "model")  # subjects that are no operation
SHORT_DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16"}


def compile_(
    subject: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SUBJECT")] = (),
    topology: str = "tpu7x:2x2x1",
    dtype: str = "bfloat16",
    shape: str | None = None,
    implementation: str = "auto",
    direction: str = "both",
    gradient: str | None = None,
    moe_backend: str = "auto",
    tokens: int = 4096,
    layers: int | None = None,
    forward: bool = False,
    hlo: Path | None = None,
    schedule: bool = False,
    overlap: bool = False,
    against: tuple[str, ...] = (),
    trip: tuple[str, ...] = (),
    taken: tuple[str, ...] = (),
    timeout: float = 1800.0,
    json: bool = False,
) -> int:
    """Compile for a TPU that this machine does not have, with the public compiler: pass or fail, memory, cost, kernels.

    SUBJECT is one of these:

      OPERATION …          calls of one or several operations: grouped_matmul, expert_ffn, ragged_gather, …
      layer PRESET         a model's MoE layer, forward and backward, on --tokens tokens
      layer PRESET KEY=VALUE …   the same on the topology's devices, with the settings of `raggedmoe train`, sizes
                           among them
      model PRESET KEY=VALUE …   a whole training step (forward, backward, optimizer), with the settings of `raggedmoe
                           train`, on the topology's devices: split by the degrees among the settings, or by
                           fsdp_parallelism=-1 if there is none; the word model may be left out

    Try:

      raggedmoe compile grouped_matmul --topology v6e:2x2 --shape R=8192,I=2048,O=1408,G=16
      raggedmoe compile grouped_matmul --shape R=8192,I=2048,O=1408,G=16 --schedule --against dense,megablox
      raggedmoe compile ragged_gather --shape width-2880 --implementation all
      raggedmoe compile layer deepseek-v3 --tokens 4096
      raggedmoe compile layer olmoe-1b-7b expert_parallelism=4 fsdp_parallelism=2 token_chunks=2 --overlap
      raggedmoe compile model deepseek-v3-tiny per_device_batch_size=4 --topology v6e:2x2
      raggedmoe compile deepseek2-16b remat=full --topology v6e:4x4
      raggedmoe compile deepseek-v3 expert_parallelism=4 fsdp_parallelism=128 --topology tpu7x:4x8x8 --layers 4
      raggedmoe compile model deepseek-v3 max_target_length=4096 --layers 2 --topology cpu
      raggedmoe compile model deepseek-v3 --layers 2 --forward --topology cpu --moe-backend dense --hlo out/dense

    Each case is compiled in a process of its own, as the compiler may abort. Nothing is allocated or run. The exit code
    is 1 if anything fails or does not fit.

    Args:
        subject: what to compile, see above.
        topology: chips and their layout, such as v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1 or tpu7x:4x8x8, of which
            dcn_data_parallelism=N among the settings takes N slices; or cpu: the program is lowered on this machine,
            its matrix products are counted, and with --hlo it is compiled for
            this machine's CPU; that needs no TPU compiler.
        dtype: type of activations and weights: bf16 or f32.
        shape: of an operation: the name of an example call, or sizes (docs/compile.md lists the letters). By default
            the example calls of a real model's size.
        implementation: of an operation: auto, a name, or all: every one there is.
        direction: of an operation: forward, backward or both.
        gradient: of an operation: of its backward pass the gradient of this argument alone, such as rhs.
        moe_backend: of a layer or a model: the bundle of strategy and kernels.
        tokens: of a layer; on several devices, of each.
        layers: of a model: so many, one of them dense if the model has dense ones. From three with experts on, for a
            TPU, one fewer is compiled as well, from which follows what the whole model needs.
        forward: the forward pass alone: of a model, from tokens to logits.
        hlo: a folder to write the lowered (StableHLO) and the optimised program (HLO) to, which are counted: matrix
            products, kernels, loops, collectives. Of several cases each has a folder in it.
        schedule: read the compiler's schedule: loops, utilisation, spills, cycles; all compiler-predicted.
        overlap: list what moves between devices, in the order of the schedule, and what the TensorCore has to do
            until it waits for it.
        against: peers to put beside an operation's schedule: other implementations by name, and for grouped_matmul
            dense (one matmul of the same size, the limit) and ragged_dot (JAX's own).
        trip: REGION=N, how often a loop runs where the data decides and its values are not known.
        taken: REGION=SHARE, how often a region is entered where the data decides.
        timeout: seconds for one case.
        json: print JSON instead of tables.
    """
    dtype = SHORT_DTYPES.get(dtype, dtype)
    if dtype not in FLOATS:
        raise unknown("dtype", dtype, (*FLOATS, *SHORT_DTYPES))
    if forward and direction == "backward":
        raise ValueError("--forward and --direction backward contradict each other; leave one out")
    if topology != HOST:
        check_topology_name(topology)
        check_compiler()
    against = tuple(peer for text in against for peer in text.split(",") if peer)
    cases = [
        _cut_to_gradient(case, gradient)
        for case in _cases(
            subject,
            topology,
            dtype,
            shape,
            implementation,
            "forward" if forward else direction,
            OLDER_BACKENDS.get(moe_backend, moe_backend),
            tokens,
            layers,
            against,
            forward,
        )
        if gradient is None or not _is_forward(case.subject)
    ]
    if not cases:
        word = "--forward" if forward else f"--direction {direction}"
        raise ValueError(f"--gradient {gradient} is of the backward pass, got {word}; leave one out")
    if hlo is not None:
        cases = _in_folders(cases, hlo)
    if topology == HOST:
        return _lower(cases, json)
    steered = [
        dataclasses.replace(
            case,
            scheduled=schedule,
            overlaps=overlap,
            trips={region: int(value) for region, value in _pairs("trip", trip)},
            taken={region: float(value) for region, value in _pairs("taken", taken)},
        )
        for case in cases
    ]
    return _compile(steered, timeout, json)


def _cases(
    subject: tuple[str, ...],
    topology: str,
    dtype: str,
    shape: str | None,
    implementation: str,
    direction: str,
    moe_backend: str,
    tokens: int,
    layers: int | None,
    against: tuple[str, ...],
    forward: bool = False,
) -> list[CompileCase]:
    """Make the cases that were asked for, every name checked."""
    if not subject:
        raise ValueError(f"expected {', '.join(OPERATIONS)}, layer PRESET or model PRESET; got nothing to compile")
    if subject[0] == "layer":
        return [_layer(subject[1:], topology, dtype, moe_backend, tokens, forward)]
    if subject[0] == "model" or _describes_run(subject[0]):
        words = subject[1:] if subject[0] == "model" else subject
        config, name = _read_run(words, topology, dtype, moe_backend)
        fewer = []
        if layers is not None and topology != HOST and not forward:
            fewer = [layers - 1] if can_extrapolate(resolve_on(config, topology).step.model, layers) else []
        return [_model(config, name, topology, num, forward) for num in (layers, *fewer)]
    check_known("direction", direction, DIRECTION_WORDS)
    return [
        case
        for name in subject
        for case in _operation_cases(name, topology, dtype, shape, implementation, DIRECTION_WORDS[direction], against)
    ]


def _describes_run(word: str) -> bool:
    """Tell whether a word is a setting, a file of settings, or a model of `raggedmoe train`."""
    return "=" in word or is_file(word) or word in (*MODELS, *ALIASES) or is_folder(word)


def _layer(
    words: tuple[str, ...], topology: str, dtype: str, moe_backend: str, tokens: int, forward: bool
) -> CompileCase:
    if not words:
        raise ValueError("expected layer PRESET, such as layer deepseek-v3, got 'layer'")
    has_settings = len(words) > 1 or "=" in words[0] or is_file(words[0])
    if not has_settings:
        layer_config(words[0])
    passes = "forward" if forward else "forward and backward"
    title = f"layer {' '.join(words)}, {tokens} tokens{' a device' if has_settings else ''}, {dtype}, {passes}"
    layer: MoELayer | MoELayerOnMesh
    if not has_settings:
        layer = MoELayer(preset=words[0], tokens=tokens, dtype=dtype, moe_backend=moe_backend, forward=forward)
    else:
        config = _with_backend(read_words(words), moe_backend)
        config.read_base_model()
        chips = None if topology == HOST else topology
        layer = MoELayerOnMesh(config=config, tokens=tokens, topology=chips, dtype=dtype, forward=forward)
    return CompileCase(title=title, subject=layer, topology=topology)


def _with_backend(config: TrainConfig, moe_backend: str) -> TrainConfig:
    """Return the configuration with a backend, unless it was given one."""
    if config.execution.moe_backend != "auto":
        return config
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, moe_backend=moe_backend))


def _read_run(words: tuple[str, ...], topology: str, dtype: str, moe_backend: str) -> tuple[TrainConfig, str]:
    """Read the words of a run that is compiled for a topology, all of whose devices it uses, and what it is called."""
    if not words:
        raise ValueError("expected model PRESET, such as model deepseek-v3-tiny; `raggedmoe models` lists them")
    config = _with_backend(read_words(words), moe_backend)
    config.read_base_model()  # a folder that is not there is named now, and not by a process for each case
    on_all = config if topology == HOST else config.on_all_devices()
    name = " ".join(words if on_all == config else (*words, "fsdp_parallelism=-1"))
    if config.overrides.dtype != "auto":
        return on_all, name
    return dataclasses.replace(on_all, overrides=dataclasses.replace(config.overrides, dtype=dtype)), name


def _model(config: TrainConfig, name: str, topology: str, layers: int | None, forward: bool) -> CompileCase:
    subject = ModelForward if forward else TrainingStep
    chips = None if topology == HOST else topology
    return CompileCase(
        title=f"{'forward pass' if forward else 'training step'} of {name}"
        f"{'' if layers is None else f', {layers} layers'}",
        subject=subject(config=config, num_layers=layers, topology=chips),
        topology=topology,
    )


def _operation_cases(
    name: str,
    topology: str,
    dtype: str,
    shape: str | None,
    implementation: str,
    directions: tuple[str, ...],
    against: tuple[str, ...],
) -> Iterator[CompileCase]:
    if name not in OPERATIONS:
        raise unknown("subject", name, (*OPERATIONS, *WHOLES, *MODELS, *ALIASES))
    known = [kernel for kernel in implementations(name) if kernel != "reference"]
    chosen = known if implementation == "all" else [implementation]
    for kernel in chosen:
        if kernel not in ("auto", "reference", *known):
            raise unknown(f"implementation of {name},", kernel, ("auto", "all", *known))
    baselines = tuple(BASELINES) if name == OPERATION else ()
    for peer in against:
        check_known(f"peer of {name},", peer, (*known, *baselines))
    calls = [shape] if shape is not None else [spec.name for spec in operation_named(name).specs if spec.large]
    for call in calls:
        if "=" not in call:
            specs = [spec.name for spec in operation_named(name).all_specs]
            if call not in specs:
                raise unknown(f"example call of {name},", call, (*specs, SHAPE_FORMS[name][0]))
        else:
            find_example(name, call, dtype)
        for direction in directions:
            for kernel in (*chosen, *(peer for peer in against if peer not in baselines)):
                operation_call = OperationCall(
                    operation=name, implementation=kernel, call=call, dtype=dtype, direction=direction
                )
                title = f"{name}/{kernel} {call} {dtype} {direction}"
                yield CompileCase(title=title, subject=operation_call, topology=topology)
            for peer in against:
                if peer in baselines:
                    baseline_call = BaselineCall(baseline=peer, call=call, dtype=dtype, direction=direction)
                    yield CompileCase(
                        title=f"{peer} {call} {dtype} {direction}", subject=baseline_call, topology=topology
                    )


def _is_forward(subject: Subject) -> bool:
    return isinstance(subject, ExampleCall) and subject.direction == FORWARD


def _cut_to_gradient(case: CompileCase, gradient: str | None) -> CompileCase:
    """Cut the backward pass of a case down to the gradient of one argument; None: leave it whole."""
    if gradient is None:
        return case
    call = case.subject
    if not isinstance(call, ExampleCall):
        raise ValueError(f"--gradient is of an operation's backward pass, got {case.title}; leave it out")
    known = differentiable(find_example(call.operation, call.call, call.dtype).arrays)
    check_known(f"differentiable argument of {call.operation},", gradient, known)
    title = f"{case.title}, d{gradient}"
    return dataclasses.replace(case, title=title, subject=dataclasses.replace(call, gradient=gradient))


def _in_folders(cases: list[CompileCase], folder: Path) -> list[CompileCase]:
    """Give the only case the folder for its programs, or each of several cases a folder in it."""
    if len(cases) == 1:
        return [dataclasses.replace(cases[0], hlo=str(folder))]
    names = [f"{number}-{re.sub(r'[^A-Za-z0-9_.=]+', '-', case.title)}" for number, case in enumerate(cases, 1)]
    return [dataclasses.replace(case, hlo=str(folder / name)) for case, name in zip(cases, names)]


def _pairs(option: str, texts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for text in texts:
        region, equals, value = text.partition("=")
        if not equals or not region.isdigit() or not value.replace(".", "", 1).isdigit():
            raise ValueError(f"--{option}: expected REGION=NUMBER with a region that --schedule prints, got {text!r}")
        yield region, value


def _compile(cases: list[CompileCase], timeout: float, json: bool) -> int:
    console = Console(stderr=json)
    outcomes: list[CompileOutcome] = []
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("compile", total=len(cases))
        progress.update(task, description=cases[0].title)
        for outcome in compile_cases(cases, timeout=timeout):
            outcomes.append(outcome)
            following = cases[len(outcomes) : len(outcomes) + 1]
            progress.update(task, advance=1, description=following[0].title if following else "")
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if json:
        print(dumps([outcome_to_json(outcome) for outcome in outcomes], indent=1))
        return 1 if failed else 0
    subject, topology = cases[0].subject, cases[0].topology
    where, slices = "one device of it", 1
    if isinstance(subject, SplitOverDevices):
        where, slices = "its devices as the degrees say", subject.config.mesh.plan.least.slices
    slices_of = f"{slices} slices of " if slices > 1 else ""
    versions = f"JAX {compat.JAX_VERSION}, libtpu {libtpu_version()}"
    console.print(f"{slices_of}{topology}, {where}; {versions}; compiled, not run")
    lines = [*outcome_lines(outcomes)]
    if any(outcome.schedule is not None for outcome in outcomes):
        lines += ["", *schedule_table(outcomes), *schedule_lines(outcomes)]
    lines += [line for outcome in outcomes if outcome.moves is not None for line in ("", *move_lines(outcome.moves))]
    whole = whole_model(outcomes)
    if whole is not None:
        lines.append(whole_model_line(whole))
    elif isinstance(subject, TrainingStep) and subject.num_layers is not None and len(cases) == 1:
        model = resolve_on(subject.config, topology).step.model
        enough = next((n for n in range(2, model.num_layers) if can_extrapolate(model, n)), None)
        if enough is not None:
            lines.append(
                f"the whole model: not known from so few layers, as a loop of one turn is none; --layers {enough}"
            )
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return 1 if failed or (whole is not None and whole.num_bytes > whole.available) else 0


def _lower(cases: list[CompileCase], json: bool) -> int:
    jax.config.update("jax_platforms", "cpu")  # where a TPU's compiler is installed, JAX would look for a TPU
    console = Console(stderr=json)
    programs = []
    for case in cases:
        lowered = lower_here(case)
        programs.append({"case": case_to_json(case), **dataclasses.asdict(lowered)})
        for line in () if json else lowered_lines(case, lowered):
            console.print(line, soft_wrap=True, highlight=False)
    if json:
        print(dumps(programs, indent=1))
    return 0
