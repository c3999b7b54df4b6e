"""What every contender must compute: plain NumPy in float32, one expert after the other, both directions."""

from collections.abc import Mapping

import numpy as np

from raggedmoe.bench.case import BOTH, Case
from raggedmoe.bench.compare import Digests, digest
from raggedmoe.bench.problem import read_array, routing_of


def reference_digests(case: Case) -> Mapping[str, Digests]:
    """Compute the value, and for a backward pass the gradients, as `compare` compares them."""
    return _layer(case) if case.subject == "layer" else _grouped_matmul(case)


def _float32(case: Case, name: str) -> np.ndarray:
    return np.asarray(read_array(case.place, name, case.dtype), np.float32)


def _grouped_matmul(case: Case) -> dict[str, Digests]:
    routing, rhs = routing_of(case.place, case.dtype), read_array(case.place, "wi_0", case.dtype)
    lhs, cotangent = _float32(case, "lhs"), _float32(case, "row_cotangent")
    value, dlhs = np.zeros(cotangent.shape, np.float32), np.zeros(lhs.shape, np.float32)
    drhs = [digest(np.zeros((1, *rhs.shape[1:]), np.float32))] * rhs.shape[0]
    for expert, rows in routing.groups():
        weight = rhs[expert].astype(np.float32)
        value[rows] = lhs[rows] @ weight.T
        dlhs[rows] = cotangent[rows] @ weight
        drhs[expert] = digest((cotangent[rows].T @ lhs[rows])[None])
    digests = {"value": digest(value), "dlhs": digest(dlhs), "drhs": Digests.join(drhs)}
    wanted = {"forward": ("value",), "dlhs": ("dlhs",), "drhs": ("drhs",), BOTH: tuple(digests)}
    return {name: digests[name] for name in wanted[case.direction]}


def _layer(case: Case) -> dict[str, Digests]:
    routing, backward = routing_of(case.place, case.dtype), case.direction == BOTH
    x, router, cotangent = (_float32(case, name) for name in ("x", "router", "cotangent"))
    stacks = {name: read_array(case.place, name, case.dtype) for name in ("wi_0", "wi_1", "wo")}
    value, dx = np.zeros(x.shape, np.float32), np.zeros(x.shape, np.float32)
    dweights = np.zeros(routing.weights.size, np.float32)
    idle = digest(np.zeros((1, *stacks["wo"].shape[1:]), np.float32))
    gradients = {name: [idle] * router.shape[0] for name in stacks}
    for expert, rows in routing.groups():
        wi_0, wi_1, wo = (stack[expert].astype(np.float32) for stack in stacks.values())
        tokens, slots = routing.token_of_row[rows], routing.slot_of_row[rows]
        inputs, weights = x[tokens], routing.weights.reshape(-1)[slots, None]
        gate, up = inputs @ wi_0.T, inputs @ wi_1.T
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        result = hidden @ wo
        value[tokens] += weights * result
        if not backward:
            continue
        dresult = weights * cotangent[tokens]
        dweights[slots] = np.einsum("rd,rd->r", result, cotangent[tokens])
        dhidden = dresult @ wo.T
        dgate, dup = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid)), dhidden * gate * sigmoid
        dx[tokens] += dgate @ wi_0 + dup @ wi_1
        of_weights = (("wi_0", dgate, inputs), ("wi_1", dup, inputs), ("wo", hidden, dresult))
        for name, left, right in of_weights:
            gradients[name][expert] = digest((left.T @ right)[None])
    if not backward:
        return {"value": digest(value)}
    dlogits = np.zeros((x.shape[0], router.shape[0]), np.float32)
    dslots = dweights.reshape(routing.weights.shape)
    dchosen = routing.weights * (dslots - (routing.weights * dslots).sum(1, keepdims=True))
    np.put_along_axis(dlogits, routing.experts, dchosen, axis=1)
    dx += dlogits @ router
    arrays = {"value": value, "dx": dx, "drouter": dlogits.T @ x}
    return {
        **{name: digest(array) for name, array in arrays.items()},
        **{f"d{name}": Digests.join(parts) for name, parts in gradients.items()},
    }
