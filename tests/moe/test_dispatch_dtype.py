"""Layers whose rows are sent to their experts in 8 bits: on any mesh they compute on tokens that were quantised before.

The tokens are quantised by NumPy loops, and given to the float64 oracles: what rounding adds is a constant of the
gradients, which is the straight-through rule. Tokens that are masked hold NaN.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import KernelChoice, MoEExecution, Plan
from raggedmoe.aot.collectives import StepSizes, layer_collectives
from raggedmoe.kernels.qarray import LHS_FORMATS
from raggedmoe.kernels.registry import FORWARD
from tests.aot.hlo_collectives import collectives
from tests.kernels.quantized_training import EPS, absmax, round_to
from tests.moe import numpy_layer
from tests.moe.examples import (
    assert_agrees,
    assert_gradients_close,
    dense_gradients,
    layer,
    moe_config,
    random_experts,
    random_params,
    random_tokens,
)
from tests.moe.on_mesh import gradients_on_mesh, mesh_of, placed, plan_of, run_on_mesh

pytestmark = pytest.mark.both_ends

E4M3, E5M2, INT8 = LHS_FORMATS
NUM_EXPERTS, PER_TOKEN, WIDTH = 8, 2, 16
KERNELS = KernelChoice(grouped_matmul="xla")  # what compiles soonest

# The strategy, format, degrees and tokens; the weights on the way in instead of out; and chunks.
CASES = {
    "all_to_all": ("all_to_all", E4M3, {"slices": 2, "expert": 4}, 32, "output", {"token_chunks": 2}),
    "ring": ("ring", INT8, {"fsdp": 2, "expert": 2, "tensor": 2}, 32, "output", {"width_chunks": 2}),
    "all_to_all-input": ("all_to_all", E4M3, {"data": 2, "expert": 4}, 32, "input", {}),
    "ring-input": ("ring", E4M3, {"data": 2, "expert": 4}, 32, "input", {}),
    "all_to_all-alone": ("all_to_all", E5M2, {"expert": 8}, 8, "output", {"width_chunks": 2}),
    "ring-alone": ("ring", E5M2, {"expert": 8}, 8, "output", {"token_chunks": 2}),
    "all_to_all-tensor": ("all_to_all", INT8, {"fsdp": 2, "expert": 2, "tensor": 2}, 32, "output", {}),
}
MARKS = {**dict.fromkeys(CASES, pytest.mark.ci), "ring": (), "ring-alone": pytest.mark.slow}
MARKS["all_to_all-tensor"] = pytest.mark.slow


def config_of(weigh):
    return moe_config(
        {"aux_loss_weight": 0.3, "weigh": weigh},
        num_experts=NUM_EXPERTS,
        experts_per_token=PER_TOKEN,
        model_dim=WIDTH,
        expert_dim=8,
    )


def routings(num_tokens):
    """Experts of every token, and which tokens count: of all, of one alone, of none; and all of two experts."""
    skewed = random_experts(np.random.default_rng(0), num_tokens, PER_TOKEN, NUM_EXPERTS, skew=1.0)
    same = np.tile(np.asarray([7, 6], np.int32), (num_tokens, 1))
    some = np.arange(num_tokens) % 7 != 3
    return {
        "skewed": (skewed, some),
        "two experts": (same, np.ones(num_tokens, bool)),
        "one token": (skewed, np.arange(num_tokens) == 5),
        "no token": (skewed, np.zeros(num_tokens, bool)),
    }


@functools.cache
def arrays(num_tokens, weigh):
    config = config_of(weigh)
    params = random_params(config, dtype=np.float32)
    x, cotangent = (random_tokens(config, num_tokens, seed=seed, dtype=np.float32) for seed in (1, 3))
    return x, params, cotangent


def quantized(x, qtype, num_parts):
    """What arrives of each token, of which each part of the columns has a scale of its own."""
    rounded = round_to(x, qtype, absmax(x, qtype, (1, WIDTH // num_parts), None), ideal=False)
    assert (rounded.slack <= 8 * EPS * np.abs(rounded.values)).all(), "the oracle's values are near to others"
    return rounded.values


def expected(case, experts, mask):
    """What both oracles say of tokens that were quantised first."""
    _, qtype, _, num_tokens, weigh, chunks = case
    config, (x, params, cotangent) = config_of(weigh), arrays(num_tokens, weigh)
    x = np.where(mask[:, None], np.asarray(x, np.float64), 0)
    sent = quantized(x, qtype, chunks.get("width_chunks", 1))
    value = numpy_layer.layer(x, params, config, mask=mask, replay=experts, sent=sent)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, np.float64) for name, array in params.items()}
        gradients = dense_gradients(
            jnp.asarray(x),
            wide,
            config,
            jnp.asarray(cotangent, np.float64),
            experts,
            jnp.asarray(mask),
            added=jnp.asarray(sent - x),
        )
    return value, gradients


def planned(config, execution, plan, num_tokens, *, forward_alone=False):
    """Bytes by kind and number of devices, as the plan prints them."""
    step = StepSizes(num_tokens=num_tokens // plan.num_token_shards, dtype="float32", ragged=False)
    found = Counter()
    for each in layer_collectives(config, execution, plan, step):
        if each.direction == FORWARD or not forward_alone:
            found[each.kind, each.num_devices] += each.num_bytes
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in CASES])
def test_the_layer_is_that_of_quantised_tokens_and_sends_what_the_plan_says(name):
    strategy, qtype, degrees, num_tokens, weigh, chunks = CASES[name]
    execution = MoEExecution(strategy=strategy, kernels=KERNELS, dispatch_dtype=qtype, **chunks)
    config, plan, (x, params, cotangent) = config_of(weigh), plan_of(**degrees), arrays(num_tokens, weigh)
    experts, mask = routings(num_tokens)["skewed"]
    params, x, cotangent, mask, experts = placed(plan, config, params, x, cotangent, mask, experts)
    given = {"execution": execution, "mask": mask, "replay": experts}
    run = gradients_on_mesh.lower(x, params, config, plan.mesh(), cotangent, **given).compile()
    assert collectives(run.as_text()) == planned(config, execution, plan, num_tokens)
    for experts, mask in routings(num_tokens).values():
        value, slopes = expected(CASES[name], experts, mask)
        spoilt = np.where(mask[:, None], x, np.nan).astype(np.float32)
        _, *given = placed(plan, config, {}, spoilt, cotangent, mask, experts)
        out, gradients = run(given[0], params, given[1], mask=given[2], replay=given[3])
        assert_agrees(out, value)
        assert set(gradients) == set(slopes)
        assert_gradients_close(gradients, slopes)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["all_to_all", "ring"])
def test_forward_alone_sends_what_the_plan_says_of_it(name):
    strategy, qtype, degrees, num_tokens, weigh, chunks = CASES[name]
    execution = MoEExecution(strategy=strategy, kernels=KERNELS, dispatch_dtype=qtype, **chunks)
    config, plan, (x, params, _) = config_of(weigh), plan_of(**degrees), arrays(num_tokens, weigh)
    params, x = placed(plan, config, params, x)
    text = run_on_mesh.lower(x, params, config, plan.mesh(), execution=execution).compile().as_text()
    assert collectives(text) == planned(config, execution, plan, num_tokens, forward_alone=True)


@pytest.mark.parametrize(("strategy", "rows"), [("ring", 4), ("all_to_all", PER_TOKEN)])
def test_the_plans_bytes_by_hand(strategy, rows):
    """A byte for each of 16 numbers and 4 for a scale instead of 32 of bfloat16, forward; all else is as it was."""
    config, plan, step = config_of("output"), Plan(expert=4), StepSizes(num_tokens=100)
    sent = {
        dtype: {
            (each.what, each.direction): each.num_bytes
            for each in layer_collectives(config, MoEExecution(strategy=strategy, dispatch_dtype=dtype), plan, step)
        }
        for dtype in (None, E4M3)
    }
    assert sent[E4M3].pop(("dispatch", FORWARD)) == 100 * rows * (16 + 4)
    assert sent[None].pop(("dispatch", FORWARD)) == 100 * rows * 32
    assert sent[E4M3] == sent[None]


def test_a_mesh_that_cuts_rows_is_refused():
    x, params, _ = arrays(32, "output")
    execution = MoEExecution(strategy="ring", tensor_split="model_dim", dispatch_dtype=INT8)
    with pytest.raises(
        ValueError, match="tensor_split='model_dim' and tensor_parallelism=2: each rank's part of a row"
    ):
        layer(x, params, config_of("output"), execution, mesh=mesh_of(expert=4, tensor=2))
