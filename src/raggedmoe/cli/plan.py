"""`raggedmoe plan`: how a run is split over devices, before there are any."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from json import dumps
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from raggedmoe.aot.collectives import (
    TPU_ROW_UNIT,
    Collective,
    StepSizes,
    collectives_across_slices,
    columns_here,
    layer_collectives,
    least_sent,
    received_rows,
    sent_again,
    sent_for_rows,
)
from raggedmoe.hardware import HARDWARE, Hardware, hardware_by_name
from raggedmoe.launch.slices import parse_slice
from raggedmoe.lora import is_adapter
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import MoEConfig, strategy_name
from raggedmoe.moe.execution import ACROSS_RANKS, MoEExecution
from raggedmoe.params import ParamSpec
from raggedmoe.sharding.axes import axes_of
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import is_routed
from raggedmoe.train.settings.model_defaults import missing_data
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.step import ResolvedStep
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step.fit import state_bytes

MOST_CPU_DEVICES = 8  # that somebody may mean without saying that they are CPUs


def plan(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [KEY=VALUE ...]")] = (),
    devices: int | None = None,
    topology: str | None = None,
    hardware: str | None = None,
    json: bool = False,
) -> int:
    """Print how a run would be split: the mesh, who holds what, bytes per device, and what each MoE layer sends.

    The words are those of `raggedmoe train`. No device is needed, and nothing is allocated:

      raggedmoe plan deepseek-v3 expert_parallelism=4 fsdp_parallelism=-1 --topology tpu7x:4x8x8

    Args:
        words: a model, and settings as `raggedmoe train` takes them.
        devices: how many there are; by default as many as the degrees ask for.
        topology: TPU chips, such as v6e:4x4 or tpu7x:4x8x8, instead of a number; with dcn_data_parallelism=N, so many
            slices of them.
        hardware: the chip whose devices they are, such as h100; for up to 8 devices this machine's CPU by default.
        json: print JSON instead of tables.
    """
    asked = read_words(words)
    chip, num_devices = _devices(asked.mesh.plan, devices, topology, hardware)
    config = resolve(asked, chip, num_devices)
    made, model, execution = config.plan, config.step.model, config.step.execution
    strategy = strategy_name(model.moe, execution.moe)
    moe_layers = len(model.moe_layers) + config.step.mtp_layers
    sequences = config.micro_batch_size // made.num_token_shards
    tokens = sequences * config.data.sequence_length
    step = StepSizes(
        num_tokens=tokens,
        num_sequences=sequences,
        dtype=str(np.dtype(model.dtype)),
        ragged=chip.platform != "cpu",
        row_unit=TPU_ROW_UNIT if chip.platform == "tpu" else 1,
        kept={name.rpartition(".moe.")[2]: form for name, form in config.step.kept.items() if ".moe." in name},
    )
    collectives = layer_collectives(model.moe_layer, execution.moe, made, step)
    across = collectives_across_slices(config.step, made, step)
    state = state_bytes(model, made, config.step.optimizer, config.step.kept)
    if json:
        print(dumps(_as_json(config.step, made, step, collectives, across, state, moe_layers), indent=1))
        return 0
    console = Console(highlight=False)
    console.print(f"[bold]{asked.model_name}[/] on {_mesh_line(made, chip, topology)}")
    for note in config.notes:
        console.print(f"  {note}")
    missing = missing_data(asked, model)
    if missing is not None:  # it can be planned, but not trained so
        console.print(f"  {missing}")
    console.print(f"strategy {strategy}; {tokens:,} tokens of a micro-batch on each device, {step.dtype}")
    console.print()
    console.print(_parameter_table(made, config.step))
    total = state.total
    room = f" of {_size(_device_bytes(chip))}" if chip.hbm_bytes else ""
    console.print(
        f"training holds {_size(total)}{room} on each device, activations not counted (parameters "
        f"{_size(state.params)}, gradients {_size(state.gradients)}, the optimizer's moments {_size(state.moments)})"
    )
    if chip.hbm_bytes and total > _device_bytes(chip):
        console.print("[bold]it does not fit[/]: split it over more devices, fsdp_parallelism=-1 for example")
    console.print()
    if collectives:
        _print_layer(console, config.step, made, step, collectives, moe_layers)
    else:
        console.print("an MoE layer sends nothing: its experts, weights and tokens are all on one device")
    if across:
        console.print()
        _print_across_slices(console, config.step, made, across)
    return 0


def _print_layer(
    console: Console, run: ResolvedStep, made: Plan, step: StepSizes, collectives: list[Collective], layers: int
) -> None:
    console.print(
        "router and routed experts of each MoE layer, a micro-batch: bytes of a collective, and what a device sends of "
        f"them{' in its slice' if made.slices > 1 else ''} (what all tokens use, shared experts too, XLA moves as "
        "it sees fit)"
    )
    console.print(_collective_table(collectives, made.sizes))
    for line in _volume_lines(run, made, step, collectives, layers):
        console.print(line)


def _print_across_slices(console: Console, run: ResolvedStep, made: Plan, collectives: list[Collective]) -> None:
    """Print what crosses slices in a whole step: sums of gradients and a few numbers, all by the data axis."""
    console.print(
        f"across {made.slices} slices, a micro-batch of the whole model: the sums of all gradients, each of the part "
        "that a device stores, and of losses and load"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("what", "collective", "over", "bytes", "sent across"):
        table.add_column(title, justify="right" if title in ("bytes", "sent across") else "left")
    specs = param_specs(run.model)
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0])
    for collective in collectives:
        what = collective.what
        kind = f"gradients: {_kind(what, specs[what])}" if what in specs else what
        entry = groups[kind, collective.kind, _over(collective.axes, made.sizes)]
        entry[0] += collective.num_bytes
        entry[1] += collective.sent_across_slices
    for names, (num_bytes, sent) in sorted(groups.items(), key=lambda item: -item[1][1]):
        table.add_row(*names, _size(num_bytes), _size(sent))
    console.print(table)
    sent, times = sum(collective.sent_across_slices for collective in collectives), run.micro_batches
    whole = f", {_size(times * sent)} in a step of {times} micro-batches" if times > 1 else ""
    console.print(f"a device sends {_size(sent)} to other slices{whole}")


def _devices(plan: Plan, devices: int | None, topology: str | None, hardware: str | None) -> tuple[Hardware, int]:
    """Read which chip to plan for, and how many JAX devices there are."""
    if topology is not None and (devices is not None or hardware is not None):
        raise ValueError(f"expected --{'hardware' if devices is None else 'devices'} or --topology, got both")
    if topology is not None:
        from raggedmoe.aot.topology import find_chip

        chip = find_chip(topology)
        return chip, plan.least.slices * parse_slice(topology).num_devices
    if devices is None:
        if plan.open:
            raise ValueError(
                "a degree of -1 takes the devices that are left: say how many with --devices or --topology"
            )
        devices = plan.least.num_devices
    if devices < 1:
        raise ValueError(f"expected --devices >= 1, got {devices}")
    if hardware is None and devices > MOST_CPU_DEVICES:
        raise ValueError(
            f"{devices} devices: expected the chip that they are, got none; use --hardware with one of "
            f"{', '.join(HARDWARE)}, or --topology, such as tpu7x:4x8x8"
        )
    return hardware_by_name(hardware or "cpu"), devices


def _mesh_line(made: Plan, chip: Hardware, topology: str | None) -> str:
    sizes = " × ".join(f"{axis} {size}" for axis, size in made.sizes.items())
    slices = f"{made.slices} slices of " if made.slices > 1 else ""
    where = slices + (topology or f"{made.num_devices // made.slices} devices ({chip.name})")
    return f"{where}: {sizes} = {made.num_devices} devices"


def _device_bytes(chip: Hardware) -> int:
    assert chip.hbm_bytes is not None
    return chip.hbm_bytes // chip.devices_per_chip


def _parameter_table(made: Plan, run: ResolvedStep) -> Table:
    """Write the table of the parameters; those of a kind that are split alike are one line."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for name, spec in param_specs(run.model).items():
        form = run.kept.get(name)
        entry = groups[_kind(name, spec) + ("" if form is None else f" ({form.qtype})"), _split(made, name, spec)]
        entry[0] += Plan().device_bytes(name, spec, form)
        entry[1] += made.device_bytes(name, spec, form)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("parameters", "split", "whole", "on a device"):
        table.add_column(title, justify="left" if title in ("parameters", "split") else "right")
    for (kind, split), (whole, here) in sorted(groups.items(), key=lambda item: -item[1][1]):
        table.add_row(kind, split, _size(whole), _size(here))
    return table


