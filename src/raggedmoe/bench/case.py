"""What is measured: a named shape, and one case of it, of which every contender computes the same."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp

FORWARD, BOTH = "forward", "forward+backward"
DIRECTIONS = {"layer": (FORWARD, BOTH), "grouped_matmul": (FORWARD, "dlhs", "drhs", BOTH)}
# Weights of 8 bits: the largest difference of a row, relative to it. Normal weights err by 2.7 % (float8, three bits of
# mantissa) or 0.8 % (int8, the largest of 2048 values being 127) of their root mean square; a layer has three matmuls,
# whose errors add up as their squares do; and twice that for the row that is worst.
FORMAT_ERRORS = {"float8_e4m3fn": 0.1, "int8": 0.03}
# The dense matmuls that a direction is made of, by the operands that are transposed: rows [R D] times weights [F D] is
# "nt", rows [R F] times weights [F D] is "nn", and the gradient [F D] of weights is "tn". All have 2·R·D·F FLOPs.
_UP, _DOWN, _WEIGHTS = "nt", "nn", "tn"
PRODUCTS = {
    ("layer", FORWARD): (_UP, _UP, _DOWN),
    ("layer", BOTH): (_UP, _UP, _DOWN, _UP, _WEIGHTS, _DOWN, _DOWN, _WEIGHTS, _WEIGHTS),
    ("grouped_matmul", FORWARD): (_UP,),
    ("grouped_matmul", "dlhs"): (_DOWN,),
    ("grouped_matmul", "drhs"): (_WEIGHTS,),
    ("grouped_matmul", BOTH): (_UP, _DOWN, _WEIGHTS),
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a layer and of its batch."""

    name: str
    tokens: int  # T
    model_dim: int  # D
    expert_dim: int  # F
    num_experts: int  # E
    experts_per_token: int  # K

    @property
    def rows(self) -> int:
        """R, the rows that go through experts."""
        return self.tokens * self.experts_per_token

    @property
    def decodes(self) -> bool:
        """Whether it has so few tokens that reading weights, and not multiplying, is the limit."""
        return self.tokens <= 64

    @property
    def flops(self) -> int:
        """The FLOPs of one matmul of all rows."""
        return 2 * self.rows * self.model_dim * self.expert_dim

    def weight_bytes(self, dtype: str, experts: int | None = None) -> int:
        """Count the bytes of the three weights of all experts, or of so many."""
        return 3 * (experts or self.num_experts) * self.model_dim * self.expert_dim * jnp.dtype(dtype).itemsize


_DEEPSEEK = Shape(
    name="deepseek2-16b", tokens=1024, model_dim=2048, expert_dim=1408, num_experts=64, experts_per_token=6
)
_MIXTRAL = Shape(name="mixtral", tokens=2048, model_dim=512, expert_dim=1024, num_experts=16, experts_per_token=2)
SHAPES = {
    shape.name: shape
    for shape in (
        _MIXTRAL,
        replace(_MIXTRAL, name="fine-grained", num_experts=64, experts_per_token=8),
        _DEEPSEEK,
        Shape(name="gpt-oss", tokens=512, model_dim=2880, expert_dim=2880, num_experts=32, experts_per_token=4),
        *(replace(_DEEPSEEK, name=f"decode-{tokens}", tokens=tokens) for tokens in (1, 8, 32)),
    )
}
# As many rows for each number of experts. With eight, a token goes to all of them.
SWEEP = tuple(
    replace(_MIXTRAL, name=f"E={experts}", num_experts=experts, experts_per_token=8)
    for experts in (8, 16, 32, 64, 128, 256, 512)
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One computation of one subject. Its folder holds the arrays that `problem.write_problem` drew."""

    subject: str  # "layer", "grouped_matmul", "train" or "generate"
    shape: Shape | None  # None for a whole model
    dtype: str
    direction: str
    folder: str
    flops: int = 0  # useful ones
    read_bytes: int = 0  # of the weights that it uses, each once
    reads: bool = False  # whether reading these bytes is its limit
    tokens: int = 0  # that it trains on or makes, if it is a whole model's
    model: str = ""  # the whole model's name

    @property
    def name(self) -> str:
        """The case in words, by which a user selects it."""
        return f"{self.subject} {self.shape.name if self.shape else self.model} {self.direction}"

    @property
    def sizes(self) -> Shape:
        """The shape, of a case that has one."""
        assert self.shape is not None
        return self.shape

    @property
    def products(self) -> tuple[str, ...]:
        """The dense matmuls of its useful FLOPs, as `PRODUCTS` has them."""
        return PRODUCTS[self.subject, self.direction]

    @property
    def place(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)


def shape_case(subject: str, shape: Shape, dtype: str, direction: str, folder: Path, active_experts: int) -> Case:
    """Make the case of a layer, or of one grouped matmul in it, on a problem that lies in the folder."""
    weights = shape.weight_bytes(dtype, active_experts) // (1 if subject == "layer" else 3)
    return Case(
        subject=subject,
        shape=shape,
        dtype=dtype,
        direction=direction,
        folder=str(folder),
        flops=shape.flops * len(PRODUCTS[subject, direction]),
        read_bytes=weights,
        reads=shape.decodes,
    )
