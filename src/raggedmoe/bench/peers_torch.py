"""PyTorch's grouped matmuls: `grouped_mm`, and a loop over the experts."""

from collections.abc import Callable, Mapping
from typing import Any

from raggedmoe.bench.case import BOTH, Case
from raggedmoe.bench.contender import Prepared, contender
from raggedmoe.bench.problem import read_array, routing_of, touch

TORCH = ("torch",)


def tensor(case: Case, name: str) -> Any:
    """Map an array of the problem as a tensor."""
    import torch

    array = read_array(case.place, name)
    touch(array)
    made = torch.from_numpy(array)
    return made.view(torch.bfloat16) if case.dtype == "bfloat16" else made


def to_numpy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Widen tensors to float32 arrays."""
    return {name: made.detach().float().numpy() for name, made in tensors.items()}


def prepare_torch(
    case: Case, forward: Callable[[Any, Any], Any], dlhs: Callable[..., Any], drhs: Callable[..., Any]
) -> Prepared:
    """Prepare a direction of a grouped matmul by the function that computes it, without autograd's bookkeeping."""
    import torch

    lhs, rhs, cotangent = (tensor(case, name) for name in ("lhs", "wi_0", "row_cotangent"))
    calls: dict[str, Callable[[], Any]] = {
        "value": lambda: forward(lhs, rhs),
        "dlhs": lambda: dlhs(cotangent, rhs),
        "drhs": lambda: drhs(cotangent, lhs),
    }
    wanted = tuple(calls) if case.direction == BOTH else ({"forward": "value"}.get(case.direction, case.direction),)

    def run() -> dict[str, Any]:
        with torch.inference_mode():
            return {name: calls[name]() for name in wanted}

    return Prepared(run=run, arrays=to_numpy)


@contender("torch grouped_mm", "grouped_matmul", needs=TORCH)
def torch_grouped_mm(case: Case) -> Prepared:
    """Prepare PyTorch's own operation."""
    import torch

    sizes = routing_of(case.place, case.dtype).group_sizes
    ends = torch.from_numpy(sizes.cumsum()).to(torch.int32)
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return prepare_torch(
        case,
        lambda lhs, rhs: grouped_mm(lhs, rhs.transpose(1, 2), offs=ends),
        lambda cotangent, rhs: grouped_mm(cotangent, rhs, offs=ends),
        lambda cotangent, lhs: grouped_mm(cotangent.T, lhs, offs=ends),
    )


@contender("torch loop", "grouped_matmul", needs=TORCH)
def torch_loop(case: Case) -> Prepared:
    """Prepare one matmul for each expert that has rows, into the result."""
    import torch

    routing = routing_of(case.place, case.dtype)
    groups = list(routing.groups())

    def rows(operand: Any, weights: Any, transposed: bool) -> Any:
        width = weights.shape[1] if transposed else weights.shape[2]
        out = torch.empty(operand.shape[0], width, dtype=operand.dtype)
        for expert, at in groups:
            torch.mm(operand[at], weights[expert].T if transposed else weights[expert], out=out[at])
        return out

    def of_weights(cotangent: Any, lhs: Any) -> Any:
        out = torch.zeros(case.sizes.num_experts, cotangent.shape[1], lhs.shape[1], dtype=lhs.dtype)
        for expert, at in groups:
            torch.mm(cotangent[at].T, lhs[at], out=out[expert])
        return out

    return prepare_torch(
        case, lambda lhs, rhs: rows(lhs, rhs, True), lambda cotangent, rhs: rows(cotangent, rhs, False), of_weights
    )
