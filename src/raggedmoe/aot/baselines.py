"""What a grouped matmul is held against: one dense matmul of the same size, and JAX's own ragged dot, as they are.

Other libraries' kernels are implementations like any other, under the same contract: megablox, tokamax, gmm_v2, xla.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.aot.case import JitProgram
from raggedmoe.aot.subjects import OperationCall, call_program, find_example, with_integers
from raggedmoe.kernels.registry import FORWARD
from raggedmoe.names import check_known

OPERATION = "grouped_matmul"


def dense(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """Multiply all rows by the first group's matrix: what a chip can do at best."""
    return jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32).astype(lhs.dtype)


def ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
    """Call JAX's own, without a contract about rows that belong to no group."""
    return jax.lax.ragged_dot(lhs, rhs, group_sizes)


BASELINES: dict[str, Callable[..., Any]] = {"dense": dense, "ragged_dot": ragged_dot}


@dataclass(frozen=True, kw_only=True)
class BaselineCall:
    """One direction of a baseline on an example call of `grouped_matmul`; or the gradient of one argument alone."""

    baseline: str
    call: str  # the name of an example call, or sizes
    dtype: str = "bfloat16"
    direction: str = FORWARD
    gradient: str | None = None

    @property
    def operation(self) -> str:
        """The operation whose example calls it takes."""
        return OPERATION

    @property
    def contender(self) -> str:
        """What computes the call, as a table of several names it."""
        return self.baseline

    def program(self) -> JitProgram:
        """Make the program of that direction."""
        check_known("peer", self.baseline, BASELINES)
        example = find_example(OPERATION, self.call, self.dtype)
        arrays = with_integers({name: example.arrays[name] for name in ("lhs", "rhs", "group_sizes")})
        transpose, rhs = example.options.get("transpose_rhs", False), arrays["rhs"]
        if self.baseline == "dense":
            arrays["rhs"] = jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)

        def function(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
            return BASELINES[self.baseline](lhs, jnp.swapaxes(rhs, -1, -2) if transpose else rhs, group_sizes)

        return call_program(function, arrays, with_integers(example.cotangent), self.direction, self.gradient)


ExampleCall = OperationCall | BaselineCall