def _kind(name: str, spec: ParamSpec) -> str:
    """Return the kind of a parameter, as a user calls it."""
    words = name.split(".")
    if is_adapter(name):
        return "adapters of experts" if is_routed(name, spec) else "adapters"
    if is_routed(name, spec):
        return "experts"
    if words[-1].startswith("router_"):
        return "routers"
    if words[-1].startswith("shared_"):
        return "shared experts"
    if "norm" in words[-1]:
        return "norms"
    return next((word for word in words if word in ("attention", "mlp", "embedding", "head")), words[-1])


def _split(made: Plan, name: str, spec: ParamSpec) -> str:
    sizes, parts = made.sizes, []
    for dim, entry in zip(spec.axes, made.spec(name, spec)):
        axes = [f"{axis} {sizes[axis]}" for axis in axes_of(entry) if sizes[axis] > 1]
        parts += [f"{dim} over {' × '.join(axes)}"] if axes else []
    return ", ".join(parts) or "whole on every device"


def _collective_table(collectives: list[Collective], sizes: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("pass", "what", "collective", "over", "bytes", "sent"):
        table.add_column(title, justify="right" if title in ("bytes", "sent") else "left", no_wrap=title != "over")
    for collective in sorted(
        collectives, key=lambda collective: (collective.direction != "forward", -collective.sent_bytes)
    ):
        cells = (
            collective.direction,
            collective.what,
            collective.kind,
            _over(collective.axes, sizes),
            _size(collective.num_bytes),
            _size(collective.sent_bytes),
        )
        table.add_row(*cells)
    return table


def _over(axes: Sequence[str], sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1)


def _volume_lines(
    run: ResolvedStep, made: Plan, step: StepSizes, collectives: list[Collective], layers: int
) -> Iterator[str]:
    model, execution = run.model, run.execution
    strategy = strategy_name(model.moe, execution.moe)
    total, again = sum(collective.sent_bytes for collective in collectives), sent_again(collectives)
    more = f", and {_size(again)} again, as the backward pass gathers weights anew" if again else ""
    yield f"a device sends {_size(total)} a layer{more}: {_size(layers * (total + again))} for all {layers} MoE layers"
    if execution.remat != "none":
        remat = execution.remat
        yield f"remat={remat}: what is computed again in the backward pass is sent again too; not counted here"
    least = least_sent(model.moe, execution.moe, made, step)
    if least:
        sent = sent_for_rows(collectives)
        yield (
            f"{strategy}: a device sends {sent / step.num_tokens:,.0f} bytes for the rows of each of "
            f"its tokens and their gradients, {sent / least:.3f} × the least ({least / step.num_tokens:,.0f})"
        )
    if strategy in ACROSS_RANKS:
        yield _buffer_line(model.moe, execution.moe, made, step)


def _buffer_line(config: MoEConfig, execution: MoEExecution, made: Plan, step: StepSizes) -> str:
    rows, chunks = received_rows(config, execution, made, step), execution.token_chunks
    even = -(-step.num_tokens // chunks) * config.experts_per_token
    size = _size(rows * columns_here(config, made) * np.dtype(step.dtype).itemsize)
    if execution.ragged_buffer_factor is None:
        why = "as many as can come; ragged_buffer_factor makes it smaller"
    else:
        why = f"ragged_buffer_factor={execution.ragged_buffer_factor:g}; rows beyond are dropped and counted"
    part = "a layer" if chunks == 1 else f"one of {chunks} chunks of tokens"
    return f"a device has room for {rows:,} rows of {part}, {size} ({why}); evenly shared it gets {even:,}"


def _as_json(
    run: ResolvedStep,
    made: Plan,
    step: StepSizes,
    collectives: list[Collective],
    across: list[Collective],
    state: Any,
    moe_layers: int,
) -> dict[str, Any]:
    model, execution = run.model, run.execution
    return {
        "mesh": made.sizes,
        "slices": made.slices,
        "strategy": strategy_name(model.moe, execution.moe),
        "tokens_per_device": step.num_tokens,
        "state_bytes": state.total,
        "parameters": {
            name: {
                "axes": spec.axes,
                "split": [axes_of(entry) for entry in made.spec(name, spec)],
                "bytes": made.device_bytes(name, spec, run.kept.get(name)),
            }
            for name, spec in param_specs(model).items()
        },
        "collectives": [{**vars(collective), "sent_bytes": collective.sent_bytes} for collective in collectives],
        "across_slices": [{**vars(collective), "sent_bytes": collective.sent_across_slices} for collective in across],
        "micro_batches": run.micro_batches,
        "moe_layers": moe_layers,
        "sent_again_bytes": sent_again(collectives),
        "least_sent_bytes": least_sent(model.moe, execution.moe, made, step),
    }


def _size(number: float | int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
