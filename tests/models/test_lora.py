"""Adapters: what they compute and how they learn, against merged weights in float64 and on every strategy and mesh."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import Decoder, Plan
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.lora import A, B, LoraConfig, is_adapter, with_adapters
from raggedmoe.models.cache import empty_cache
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.merge import merge_lora
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.params import ParamSpec, init_params
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, quick_jit, tiny
from tests.models.test_decoder import EPS, loss_of
from tests.models.test_mesh import MESHES, RAGGED_DOT, on_mesh, with_moe

LORA = LoraConfig(rank=3, alpha=4.5, router="trained")
ROWS, LENGTH = 4, 12


def adapted(name, lora=LORA, **changes):
    return dataclasses.replace(tiny(name, **changes), lora=lora)


def small(lora=LORA):
    """Latent attention, a dense layer, shared experts and multi-token prediction."""
    return adapted("deepseek-v3-tiny", lora, num_layers=2, dense_layers=(0,))


def merged_in_float64(config, params):
    """The weights that the adapters stand for, by loops over layers and experts in NumPy: an oracle of its own."""
    plain = param_specs(dataclasses.replace(config, lora=None))
    weights = {name: np.asarray(params[name], np.float64) for name in plain}
    for name, spec in plain.items():
        if f"{name}{B}" not in params:
            continue
        first = name.replace("k_b", "kv_b").replace("v_b", "kv_b") if name.endswith((".k_b", ".v_b")) else name
        first = np.asarray(params[f"{first.replace('kkv_b', 'kv_b')}{A}"], np.float64)
        second = np.asarray(params[f"{name}{B}"], np.float64)
        num_lead = sum(axis in ("layer", "expert") for axis in spec.axes)
        inputs = (spec.contracts,) if isinstance(spec.contracts, str) else spec.contracts
        for at in np.ndindex(spec.shape[:num_lead]):
            rank = first[at].shape[0]
            outer = second[at].reshape(rank, -1).T @ first[at].reshape(rank, -1)  # [outputs inputs]
            if spec.axes[num_lead] in inputs:
                outer = outer.T
            weights[name][at] += config.lora.alpha / config.lora.rank * outer.reshape(spec.shape[num_lead:])
    return weights


@pytest.fixture(scope="module")
def single():
    """A model, its loss and gradients by adapters, and by merged weights."""
    config = small()
    params, ids = drawn_params(config), drawn_ids(config, ROWS, LENGTH)
    value, gradients = quick_jit(jax.value_and_grad(loss_of(config, ids, EINSUM)))(params)
    return config, params, ids, value, jax.device_get(gradients)


def split(config, params):
    specs = param_specs(config)
    trained = {name: value for name, value in params.items() if specs[name].trained}
    return trained, {name: value for name, value in params.items() if name not in trained}


def test_an_adapter_has_the_layers_experts_and_widths_of_its_matrix():
    specs = param_specs(small())
    prefix = "stacks.1.0.moe"
    width, hidden, experts = (
        dict(zip(specs[f"{prefix}.wi_0"].axes, specs[f"{prefix}.wi_0"].shape))[a]
        for a in ("model_dim", "expert_dim", "expert")
    )
    first, second = specs[f"{prefix}.wo{A}"], specs[f"{prefix}.wo{B}"]
    assert (first.axes, first.shape) == (("layer", "expert", "lora_rank", "expert_dim"), (1, experts, 3, hidden))
    assert (second.axes, second.shape) == (("layer", "expert", "lora_rank", "model_dim"), (1, experts, 3, width))
    assert (first.init, second.init) == ("normal", "zeros")
    assert specs[f"stacks.0.0.attention.kv_b{A}"].axes == ("layer", "lora_rank", "kv_latent")
    assert f"stacks.0.0.attention.k_b{A}" not in specs


def test_only_adapters_and_a_trained_router_learn():
    for router in ("frozen", "trained"):
        specs = param_specs(small(dataclasses.replace(LORA, router=router)))
        moved = {name.rpartition(".")[2] for name, spec in specs.items() if spec.updated_by and not is_adapter(name)}
        assert moved == ({"router_kernel", "router_selection_bias"} if router == "trained" else set())


@pytest.mark.parametrize(
    ("targets", "leaves"),
    [
        (("attention.wq",), {"wq"}),
        (("attention.kv_b", "moe.wo"), {"kv_b", "k_b", "v_b", "wo"}),
        (("mlp",), {"wi_0", "wi_1", "wo", "shared_wi_0", "shared_wi_1", "shared_wo"}),
    ],
)
def test_targets_are_groups_or_matrices(targets, leaves):
    name = "mixtral-tiny" if targets == ("attention.wq",) else "deepseek-v3-tiny"
    specs = param_specs(adapted(name, LoraConfig(rank=2, targets=targets)))
    assert {n.rpartition(".")[2].replace(A, "").replace(B, "") for n in specs if is_adapter(n)} == leaves


def test_what_no_model_has_is_refused_by_name():
    params = {}
    with pytest.raises(ValueError, match="which this model has not"):
        Decoder(adapted("mixtral-tiny", LoraConfig(rank=2, targets=("attention.kv_b",))), params=params)
    with pytest.raises(ValueError, match="which this model has not"):
        Decoder(adapted("mixtral-tiny", LoraConfig(rank=2, targets=("mlp",))), params=params)
    with pytest.raises(ValueError, match="targets"):
        LoraConfig(rank=2, targets=())
    with pytest.raises(ValueError, match="alpha"):
        LoraConfig(rank=2, alpha=0.0)
    with pytest.raises(ValueError, match="lora cannot be used with moe_backend='expert_ffn': it fuses the matmuls"):
        Decoder(
            adapted("mixtral-tiny"), params=params, execution=ModelExecution(moe=MoEExecution(moe_backend="expert_ffn"))
        )


def test_new_adapters_change_no_bit():
    config = small()
    plain = dataclasses.replace(config, lora=None)
    params, ids = drawn_params(plain), drawn_ids(config, 2, LENGTH)
    new = {name: spec for name, spec in param_specs(config).items() if is_adapter(name)}
    params = {**params, **init_params(new, jax.random.key(0))}
    execution = ModelExecution(moe=MoEExecution(kernels=KernelChoice(grouped_matmul="cpu")))  # so none is fused
    found = quick_jit(lambda params: decode(params, ids, config, execution).hidden)(params)
    expected = quick_jit(
        lambda params: decode({n: params[n] for n in param_specs(plain)}, ids, plain, execution).hidden
    )(params)
    assert np.array_equal(found, expected)


def test_the_loss_is_that_of_merged_weights(single):
    config, params, ids, value, _ = single
    plain = dataclasses.replace(config, lora=None)
    merged = {name: jnp.asarray(array, jnp.float32) for name, array in merged_in_float64(config, params).items()}
    expected = quick_jit(loss_of(plain, ids, EINSUM))(merged)
    assert abs(float(value) - float(expected)) <= 32 * EPS * abs(float(expected))


def of_adapters(config, params, of_weights):
    """The gradients of adapters and routers by those of the merged weights, by the chain rule in NumPy.

    Of ``W + s B A`` with the gradient G of W, they are ``s Bᵀ G`` and ``s G Aᵀ``.
    """
    scale, expected = config.lora.alpha / config.lora.rank, {}
    for name, spec in param_specs(dataclasses.replace(config, lora=None)).items():
        if name.rpartition(".")[2].startswith("router_kernel"):
            expected[name] = of_weights[name].astype(np.float64)
        if f"{name}{B}" not in params:
            continue
        head, _, leaf = name.rpartition(".")
        first_name = f"{head}.{'kv_b' if leaf in ('k_b', 'v_b') else leaf}{A}"
        first, second = (np.asarray(params[n], np.float64) for n in (first_name, f"{name}{B}"))
        num_lead = sum(axis in ("layer", "expert") for axis in spec.axes)
        inputs = (spec.contracts,) if isinstance(spec.contracts, str) else spec.contracts
        of_first, of_second = np.zeros_like(first), np.zeros_like(second)
        for at in np.ndindex(spec.shape[:num_lead]):
            g, rank = of_weights[name][at].astype(np.float64), first[at].shape[0]
            rows = first[at].reshape(rank, -1)
            g = g.reshape(rows.shape[1], -1).T if spec.axes[num_lead] in inputs else g.reshape(-1, rows.shape[1])
            of_first[at] = scale * (second[at].reshape(rank, -1) @ g).reshape(first[at].shape)
            of_second[at] = scale * (rows @ g.T).reshape(second[at].shape)
        expected[first_name] = expected.get(first_name, 0) + of_first
        expected[f"{name}{B}"] = of_second
    return expected


def test_every_adapters_and_routers_gradient_is_that_of_the_merged_weights(single):
    config, params, ids, _, gradients = single
    plain = dataclasses.replace(config, lora=None)
    merged = {name: jnp.asarray(array, jnp.float32) for name, array in merged_in_float64(config, params).items()}
    expected = of_adapters(config, params, jax.device_get(quick_jit(jax.grad(loss_of(plain, ids, EINSUM)))(merged)))
    trained, _ = split(config, params)
    assert expected.keys() == trained.keys()
    assert all(np.abs(gradient).max() > 0 for gradient in expected.values())
    assert_near(gradients, expected)


STRATEGIES = {
    "auto": ModelExecution(),
    "ragged_dot": RAGGED_DOT,
    "chunks": with_moe(RAGGED_DOT, width_chunks=2, token_chunks=2),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "auto" else pytest.mark.slow) for n in STRATEGIES])
def test_every_strategy_has_the_adapters_loss_and_gradients(single, name):
    config, params, ids, value, gradients = single
    trained, frozen = split(config, params)
    loss = loss_of(config, ids, STRATEGIES[name])
    found, by_name = quick_jit(jax.value_and_grad(lambda trained: loss({**trained, **frozen})))(trained)
    assert abs(float(found) - float(value)) <= 32 * EPS * abs(float(value))
    assert_near(by_name, {n: gradients[n] for n in trained})


def assert_near(found, expected):
    """Within the roundings of sums over all tokens in two orders, through two layers and the head."""
    for name, gradient in jax.device_get(expected).items():
        bound = 64 * math.sqrt(ROWS * LENGTH) * EPS * np.abs(gradient).max()
        assert np.abs(np.asarray(found[name]) - gradient).max() <= bound, name


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ("mixed", {"strategy": "all_to_all"}),
        ("mixed", {"strategy": "all_to_all", "tensor_split": "model_dim"}),
        ("expert", {"strategy": "ring"}),
        ("fsdp", {}),
        ("tensor", {}),
        ("data", {}),
    ],
)
@pytest.mark.slow  # tests/moe/test_lora.py has one layer's experts on a mesh
def test_a_mesh_has_the_adapters_loss_and_gradients_of_one_device(single, mesh, changes):
    config, params, ids, value, gradients = single
    execution = with_moe(dataclasses.replace(RAGGED_DOT, scan_layers=False), **changes)
    placed, placed_ids, devices, places = on_mesh(config, execution, MESHES[mesh], params, ids)
    trained, frozen = split(config, placed)
    loss = loss_of(config, placed_ids, execution, mesh=devices)
    function = jax.value_and_grad(lambda trained, frozen: loss({**trained, **frozen}))
    found, by_name = quick_jit(function, out_shardings=(None, {n: places[n] for n in trained}))(trained, frozen)
    assert abs(float(found) - float(value)) <= 32 * EPS * abs(float(value))
    assert_near(by_name, {n: gradients[n] for n in trained})


def test_adapters_of_experts_are_split_as_their_matrices_and_whole_where_that_does_not_divide():
    plan = Plan(fsdp=2, expert=2, tensor=2)
    specs = param_specs(small())
    split = {n: plan.spec(n, spec) for n, spec in specs.items()}
    prefix = "stacks.1.0.moe"
    assert split[f"{prefix}.wi_0{A}"][1] == split[f"{prefix}.wi_0{B}"][1] == "expert"
    assert split[f"{prefix}.wi_0{A}"][3] == "fsdp"
    assert split[f"{prefix}.wi_0{B}"][3] == ("tensor", "fsdp")
    odd = ParamSpec(
        shape=(2, 3, 7), dtype=jnp.float32, axes=("expert", "lora_rank", "expert_dim"), contracts="lora_rank"
    )
    assert not any(plan.spec("wi_0_lora_b", odd)[2:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["deepseek-v2-tiny", "gpt-oss-tiny"])
def test_merged_computes_what_the_adapters_do(name, dtype):
    """Hidden states agree to the roundings of the weights' type, which merging adds once to every weight."""
    config = adapted(name, num_layers=2, dtype=dtype, param_dtype=dtype)
    model = Decoder(config, params=drawn_params(config), execution=EINSUM)
    merged = merge_lora(model)
    assert merged.config == dataclasses.replace(config, lora=None)
    for part, weight in merged_in_float64(config, model.params).items():
        error = np.abs(np.asarray(merged.params[part], np.float64) - weight)
        assert np.all(error <= (float(jnp.finfo(dtype).eps) + 4 * EPS) * (np.abs(weight) + 1)), part
        assert merged.params[part].dtype == model.params[part].dtype


