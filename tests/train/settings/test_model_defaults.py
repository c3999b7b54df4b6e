"""Settings that follow the model: its folder's tokenizer, and lengths, batches and learning rates that suit it."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models

from raggedmoe.cli.tokenize import tokenize_
from raggedmoe.hardware import HARDWARE
from raggedmoe.interop.named_model import load_config
from raggedmoe.models.presets import PRESETS
from raggedmoe.train.data.tokenizer import BYTES
from raggedmoe.train.settings.config import config_of
from raggedmoe.train.settings.model_defaults import check_data, keep_earlier_defaults, peak_learning_rate
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from tests.interop.folders import GOLDEN, change_config, copied

CPU = HARDWARE["cpu"]


def resolved(*words):
    return resolve(read_words(words), CPU)


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of sizes that no preset has, with a tokenizer."""
    made = copied("qwen3_moe", tmp_path / "mine")
    (made / "tokenizer.json").write_text("{}")
    return made


def test_a_folder_is_a_model_with_its_sizes_its_parameters_and_its_tokenizer(folder):
    config = resolved(str(folder), "dataset_type=text", f"dataset_path={folder}")
    loaded = load_config(folder)
    assert config.step.model.moe == loaded.moe
    assert config.step.model.attention == loaded.attention
    assert config.asked.parameters_folder == folder
    assert config.data.tokenizer_path == str(folder / "tokenizer.json")
    assert config.folder.name == "mine"


def test_load_parameters_path_alone_is_the_model_too(folder):
    alone = resolved(f"load_parameters_path={folder}")
    assert alone.asked.model == str(folder)
    assert alone.step.model == resolved(str(folder)).step.model
    both = read_words(("demo", f"load_parameters_path={folder}"))
    assert both.model_name == "demo"
    assert both.parameters_folder == folder


def test_a_configuration_survives_its_changes(folder):
    for words in ((f"load_parameters_path={folder}",), ("demo", f"load_parameters_path={folder}"), (str(folder),)):
        config = read_words(words)
        again = config_of(json.loads(json.dumps(config.changes())))
        assert again == config
        assert resolve(again, CPU).asked.values() == resolve(config, CPU).asked.values()


def test_from_scratch_takes_the_architecture_alone_and_other_sizes(folder):
    config = resolved(str(folder), "from_scratch=true", "num_layers=1", "vocab_size=99")
    assert config.asked.parameters_folder is None
    assert config.step.model.num_layers == 1
    assert config.step.model.vocab_size == 99
    assert config.data.tokenizer_path == str(folder / "tokenizer.json")


def test_from_scratch_with_a_preset_is_refused():
    with pytest.raises(ValueError, match=r"from_scratch=true: model_name=demo is no folder.*; leave it out"):
        read_words(("demo", "from_scratch=true"))


@pytest.mark.parametrize("typed", ["bytes", "other/tokenizer.json"])
def test_a_tokenizer_that_is_named_is_taken(folder, typed):
    assert resolved(str(folder), "dataset_type=stdlib", f"tokenizer_path={typed}").data.tokenizer_path == typed


def test_lengths_and_batches_follow_the_model():
    def of(*words):
        data = resolved(*words).data
        return data.max_target_length, data.per_device_batch_size

    assert of("demo") == (256, 4)
    assert of("olmoe-tiny") == (256, 16)
    assert of("olmoe-1b-7b", "num_layers=1") == (2048, 2)
    assert of("qwen3-tiny", "vocab_size=9000") == (512, 8)  # of at most 512 positions
    assert of("olmoe-1b-7b", "num_layers=1", "max_target_length=64") == (64, 16)
    assert of("olmoe-1b-7b", "num_layers=1", "per_device_batch_size=3") == (2048, 3)


def test_learning_rates_follow_the_model():
    rates = {name: peak_learning_rate(PRESETS[name], loaded=False) for name in ("demo", "olmoe-1b-7b", "deepseek-v3")}
    assert rates == {"demo": 3e-3, "olmoe-1b-7b": 5.1e-4, "deepseek-v3": 2.0e-4}
    assert peak_learning_rate(PRESETS["olmoe-1b-7b"], loaded=True) == 5.1e-5
    assert resolved("olmoe-1b-7b", "num_layers=1").step.optimizer.peak_learning_rate == 5.1e-4
    assert resolved("olmoe-1b-7b", "num_layers=1", "learning_rate=1").step.optimizer.peak_learning_rate == 1


def checked(*words):
    config = read_words(words)
    check_data(config, resolve(config, CPU).step.model)


def test_a_model_of_tokens_without_data_is_refused():
    with pytest.raises(ValueError, match=r"olmoe-1b-7b is no model of bytes: expected the data .* dataset_type=text"):
        checked("olmoe-1b-7b", "num_layers=1")
    for word in ("vocab_size=512", "dataset_type=stdlib", "dataset_type=synthetic"):
        checked("olmoe", "num_layers=1", word)
    checked("demo")


