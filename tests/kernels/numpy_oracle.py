"""The operations and their gradients by hand, as NumPy loops over rows in float64. It imports nothing of ours.

Each function takes the operation's arguments by name and a cotangent, and returns the value and the gradients by the
names that `value_and_gradients` gives them.
"""

import math

import numpy as np


def ragged_gather(cotangent, x, indices, start=0, end=None, weights=None, inverse=None):
    num_rows = len(indices)
    out, dx, dweights = np.zeros((num_rows, x.shape[1])), np.zeros(x.shape), np.zeros(num_rows)
    for i in range(num_rows):
        t = indices[i]
        if start <= i < (num_rows if end is None else end) and 0 <= t < len(x):
            weight = 1.0 if weights is None else weights[i]
            out[i] = weight * x[t]
            dx[t] += weight * cotangent[i]
            dweights[i] = x[t] @ cotangent[i]
    return {"value": out, "dx": dx} | ({} if weights is None else {"dweights": dweights})


def ragged_gather_reduce(cotangent, rows, indices, weights=None, start=0, end=None, inverse=None):
    num_tokens, num_slots = indices.shape
    out, drows, dweights = np.zeros((num_tokens, rows.shape[1])), np.zeros(rows.shape), np.zeros(indices.shape)
    for t in range(num_tokens):
        for k in range(num_slots):
            r = indices[t, k]
            if start <= r < (len(rows) if end is None else end) and 0 <= r < len(rows):
                weight = 1.0 if weights is None else weights[t, k]
                out[t] += weight * rows[r]
                drows[r] += weight * cotangent[t]
                dweights[t, k] = rows[r] @ cotangent[t]
    return {"value": out, "drows": drows} | ({} if weights is None else {"dweights": dweights})


