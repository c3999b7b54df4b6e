"""Every command that takes a model takes a Hugging Face folder too, of any sizes, without reading a tensor of it."""

import json

import pytest

from tests.interop.folders import copied


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model of odd sizes in the folder `model` of the working directory, without its weights."""
    monkeypatch.chdir(tmp_path)
    for path in copied("qwen3_moe", tmp_path / "model").glob("*.safetensors*"):
        path.unlink()
    return "model"


def test_models_counts_its_parameters(folder, raggedmoe):
    code, out, _ = raggedmoe("models", folder, "--json")
    assert code == 0
    assert [row["family"] for row in json.loads(out)] == ["qwen3_moe"]


@pytest.mark.parametrize("words", [("model",), ("load_parameters_path=model", "from_scratch=true")])
def test_plan_splits_it(words, folder, raggedmoe):
    code, out, error = raggedmoe("plan", *words, "fsdp_parallelism=2", "dataset_type=synthetic")
    assert (code, error) == (0, "")
    assert "model on 2 devices (cpu)" in out


@pytest.mark.parametrize("words", [("model",), ("load_parameters_path=model",), ("--model", "model")])
def test_explain_traces_its_layer(words, folder, raggedmoe):
    code, out, _ = raggedmoe("explain", *words, "--hardware", "v6e")
    assert code == 0
    assert "\nragged_gather, " in out


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("model", "model"), marks=pytest.mark.ci),
        ("load_parameters_path=model",),
        ("layer", "model"),
        ("layer", "load_parameters_path=model"),
    ],
)
def test_compile_lowers_it(words, folder, raggedmoe):
    code, out, _ = raggedmoe("compile", *words, "--topology", "cpu", "--tokens", 8)
    assert code == 0
    assert f"{' '.join(words[-2:] if words[0] == 'layer' else words[-1:])}" in out
    assert "lowered" in out


def test_bench_measures_its_layer(folder, raggedmoe):
    code, out, _ = raggedmoe(
        *("bench", "layer", folder, "--devices", 1, "--tokens", 8, "--rounds", 1, "--dtypes", "float32")
    )
    assert code == 0
    assert "layer model fsdp_parallelism=-1, 1 devices, 8 tokens on each" in out


def test_launch_renders_a_manifest_for_it(folder, raggedmoe):
    words = ("launch", "--render", "jobset", "--topology", "v6e:2x2", "--image", "i", "--claim", "runs:/runs", "--")
    code, out, _ = raggedmoe(
        *words, "train", folder, "fsdp_parallelism=-1", "dataset_type=synthetic", "base_output_directory=/runs"
    )
    assert code == 0
    assert json.loads(out)["kind"] == "JobSet"


def test_a_folder_that_is_not_there_is_named_by_each(folder, raggedmoe):
    for words in (("plan",), ("explain",), ("compile",), ("bench", "layer", "--devices", 1), ("models",)):
        code, _, error = raggedmoe(*words[:2], "./gone", *words[2:])
        assert code == 2
        assert "gone: expected a preset or a folder with a model, found neither" in error
