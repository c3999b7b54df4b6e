"""The layer on meshes of eight devices: whatever the strategy, the degrees and the chunks, it is the one-device layer.

Compared with the float64 oracles, never with another way. In `make test` every strategy meets every axis of the mesh
and every way to cut the work, and those ways meet each other; all cases are `slow`.
"""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import ExpertConfig, KernelChoice, MoE, MoEExecution, update_selection_bias
from raggedmoe.aot.collectives import StepSizes, layer_collectives
from raggedmoe.aot.program_text import counts_of
from raggedmoe.kernels.registry import record_selections
from tests.aot.hlo_collectives import collectives
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
from tests.pairwise import pairwise

pytestmark = pytest.mark.both_ends

NUM_TOKENS, NUM_EXPERTS, PER_TOKEN = 32, 24, 3  # one of eight ranks can hold all experts of a token
SIZES = {"num_experts": NUM_EXPERTS, "experts_per_token": PER_TOKEN, "model_dim": 16, "expert_dim": 8}
ROUTER = {
    "logit_bias": True,
    "selection_bias": True,
    "expert_scale": True,
    "aux_loss_weight": 0.3,
    "z_loss_weight": 0.2,
}
EXPERTS = ExpertConfig(biases=True)
OPTIONS = {
    "strategy": ("all_to_all", "ring", "dense", "local"),
    "expert": (1, 2, 4, 8),
    "fsdp": (1, 2, 4, 8),
    "tensor": (1, 2, 4, 8),
    "data": (1, 2, 4, 8),
    "tensor_split": ("expert_dim", "model_dim"),
    "token_chunks": (1, 2, 4),
    "width_chunks": (1, 2),
}
COMPILES_SOON = KernelChoice(grouped_matmul="xla")  # in half the time of the CPU's tile loops
ROUTINGS = ("balanced", "random", "one_rank", "empty_rank")


def cases():
    """Every combination that fits eight devices and says something new."""
    for values in itertools.product(*OPTIONS.values()):
        case = dict(zip(OPTIONS, values))
        fits = case["expert"] * case["fsdp"] * case["tensor"] * case["data"] == 8
        alone = case["strategy"] == "local" and case["expert"] > 1
        nothing_new = case["tensor"] == 1 and case["tensor_split"] == "model_dim"
        if case["strategy"] == "dense":  # which sends as `ring` does
            nothing_new |= (case["token_chunks"], case["width_chunks"]) not in ((1, 1), (2, 2), (4, 2))
        if fits and not alone and not nothing_new:
            yield case


CUTS = {"tensor_split", "token_chunks", "width_chunks"}


def must_meet(one, other):
    """Whether two values are of the strategy and anything else, or of what cuts the work."""
    return one[0] == "strategy" or {one[0], other[0]} <= CUTS


ALL = list(cases())


def is_small(case):
    """Two of everything, and four of the experts' ranks alone, whose order two would not show."""
    other_degrees = max(case[name] for name in ("fsdp", "tensor", "data"))
    return case["expert"] <= 4 and other_degrees <= 2 and case["token_chunks"] <= 2


SOME = pairwise(
    (case for case in ALL if is_small(case) and (case["expert"] > 1 or case["strategy"] == "local")), must_meet
)


def name_of(case):
    return "-".join(f"{value}" if isinstance(value, str) else f"{key}{value}" for key, value in case.items())


every_case = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name_of(case), marks=[] if case in SOME else [pytest.mark.slow]) for case in ALL]
)


QUICK = MoEExecution(strategy="local", kernels=COMPILES_SOON)  # where experts are of no interest: what compiles soonest
CONFIG = moe_config(ROUTER, experts=EXPERTS, **SIZES)


def execution_of(case):
    chosen = {name: case[name] for name in ("strategy", "tensor_split", "token_chunks", "width_chunks")}
    if case["strategy"] != "dense":  # by what compiles sooner; the CPU's kernels are in the other tests here
        chosen["kernels"] = COMPILES_SOON
    return MoEExecution(**chosen)


def plan_of_case(case):
    degrees = {name: case[name] for name in ("data", "fsdp", "expert", "tensor")}
    return plan_of(tensor_split=case["tensor_split"], **degrees)