def test_a_model_of_tokens_needs_data_whatever_else_of_them_is_set():
    config = read_words(("olmoe-1b-7b", "num_layers=1"))
    packed = replace(config, data=replace(config.data, packing=False))
    with pytest.raises(ValueError, match="expected the data to train it on"):
        check_data(packed, resolve(packed, CPU).step.model)
    asked = replace(config, data=replace(config.data, dataset_type="stdlib"))
    check_data(asked, resolve(asked, CPU).step.model)


def test_a_folder_without_a_tokenizer_is_refused_unless_bytes_are_asked_for():
    model = str(GOLDEN / "qwen3_moe")
    with pytest.raises(ValueError, match=r"qwen3_moe: expected the model's tokenizer\.json, got none; .*=bytes"):
        checked(model, "dataset_type=stdlib")
    checked(model, "dataset_type=stdlib", "tokenizer_path=bytes")
    checked(model, "dataset_type=synthetic")


def test_a_tokenizer_in_another_form_is_named(folder):
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ValueError, match=r"got tokenizer\.model alone; write one with transformers"):
        checked(str(folder), "dataset_type=stdlib")


def test_tokens_that_are_not_the_models_are_refused(folder, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text " * 9)
    vocab = {text: number for number, text in enumerate(["text", "some", "more"])}
    theirs = Tokenizer(models.WordLevel(vocab, unk_token="text"))
    theirs.save(str(folder / "tokenizer.json"))

    def tokens(name, *options):
        tokenize_((str(tmp_path / "text"), str(tmp_path / name)), **dict(options))
        return (str(folder), "dataset_type=tokens", f"dataset_path={tmp_path / name}")

    as_bytes, own = tokens("bytes"), tokens("own", ("tokenizer", folder))
    with pytest.raises(ValueError, match=r"expected tokens of the tokenizer .* token 0 is .* and not 'text'"):
        checked(*as_bytes)
    checked(*as_bytes, "from_scratch=true")
    checked(*own)
    theirs.add_tokens(["new"])
    theirs.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"token 3 is 'none' and not 'new'; .*--tokenizer"):
        checked(*own)
    (folder / "tokenizer.json").unlink()
    change_config(folder, vocab_size=600)
    with pytest.raises(ValueError, match="got others: bytes for a vocabulary of 600"):
        checked(*as_bytes)
    (folder / "tokenizer.json").write_text(BYTES.text)  # without an end
    checked(*as_bytes)


def test_what_tokens_do_not_read_is_said(folder):
    said = ("add_eos=false", "dataset_suffixes=.txt", "held_out=0.2", "chat_date=2026-05-31")
    notes = resolved("demo", "dataset_type=tokens", "dataset_path=x", *said).notes
    for word in said:
        assert any(note.startswith(f"{word}: changes nothing: ") for note in notes), word
    assert not resolved("demo", "dataset_type=tokens", "dataset_path=x", "held_out=0").notes


OLD = {"dataset_type": "stdlib", "tokenizer_path": None, "max_target_length": 256, "per_device_batch_size": 16}


def test_a_run_that_began_with_other_defaults_keeps_them(folder):
    asked = read_words(("olmoe-1b-7b", "num_layers=1"))
    kept = keep_earlier_defaults(asked, {**OLD, "learning_rate": 3e-3, "model_name": "olmoe-1b-7b"})
    config = resolve(kept, CPU).asked
    assert (config.data.max_target_length, config.data.per_device_batch_size) == (256, 16)
    assert config.optimizer.learning_rate == 3e-3
    check_data(kept, resolve(kept, CPU).step.model)
    assert keep_earlier_defaults(asked, {}) == asked


def test_what_is_given_or_was_given_is_not_replaced():
    asked = read_words(("olmoe-1b-7b", "max_target_length=64", "learning_rate=1e-4"))
    kept = keep_earlier_defaults(asked, {**OLD, "learning_rate": 3e-3})
    assert (kept.data.max_target_length, kept.optimizer.learning_rate) == (64, 1e-4)
    kept = keep_earlier_defaults(read_words(("olmoe-1b-7b",)), {"max_target_length": 99, "learning_rate": 1e-5})
    assert (kept.data.max_target_length, kept.optimizer.learning_rate) == (None, None)


def test_an_earlier_run_that_began_from_parameters_alone_was_of_the_demo(folder):
    asked = read_words((f"load_parameters_path={folder}",))
    assert keep_earlier_defaults(asked, {"model_name": "demo"}).model_name == "demo"
    assert keep_earlier_defaults(asked, {"model_name": str(folder)}).model_name == str(folder)
