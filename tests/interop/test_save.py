"""Models out and in again, bit for bit, in every family, layout and type; and multi-token prediction."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from raggedmoe import interop
from raggedmoe.models.module import Decoder
from raggedmoe.models.presets import PRESETS
from tests.interop.folders import (
    FIXTURES,
    GOLDEN,
    INDEX,
    SINGLE,
    TINY,
    assert_same_params,
    bits,
    change_tensors,
    copied,
    drawn_model,
    layouts_of,
    stored,
)

# Every family in both layouts, and in both types.
WAYS = [
    (name, layout, jnp.bfloat16 if layout == "fused" else jnp.float32)
    for name in TINY
    for layout in layouts_of(PRESETS[name].family)
] + [("gpt-oss-tiny", "fused", jnp.float32)]


@pytest.fixture(scope="module")
def tiny():
    """A drawn model of a preset, in a type."""
    made = {}

    def model(name, dtype=jnp.float32):
        if (name, dtype) not in made:
            made[name, dtype] = drawn_model(replace(PRESETS[name], param_dtype=dtype, dtype=dtype))
        return made[name, dtype]

    return model


@pytest.mark.product
@pytest.mark.parametrize(("name", "layout", "dtype"), WAYS)
def test_a_saved_model_is_loaded_bit_for_bit_from_several_files(name, layout, dtype, tiny, tmp_path):
    model = tiny(name, dtype)
    interop.save(model, tmp_path / "out", layout=layout, shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    loaded = interop.load(tmp_path / "out")
    assert_same_params(loaded, model)
    assert loaded.config.param_dtype == dtype


@pytest.mark.product
@pytest.mark.parametrize("name", TINY)
def test_a_saved_model_has_the_same_settings_when_loaded(name, tiny, tmp_path):
    model = tiny(name)
    interop.save(model, tmp_path / "out")
    loaded = interop.load(tmp_path / "out").config
    layers = range(model.config.num_layers)
    assert [loaded.kind(n) for n in layers] == [model.config.kind(n) for n in layers]
    for setting in ("family", "model_dim", "vocab_size", "norm_epsilon", "tied_embeddings", "mtp_layers", "max_length"):
        assert getattr(loaded, setting) == getattr(model.config, setting), setting
    assert loaded.attention.rope == model.config.attention.rope
    assert replace(loaded.moe.router, aux_loss_weight=0.0) == replace(model.config.moe.router, aux_loss_weight=0.0)
    assert loaded.moe.experts == model.config.moe.experts


@pytest.mark.parametrize("name", FIXTURES)
def test_saving_what_transformers_wrote_gives_its_tensors_bit_for_bit(name, golden_model, tmp_path):
    interop.save(golden_model(name), tmp_path / "out")
    found, expected = stored(tmp_path / "out"), stored(GOLDEN / name)
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        assert found[tensor].dtype == values.dtype, tensor
        np.testing.assert_array_equal(bits(found[tensor]), bits(values), err_msg=tensor)


def test_the_fused_layout_is_written_as_transformers_writes_it(golden_model, tmp_path):
    interop.save(golden_model("qwen3_moe_tied"), tmp_path / "out", layout="fused")
    found, expected = stored(tmp_path / "out"), stored(GOLDEN / "qwen3_moe_fused")
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_array_equal(bits(found[tensor]), bits(values), err_msg=tensor)


def test_the_index_names_the_file_of_every_tensor_and_their_size(tiny, tmp_path):
    interop.save(tiny("mixtral-tiny"), tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    sizes = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert index["weight_map"].pop(name) == path.name
            sizes[name] = tensor.nbytes
    assert index["weight_map"] == {}
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_no_file_is_larger_than_asked_for_but_for_one_large_tensor(tiny, tmp_path):
    interop.save(tiny("mixtral-tiny"), tmp_path / "out", shard_bytes=30_000)
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 30_000


def test_small_models_are_one_file_without_an_index(tiny, tmp_path):
    interop.save(tiny("mixtral-tiny"), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", SINGLE}


def test_another_type_is_written_when_asked_for_and_routers_stay_in_float32(tiny, tmp_path):
    interop.save(tiny("deepseek-v3-tiny"), tmp_path / "out", dtype=jnp.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, tensor in stored(tmp_path / "out").items():
        assert tensor.dtype == (np.float32 if ".mlp.gate." in name else jnp.bfloat16), name


def test_routers_that_bfloat16_can_hold_are_written_in_it(tmp_path):
    in_bfloat16 = interop.load(GOLDEN / "olmoe", param_dtype=jnp.bfloat16)
    params = {name: array.astype(jnp.bfloat16).astype(array.dtype) for name, array in in_bfloat16.params.items()}
    interop.save(Decoder(in_bfloat16.config, params=params), tmp_path / "out")
    assert {tensor.dtype.name for tensor in stored(tmp_path / "out").values()} == {"bfloat16"}


@pytest.mark.parametrize("settings", [{"dtype": "float64"}, {"param_dtype": np.float64}])
def test_float64_is_refused_where_jax_does_not_have_it(settings):
    with pytest.raises(ValueError, match="JAX_ENABLE_X64"):
        interop.load(GOLDEN / "olmoe", **settings)


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_weights_are_rounded_to_the_type_that_is_asked_for(name, golden_model):
    loaded = interop.load(GOLDEN / name, param_dtype=jnp.bfloat16)
    for param, array in golden_model(name).params.items():
        expected = np.asarray(array if "router" in param else array.astype(jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(loaded.params[param]), expected, strict=True)


def test_a_checkpoint_in_float64_is_loaded_in_a_type_that_jax_has(golden_model, tmp_path):
    folder = copied("olmoe", tmp_path / "olmoe")
    change_tensors(folder, lambda tensors: tensors.update({n: t.astype(np.float64) for n, t in tensors.items()}))
    loaded = interop.load(folder)
    assert loaded.config.param_dtype == jnp.float32
    assert_same_params(loaded, golden_model("olmoe"))


@pytest.mark.parametrize("save", [interop.save, interop.save_native])
def test_a_model_that_is_spread_over_devices_is_saved_as_one_that_is_not(save, golden_model, tmp_path):
    model = golden_model("mixtral")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(array):
        axis = next((n for n, size in enumerate(array.shape) if size % 8 == 0), None)
        spec = jax.P(*["x" if n == axis else None for n in range(array.ndim)])
        return jax.device_put(array, jax.NamedSharding(mesh, spec))

    params = {name: spread(array) for name, array in model.params.items()}
    assert len(params["embedding"].devices()) == 8
    save(Decoder(model.config, params=params), tmp_path / "out")
    assert_same_params(interop.load(tmp_path / "out"), model)


# Tied embeddings


def test_a_tied_checkpoint_may_hold_the_head_once_more(golden_model, tmp_path):
    folder = copied("qwen3_moe_tied", tmp_path / "tied")
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
    assert_same_params(interop.load(folder), golden_model("qwen3_moe_tied"))


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path):
    folder = copied("qwen3_moe_tied", tmp_path / "tied")

    def other(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][-1, -1] += 1

    change_tensors(folder, other)
    with pytest.raises(ValueError, match=r"model\.safetensors: lm_head\.weight differs from embedding"):
        interop.load(folder)


# Multi-token prediction


@pytest.fixture
def with_mtp(tiny, tmp_path):
    model = tiny("deepseek-v3-tiny")
    assert model.config.mtp_layers == 1
    interop.save(model, tmp_path / "mtp")
    return model, tmp_path / "mtp"


def mtp_prefix(model):
    return f"model.layers.{model.config.num_layers}."


def test_a_multi_token_checkpoint_holds_copies_of_embedding_and_head(with_mtp):
    model, folder = with_mtp
    tensors, prefix = stored(folder), mtp_prefix(model)
    np.testing.assert_array_equal(tensors[f"{prefix}embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(tensors[f"{prefix}shared_head.head.weight"], tensors["lm_head.weight"])
    assert {f"{prefix}{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} <= tensors.keys()


def test_a_multi_token_checkpoint_without_the_copies_gives_the_same_model(with_mtp):
    model, folder = with_mtp

    def remove(tensors):
        del tensors[f"{mtp_prefix(model)}embed_tokens.weight"]
        del tensors[f"{mtp_prefix(model)}shared_head.head.weight"]

    change_tensors(folder, remove)
    assert_same_params(interop.load(folder), model)


@pytest.mark.parametrize(("copy", "param"), [("embed_tokens.weight", "embedding"), ("shared_head.head.weight", "head")])
def test_a_copy_that_differs_is_refused_by_name(copy, param, with_mtp):
    model, folder = with_mtp
    name = mtp_prefix(model) + copy

    def other(tensors):
        tensors[name][0, 0] += 1

    change_tensors(folder, other)
    with pytest.raises(ValueError) as raised:
        interop.load(folder)
    assert f"{SINGLE}: {name} differs from {param}" in str(raised.value)


def test_a_config_that_names_modules_whose_tensors_are_not_there_loads_without_them(with_mtp):
    model, folder = with_mtp

    def remove(tensors):
        for name in [name for name in tensors if name.startswith(mtp_prefix(model))]:
            del tensors[name]

    change_tensors(folder, remove)
    loaded = interop.load(folder)
    assert loaded.config.mtp_layers == 0
    assert loaded.params.keys() == {name for name in model.params if not name.startswith("mtp.")}


def test_half_a_module_is_refused(with_mtp):
    model, folder = with_mtp
    name = f"{mtp_prefix(model)}eh_proj.weight"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=r"missing \(1\)") as raised:
        interop.load(folder)
    assert name in str(raised.value)
