"""What goes along with a model from folder to folder: its tokenizer, and the keys of config.json that are no sizes."""

import json
from dataclasses import replace

import pytest

from raggedmoe import interop
from raggedmoe.cli.convert import export, import_
from raggedmoe.interop.companions import KEPT_CONFIG, read_companions
from raggedmoe.models.companions import Companions
from raggedmoe.models.module import Decoder
from tests.interop.folders import change_config, copied

FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"eos_token": "<|end|>", "chat_template": "x"}',
    "special_tokens_map.json": '{"eos_token": "<|end|>"}',
    "added_tokens.json": "{}",
    "generation_config.json": '{"eos_token_id": [5, 6], "temperature": 0.7}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "tokenization_own.py": "x = 1",
    "LICENSE": "yours",
}
KEYS = {
    "eos_token_id": [5, 6],
    "pad_token_id": 4,
    "attention_dropout": 0.25,
    "initializer_range": 0.01,
    "use_cache": False,
    "router_aux_loss_coef": 0.003,
    "somebodys_own_key": {"a": [1, None]},
}


@pytest.fixture
def source(tmp_path):
    """A checkpoint with every file that may lie beside the weights, and keys that say nothing of a size."""
    folder = copied("qwen3_moe", tmp_path / "source")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / "pytorch_model.bin").write_text("weights")
    change_config(folder, **KEYS)
    return folder


def config_json(folder):
    return json.loads((folder / "config.json").read_text())


def assert_nothing_lost(folder, source):
    for name, content in FILES.items():
        assert (folder / name).read_text() == content, name
    assert not (folder / "pytorch_model.bin").exists()
    before, after = config_json(source), config_json(folder)
    assert {key: after.get(key, "lost") for key in KEYS} == KEYS
    assert before.keys() - after.keys() <= {"num_local_experts", "rope_parameters"}  # as older versions spell them


def test_import_and_export_lose_nothing(source, tmp_path, caplog):
    assert import_(source, tmp_path / "ours") == 0
    assert export(tmp_path / "ours", tmp_path / "theirs") == 0
    assert_nothing_lost(tmp_path / "theirs", source)
    assert not (tmp_path / "theirs" / KEPT_CONFIG).exists()


def test_saving_from_python_does_what_the_commands_do(source, tmp_path):
    interop.save_native(interop.load(source), tmp_path / "ours")
    interop.save(interop.load(tmp_path / "ours"), tmp_path / "theirs")
    assert_nothing_lost(tmp_path / "theirs", source)
    import_(source, tmp_path / "by command")
    export(tmp_path / "by command", tmp_path / "exported")
    for folder, other in (("ours", "by command"), ("theirs", "exported")):
        names = {path.relative_to(tmp_path / folder) for path in (tmp_path / folder).rglob("*") if path.is_file()}
        assert names == {path.relative_to(tmp_path / other) for path in (tmp_path / other).rglob("*") if path.is_file()}
        for name in names:
            assert (tmp_path / folder / name).read_bytes() == (tmp_path / other / name).read_bytes(), name


def test_sizes_are_those_of_the_model_and_not_of_the_original(source, tmp_path):
    change_config(source, max_window_layers=3, layer_types=["full_attention"] * 9)
    model = interop.load(source)
    config = replace(model.config, max_length=77)
    interop.save(Decoder(config, params=model.params, companions=model.companions), tmp_path / "out")
    saved = config_json(tmp_path / "out")
    assert saved["max_position_embeddings"] == 77
    assert "layer_types" not in saved
    assert interop.load(tmp_path / "out").config == replace(config, moe=model.config.moe)


def test_of_another_familys_config_only_the_ends_of_a_text_are_kept(source, tmp_path, golden_model):
    change_config(source, bos_token_id=3)
    interop.save(golden_model("olmoe"), tmp_path / "out", companions=source)
    saved = config_json(tmp_path / "out")
    assert saved["eos_token_id"] == [5, 6]
    assert saved["bos_token_id"] == 3
    assert "somebodys_own_key" not in saved
    assert interop.load(tmp_path / "out").config == golden_model("olmoe").config


def test_where_texts_end_is_said_in_generation_config_where_only_config_json_said_it(source):
    (source / "generation_config.json").unlink()
    assert json.loads(read_companions(source).files["generation_config.json"]) == {"eos_token_id": [5, 6]}


def test_a_model_that_was_not_loaded_has_no_companions(tmp_path, golden_model):
    model = golden_model("olmoe")
    interop.save(Decoder(model.config, params=model.params), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_a_model_with_companions_can_be_traced(golden_model):
    from flax import nnx

    model = golden_model("olmoe")
    traced = Decoder(model.config, params=model.params, companions=Companions(files={"a": b"b"}))
    graph, _ = nnx.split(traced)
    assert hash(graph) == hash(nnx.split(traced)[0])
