"""Configurations refuse what makes no sense, and see which layers are alike."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.models.config import (
    MOST_LAYERS,
    GroupedQueryConfig,
    LatentConfig,
    RopeConfig,
    Stack,
    YarnConfig,
    check_execution,
)
from raggedmoe.models.config_json import from_json, to_json
from raggedmoe.models.count import count_params
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.presets import ALIASES, PRESETS, model_preset
from raggedmoe.moe.execution import MoEExecution
from tests.models.drawn import tiny

GROUPED = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
LATENT = {"num_heads": 2, "q_lora_rank": None, "kv_lora_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}

TPU_KERNEL = MoEExecution(moe_backend="expert_ffn", kernels=KernelChoice(expert_ffn="pallas_tpu"))


def running(model, **execution):
    check_execution(tiny(model), ModelExecution(**execution))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GroupedQueryConfig(**GROUPED | {"num_kv_heads": 3}),
            r"not divisible by num_kv_heads=3; use num_kv_heads in \[1, 2, 4\]",
        ),
        (lambda: GroupedQueryConfig(**GROUPED | {"head_dim": 7}), "expected an even head_dim"),
        (lambda: GroupedQueryConfig(**GROUPED | {"num_heads": 0}), "num_heads to be a positive integer, got 0"),
        (lambda: GroupedQueryConfig(**GROUPED, qk_norm="heads"), "unknown qk_norm 'heads'.*did you mean 'head'"),
        (lambda: GroupedQueryConfig(**GROUPED, clip=-1.0), "expected clip > 0"),
        (lambda: LatentConfig(**LATENT | {"q_lora_rank": 0}), "q_lora_rank to be a positive"),
        (lambda: LatentConfig(**LATENT | {"rope_dim": 3}), "expected an even rope_dim"),
        (lambda: RopeConfig(theta=0.5), "expected a rope theta > 1"),
        (lambda: YarnConfig(factor=0.5, original_length=8), "expected a YaRN factor >= 1"),
        (lambda: tiny("mixtral-tiny", model_dim=32), "expected moe.model_dim to be model_dim=32, got 64"),
        (lambda: tiny("mixtral-tiny", dense_layers=(7,), mlp_dim=8), r"expected dense_layers in 0 .. 1, got \[7\]"),
        (lambda: tiny("mixtral-tiny", dense_layers=(0,)), "need mlp_dim"),
        (lambda: tiny("mixtral-tiny", windows=()), "expected at least one window"),
        (lambda: tiny("mixtral-tiny", windows=(0,)), "each None or >= 1"),
        (lambda: tiny("mixtral-tiny", mtp_layers=-1), "expected mtp_layers >= 0"),
        (lambda: ModelExecution(remat="attn"), "expected remat 'none', 'full' or a tuple"),
        (lambda: ModelExecution(remat=("attn_out", "moe_ups")), "remat name 'moe_ups'.*did you mean 'moe_up'"),
        (lambda: running("mixtral-tiny", remat=("kv_a",)), "remat keeps 'kv_a', which this model never computes"),
        (lambda: running("deepseek-v2-tiny", remat=("q_a",)), "remat keeps 'q_a', which this model never computes"),
        (lambda: running("mixtral-tiny", remat=("mlp_up",)), "remat keeps 'mlp_up', which this model never computes"),
        (
            lambda: running("mixtral-tiny", moe=TPU_KERNEL, remat=("moe_up",)),
            "remat keeps 'moe_up', which this model never",
        ),
        (lambda: model_preset("mixtral-8x9b"), "unknown model 'mixtral-8x9b'.*did you mean 'mixtral-8x"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_dense_prefix_is_a_stack_of_its_own():
    stacks = model_preset("deepseek-v3").stacks
    assert [(s.first, len(s.kinds), s.repeats) for s in stacks] == [(0, 1, 3), (3, 1, 58)]


def test_alternating_windows_are_one_stack_of_pairs():
    (stack,) = model_preset("gpt-oss-20b").stacks
    assert [kind.window for kind in stack.kinds] == [128, None]
    assert stack.repeats == 12


def test_every_second_layer_dense_is_one_stack_of_pairs():
    config = tiny("mixtral-tiny", num_layers=6, dense_layers=(0, 2, 4), mlp_dim=32)
    (stack,) = config.stacks
    assert [kind.moe for kind in stack.kinds] == [False, True]
    assert stack.repeats == 3


@pytest.mark.parametrize("dense", [(), (0,), (1,), (0, 1, 4), (2, 3), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("windows", [(None,), (4, None), (4, 8, None)])
def test_stacks_are_the_layers_in_order_whatever_the_pattern(dense, windows):
    config = tiny("mixtral-tiny", num_layers=7, dense_layers=dense, windows=windows, mlp_dim=32)
    seen = [
        (stack.layer(repeat, position), kind)
        for stack in config.stacks
        for repeat in range(stack.repeats)
        for position, kind in enumerate(stack.kinds)
    ]
    assert seen == [(layer, config.kind(layer)) for layer in range(7)]


def test_layers_without_a_pattern_are_not_one_long_body():
    config = tiny("mixtral-tiny", num_layers=5, dense_layers=(0, 3), mlp_dim=32)
    assert all(len(stack.kinds) <= 2 for stack in config.stacks)


def drawn_layers(num_layers, **settings):
    """Layers in no order, but for a stretch in the middle that repeats."""
    rng = np.random.default_rng(0)
    dense = rng.integers(2, size=num_layers)
    middle = slice(num_layers // 3, num_layers // 2)
    dense[middle] = np.resize(dense[middle][:7], dense[middle].size)
    numbers = tuple(int(layer) for layer in np.flatnonzero(dense))
    return tiny("mixtral-tiny", num_layers=num_layers, dense_layers=numbers, mlp_dim=32, **settings)


def test_stacks_are_those_that_reach_furthest():
    config = drawn_layers(128)
    kinds = "".join("d" if layer in config.dense_layers else "m" for layer in range(128))
    expected, rest = [], kinds
    while rest:  # a regular expression's back-reference finds the repeats of each period
        reach = {len(match.group()): n for n in range(64, 0, -1) if (match := re.match(rf"(.{{{n}}})\1+", rest))}
        furthest = max(reach, default=1)
        expected.append((reach.get(furthest, 1), furthest // reach.get(furthest, 1)))
        rest = rest[furthest:]
    assert [(len(stack.kinds), stack.repeats) for stack in config.stacks] == expected
    assert any(period > 2 and repeats > 1 for period, repeats in expected)


def test_the_most_layers_are_looked_through_once():
    """If the time grew as the square of the layers, or with each use, this would take minutes."""
    config = drawn_layers(MOST_LAYERS)
    assert sum(len(stack.kinds) * stack.repeats for stack in config.stacks) == MOST_LAYERS
    assert config.stacks is config.stacks
    assert len(config.moe_layers) == MOST_LAYERS - len(config.dense_layers)
    assert count_params(config).total > count_params(drawn_layers(128)).total


def test_more_layers_than_that_are_refused():
    with pytest.raises(ValueError, match="at most 10000 together, got 9999 and 2"):
        tiny("deepseek-v3-tiny", num_layers=9_999, mtp_layers=2)


@pytest.mark.parametrize("name", PRESETS)
def test_json_gives_every_preset_back(name):
    config = dataclasses.replace(model_preset(name), param_dtype=jnp.dtype("bfloat16"))
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "modle"}, "expected an object with a kind"),
        ({"colour": 3}, "ModelConfig has no colour; was it written by a newer version"),
        ({"attention": {"kind": "latent"}}, "expected a complete LatentConfig"),
        ({"param_dtype": "float33"}, "param_dtype: expected the name of a type such as bfloat16, got 'float33'"),
    ],
)
def test_json_that_is_no_configuration_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        from_json(to_json(tiny("mixtral-tiny")) | change)


def test_names_of_others_lead_to_our_presets():
    assert model_preset("deepseek2-16b") is model_preset("deepseek-v2-lite")
    assert set(ALIASES.values()) <= set(PRESETS)


def test_a_stack_knows_its_layers_numbers():
    kind = model_preset("mixtral-8x7b").kind(0)
    assert Stack(first=3, kinds=(kind, kind), repeats=2).layer(1, 1) == 6
