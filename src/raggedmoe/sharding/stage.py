"""A stage of a layer on a mesh: a plain function, and a line that says where its arguments and its result lie.

Between stages every array is a global one. What each device has for itself (its rows, its copy of gathered weights) is
one part of it there, along the first dimension. So nothing is communicated between two stages, and the devices'
gradients are not summed there either: that happens where a stage says so, and nowhere else.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from raggedmoe.sharding.axes import AXES, HIDDEN_TENSOR, TOKEN_AXES, WIDTH_TENSOR

Function = TypeVar("Function", bound=Callable[..., Any])

REPLICATED = PartitionSpec()
TOKENS = PartitionSpec(TOKEN_AXES)  # split by tokens, or one for each part of them; the same on all tensor ranks
PER_DEVICE = PartitionSpec(AXES)  # every device has its own
TOKENS_AND_WIDTH = PartitionSpec(TOKEN_AXES, WIDTH_TENSOR)  # the tokens before dispatch and after unpermute
# Between the projections each tensor rank has its part of F, or all of them have the same sums over D.
BETWEEN_PROJECTIONS = PartitionSpec((*TOKEN_AXES, HIDDEN_TENSOR))


def stage(*, result: Any, checked: bool = True, **arguments: Any) -> Callable[[Function], Function]:
    """Declare how a stage's positional arguments, by name and in order, and its result are split over logical axes.

    Each by a `PartitionSpec`, or a tree of them for what consists of several arrays. `LogicalMesh.run` reads them.
    ``checked`` has JAX prove that what is said to be the same on several devices is: not for stages without
    communication that call kernels of others, which do not say what their results vary over.
    """

    def declare(function: Function) -> Function:
        parameters = inspect.signature(function).parameters.values()
        names = [entry.name for entry in parameters if entry.kind != inspect.Parameter.KEYWORD_ONLY]
        assert names == list(arguments), f"{function.__name__}: partitions of {list(arguments)} for {names}"
        function.__dict__.update(partitions=(tuple(arguments.values()), result), checked=checked)
        return function

    return declare
