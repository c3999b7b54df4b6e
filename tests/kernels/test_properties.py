"""Random ragged calls: every implementation's value and gradients against NumPy's loops, in float32.

A new shape is a new compilation, a new routing is not: each drawn shape is tried with every kind of routing.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedmoe.kernels.example import Example, normal, poison_rows
from raggedmoe.kernels.expert_ffn.activations import ACTIVATIONS
from raggedmoe.kernels.expert_ffn.api import ExpertBiases
from tests.kernels.compare import FAST, beyond_rounding, run

WIDTHS = (1, 3, 7, 17, 31, 45, 2880)
MOST_ROWS = 1300  # five tiles of the largest size, if one expert gets them all
MOST_PRODUCTS = 2_000_000  # rows · D · F, so that the loops in NumPy stay short


@st.composite
def shapes(draw):
    """(T, E, K, D, F)."""
    tokens, experts = draw(st.integers(1, 200)), draw(st.integers(1, 40))
    per_token = min(draw(st.integers(1, experts)), max(1, MOST_ROWS // tokens))
    first = draw(st.sampled_from([w for w in WIDTHS if w * tokens * per_token <= MOST_PRODUCTS]))
    second = draw(st.sampled_from([w for w in WIDTHS if w * first * tokens * per_token <= MOST_PRODUCTS] or [1]))
    return tokens, experts, per_token, *draw(st.permutations([first, second]))


def group_sizes_of(rng, rows, groups):
    """Group sizes that sum to at most ``rows``: any, all rows in one group, most groups empty, and no row."""
    weights = rng.dirichlet(np.full(groups, 0.5))
    yield "any", np.bincount(rng.choice(groups, size=rng.integers(rows + 1), p=weights), minlength=groups)
    yield "one expert", rows * (np.arange(groups) == rng.integers(groups))
    yield "empty groups", np.bincount(rng.choice(rng.integers(groups, size=2), size=rows), minlength=groups)
    yield "no row", np.zeros(groups, int)


def ranges_of(rng, rows):
    """A valid range of rows: all, some, none, and one that leaves the array."""
    yield 0, rows
    yield tuple(sorted(rng.integers(rows + 1, size=2)))
    yield rows // 2, rows // 2
    yield -3, rows + 5


def gather_examples(rng, shape, options):
    tokens, _, per_token, width, _ = shape
    rows = tokens * per_token
    for start, end in ranges_of(rng, rows):
        slots = rng.permutation(rows)
        keep = (np.arange(rows) >= start) & (np.arange(rows) < end)
        arrays = {"x": normal(rng, (tokens, width), "float32"), "indices": jnp.asarray(slots // per_token)}
        arrays |= {"start": jnp.int32(start), "end": jnp.int32(end)}
        if options["weights"]:
            arrays["weights"] = poison_rows(normal(rng, (rows,), "float32"), keep)
        if options["inverse"]:
            arrays["inverse"] = jnp.asarray(np.argsort(slots).reshape(tokens, per_token))
        yield Example(
            arrays=arrays, options={}, cotangent=poison_rows(normal(rng, (rows, width), "float32"), keep), flops=0
        )


def reduce_examples(rng, shape, options):
    tokens, _, per_token, width, _ = shape
    rows = tokens * per_token
    for start, end in ranges_of(rng, rows):
        slots = rng.permutation(rows)
        keep = (np.arange(rows) >= start) & (np.arange(rows) < end)
        arrays = {"rows": poison_rows(normal(rng, (rows, width), "float32"), keep), "start": jnp.int32(start)}
        arrays |= {"indices": jnp.asarray(np.argsort(slots).reshape(tokens, per_token)), "end": jnp.int32(end)}
        if options["weights"]:
            arrays["weights"] = normal(rng, (tokens, per_token), "float32")
        if options["inverse"]:
            arrays["inverse"] = jnp.asarray(slots)
        yield Example(arrays=arrays, options={}, cotangent=normal(rng, (tokens, width), "float32"), flops=0)


def matmul_examples(rng, shape, options):
    tokens, experts, per_token, inner, out = shape
    rows, transpose = tokens * per_token, options["transpose"]
    held = int(rng.integers(1, experts + 1)) if options["offset"] else experts
    for _, sizes in group_sizes_of(rng, rows, experts):
        first = int(rng.integers(experts - held + 1))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        keep = (np.arange(rows) >= bounds[first]) & (np.arange(rows) < bounds[first + held])
        arrays = {
            "lhs": poison_rows(normal(rng, (rows, inner), "float32"), keep),
            "rhs": normal(rng, (held, out, inner) if transpose else (held, inner, out), "float32"),
            "group_sizes": jnp.asarray(sizes),
        }
        if options["offset"]:
            arrays["group_offset"] = jnp.int32(first)
        cotangent = poison_rows(normal(rng, (rows, out), "float32"), keep)
        yield Example(arrays=arrays, options={"transpose_rhs": transpose}, cotangent=cotangent, flops=0)


def ffn_examples(rng, shape, options):
    tokens, experts, per_token, width, hidden = shape
    rows = tokens * per_token
    gated = options["activation"] == "clamped_swiglu" or options["gated"]
    weight = (experts, hidden, width)
    for _, sizes in group_sizes_of(rng, rows, experts):
        keep = np.arange(rows) < sizes.sum()
        arrays = {
            "rows": poison_rows(normal(rng, (rows, width), "float32"), keep),
            "wi_0": normal(rng, weight, "float32") * width**-0.5,
            "wi_1": normal(rng, weight, "float32") * width**-0.5 if gated else None,
            "wo": normal(rng, weight, "float32") * hidden**-0.5,
            "group_sizes": jnp.asarray(sizes),
        }
        if options["biases"]:
            up = normal(rng, weight[:2], "float32") if gated else None
            arrays["biases"] = ExpertBiases(normal(rng, weight[:2], "float32"), up, normal(rng, weight[::2], "float32"))
        cotangent = poison_rows(normal(rng, (rows, width), "float32"), keep)
        yield Example(arrays=arrays, options={"activation": options["activation"]}, cotangent=cotangent, flops=0)


def attention_examples(rng, shape, options):
    queries, spare, group, width, value_width = shape[0], shape[1], min(shape[2], 3), shape[3], shape[4]
    queries, width, value_width = min(queries, 40), min(width, 45), min(value_width, 45)
    in_cache = options["inverse"]
    slots, key_heads = queries + (spare if in_cache else 0), int(rng.integers(1, 3))
    shapes = {
        "query": (2, queries, key_heads * group, width),
        "key": (2, slots, key_heads, width),
        "value": (2, slots, key_heads, value_width),
    }
    static = {"window": int(rng.integers(1, slots + 3)) if options["offset"] else None, "scale": None}
    for _ in range(3):
        arrays = {name: normal(rng, shape, "float32") for name, shape in shapes.items()}
        if in_cache:
            arrays["positions"] = jnp.asarray(rng.integers(-2, slots + 2, (2, queries)), jnp.int32)
        elif options["transpose"]:
            arrays["segments"] = jnp.asarray(rng.integers(0, 3, (2, queries)), jnp.int32)
        if options["weights"]:
            arrays["sinks"] = normal(rng, (key_heads * group,), "float32")
        cotangent = normal(rng, (*shapes["query"][:3], value_width), "float32")
        yield Example(arrays=arrays, options=static, cotangent=cotangent, flops=0)


EXAMPLES = {
    "ragged_gather": gather_examples,
    "ragged_gather_reduce": reduce_examples,
    "grouped_matmul": matmul_examples,
    "expert_ffn": ffn_examples,
    "attention": attention_examples,
}
NUM_SHAPES = {"ragged_gather": 5, "ragged_gather_reduce": 5, "grouped_matmul": 4, "expert_ffn": 2, "attention": 2}
OPTIONS = st.fixed_dictionaries(
    dict.fromkeys(("weights", "inverse", "transpose", "offset", "gated", "biases"), st.booleans())
    | {"activation": st.sampled_from(sorted(ACTIVATIONS))}
)


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "implementation"), FAST)
def test_any_ragged_call_agrees_with_numpy(name, implementation, times):
    @settings(max_examples=times * NUM_SHAPES[name])
    @given(shape=shapes(), options=OPTIONS, seed=st.integers(0, 2**32 - 1))
    def agrees(shape, options, seed):
        for example in EXAMPLES[name](np.random.default_rng(seed), shape, options):
            assert beyond_rounding(name, example, run(name, example, implementation)) == {}

    agrees()


@pytest.mark.parametrize(("name", "implementation"), [case for case in FAST if case[0].startswith("ragged_gather")])
def test_indices_that_point_nowhere_add_nothing(name, implementation):
    rng = np.random.default_rng(0)
    for inverse in (False, True):
        for example in EXAMPLES[name](rng, (9, 4, 3, 7, 1), {"weights": True, "inverse": inverse}):
            arrays = dict(example.arrays)
            lost = rng.permutation(27)[:8]
            indices = np.array(arrays["indices"])
            indices.reshape(-1)[lost] = rng.choice([-1, -27, 27, 100], size=8)
            if inverse:  # a row that lost its token, or a slot that lost its row, is in no inverse either
                there = np.array(arrays["inverse"])
                there[np.isin(there, lost)] = rng.choice([-1, 27, 1000], size=8)
                arrays["inverse"] = jnp.asarray(there)
            arrays["indices"] = jnp.asarray(indices)
            example = Example(arrays=arrays, options={}, cotangent=example.cotangent, flops=0)
            assert beyond_rounding(name, example, run(name, example, implementation)) == {}
