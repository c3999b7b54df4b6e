"""Our own folder: bit for bit, and refused when it is not what it says."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop import native as native_module
from raggedmoe.interop.safetensors_file import StoredTensor
from raggedmoe.models.presets import PRESETS
from tests.interop.folders import (
    INDEX,
    SINGLE,
    TINY,
    assert_same_params,
    change_json,
    change_tensors,
    drawn_model,
    stored,
)


@pytest.fixture
def native(tmp_path, golden_model):
    interop.save_native(golden_model("olmoe"), tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.product
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_saved_model_is_loaded_bit_for_bit_from_several_files(name, dtype, tmp_path):
    model = drawn_model(replace(PRESETS[name], param_dtype=dtype, dtype=dtype))
    interop.save_native(model, tmp_path / "out", shard_bytes=30_000)
    assert (tmp_path / "out" / INDEX).is_file()
    loaded = interop.load(tmp_path / "out")
    assert_same_params(loaded, model)
    assert loaded.config == model.config


def test_a_model_is_read_in_pieces_of_bounded_size(native, monkeypatch):
    pieces, read = [], StoredTensor.read

    def recorded(tensor, start=0, stop=None):
        pieces.append((tensor, start, read(tensor, start, stop)))
        return pieces[-1][-1]

    monkeypatch.setattr(StoredTensor, "read", recorded)
    monkeypatch.setattr(native_module, "PIECE_BYTES", 1000)
    interop.load(native)
    row_bytes = {id(tensor): tensor.num_bytes // tensor.shape[0] for tensor, _, _ in pieces}
    assert all(piece.nbytes <= max(1000, row_bytes[id(tensor)]) for tensor, _, piece in pieces)
    assert sum(start > 0 for _, start, _ in pieces) > 10


def test_our_files_hold_our_names(native, golden_model):
    assert stored(native).keys() == golden_model("olmoe").params.keys()


def test_another_type_of_weights_is_given_when_asked_for(native, golden_model):
    loaded = interop.load(native, param_dtype=jnp.bfloat16)
    assert loaded.config.param_dtype == loaded.config.dtype == jnp.bfloat16
    for name, array in golden_model("olmoe").params.items():
        # Routers stay in float32.
        expected = np.asarray(array if "router" in name else array.astype(jnp.bfloat16))
        np.testing.assert_array_equal(np.asarray(loaded.params[name]), expected, strict=True)


def refused(folder, *named):
    with pytest.raises(ValueError) as raised:
        interop.load(folder)
    for text in named:
        assert text in str(raised.value)


def test_a_format_of_another_number_is_refused(native):
    change_json(native / "raggedmoe.json", lambda value: value.update(format=2))
    refused(native, "raggedmoe.json", "expected format 1, got 2")


@pytest.mark.parametrize("key", ["format", "config", "axes"])
def test_a_description_without_one_of_its_parts_is_refused(key, native):
    change_json(native / "raggedmoe.json", lambda value: value.pop(key))
    refused(native, "raggedmoe.json", key)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_description_that_is_no_json_object_is_refused(text, native):
    (native / "raggedmoe.json").write_text(text)
    refused(native, "raggedmoe.json: expected")


@pytest.mark.parametrize("axes", [[], None, {"embedding": 3}, {"embedding": None}])
def test_axes_that_are_no_lists_of_names_are_refused(axes, native):
    change_json(native / "raggedmoe.json", lambda value: value.update(axes=axes))
    refused(native, "raggedmoe.json")


def test_swapped_axes_are_refused_although_the_sizes_agree(native):
    name = "stacks.0.0.attention.wq"

    def swap(value):
        value["axes"][name] = [value["axes"][name][0], *value["axes"][name][:0:-1]]

    change_json(native / "raggedmoe.json", swap)
    refused(native, name, SINGLE, "head_dim")


def test_a_missing_and_an_unknown_tensor_are_both_listed(native):
    change_tensors(native, lambda tensors: tensors.update({"extra": tensors.pop("final_norm")}))
    refused(native, "final_norm: missing", "extra: unknown", "nothing was loaded")


def test_a_misshapen_tensor_is_listed_with_expected_and_found(native):
    change_tensors(native, lambda tensors: tensors.update(final_norm=np.ones(31, np.float32)))
    refused(native, "final_norm", "(32,)", "(31,)")


def test_a_tensor_of_another_type_is_refused(native):
    change_tensors(native, lambda tensors: tensors.update(final_norm=np.ones(32, np.float16)))
    refused(native, "final_norm", "float16")


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update(kind="dragon"),
        lambda config: config.update(kind="rope"),
        lambda config: config.update(new_setting=1),
        lambda config: config.pop("vocab_size"),
        lambda config: config.update(vocab_size="many"),
        lambda config: config.update(attention=None),
        lambda config: config.update(moe={"kind": "rope"}),
        lambda config: config.update(param_dtype="float99"),
        lambda config: config.update(param_dtype=[]),
        lambda config: config.update(vocab_size={"kind": "rope"}),
        lambda config: config["attention"].update(rope={"kind": "rope", "yarn": {"kind": "rope"}}),
        lambda config: config["attention"].update(num_heads=10**12, num_kv_heads=7),
        lambda config: config["moe"].update(num_experts=10**12, router={"kind": "router", "num_groups": 7}),
        lambda config: config["attention"].update(rope={"kind": "rope", "theta": 10**400}),
    ],
    ids=[
        *("kind", "other kind", "unknown key", "no size", "size", "no attention", "other moe", "type", "no type"),
        *("nested size", "other yarn", "heads", "experts", "theta"),
    ],
)
def test_a_configuration_that_is_not_a_models_is_refused(change, native):
    change_json(native / "raggedmoe.json", lambda value: change(value["config"]))
    refused(native, "raggedmoe.json")


@pytest.mark.parametrize("changes", [{"num_layers": 10**9}, {"mtp_layers": 10**9}, {"num_layers": 10_001}])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(changes, native):
    change_json(native / "raggedmoe.json", lambda value: value["config"].update(changes))
    refused(native, "raggedmoe.json: expected num_layers and mtp_layers to be at most 10000 together, got")


def test_objects_nested_without_end_are_refused(native):
    change_json(native / "raggedmoe.json", lambda value: value["config"]["attention"].update(rope="deep"))
    deep = '{"kind": "rope", "yarn": ' * 900 + "1" + "}" * 900
    text = (native / "raggedmoe.json").read_text()
    (native / "raggedmoe.json").write_text(text.replace('"deep"', deep))
    refused(native, "raggedmoe.json.attention.rope.yarn: expected an object with a kind out of yarn, got {'kind'")


def test_of_many_missing_tensors_some_are_listed(native):
    change_json(native / "raggedmoe.json", lambda value: value["config"].update(mtp_layers=1_000))
    with pytest.raises(ValueError, match=r"mtp\.0\.attention\.k_norm: missing") as raised:
        interop.load(native)
    assert str(raised.value).count("\n") == 21
    assert "more" in str(raised.value)


def test_as_many_missing_tensors_as_are_listed_leave_none_more(native, monkeypatch):
    change_json(native / "raggedmoe.json", lambda value: value["config"].update(mtp_layers=1))
    with pytest.raises(ValueError, match="missing") as raised:
        interop.load(native)
    num_missing = str(raised.value).count(": missing")
    assert 1 < num_missing < 20
    monkeypatch.setattr(native_module, "MAX_SHOWN", num_missing)
    with pytest.raises(ValueError, match="missing") as again:
        interop.load(native)
    assert str(again.value) == str(raised.value)


def test_the_description_says_the_axes_of_every_parameter(native, golden_model):
    described = json.loads((native / "raggedmoe.json").read_text())
    assert described["axes"].keys() == golden_model("olmoe").params.keys()
