"""config.json: both spellings, and every setting that our decoder does not have refused by name."""

import contextlib
import json

import pytest

from raggedmoe import interop
from raggedmoe.interop.families.registry import FAMILIES, family_by_model_type
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.models.presets import PRESETS
from tests.interop.folders import FIXTURES, GOLDEN, change_config, copied


def golden_config(name, **changes):
    """A fixture's config.json."""
    return {**json.loads((GOLDEN / name / "config.json").read_text()), **changes}


def read(values):
    """Our configuration of a config.json's values."""
    return family_by_model_type(values["model_type"], "here").read_config(ConfigReader("config.json", values))


def old_style(values):
    """Return the settings as published checkpoints spell them."""
    values = dict(values)
    rope = dict(values.pop("rope_parameters"))
    values["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    values["torch_dtype"] = values.pop("dtype")
    if values["model_type"] == "qwen3_moe":
        values["num_experts"] = values.pop("num_local_experts")
    return values


@pytest.mark.parametrize("name", FIXTURES)
def test_the_old_spelling_of_a_config_gives_the_same_model_as_the_new(name):
    new = golden_config(name)
    old = old_style(new)
    assert old.keys() != new.keys()
    assert read(old) == read(new)


def test_yarn_is_told_from_plain_rope_in_both_spellings():
    new = golden_config("deepseek_v3")
    plain = {**old_style(new), "rope_scaling": None}
    assert read(plain) != read(new)
    assert read(plain).attention.rope.yarn is None


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("mixtral", "hidden_act", "gelu", "'silu'"),
        ("deepseek_v3", "hidden_act", "gelu", "'silu'"),
        ("mixtral", "rope_parameters", {"rope_type": "linear", "factor": 2.0}, "'linear'"),
        ("mixtral", "rope_scaling", {"type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ("deepseek_v3", "moe_layer_freq", 2, "moe_layer_freq=2"),
        ("deepseek_v3", "attention_bias", True, "attention_bias=True"),
        ("deepseek_v3", "topk_method", "greedy", "topk_method='greedy'"),
        ("deepseek_v2", "scoring_func", "sigmoid", "scoring_func='sigmoid'"),
        ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob=True"),
        ("gpt_oss", "swiglu_limit", 5.0, "swiglu_limit=5.0"),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 2, "layer_types"),
        ("gpt_oss", "layer_types", ["full_attention"], "layer_types"),
        ("mixtral", "quantization_config", {"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ("mixtral", "quantization_config", "gptq", "'gptq'"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "yarn", "factor": 2.0, "short_factor": 1}, "short_factor"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "yarn"}, "'factor'"),
    ],
)
def test_a_setting_that_we_do_not_have_is_refused_by_name(name, key, value, said, tmp_path):
    folder = copied(name, tmp_path / name)
    change_config(folder, **{key: value})
    with pytest.raises(ValueError, match=r"not supported|expected") as raised:
        interop.load(folder)
    assert "config.json: " in str(raised.value)
    assert said in str(raised.value)


def test_an_unknown_model_type_suggests_the_nearest(tmp_path):
    folder = copied("qwen3_moe", tmp_path / "qwen")
    change_config(folder, model_type="qwen3moe")
    with pytest.raises(ValueError, match=r"'qwen3moe'.*did you mean 'qwen3_moe'"):
        interop.load(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "3", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_by_file(text, tmp_path):
    folder = copied("olmoe", tmp_path / "olmoe")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json: expected"):
        interop.load(folder)


def test_a_folder_without_a_config_is_refused(tmp_path):
    folder = copied("olmoe", tmp_path / "olmoe")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: expected .* found none"):
        interop.load(folder)


def test_a_config_without_a_size_names_the_key():
    values = golden_config("olmoe")
    del values["num_experts"]
    with pytest.raises(ValueError, match="'num_experts'"):
        read(values)


def test_a_key_that_nobody_reads_is_said_in_a_warning(tmp_path, caplog):
    folder = copied("olmoe", tmp_path / "olmoe")
    change_config(folder, attention_magic=3, initializer_range=0.5)
    interop.load(folder)
    (record,) = caplog.records
    assert "attention_magic" in record.message
    assert "initializer_range" not in record.message


@pytest.mark.parametrize("name", FIXTURES)
def test_a_value_of_a_wrong_kind_under_any_key_is_read_or_refused_and_never_crashes(name):
    values = golden_config(name)
    for key in values:
        for wrong in ("x", -1, 0, 1.5, [], [None], {}, {"a": 1}, True, None, float("nan"), 10**30):
            # Any other exception than a ValueError fails the test; some of these values are right.
            with contextlib.suppress(ValueError):
                read({**values, key: wrong})


def test_a_size_of_a_wrong_kind_is_refused_with_its_key():
    for wrong in ("2048", 0, -1, 1.5, True, [8]):
        with pytest.raises(ValueError, match="'hidden_size'"):
            read(golden_config("olmoe", hidden_size=wrong))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_said_in_its_familys_config(name):
    from raggedmoe.interop.save import make_config_json

    written = make_config_json(PRESETS[name], "bfloat16")
    assert json.loads(json.dumps(written)) == written
    assert FAMILIES[written["model_type"]].model_type == PRESETS[name].family
