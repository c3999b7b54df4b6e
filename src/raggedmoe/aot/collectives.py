"""What a layer sends over the mesh: every collective of its forward and backward pass, with its volume.

The same list is read off the compiled program by a test: what is printed here is what is communicated.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.kernels.registry import BACKWARD, FORWARD
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import MoEConfig, strategy_name
from raggedmoe.moe.dispatch.strategy import buffer_rows
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.params import ParamSpec
from raggedmoe.sharding.axes import DATA, EXPERT, FSDP, TENSOR, TOKEN_AXES, axes_of, even_parts
from raggedmoe.sharding.plan import Plan
from raggedmoe.sharding.rules import is_routed
from raggedmoe.train.settings.step import ResolvedStep

WIDE = 4  # bytes of the router's numbers, and of counts
# A TPU's ragged exchange sends rows in a multiple of so many bytes, of any type: XLA pads them (libtpu 0.0.50.1, v6e).
TPU_ROW_UNIT = 512
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"
EXCHANGE, RAGGED_EXCHANGE = "all-to-all", "ragged-all-to-all"
# What a device sends, of n in a ring, for each byte of the collective: of what is gathered, scattered, summed, moved.
SENT = {
    GATHER: lambda n: (n - 1) / n,
    SCATTER: lambda n: (n - 1) / n,
    REDUCE: lambda n: 2 * (n - 1) / n,
    EXCHANGE: lambda n: (n - 1) / n,
    RAGGED_EXCHANGE: lambda n: (n - 1) / n,
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a layer."""

    kind: str
    what: str
    direction: str
    axes: tuple[str, ...]
    num_devices: int  # that take part together
    num_bytes: int  # of what is gathered, scattered, summed or exchanged, on one device
    num_slices: int = 1  # that those devices are of

    @property
    def sent_bytes(self) -> float:
        """What one device sends in its slice, by the usual algorithms; of a ragged exchange one row in n stays."""
        return SENT[self.kind](self.num_devices // self.num_slices) * self.num_bytes

    @property
    def sent_across_slices(self) -> float:
        """What one device sends to other slices: each of a slice's devices has its part of the sums to exchange."""
        return SENT[self.kind](self.num_slices) * self.num_bytes / (self.num_devices // self.num_slices)


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """What the volumes depend on beside the layer and the plan."""

    num_tokens: int  # of one device
    num_sequences: int = 1  # of one device, which strategy "capacity" counts slots in
    dtype: str = "bfloat16"  # of activations, and of weights as they are multiplied
    ragged: bool = True  # the platform has a ragged all-to-all; XLA's CPU backend has not
    row_unit: int = 1  # bytes that it sends a multiple of for each row
    # The layer's frozen matrices that are stored quantised, and sent so.
    kept: Mapping[str, QuantizedForm] = field(default_factory=dict, hash=False)


def layer_collectives(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> list[Collective]:
    """List all that a training step of one layer communicates; nothing over axes of one device."""
    collectives = [*_of_router(config, plan), *_of_weights(config, plan, step)]
    collectives += _of_rows(config, execution, plan, step)
    return _on_mesh(collectives, plan)


def collectives_across_slices(run: ResolvedStep, plan: Plan, step: StepSizes) -> list[Collective]:
    """List all of a model that crosses slices in a micro-batch: sums of gradients, and what routers sum forward.

    Of a gradient it is the part that a device stores. Those of routed experts have the type of activations, as they are
    multiplied, and all others are float32. A table of the vocabulary has a gradient for each use: modules of
    multi-token prediction use both, a tied one is also the head. The few numbers of the loss itself are not counted.
    """
    model, modules = run.model, run.mtp_layers
    layers = len(model.moe_layers) + modules
    crossing = [
        replace(collective, num_bytes=layers * collective.num_bytes)
        for collective in layer_collectives(model.moe_layer, run.execution.moe, plan, step)
        if collective.direction == FORWARD
    ]
    for name, spec in param_specs(model).items():
        if not spec.trained or (name.startswith("mtp.") and not modules):
            continue
        size = np.dtype(model.dtype).itemsize if is_routed(name, spec) else WIDE
        uses = 1 if "vocab" not in spec.axes else (2 if model.tied_embeddings else 1) * (1 + modules)
        num_bytes = uses * plan.device_elements(name, spec) * size
        crossing += _on_mesh(
            [_collective(REDUCE, name, BACKWARD, _axes_of_gradient_sum(plan, name, spec), num_bytes)], plan
        )
    return [collective for collective in crossing if collective.num_slices > 1 and collective.num_bytes]


def _on_mesh(collectives: list[Collective], plan: Plan) -> list[Collective]:
    """Give collectives the number of devices that take part on the plan's mesh, and leave out those of one alone."""
    sizes = plan.sizes
    sized = [
        replace(
            collective,
            num_devices=math.prod(sizes[axis] for axis in collective.axes),
            num_slices=plan.slices if DATA in collective.axes else 1,
        )
        for collective in collectives
    ]
    return [collective for collective in sized if collective.num_devices > 1 and collective.num_bytes]


def least_sent(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> float:
    """Count the bytes that a device sends at least for its tokens, over the experts' axis, in a whole training step.

    all_to_all: every row whose expert is elsewhere, there and back, and its gradient, there and back; with balanced
    experts one in n stays. ring: every token to all others, the sums back, and both gradients. capacity: the slots of
    every expert that is elsewhere, as all_to_all's rows. With a dispatch_dtype, what goes there forward has 8 bits.
    """
    strategy, ranks = strategy_name(config, execution), plan.expert
    rows_per_way = {
        "all_to_all": step.num_tokens * config.experts_per_token * (ranks - 1) / ranks,
        "ring": step.num_tokens * (ranks - 1),
    }
    if strategy == "capacity":
        rows_per_way["capacity"] = num_slots(config, step.num_tokens, step.num_sequences) * (ranks - 1) / ranks
    there, other = (row_bytes(config, execution, plan, step, there=there) for there in (True, False))
    return rows_per_way.get(strategy, 0) * (there + 3.0 * other)


def sent_again(collectives: list[Collective]) -> float:
    """Count the bytes that a device sends again in a model's backward pass, which gathers weights anew."""
    return sum(
        collective.sent_bytes
        for collective in collectives
        if collective.kind == GATHER and collective.direction == FORWARD and FSDP in collective.axes
    )


def sent_for_rows(collectives: list[Collective]) -> float:
    """Count the bytes that a device sends over the experts' axis for its tokens, of a layer's collectives."""
    return sum(
        collective.sent_bytes
        for collective in collectives
        if collective.what in ("dispatch", "unpermute") and EXPERT in collective.axes
    )


def _collective(kind: str, what: str, direction: str, axes: tuple[str, ...], num_bytes: int) -> Collective:
    return Collective(kind=kind, what=what, direction=direction, axes=axes, num_devices=1, num_bytes=num_bytes)


def _axes_of_gradient_sum(plan: Plan, name: str, spec: ParamSpec) -> tuple[str, ...]:
    """Return the mesh axes over which the gradient of the part that a device stores is summed."""
    split = axes_of(*plan.spec(name, spec))
    if not is_routed(name, spec):
        return tuple(axis for axis in TOKEN_AXES if axis not in split)
    # The biases after the up projections are added where the tensor ranks agree already, if they split D.
    is_up_bias = name.rpartition(".")[2].startswith("bias_wi")
    agreed = (TENSOR,) if is_up_bias and plan.tensor_split == "model_dim" else ()
    return tuple(axis for axis in (DATA, FSDP, TENSOR) if axis not in (*split, *agreed))


def columns_here(config: MoEConfig, plan: Plan) -> int:
    """Count the columns of a token that one device moves."""
    return config.model_dim // (plan.tensor if plan.tensor_split == "model_dim" else 1)


def row_bytes(
    config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes, *, there: bool, unit: int = 1
) -> int:
    """Count the bytes that a row is sent in, each part and its scale in a multiple of the unit.

    ``there``: to its expert, which has 8 bits if the execution says so. Its result and both gradients have the type of
    the activations.
    """
    size = np.dtype(step.dtype).itemsize
    in_8_bits = there and execution.dispatch_dtype is not None
    scale = max(size, WIDE) if in_8_bits else 0  # of the type of sums
    parts = even_parts(columns_here(config, plan), execution.width_chunks)
    widths = [(part.stop - part.start) * (1 if in_8_bits else size) for part in parts]
    return sum(-(-num_bytes // unit) * unit for width in widths for num_bytes in (width, scale))


def _of_router(config: MoEConfig, plan: Plan) -> Iterator[Collective]:
    sizes = plan.sizes
    yield _collective(REDUCE, "losses and load", FORWARD, TOKEN_AXES, _sums_of_router(config) * WIDE)
    for name, spec in config.param_specs().items():
        if not name.startswith("router_") or name == "router_selection_bias":
            continue
        split = axes_of(*plan.spec(name, spec))
        num_bytes = spec.num_elements * WIDE
        yield _collective(GATHER, name, FORWARD, split, num_bytes)
        if not spec.trained:
            continue
        yield _collective(SCATTER, name, BACKWARD, split, num_bytes)
        here = num_bytes // math.prod(sizes[axis] for axis in split)
        yield _collective(REDUCE, name, BACKWARD, _axes_of_gradient_sum(plan, name, spec), here)
    if config.router.selection == "balanced":
        yield _collective(GATHER, "tokens before", FORWARD, TOKEN_AXES, plan.num_token_shards * WIDE)


def _sums_of_router(config: MoEConfig) -> int:
    """Count what all devices sum: load; tokens and squares for the z-loss; what the balance loss is made of."""
    always = config.num_experts + 2
    if config.router.selection == "expert_choice":
        return always
    if config.router.aux_loss == "sequence":
        return always + 2  # the loss of each device's sequences, and how many there are
    return always + 2 * config.num_experts + 1  # counts and probabilities; tokens


def _of_weights(config: MoEConfig, plan: Plan, step: StepSizes) -> Iterator[Collective]:
    """List how FSDP gathers weights before use, once whatever the chunks, and sums and splits their gradients."""
    size, sizes = np.dtype(step.dtype).itemsize, plan.sizes
    for name, spec in config.param_specs().items():
        if not is_routed(name, spec):
            continue
        if name in step.kept:
            for what, (num_bytes, axes) in zip(
                (name, f"{name} scales"), plan.stored_parts(name, spec, step.kept[name])
            ):
                others = math.prod(sizes[axis] for axis in axes if axis != FSDP)
                yield _collective(GATHER, what, FORWARD, (FSDP,) if FSDP in axes else (), num_bytes // others)
            continue
        split = axes_of(*plan.spec(name, spec))
        here = spec.num_elements * size // math.prod(sizes[axis] for axis in split if axis != FSDP)
        if FSDP in split:
            yield _collective(GATHER, name, FORWARD, (FSDP,), here)
        if not spec.trained:
            continue
        if FSDP in split:
            yield _collective(SCATTER, name, BACKWARD, (FSDP,), here)
            here //= sizes[FSDP]
        yield _collective(REDUCE, name, BACKWARD, _axes_of_gradient_sum(plan, name, spec), here)


def _of_rows(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> Iterator[Collective]:
    strategy, tokens, per_token = strategy_name(config, execution), step.num_tokens, config.experts_per_token
    size, ranks = np.dtype(step.dtype).itemsize, plan.expert
    unit = step.row_unit if strategy == "all_to_all" and step.ragged else 1
    sent, moved = (tokens * row_bytes(config, execution, plan, step, there=there, unit=unit) for there in (True, False))
    slots = tokens * per_token * WIDE
    if strategy in ("ring", "dense"):
        yield _collective(GATHER, "routing", FORWARD, (EXPERT,), 2 * ranks * slots)  # experts and their weights
        yield _collective(SCATTER, "routing weights", BACKWARD, (EXPERT,), ranks * slots)
        yield _collective(GATHER, "dispatch", FORWARD, (EXPERT,), ranks * sent)
        yield _collective(SCATTER, "unpermute", FORWARD, (EXPERT,), ranks * moved)
        yield _collective(GATHER, "unpermute", BACKWARD, (EXPERT,), ranks * moved)
        yield _collective(SCATTER, "dispatch", BACKWARD, (EXPERT,), ranks * moved)
    elif strategy == "all_to_all":
        parts = len(_parts(execution, step))
        yield _collective(GATHER, "counts", FORWARD, (EXPERT,), parts * ranks * config.num_experts * WIDE)
        kind = RAGGED_EXCHANGE if step.ragged else EXCHANGE
        held = config.num_experts // ranks
        rows = per_token if step.ragged else ranks * min(per_token, held)  # of each token; equal parts are the largest
        for what, direction in itertools.product(("dispatch", "unpermute"), (FORWARD, BACKWARD)):
            num_bytes = sent if (what, direction) == ("dispatch", FORWARD) else moved
            yield _collective(kind, what, direction, (EXPERT,), rows * num_bytes)
    elif strategy == "capacity":
        rows = num_slots(config, tokens, step.num_sequences)
        yield _collective(EXCHANGE, "used slots", FORWARD, (EXPERT,), rows)
        for what, direction in itertools.product(("dispatch", "unpermute"), (FORWARD, BACKWARD)):
            yield _collective(EXCHANGE, what, direction, (EXPERT,), rows * columns_here(config, plan) * size)
    if execution.ragged_buffer_factor is not None or strategy == "capacity":
        yield _collective(REDUCE, "dropped", FORWARD, TOKEN_AXES, len(_parts(execution, step)) * WIDE)
    yield from _of_tensor_ranks(config, execution, plan, step)


def _of_tensor_ranks(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> Iterator[Collective]:
    tokens, size = step.num_tokens, np.dtype(step.dtype).itemsize
    whole = tokens * config.model_dim * size
    if plan.tensor_split == "expert_dim":
        yield _collective(REDUCE, "unpermute", FORWARD, (TENSOR,), whole)
        yield _collective(REDUCE, "dispatch", BACKWARD, (TENSOR,), whole)
    else:
        rows = sum(_rows_of_parts(config, execution, plan, step))
        hidden, projections = rows * config.expert_dim, 2 if config.experts.gated else 1
        yield _collective(REDUCE, "up projections", FORWARD, (TENSOR,), projections * hidden * WIDE)
        yield _collective(REDUCE, "hidden rows", BACKWARD, (TENSOR,), hidden * size)
        yield _collective(GATHER, "output", FORWARD, (TENSOR,), whole)
        yield _collective(GATHER, "input", BACKWARD, (TENSOR,), whole)
    # Where they weigh rows, which is once for each chunk of columns; where all tokens come, those of all ranks.
    strategy = strategy_name(config, execution)
    chunks = len(even_parts(columns_here(config, plan), execution.width_chunks))
    copies = chunks * (plan.expert if strategy in ("ring", "dense") else 1)
    slots = tokens * config.experts_per_token
    yield _collective(REDUCE, "routing weights", BACKWARD, (TENSOR,), copies * slots * WIDE)


def _parts(execution: MoEExecution, step: StepSizes) -> list[slice]:
    return even_parts(step.num_tokens, execution.token_chunks)


def received_rows(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> int:
    """Count the rows that a device has room for at once: those of its largest chunk of tokens."""
    return max(_rows_of_parts(config, execution, plan, step))


def _rows_of_parts(config: MoEConfig, execution: MoEExecution, plan: Plan, step: StepSizes) -> list[int]:
    ranks, sequences = plan.expert, step.num_sequences
    return [rows_here(config, execution, ranks, part.stop - part.start, sequences) for part in _parts(execution, step)]


def num_slots(config: MoEConfig, num_tokens: int, num_sequences: int) -> int:
    """Count the slots that all experts together have for a device's tokens under strategy "capacity"."""
    if config.router.selection == "expert_choice":
        return config.num_experts * config.capacity(num_tokens)
    return config.num_experts * num_sequences * config.capacity(num_tokens // num_sequences)


def rows_here(
    config: MoEConfig, execution: MoEExecution, num_ranks: int, num_tokens: int, num_sequences: int = 1
) -> int:
    """Count R, the rows that a device's experts compute on at most, for so many tokens on each device."""
    strategy = strategy_name(config, execution)
    if strategy == "capacity":
        return num_slots(config, num_tokens, num_sequences)
    if strategy == "dense":
        return config.num_experts * num_tokens
    return buffer_rows(
        num_tokens, config.experts_per_token, config.num_experts // num_ranks, num_ranks, execution.ragged_buffer_factor
    )