def grouped_matmul(cotangent, lhs, rhs, group_sizes, group_offset=0, transpose_rhs=False):
    out, dlhs, drhs = np.zeros(cotangent.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    for r, g in _rows_and_groups(group_sizes, group_offset, len(rhs)):
        matrix = rhs[g].T if transpose_rhs else rhs[g]
        out[r] = lhs[r] @ matrix
        dlhs[r] = matrix @ cotangent[r]
        drhs[g] += np.outer(cotangent[r], lhs[r]) if transpose_rhs else np.outer(lhs[r], cotangent[r])
    return {"value": out, "dlhs": dlhs, "drhs": drhs}


def expert_ffn(cotangent, rows, wi_0, wi_1, wo, group_sizes, biases=None, activation="silu"):
    """``biases``: (wi_0, wi_1, wo); ``activation``: a name, or a function like those in ACTIVATIONS."""
    activate = ACTIVATIONS.get(activation, activation)
    out, drows = np.zeros(rows.shape), np.zeros(rows.shape)
    dwi_0, dwi_1, dwo = np.zeros(wi_0.shape), np.zeros(wi_0.shape), np.zeros(wo.shape)
    db_0, db_1, db_o = np.zeros(wi_0.shape[:2]), np.zeros(wi_0.shape[:2]), np.zeros(wo.shape[::2])
    for r, g in _rows_and_groups(group_sizes, 0, len(wi_0)):
        gate = wi_0[g] @ rows[r] + (0 if biases is None else biases[0][g])
        up = None if wi_1 is None else wi_1[g] @ rows[r] + (0 if biases is None else biases[1][g])
        hidden, slope_gate, slope_up = activate(gate, up)
        out[r] = hidden @ wo[g] + (0 if biases is None else biases[2][g])
        dhidden = wo[g] @ cotangent[r]
        dwo[g] += np.outer(hidden, cotangent[r])
        db_o[g] += cotangent[r]
        dgate = dhidden * slope_gate
        drows[r] = dgate @ wi_0[g]
        dwi_0[g] += np.outer(dgate, rows[r])
        db_0[g] += dgate
        if wi_1 is not None:
            dup = dhidden * slope_up
            drows[r] += dup @ wi_1[g]
            dwi_1[g] += np.outer(dup, rows[r])
            db_1[g] += dup
    gradients = {"value": out, "drows": drows, "dwi_0": dwi_0, "dwi_1": dwi_1, "dwo": dwo}
    gradients |= {} if biases is None else {"dbiases.wi_0": db_0, "dbiases.wi_1": db_1, "dbiases.wo": db_o}
    ungated = ("dwi_1", "dbiases.wi_1") if wi_1 is None else ()
    return {name: gradient for name, gradient in gradients.items() if name not in ungated}


def attention(cotangent, query, key, value, positions=None, segments=None, sinks=None, scale=None, window=None):
    batch, num_queries, heads, width = query.shape
    num_slots, group = key.shape[1], heads // key.shape[2]
    scale = width**-0.5 if scale is None else scale
    out, dquery, dkey, dvalue = (np.zeros(a.shape) for a in (cotangent, query, key, value))
    dsinks = np.zeros(heads)
    for b in range(batch):
        for i in range(num_queries):
            position = i if positions is None else positions[b, i]
            first = 0 if window is None else max(0, position - window + 1)
            last = min(position + 1, num_slots)
            seen = [j for j in range(first, last) if segments is None or segments[b, i] == segments[b, j]]
            for n in range(heads if seen else 0):
                k, v = key[b, seen, n // group], value[b, seen, n // group]
                logits = scale * (k @ query[b, i, n])
                with_sink = logits if sinks is None else np.append(logits, sinks[n])
                shares = np.exp(with_sink - with_sink.max())
                shares /= shares.sum()
                weights = shares[: len(seen)]
                out[b, i, n] = weights @ v
                slopes = v @ cotangent[b, i, n]
                mean = weights @ slopes
                dlogits = scale * weights * (slopes - mean)
                dquery[b, i, n] = dlogits @ k
                dkey[b, seen, n // group] += np.outer(dlogits, query[b, i, n])
                dvalue[b, seen, n // group] += np.outer(weights, cotangent[b, i, n])
                if sinks is not None:
                    dsinks[n] -= shares[-1] * mean
    gradients = {"value": out, "dquery": dquery, "dkey": dkey, "dvalue": dvalue}
    return gradients | ({} if sinks is None else {"dsinks": dsinks})


def _rows_and_groups(group_sizes, group_offset, num_groups):
    """(row, place in the weights) for the rows of the groups held here."""
    row = 0
    for group, size in enumerate(group_sizes):
        for _ in range(size):
            if group_offset <= group < group_offset + num_groups:
                yield row, group - group_offset
            row += 1


def _gated(function):
    """From a function of the gate that gives (value, slope): (hidden, its slope in gate, its slope in up)."""

    def activation(gate, up):
        value, slope = function(gate)
        return (value, slope, None) if up is None else (value * up, slope * up, value)

    return activation


def _silu(g):
    s = 1 / (1 + np.exp(-g))
    return g * s, s + g * s * (1 - s)


def _gelu(g):
    cdf = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in g])
    return g * cdf, cdf + g * np.exp(-g * g / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(g):
    scale = math.sqrt(2 / math.pi)
    tanh = np.tanh(scale * (g + 0.044715 * g**3))
    return g * (1 + tanh) / 2, (1 + tanh) / 2 + g * (1 - tanh**2) / 2 * scale * (1 + 3 * 0.044715 * g**2)


def _relu2(g):
    return np.maximum(g, 0) ** 2, 2 * np.maximum(g, 0)


def _clamped_swiglu(gate, up):
    g = np.minimum(gate, 7.0)
    s = 1 / (1 + np.exp(-1.702 * g))
    value, slope = g * s, (s + 1.702 * g * s * (1 - s)) * (gate < 7.0)
    return value * (np.clip(up, -7.0, 7.0) + 1), slope * (np.clip(up, -7.0, 7.0) + 1), value * (np.abs(up) < 7.0)


def majorant(gate, up):
    """For non-negative arguments, no smaller than any activation above, in value, slopes and curvature."""
    value, slope = 1.2 * gate + gate**2, 1.2 + 2 * gate
    return (value, slope, None) if up is None else (value * (up + 1), slope * (up + 1), value)


ACTIVATIONS = {
    "silu": _gated(_silu),
    "gelu": _gated(_gelu),
    "gelu_tanh": _gated(_gelu_tanh),
    "relu2": _gated(_relu2),
    "clamped_swiglu": _clamped_swiglu,
}
