"""A run of a Hugging Face folder's model: its sizes, its tokenizer, its end of a text, and all that belongs to it."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raggedmoe import interop
from raggedmoe.cli.convert import export
from raggedmoe.cli.generate import generate
from raggedmoe.cli.train import train
from tests.interop.folders import change_config, copied, stored

pytestmark = pytest.mark.usefixtures("shared_programs")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SHORT = ("max_target_length=16", "per_device_batch_size=2", "eval_steps=1", "enable_checkpointing=false")
COUNTING = (" ".join(WORDS[:4]), " ".join(WORDS[4:8]), " ".join(WORDS[8:]))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of sizes that no preset has, whose tokenizer knows a few words."""
    made = copied("qwen3_moe", tmp_path / "mine")
    vocab = {word: number for number, word in enumerate([*WORDS, "<stop>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="one"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["<stop>"])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"eos_token": "<stop>", "model_max_length": 64}')
    (made / "chat_template.jinja").write_text("{{ messages }}")
    change_config(made, eos_token_id=12, attention_dropout=0.5)
    return made


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(24):
        (tmp_path / "text" / f"{number:02}.txt").write_text(COUNTING[number % 3])
    return tmp_path / "text"


def run(folder, text, tmp_path, *words):
    data = ("dataset_type=text", f"dataset_path={text}", f"base_output_directory={tmp_path}", "run_name=run")
    assert train((*([str(folder)] if folder else []), *data, *SHORT, *words)) == 0
    return tmp_path / "run" / "model"


def test_a_folders_model_goes_in_and_comes_out_with_all_that_belongs_to_it(folder, text, tmp_path):
    trained = run(folder, text, tmp_path, "steps=1", "learning_rate=1e-30", "warmup_from=zero")
    assert export(trained, tmp_path / "out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out"))
    assert {key: after[key] for key in ("eos_token_id", "attention_dropout")} == {
        "eos_token_id": 12,
        "attention_dropout": 0.5,
    }
    assert before.keys() - after.keys() <= {"num_local_experts", "rope_parameters"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 12}
    # A learning rate of nothing: the weights are those of the folder, so they were loaded.
    ours, theirs = interop.load(tmp_path / "out").params, interop.load(folder).params
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_from_scratch_the_weights_are_new_and_the_rest_is_the_folders(folder, text, tmp_path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    trained = run(folder, text, tmp_path, "steps=1", "from_scratch=true", "num_layers=2")
    assert interop.load(trained).config.num_layers == 2
    assert (trained / "tokenizer_config.json").read_bytes() == (folder / "tokenizer_config.json").read_bytes()


def test_a_trained_model_stops_where_its_texts_did(folder, text, tmp_path, capsys):
    words = ("from_scratch=true", "num_layers=1", "steps=60", "learning_rate=0.02")
    trained = run(folder, text, tmp_path, *words)
    for texts in COUNTING:
        first, rest = texts.split(" ", 1)
        capsys.readouterr()
        assert generate(trained, first, max_new_tokens=20) == 0
        assert capsys.readouterr().out.split() == rest.split()


def test_a_folder_that_lacks_the_weights_is_refused_before_it_is_compiled(folder, text, tmp_path):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"mine: expected model\.safetensors"):
        run(folder, text, tmp_path, "steps=1")


def test_a_tokenizer_larger_than_a_presets_vocabulary_is_refused_with_the_key_to_use(folder, text, tmp_path):
    with pytest.raises(ValueError, match=r"got one of 12; use vocab_size=13 or more"):
        run("qwen3-tiny", text, tmp_path, f"tokenizer_path={folder}/tokenizer.json", "vocab_size=12")


def test_a_run_from_before_texts_ended_goes_on_without_ends(tmp_path, text):
    """Its run.json does not have the setting, and its data have no ends."""
    words = ("olmoe-tiny", "num_layers=1", "max_target_length=16", "per_device_batch_size=2", "eval_steps=1")
    data = ("dataset_type=text", f"dataset_path={text}", f"base_output_directory={tmp_path}", "run_name=run")
    assert train((*words, *data, "steps=2", "add_eos=false")) == 0
    path = tmp_path / "run" / "run.json"
    described = json.loads(path.read_text())
    del described["settings"]["add_eos"]
    path.write_text(json.dumps(described))
    shutil.rmtree(tmp_path / "run" / "model")
    assert train((*words, *data, "steps=3")) == 0
    again = json.loads(path.read_text())
    assert again["settings"]["add_eos"] is False
    assert again["data_fingerprint"] == described["data_fingerprint"]
    assert (tmp_path / "run" / "model").is_dir()
    assert stored(tmp_path / "run" / "model")