def test_one_token_after_the_other_is_the_whole_text():
    """With a cache: experts read in place, and latent attention brought to the latents."""
    config = small()
    params, ids = drawn_params(config), drawn_ids(config, 2, 6)
    whole = quick_jit(lambda params: decode(params, ids, config, EINSUM).hidden)(params)
    cache, parts = empty_cache(config, 2, 8), []
    step = quick_jit(lambda params, ids, cache: decode(params, ids, config, cache=cache))
    for at in range(6):
        out = step(params, ids[:, at : at + 1], cache)
        cache = out.cache
        parts.append(np.asarray(out.hidden))
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=512 * EPS, rtol=512 * EPS)


def test_an_idle_experts_adapter_has_no_gradient_and_one_token_is_enough():
    config = adapted("mixtral-tiny", num_layers=1)
    params, ids = drawn_params(config), drawn_ids(config, 1, 1)
    trained, frozen = split(config, params)

    def loss(trained):
        out = decode({**trained, **frozen}, ids, config)
        return logits({**trained, **frozen}, out.hidden, config).sum(), out.experts.load

    gradients, load = quick_jit(jax.grad(loss, has_aux=True))(trained)
    used = np.asarray(load[0]) > 0
    assert 0 < used.sum() < used.size
    for name in (n for n in gradients if ".moe.w" in n):
        by_expert = np.abs(np.asarray(gradients[name])[0]).reshape(used.size, -1).max(1)
        assert np.array_equal(by_expert > 0, used), name


def test_without_lora_specs_are_as_they_were():
    specs = {"w": ParamSpec(shape=(2, 3), dtype=jnp.float32, axes=("mlp_dim", "model_dim"), contracts="model_dim")}
    assert with_adapters(specs, None) == specs