def routing(name):
    """Experts of every token."""
    rng = np.random.default_rng(len(name))
    if name == "balanced":
        return (np.arange(NUM_TOKENS)[:, None] * PER_TOKEN + np.arange(PER_TOKEN)[None]) % NUM_EXPERTS
    if name == "random":
        return random_experts(rng, NUM_TOKENS, PER_TOKEN, NUM_EXPERTS, skew=1.0)
    # The last rank alone, or all but the first, however many there are.
    held = NUM_EXPERTS // 8 if name == "one_rank" else NUM_EXPERTS // 2
    chosen = np.argsort(rng.random((NUM_TOKENS, held)), axis=1)[:, :PER_TOKEN]
    return (NUM_EXPERTS - held + chosen).astype(np.int32)


@functools.cache
def arrays():
    x, params = random_tokens(CONFIG, NUM_TOKENS, dtype=np.float32), random_params(CONFIG, dtype=np.float32)
    mask = np.arange(NUM_TOKENS) % 7 != 3
    return x, params, mask, random_tokens(CONFIG, NUM_TOKENS, seed=3, dtype=np.float32)


@functools.cache
def expected(routing_name):
    """What both oracles say."""
    config = CONFIG
    x, params, mask, cotangent = arrays()
    experts = routing(routing_name)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(value, np.float64) for name, value in params.items()}
        gradients = dense_gradients(
            jnp.asarray(x, np.float64), wide, config, jnp.asarray(cotangent, np.float64), experts, jnp.asarray(mask)
        )
    return numpy_layer.layer(x, params, config, mask=mask, replay=experts), gradients


def planned(config, execution, plan, num_sequences=1):
    """Bytes by kind and number of devices, as the plan prints them; the sequences are those of one device."""
    tokens = NUM_TOKENS // plan.num_token_shards
    step = StepSizes(num_tokens=tokens, num_sequences=num_sequences, dtype="float32", ragged=False)
    found = Counter()
    for each in layer_collectives(config, execution, plan, step):
        found[each.kind, each.num_devices] += each.num_bytes
    return found


def by_kind(found):
    return {kind: sum(found[key] for key in found if key[0] == kind) for kind, _ in found}


def sent_by_kind(hlo):
    """Return what is sent as `raggedmoe bench layer` and `compile --hlo` read it."""
    return {kind: traffic.num_bytes for kind, traffic in counts_of(hlo).collectives.items()}


@pytest.mark.product
@every_case
def test_layer_is_that_of_one_device_and_sends_what_the_plan_says(case):
    config, execution, plan = CONFIG, execution_of(case), plan_of_case(case)
    x, params, mask, cotangent = arrays()
    params, x, mask, cotangent = placed(plan, config, params, x, mask, cotangent)
    run = gradients_on_mesh.lower(
        x,
        params,
        config,
        plan.mesh(),
        cotangent,
        execution=execution,
        mask=mask,
        replay=placed(plan, config, {}, routing("random"))[1],
    ).compile()
    assert collectives(run.as_text()) == planned(config, execution, plan)
    assert sent_by_kind(run.as_text()) == by_kind(planned(config, execution, plan))
    for name in ROUTINGS:
        replay = placed(plan, config, {}, routing(name))[1]
        out, gradients = run(x, params, cotangent, mask=mask, replay=replay)
        value, slopes = expected(name)
        assert_agrees(out, value)
        assert set(gradients) == set(slopes)
        assert_gradients_close(gradients, slopes)
        bias, rate = params["router_selection_bias"], 0.125
        moved = np.asarray(update_selection_bias(bias, out.load, rate)) - np.asarray(bias)
        direction = np.sign(value.load.sum() - value.load * NUM_EXPERTS)
        np.testing.assert_allclose(moved, rate * direction, atol=1e-6)


SHARED = moe_config(
    {"aux_loss_weight": 0.3},
    experts=ExpertConfig(num_shared=2, shared_gate=True),
    **{**SIZES, "num_experts": 8},
)


@functools.cache
def expected_with_shared():
    """The arrays, and what both oracles say."""
    x, cotangent = (random_tokens(SHARED, NUM_TOKENS, seed=seed, dtype=np.float32) for seed in (1, 3))
    params = random_params(SHARED, dtype=np.float32)
    value = numpy_layer.layer(x, params, SHARED)
    with jax.enable_x64(True):
        wide_x, wide_params, wide_cotangent = jax.tree.map(
            lambda array: jnp.asarray(array, np.float64), (x, params, cotangent)
        )
        gradients = dense_gradients(wide_x, wide_params, SHARED, wide_cotangent, value.experts)
    return (x, params, cotangent), value, gradients


