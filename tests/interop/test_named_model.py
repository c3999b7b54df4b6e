"""A model by its preset's name or its folder: only its architecture is read."""

from dataclasses import replace

import pytest

from raggedmoe import interop, model_preset
from raggedmoe.interop.named_model import is_folder, load_config, named_model
from tests.interop.folders import FIXTURES, GOLDEN, change_config, copied


@pytest.mark.parametrize("name", FIXTURES)
def test_a_folders_architecture_is_that_of_the_model_that_is_loaded_from_it(name, golden_model):
    loaded = golden_model(name).config
    found = load_config(GOLDEN / name)
    assert found == replace(loaded, dtype=found.dtype, param_dtype=found.param_dtype)


def test_a_folder_of_ours_is_one_too(tmp_path, golden_model):
    model = golden_model("mixtral")
    interop.save_native(model, tmp_path / "ours")
    assert load_config(tmp_path / "ours") == model.config


def test_no_weights_are_needed(tmp_path, golden_model):
    folder = copied("mixtral", tmp_path / "model")
    for path in folder.glob("model*"):
        path.unlink()
    assert load_config(folder).moe == golden_model("mixtral").config.moe


def test_multi_token_prediction_is_left_out_only_where_weights_are_and_lack_it(tmp_path):
    folder = copied("deepseek_v3", tmp_path / "model")
    change_config(folder, num_nextn_predict_layers=1)
    assert load_config(folder).mtp_layers == 0
    (folder / "model.safetensors").unlink()
    assert load_config(folder).mtp_layers == 1


def test_a_presets_name_is_never_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "olmoe", "mine"):
        (tmp_path / name).mkdir()
    assert [is_folder(name) for name in ("demo", "olmoe", "mine", "./demo", "nowhere", "no/where")] == [
        *(False, False, True, True, False, True)
    ]
    assert named_model("demo") == model_preset("demo")


def test_a_folder_that_is_not_there_is_named_with_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"Some/Model: expected a preset or a folder.*`hf download Some/Model"):
        named_model("Some/Model")
    with pytest.raises(ValueError, match=r"gone: expected a preset or a folder with a model, found neither$"):
        named_model(str(tmp_path / "gone"))


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json: expected a Hugging Face model's config\.json, found none"):
        named_model(str(tmp_path))
