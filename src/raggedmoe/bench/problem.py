"""The weights and inputs of a case, as files that all contenders map into their memory: drawn once, not copied.

The router's decisions have wide margins, so that no library's rounding sends a token to another expert: every token is
made of the directions of its experts and of noise that no router's row sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from raggedmoe.bench.case import Shape

CHOSEN_LOGIT, OTHER_LOGIT, LOGIT_STEP = 1.0, -2.0, 0.25
_STORED = {"bfloat16": np.uint16}  # types that a .npy file has no name for, and what holds their bits
_TYPES = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which expert each token goes to, and the rows in the order of their experts."""

    experts: np.ndarray  # [T K]
    weights: np.ndarray  # [T K]
    token_of_row: np.ndarray  # [R]
    slot_of_row: np.ndarray  # [R]
    group_sizes: np.ndarray  # [E]

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Iterate over the experts that have rows, with where they are."""
        ends = np.cumsum(self.group_sizes)
        return ((e, slice(end - size, end)) for e, (end, size) in enumerate(zip(ends, self.group_sizes)) if size)


def write_array(folder: Path, name: str, array: np.ndarray, dtype: str) -> None:
    """Store an array in that type."""
    typed = np.ascontiguousarray(array, _TYPES.get(dtype, dtype))
    np.save(folder / f"{name}.npy", typed.view(_STORED.get(dtype, typed.dtype)))


def read_array(folder: Path, name: str, dtype: str = "float32") -> np.ndarray:
    """Map an array of a problem: its pages are shared between processes, and what is written to it stays in one."""
    stored: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="c")
    return np.asarray(stored).view(_TYPES[dtype]) if dtype in _TYPES and stored.dtype == _STORED[dtype] else stored


def touch(*arrays: np.ndarray) -> None:
    """Read something of every page, so that it is resident before memory is measured."""
    for array in arrays:
        array.reshape(-1).view(np.uint8)[::4096].sum()


def draw_routing(rng: np.random.Generator, shape: Shape) -> tuple[Routing, np.ndarray]:
    """Draw experts, all equally likely, and the logits [T E] that choose them."""
    tokens, per_token = shape.tokens, shape.experts_per_token
    experts = np.argsort(rng.random((tokens, shape.num_experts)), axis=1)[:, :per_token]
    chosen = CHOSEN_LOGIT + LOGIT_STEP * np.arange(per_token, dtype=np.float32)
    logits = rng.uniform(OTHER_LOGIT - 1, OTHER_LOGIT, (tokens, shape.num_experts)).astype(np.float32)
    np.put_along_axis(logits, experts, np.broadcast_to(chosen, experts.shape), axis=1)
    slots = np.argsort(experts.reshape(-1), kind="stable")
    routing = Routing(
        experts=experts,
        weights=np.empty((tokens, per_token), np.float32),  # `routing_of` computes them from what is stored
        token_of_row=slots // per_token,
        slot_of_row=slots,
        group_sizes=np.bincount(experts.reshape(-1), minlength=shape.num_experts),
    )
    return routing, logits


def write_problem(folder: Path, shape: Shape, dtype: str, *, for_torch: bool, seed: int = 0) -> Routing:
    """Draw and store a layer's arrays; ``for_torch`` stores the experts in transformers' layout as well."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    experts, width, hidden = shape.num_experts, shape.model_dim, shape.expert_dim
    routing, logits = draw_routing(rng, shape)
    directions = np.linalg.qr(rng.standard_normal((width, experts), dtype=np.float32))[0].T
    noise = rng.standard_normal((shape.tokens, width), dtype=np.float32)
    x = noise - noise @ directions.T @ directions + logits @ directions
    write_array(folder, "x", x, dtype)
    write_array(folder, "router", directions, dtype)
    write_array(folder, "cotangent", rng.standard_normal((shape.tokens, width), dtype=np.float32), dtype)
    write_array(folder, "lhs", x[routing.token_of_row], dtype)
    write_array(folder, "row_cotangent", rng.standard_normal((shape.rows, hidden), dtype=np.float32), dtype)
    write_array(folder, "experts", routing.experts, "int64")
    _write_experts(folder, rng, shape, dtype, for_torch)
    return routing_of(folder, dtype)


def _write_experts(folder: Path, rng: np.random.Generator, shape: Shape, dtype: str, for_torch: bool) -> None:
    """Draw one expert after the other into the files: all of them in float32 may be more than the memory."""
    experts, width, hidden = shape.num_experts, shape.model_dim, shape.expert_dim
    stored = np.dtype(_STORED.get(dtype, dtype))

    def new(name: str, *sizes: int) -> np.ndarray:
        array: Any = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", stored, (experts, *sizes))
        return array.view(_TYPES[dtype]) if dtype in _TYPES else array

    ours = {name: new(name, hidden, width) for name in ("wi_0", "wi_1", "wo")}
    theirs = {"gate_up": new("gate_up", 2 * hidden, width), "down": new("down", width, hidden)} if for_torch else {}
    for expert in range(experts):
        for name, array in ours.items():
            fan_in = hidden if name == "wo" else width
            array[expert] = rng.standard_normal((hidden, width), dtype=np.float32) * np.float32(fan_in**-0.5)
        if theirs:
            theirs["gate_up"][expert] = np.concatenate((ours["wi_0"][expert], ours["wi_1"][expert]))
            theirs["down"][expert] = ours["wo"][expert].T


def routing_of(folder: Path, dtype: str) -> Routing:
    """Route a stored problem: the experts that were drawn, with the softmax of their logits as stored."""
    experts = np.array(read_array(folder, "experts"))
    x, router = (np.asarray(read_array(folder, name, dtype), np.float32) for name in ("x", "router"))
    logits = np.take_along_axis(x @ router.T, experts, axis=1)
    scores = np.exp(logits - logits.max(1, keepdims=True))
    slots = np.argsort(experts.reshape(-1), kind="stable")
    return Routing(
        experts=experts,
        weights=scores / scores.sum(1, keepdims=True),
        token_of_row=slots // experts.shape[1],
        slot_of_row=slots,
        group_sizes=np.bincount(experts.reshape(-1), minlength=router.shape[0]),
    )