# The gradients were exchanged where experts are split over D.
@pytest.mark.product
@pytest.mark.parametrize("tensor_split", [pytest.param("expert_dim", marks=pytest.mark.slow), "model_dim"])
@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [
        ("ring", {"data": 2, "expert": 2, "tensor": 2}),
        pytest.param("local", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.ci),
        pytest.param("all_to_all", {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("ring", {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("all_to_all", {"data": 2, "fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("local", {"data": 4, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("ring", {"data": 2, "tensor": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{name}{size}" for name, size in value.items()),
)
def test_shared_experts_have_their_gradients_on_every_mesh(strategy, degrees, tensor_split):
    """They are in no stage: XLA exchanged the gradients of two devices' tokens where nothing said how they lie."""
    (x, params, cotangent), value, slopes = expected_with_shared()
    execution = MoEExecution(strategy=strategy, tensor_split=tensor_split)
    plan = plan_of(tensor_split=tensor_split, **degrees)
    params, x, cotangent = placed(plan, SHARED, params, x, cotangent)
    out, gradients = gradients_on_mesh(x, params, SHARED, plan.mesh(), cotangent, execution=execution)
    assert_agrees(out, value)
    assert set(gradients) == set(slopes)
    assert_gradients_close(gradients, slopes)


@pytest.mark.ci
def test_more_width_chunks_than_a_rank_has_columns_send_what_the_plan_says():
    case = {"strategy": "ring", "data": 1, "fsdp": 1, "expert": 1, "tensor": 8, "tensor_split": "model_dim"}
    config, plan = CONFIG, plan_of_case(case)
    execution = execution_of({**case, "token_chunks": 1, "width_chunks": 4})
    assert config.model_dim // 8 < execution.width_chunks
    params, *arrays_of_tokens = placed(plan, config, arrays()[1], *(a for a in arrays() if not isinstance(a, dict)))
    x, mask, cotangent = arrays_of_tokens
    run = gradients_on_mesh.lower(x, params, config, plan.mesh(), cotangent, execution=execution, mask=mask).compile()
    assert collectives(run.as_text()) == planned(config, execution, plan)


@pytest.mark.parametrize(
    ("router", "factor", "plan"),
    [
        pytest.param(
            {"aux_loss": "sequence", "aux_loss_weight": 0.3, "z_loss_weight": 0.2},
            None,
            plan_of(data=2, fsdp=2),
            marks=pytest.mark.ci,
        ),
        (
            {"selection": "expert_choice", "z_loss_weight": 0.2},
            1.0,
            plan_of(data=2, expert=2),
        ),
    ],
    ids=["sequence", "expert-choice"],
)
def test_other_losses_of_routers_send_what_the_plan_says(router, factor, plan):
    config = moe_config(router, **SIZES, capacity_factor=factor)
    execution = QUICK if factor is None else MoEExecution()
    x, _, _, cotangent = arrays()
    params, x, cotangent = placed(plan, config, random_params(config, dtype=np.float32), x, cotangent)
    given = {"execution": execution, "num_sequences": 8}
    run = gradients_on_mesh.lower(x, params, config, plan.mesh(), cotangent, **given).compile()
    assert collectives(run.as_text()) == planned(config, execution, plan)


@pytest.mark.parametrize(
    "degrees",
    [{"data": 2, "expert": 4}, pytest.param({"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow)],
    ids=["data", "fsdp-tensor"],
)
def test_slots_of_experts_on_other_devices_are_those_of_one_device_and_send_what_the_plan_says(degrees):
    config, execution = moe_config(ROUTER, experts=EXPERTS, capacity_factor=1.0, **SIZES), MoEExecution()
    plan, num_sequences, experts = plan_of(**degrees), 8, routing("random")
    x, params, mask, cotangent = arrays()
    value = numpy_layer.layer(x, params, config, mask=mask, replay=experts, num_sequences=num_sequences)
    kept = numpy_layer.kept_slots(value.experts, config, num_sequences)
    with jax.enable_x64(True):
        wide = [jnp.asarray(array, np.float64) for array in (x, cotangent)]
        wide_params = {name: jnp.asarray(array, np.float64) for name, array in params.items()}
        given = (experts, jnp.asarray(mask), jnp.asarray(kept))
        slopes = dense_gradients(wide[0], wide_params, config, wide[1], *given)
    params, x, mask, cotangent, replay = placed(plan, config, params, x, mask, cotangent, experts)
    options = {"mask": mask, "replay": replay}
    given = {"execution": execution, "num_sequences": num_sequences}
    lowered = gradients_on_mesh.lower(x, params, config, plan.mesh(), cotangent, **options, **given)
    run = lowered.compile()
    assert collectives(run.as_text()) == planned(config, execution, plan, num_sequences // plan.num_token_shards)
    out, gradients = run(x, params, cotangent, **options)
    assert value.dropped > 0
    assert_agrees(out, value)
    assert_gradients_close(gradients, slopes)


@pytest.mark.parametrize("strategy", ["all_to_all", pytest.param("ring", marks=pytest.mark.ci)])
def test_a_replay_that_names_an_expert_twice_is_refused_or_means_the_same_on_a_mesh(strategy):
    config, there = moe_config(**SIZES), replace(QUICK, strategy=strategy)
    x, params, _, _ = arrays()
    params = {name: params[name] for name in config.param_specs()}
    twice = routing("one_rank")
    twice[:, 1:] = twice[:, :1]
    with pytest.raises(ValueError, match="expected replay with different experts for each token, got one twice"):
        layer(x, params, config, there, mesh=mesh_of(expert=8), replay=jnp.asarray(twice))
    one = run_on_mesh(x, params, config, None, execution=QUICK, replay=jnp.asarray(twice))
    many = run_on_mesh(x, params, config, mesh_of(expert=8), execution=there, replay=jnp.asarray(twice))
    np.testing.assert_array_equal(one.load, many.load)
    assert int(many.load.sum()) == NUM_TOKENS
    assert int(many.dropped) == 0
    np.testing.assert_allclose(one.output, many.output, atol=1e-5)


@pytest.mark.parametrize(
    ("selection", "strategy", "degrees"),
    [
        pytest.param("random", "all_to_all", {"expert": 8}, marks=pytest.mark.ci),
        ("balanced", "ring", {"expert": 4, "tensor": 2}),
        pytest.param("learned", "ring", {"expert": 2, "data": 4}, marks=pytest.mark.ci),
    ],
)
def test_what_is_drawn_or_counted_for_a_token_does_not_depend_on_the_mesh(selection, strategy, degrees):
    router = {"selection": selection, "jitter": 0.2, "aux_loss_weight": 0.3}
    config = moe_config(router, **SIZES)
    x, params, mask, _ = arrays()
    params = {name: params[name] for name in config.param_specs()}
    given = {"mask": jnp.asarray(mask), "key": jax.random.key(5)}
    one = run_on_mesh(x, params, config, None, execution=QUICK, **given)
    many = run_on_mesh(x, params, config, mesh_of(**degrees), execution=replace(QUICK, strategy=strategy), **given)
    np.testing.assert_array_equal(one.experts, many.experts)
    np.testing.assert_array_equal(one.load, many.load)
    np.testing.assert_allclose(one.output, many.output, atol=1e-5)
    assert float(one.aux_loss) == pytest.approx(float(many.aux_loss), rel=1e-6)


def recounted(experts, num_ranks, buffer, strategy, num_chunks=1):
    """Which slots are kept: one after the other, as the strategies' docstrings say, by lists."""
    kept = np.ones(experts.shape, bool)
    held, per_rank = NUM_EXPERTS // num_ranks, len(experts) // num_ranks
    for chunk in range(num_chunks):
        size = per_rank // num_chunks
        for rank in range(num_ranks):
            arriving = []
            for source in range(num_ranks):
                first = source * per_rank + chunk * size
                for t, k in itertools.product(range(first, first + size), range(PER_TOKEN)):
                    if experts[t, k] // held == rank:
                        order = (experts[t, k], t, k) if strategy == "ring" else (source, experts[t, k], t, k)
                        arriving.append((order, t, k))
            for _, t, k in sorted(arriving)[buffer:]:
                kept[t, k] = False
    return kept


@pytest.mark.parametrize(
    ("strategy", "factor", "token_chunks"),
    [
        pytest.param("ring", 1.0, 1, marks=pytest.mark.ci),
        ("all_to_all", 0.3, 1),
        pytest.param("ring", 0.3, 2, marks=pytest.mark.slow),
        pytest.param("all_to_all", 1.0, 2, marks=pytest.mark.slow),
    ],
)
def test_a_buffer_that_is_too_small_drops_in_order_and_counts_every_drop(x64, strategy, factor, token_chunks):
    config = moe_config({"aux_loss_weight": 0.3}, experts=EXPERTS, **SIZES)
    execution = replace(QUICK, strategy=strategy, ragged_buffer_factor=factor, token_chunks=token_chunks)
    x, params, cotangent = random_tokens(config, NUM_TOKENS), random_params(config), random_tokens(config, NUM_TOKENS)
    num_ranks, total = 4, 0
    buffer = math.floor(factor * (NUM_TOKENS // num_ranks // token_chunks) * PER_TOKEN)
    for name in ROUTINGS:
        experts = routing(name)
        kept = recounted(experts, num_ranks, buffer, strategy, token_chunks)
        mesh = mesh_of(expert=num_ranks)
        given = {"execution": execution, "replay": jnp.asarray(experts)}
        out, gradients = gradients_on_mesh(x, params, config, mesh, cotangent, **given)
        assert int(out.dropped) == (~kept).sum()
        slopes = dense_gradients(x, params, config, cotangent, experts, kept=jnp.asarray(kept))
        assert_gradients_close(gradients, slopes)
        total += (~kept).sum()
        np.testing.assert_array_equal(out.load, np.bincount(experts.reshape(-1), minlength=NUM_EXPERTS))
    assert total > 0


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_the_worst_case_buffer_drops_nothing(strategy):
    config, execution = moe_config(experts=EXPERTS, **SIZES), MoEExecution(strategy=strategy)
    x, params = random_tokens(config, NUM_TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    for first in range(NUM_EXPERTS):  # all tokens choose the same experts
        experts = np.tile((first + np.arange(PER_TOKEN)) % NUM_EXPERTS, (NUM_TOKENS, 1)).astype(np.int32)
        given = {"execution": execution, "replay": jnp.asarray(experts)}
        out = run_on_mesh(x, params, config, mesh_of(expert=4), **given)
        assert int(out.dropped) == 0
        assert_agrees(out, numpy_layer.layer(x, params, config, replay=experts))


@pytest.mark.ci
@pytest.mark.product
@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_named_kernels_are_those_that_every_stage_calls(strategy):
    kernels = KernelChoice(ragged_gather="xla", ragged_gather_reduce="reference", grouped_matmul="reference")
    config, execution = moe_config(**SIZES), MoEExecution(strategy=strategy, kernels=kernels)
    x, params = random_tokens(config, NUM_TOKENS, dtype=np.float32), random_params(config, dtype=np.float32)
    with record_selections() as selections:
        out = run_on_mesh(x, params, config, mesh_of(expert=2), execution=execution)
    chosen = {(selection.call.operation, selection.chosen.name) for selection in selections}
    assert chosen == {("ragged_gather", "xla"), ("ragged_gather_reduce", "reference"), ("grouped_matmul", "reference")}
    assert_agrees(out, numpy_layer.layer(x, params, config))


def test_the_module_runs_on_a_mesh():
    config, execution = moe_config(**SIZES), MoEExecution(strategy="all_to_all")
    params = random_params(config, dtype=np.float32)
    axes = {name: spec.axes for name, spec in config.param_specs().items()}
    layer = MoE(config, params=params, axes=axes, execution=execution, mesh=mesh_of(expert=2, data=2))
    x = random_tokens(config, NUM_TOKENS, dtype=np.float32)
    assert_agrees(jax.jit(lambda x: layer(x))(x), numpy_layer.layer(x, params, config))


@pytest.mark.parametrize(
    ("options", "strategy", "degrees", "num_tokens", "message"),
    [
        (
            {"num_experts": 6},
            "ring",
            {"expert": 4},
            8,
            r"wi_0: its expert=6 is not divisible by expert_para",
        ),
        ({}, "local", {"expert": 2}, 8, "needs all experts on every device.*use 'ring' or 'all_to_all'"),
        (
            {"capacity_factor": 1.0},
            None,
            {"data": 2},
            8,
            "whole sequences=1 is not divisible by data_parallelism × .*=2",
        ),
        (
            {},
            "ring",
            {"expert": 2, "data": 4},
            12,
            "tokens=12 is not divisible by data_parallelism × .*=8; .* or pad with tokens=16",
        ),
        ({"expert_dim": 5}, "ring", {"tensor": 2}, 8, r"wi_0: its expert_dim=5 is not divisible by tensor"),
        ({}, "ring", {"fsdp": 8}, 8, r"wi_0: its model_dim=\d+ is not divisible by fsdp_parallelism=8"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_to_do(options, strategy, degrees, num_tokens, message):
    config = moe_config(**{**SIZES, "model_dim": 12, **options})
    x, params = random_tokens(config, num_tokens, dtype=np.float32), random_params(config, dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        run_on_mesh(x, params, config, mesh_of(**degrees), execution=MoEExecution(strategy=strategy))
