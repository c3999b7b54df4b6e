"""Bad input is refused with what was expected, what came, and what to do."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from raggedmoe import ExpertBiases, attention, expert_ffn, grouped_matmul, ragged_gather, ragged_gather_reduce


@pytest.fixture(autouse=True)
def _without_checked_annotations():
    """Users have no beartype: what they see is the operation's own error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def f(*shape, dtype="float32"):
    return jax.device_put(np.ones(shape, dtype))


def i(*shape):
    return jax.device_put(np.zeros(shape, np.int32))


WEIGHT = f(2, 3, 4)  # [G F D]
SIZES = jnp.array([1, 2])
gather = functools.partial(ragged_gather, f(5, 4), i(6))
reduce = functools.partial(ragged_gather_reduce, f(6, 4), i(5, 2))
matmul = functools.partial(grouped_matmul, f(6, 3))
ffn = functools.partial(expert_ffn, f(6, 4), wo=WEIGHT, group_sizes=SIZES)
attend = functools.partial(attention, f(2, 5, 4, 8), f(2, 5, 2, 8), f(2, 5, 2, 3))

CASES = {
    "gather-rank": (
        lambda: ragged_gather(f(5, 4, 1), i(6)),
        ValueError,
        "ragged_gather: expected x [T D] of a floating type, got float32[5, 4, 1]; reshape it to 2 dimension(s)",
    ),
    "gather-dtype": (
        lambda: ragged_gather(i(5, 4), i(6)),
        TypeError,
        "expected x [T D] of a floating type, got int32[5, 4]; cast it to one of bfloat16, float16, float32, float64",
    ),
    "gather-not-an-array": (lambda: ragged_gather([[1.0]], i(6)), TypeError, "got list; pass a jax or numpy array"),
    "gather-indices-dtype": (
        lambda: ragged_gather(f(5, 4), f(6)),
        TypeError,
        "expected indices [R] of an integer type, got float32[6]; cast it to int32",
    ),
    "gather-weights": (
        lambda: gather(weights=f(5)),
        ValueError,
        "expected len(weights) to be 6, got 5; give one weight for each index",
    ),
    "gather-inverse": (
        lambda: gather(inverse=i(6, 1)),
        ValueError,
        "expected inverse.shape[0] to be 5, got 6; give one line for each row of x",
    ),
    "gather-start": (
        lambda: gather(start=1.5),
        TypeError,
        "expected an integer scalar, got float32[]; pass an int or an int32[]",
    ),
    "reduce-rank": (
        lambda: ragged_gather_reduce(f(6, 4), i(10)),
        ValueError,
        "ragged_gather_reduce: expected indices [T K] of an integer type, got int32[10]; reshape it to 2 dimension(s)",
    ),
    "reduce-weights": (
        lambda: reduce(weights=f(2, 5)),
        ValueError,
        "expected weights of the shape of indices, [5, 2], got [2, 5]; give one weight for each slot",
    ),
    "reduce-inverse": (
        lambda: reduce(inverse=i(5)),
        ValueError,
        "expected len(inverse) to be 6, got 5; give one slot for each row",
    ),
    "matmul-rank": (
        lambda: matmul(f(3, 7), SIZES),
        ValueError,
        "grouped_matmul: expected rhs [G I O] of a floating type, got float32[3, 7]; reshape it to 3 dimension(s)",
    ),
    "matmul-layout": (
        lambda: matmul(f(2, 7, 3), SIZES),
        ValueError,
        "expected rhs [G I O] with I = 3 as in lhs, got [2, 7, 3] with transpose_rhs=False; pass transpose_rhs=True",
    ),
    "matmul-layout-transposed": (
        lambda: matmul(f(2, 3, 7), SIZES, transpose_rhs=True),
        ValueError,
        "expected rhs [G O I] with I = 3 as in lhs, got [2, 3, 7] with transpose_rhs=True; pass transpose_rhs=False",
    ),
    "matmul-other-weights": (
        lambda: matmul(f(2, 5, 7), SIZES),
        ValueError,
        "got [2, 5, 7] with transpose_rhs=False; check which weights these are",
    ),
    "matmul-two-types": (
        lambda: matmul(f(2, 3, 7, dtype="bfloat16"), SIZES),
        TypeError,
        "expected lhs and rhs of one type, got float32 and bfloat16; cast one of them",
    ),
    "matmul-sizes-dtype": (
        lambda: matmul(f(2, 3, 7), f(2)),
        TypeError,
        "expected group_sizes [E] of an integer type, got float32[2]; cast it to int32",
    ),
    "matmul-sizes-too-many": (
        lambda: matmul(f(2, 3, 7), jnp.array([1, 2, 3])),
        ValueError,
        "expected len(group_sizes) to be 2, got 3; give one size for each matrix, or group_offset if rhs holds only",
    ),
    "matmul-sizes-too-large": (
        lambda: matmul(f(2, 3, 7), jnp.array([5, 2])),
        ValueError,
        "expected group_sizes to sum to at most the 6 rows given, got 7; count only the rows that are in the buffer",
    ),
    "matmul-sizes-negative": (
        lambda: matmul(f(2, 3, 7), jnp.array([3, -1])),
        ValueError,
        "expected group_sizes >= 0, got -1 at 1",
    ),
    "matmul-more-groups-than-experts": (
        lambda: matmul(f(3, 3, 7), SIZES, group_offset=0),
        ValueError,
        "expected G <= E, got 3 matrices and 2 group sizes",
    ),
    "matmul-result-type": (
        lambda: matmul(f(2, 3, 7), SIZES, preferred_element_type="int32"),
        TypeError,
        "expected preferred_element_type to be one of bfloat16, float16, float32, float64, got int32",
    ),
    "ffn-rank": (
        lambda: ffn(wi_0=f(3, 4), wi_1=None),
        ValueError,
        "expert_ffn: expected wi_0 [G F D] of a floating type, got float32[3, 4]; reshape it to 3 dimension(s)",
    ),
    "ffn-layout": (
        lambda: ffn(wi_0=f(2, 4, 3), wi_1=None),
        ValueError,
        "expected D (the last dimension) of wi_0 to be 4, got 3; all weights are [G F D], D last",
    ),
    "ffn-down-layout": (
        lambda: expert_ffn(f(6, 4), WEIGHT, None, f(2, 4, 3), SIZES),
        ValueError,
        "expected wo [G F D] = [2, 3, 4] like wi_0, got [2, 4, 3]; all three are stored with D last",
    ),
    "ffn-two-types": (
        lambda: ffn(wi_0=WEIGHT.astype("bfloat16"), wi_1=None),
        TypeError,
        "expected wi_0 of the rows' type float32, got bfloat16; cast it",
    ),
    "ffn-sizes-too-large": (
        lambda: expert_ffn(f(6, 4), WEIGHT, WEIGHT, WEIGHT, jnp.array([5, 2])),
        ValueError,
        "expert_ffn: expected group_sizes to sum to at most the 6 rows given, got 7",
    ),
    "ffn-sizes-number": (
        lambda: expert_ffn(f(6, 4), WEIGHT, WEIGHT, WEIGHT, jnp.array([1, 1, 1])),
        ValueError,
        "expected len(group_sizes) to be 2, got 3; give one size for each expert held here",
    ),
    "ffn-biases": (
        lambda: ffn(wi_0=WEIGHT, wi_1=None, biases=ExpertBiases(f(2, 4), None, f(2, 4))),
        ValueError,
        "expected biases.wi_0.shape[1] to be 3, got 4; give one bias for each output",
    ),
    "ffn-biases-groups": (
        lambda: ffn(wi_0=WEIGHT, wi_1=None, biases=ExpertBiases(f(1, 3), None, f(2, 4))),
        ValueError,
        "expected biases.wi_0.shape[0] to be 2, got 1; give one line for each expert",
    ),
    "ffn-activation": (
        lambda: ffn(wi_0=WEIGHT, wi_1=None, activation="swilu"),
        ValueError,
        "unknown activation 'swilu': expected one of silu, gelu, gelu_tanh, relu2, clamped_swiglu; did you mean",
    ),
    "attention-rank": (
        lambda: attention(f(5, 4, 8), f(2, 5, 2, 8), f(2, 5, 2, 3)),
        ValueError,
        "attention: expected query [B S N H] of a floating type, got float32[5, 4, 8]; reshape it to 4 dimension(s)",
    ),
    "attention-two-types": (
        lambda: attention(f(2, 5, 4, 8), f(2, 5, 2, 8, dtype="bfloat16"), f(2, 5, 2, 3)),
        TypeError,
        "expected key of the query's type float32, got bfloat16; cast it",
    ),
    "attention-heads": (
        lambda: attention(f(2, 5, 4, 8), f(2, 5, 3, 8), f(2, 5, 3, 3)),
        ValueError,
        "expected N, the query heads, to be a multiple of M, the key heads, got N = 4 and M = 3; check which heads",
    ),
    "attention-value-heads": (
        lambda: attention(f(2, 5, 4, 8), f(2, 5, 2, 8), f(2, 5, 4, 3)),
        ValueError,
        "expected M of value to be 2, got 4; give one value for each key",
    ),
    "attention-width": (
        lambda: attention(f(2, 5, 4, 8), f(2, 5, 2, 6), f(2, 5, 2, 3)),
        ValueError,
        "expected H of key to be 8, got 6; queries and keys are as wide as each other",
    ),
    "attention-batch": (
        lambda: attention(f(1, 5, 4, 8), f(2, 5, 2, 8), f(2, 5, 2, 3)),
        ValueError,
        "expected B of key to be 1, got 2; give one sequence of slots for each of queries",
    ),
    "attention-cache-without-positions": (
        lambda: attention(f(2, 1, 4, 8), f(2, 5, 2, 8), f(2, 5, 2, 3)),
        ValueError,
        "expected L without positions to be 1, got 5; give the positions of the queries in the cache",
    ),
    "attention-positions-shape": (
        lambda: attend(positions=i(2, 4)),
        ValueError,
        "expected positions.shape[1] to be 5, got 4; give one position for each query",
    ),
    "attention-positions-dtype": (
        lambda: attend(positions=f(2, 5)),
        TypeError,
        "expected positions [B S] of an integer type, got float32[2, 5]; cast it to int32",
    ),
    "attention-positions-and-segments": (
        lambda: attend(positions=i(2, 5), segments=i(2, 5)),
        ValueError,
        "expected segments or positions, got both; slots of a cache have no segment",
    ),
    "attention-window": (
        lambda: attend(window=0),
        ValueError,
        "expected window >= 1, got 0; a query sees itself, or pass None for all",
    ),
    "attention-traced-window": (
        lambda: jax.jit(lambda window: attend(window=window))(3),
        TypeError,
        "expected window to be a static int, got",
    ),
    "attention-scale": (
        lambda: attend(scale=jnp.ones(())),
        TypeError,
        "expected scale to be a static float, got Array(1., dtype=float32); scale the queries by an array",
    ),
    "attention-sinks": (
        lambda: attend(sinks=f(2)),
        ValueError,
        "expected len(sinks) to be 4, got 2; give one sink for each query head",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), CASES.values(), ids=CASES)
def test_bad_input_is_refused_with_a_remedy(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


@pytest.mark.parametrize("call", [lambda sizes: matmul(f(2, 3, 7), sizes), lambda sizes: ffn(wi_0=WEIGHT, wi_1=None)])
def test_group_sizes_that_are_traced_are_not_refused(call):
    assert jax.eval_shape(call, SIZES).shape[0] == 6
