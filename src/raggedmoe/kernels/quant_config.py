"""What is quantised on its way to a grouped matmul, in which format, and by which scales."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.names import check_known
from raggedmoe.params import check_sizes

# The field with each operand's constant scale.
CONSTANTS = {"weights": "weight_scale", "rows": "row_scale", "cotangents": "cotangent_scale"}


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """The formats of a grouped matmul's operands, forward and backward. None: the operand is multiplied as it is.

    Scales are made anew for each call, so that the largest absolute value of what shares one is the largest of the
    format ("current"); or, with a history, so that the largest of some steps before is ("delayed"); or they are a
    constant. By the latter two what is too large becomes the format's largest value.
    """

    weights: str  # The format of the experts' matrices: a scale for each expert and output channel.
    rows: str | None = None  # The format of the rows that are multiplied by them: a scale for each row.
    cotangents: str | None = None  # The format of the gradients' rows, backward.
    # Rows have a scale for each so many columns instead, and matrices for each square of so many.
    block: int | None = None
    weight_scale: float | None = None  # A constant scale of the weights; None makes them from the largest values.
    row_scale: float | None = None  # The same of the rows,
    # And of the cotangents, times the other operand's scales where those are folded into them: without blocks.
    cotangent_scale: float | None = None
    # Each operand has one scale, of the largest absolute value that it had in so many steps before: see
    # `kernels/amax.py`. An operand with a constant scale keeps it.
    history: int | None = None
    # Cotangents are rounded up or down by chance, so that their mean is right; this takes a random key.
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for name, constant in CONSTANTS.items():
            qtype, scale = getattr(self, name), getattr(self, constant)
            if qtype is not None:
                check_known(f"format of {name}", qtype, LHS_FORMATS)
            if scale is None:
                continue
            if qtype is None:
                raise ValueError(f"{constant}={scale} is the scale of quantised {name}, which are not; leave it out")
            if not 0 < scale < math.inf:
                raise ValueError(f"expected {constant} > 0 and finite, got {scale}")
        if self.block is not None:
            check_sizes(self, "block")
        if self.history is not None:
            check_sizes(self, "history")
            if self.block is not None:
                raise ValueError(
                    f"history={self.history} makes one scale for a whole operand, got block={self.block} as well; "
                    "leave one of them out"
                )
        if self.stochastic_rounding and self.cotangents is None:
            raise ValueError("stochastic_rounding=True is of cotangents, which are not quantised; leave it out")

    def is_delayed(self, operand: str) -> bool:
        """Tell whether the scale of "weights", "rows" or "cotangents" is made of a history."""
        is_constant = getattr(self, CONSTANTS[operand]) is not None
        return self.history is not None and getattr(self, operand) is not None and not is_constant


E4M3, E5M2, INT8 = LHS_FORMATS

# The names of a run's setting `quantization`.
QUANTIZATIONS: dict[str, QuantConfig] = {
    "fp8": QuantConfig(weights=E4M3, rows=E4M3, cotangents=E5M2),
    "int8": QuantConfig(weights=INT8, rows=INT8, cotangents=INT8),
    "fp8_weights": QuantConfig(weights=E4M3),
    "int8_weights": QuantConfig(weights=INT8),
}


def rounding_key(config: QuantConfig | None, key: jax.Array | None, *numbers: Any) -> jax.Array | None:
    """Derive a key for stochastic rounding from another and some numbers; None where nothing is rounded so."""
    if config is None or not config.stochastic_rounding or key is None:
        return None
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
