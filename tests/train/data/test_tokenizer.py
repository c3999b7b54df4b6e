"""The tokenizer of bytes, and tokenizers that come with a model."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from raggedmoe.models.companions import Companions
from raggedmoe.train.data import tokenizer as tokenizer_module
from raggedmoe.train.data.tokenizer import BYTES, BYTES_THAT_END, byte_tokenizer_json, load_tokenizer


@pytest.mark.parametrize(
    "text", ["héllo\n\tdef", "", " two  spaces ", "\x00\x7f\u00ad\u0100 \U0001f600\r\n", "<s> ##a"]
)
@pytest.mark.parametrize("ends", [False, True])
def test_the_byte_tokenizer_gives_the_bytes_of_utf8_and_back(text, ends):
    tokenizer = Tokenizer.from_str(byte_tokenizer_json(ends=ends))
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_has_the_256_bytes_and_no_other_token():
    assert sorted(Tokenizer.from_str(byte_tokenizer_json()).get_vocab().values()) == list(range(256))


def test_the_byte_tokenizer_decodes_bytes_that_are_no_text():
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    assert tokenizer.decode([ord("a"), 0xFF, ord("b")]) == "a\N{REPLACEMENT CHARACTER}b"


def test_the_byte_that_ends_a_text_is_a_special_token():
    tokenizer = Tokenizer.from_str(BYTES_THAT_END.text)
    assert tokenizer.get_vocab_size() == 256
    assert tokenizer.encode("a<|endoftext|>ÿ").ids == [ord("a"), 0xFF, *"ÿ".encode()]
    assert tokenizer.decode([ord("a"), 0xFF]) == "a"
    assert tokenizer.decode([ord("a"), 0xFF], skip_special_tokens=False) == "a<|endoftext|>"


WORDS = {"a": 0, "b": 1, "<end>": 2, "</s>": 3, "<other>": 4}


@pytest.fixture
def path(tmp_path):
    """A tokenizer.json of whole words."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def ended(path, text=None):
    return load_tokenizer(path, 5).with_end(text)


def test_a_token_that_was_added_counts_against_the_vocabulary(path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<added>"])
    tokenizer.save(str(path))
    assert load_tokenizer(path, 6).vocab_size == 6
    with pytest.raises(ValueError, match="below the model's vocabulary of 5, got one of 5; use vocab_size=6"):
        load_tokenizer(path, 5)


def write(path, name, value):
    (path.parent / name).write_text(json.dumps(value))


def test_a_document_ends_with_the_token_that_the_files_name(path):
    found = ended(path)
    assert [tokens.tolist() for tokens in found.encode([(Path("x"), b"a b"), (Path("y"), b"")])] == [[0, 1, 3], []]
    for name, value, end in (
        ("config.json", {"eos_token_id": 4}, 4),
        ("generation_config.json", {"eos_token_id": [2, 4]}, 2),
        ("special_tokens_map.json", {"eos_token": {"content": "<other>"}}, 4),
        ("tokenizer_config.json", {"eos_token": "<end>"}, 2),
    ):  # each comes before those above
        write(path, name, value)
        assert ended(path).end == end, name
    assert ended(path, "b").end == 1


def test_an_end_that_the_tokenizer_does_not_have_is_refused(path):
    with pytest.raises(ValueError, match=r"eos_token=<no>: expected a token of .*tokenizer\.json"):
        ended(path, "<no>")


def test_a_tokenizer_without_a_known_end_is_warned_of(tmp_path, caplog):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json", 1).with_end(None).end is None
    assert "no token is known to end a text" in caplog.text


def test_a_model_of_bytes_needs_no_library_to_be_read_again(tmp_path):
    for text in (BYTES.text, BYTES_THAT_END.text):
        (tmp_path / "tokenizer.json").write_text(text)
        assert load_tokenizer(tmp_path / "tokenizer.json", 256) is BYTES_THAT_END


def test_the_trained_model_is_told_where_texts_end():
    found = BYTES_THAT_END.with_companions(Companions(), None)
    assert json.loads(found.files["generation_config.json"]) == {"eos_token_id": 255}
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    assert found.config_json == {"eos_token_id": 255}
    assert "generation_config.json" not in BYTES.with_companions(Companions(), None).files


def test_ends_that_a_model_has_already_stay_and_one_more_is_added(path):
    write(path, "config.json", {"eos_token_id": 4, "pad_token_id": 0})
    write(path, "generation_config.json", {"eos_token_id": [4, 3], "temperature": 0.5})
    of_model = Companions(
        files={name: (path.parent / name).read_bytes() for name in ("generation_config.json",)},
        config_json={"eos_token_id": 4, "pad_token_id": 0},
    )
    found = ended(path, "<end>").with_companions(of_model, path.parent)
    assert json.loads(found.files["generation_config.json"]) == {"eos_token_id": [4, 3, 2], "temperature": 0.5}
    assert found.config_json == {"eos_token_id": [4, 2], "pad_token_id": 0}


def test_another_tokenizer_takes_the_place_of_all_that_the_model_had_of_its_own(path, tmp_path):
    of_model = Companions(
        files={"merges.txt": b"x", "LICENSE": b"y", "generation_config.json": b'{"eos_token_id": 9, "top_p": 0.5}'},
        config_json={"eos_token_id": 9, "use_cache": False},
    )
    write(path, "special_tokens_map.json", {"eos_token": "<end>"})
    found = ended(path).with_companions(of_model, tmp_path / "elsewhere")
    assert sorted(found.files) == [
        *("LICENSE", "generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert json.loads(found.files["generation_config.json"]) == {"eos_token_id": 2, "top_p": 0.5}
    assert found.config_json == {"eos_token_id": 2, "use_cache": False}
    assert json.loads(found.files["tokenizer_config.json"])["eos_token"] == "<end>"


def test_the_models_own_tokenizer_elsewhere_takes_nothing_from_the_model(path, tmp_path):
    elsewhere = tmp_path / "tokens" / "tokenizer.json"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(path.read_bytes())
    of_model = Companions(
        files={"tokenizer.json": path.read_bytes(), "tokenizer_config.json": b'{"pad_token": "<pad>"}'},
        config_json={"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1},
    )
    tokenizer = ended(elsewhere, "<end>")
    found = tokenizer.with_companions(of_model, path.parent)
    assert found.config_json == of_model.config_json
    assert found.files["tokenizer_config.json"] == of_model.files["tokenizer_config.json"]
    # As `raggedmoe tokenize` writes a folder of a tokenizer that came alone.
    minimal = tokenizer.with_companions(Companions(), None).files["tokenizer_config.json"]
    elsewhere.with_name("tokenizer_config.json").write_bytes(minimal)
    elsewhere.with_name("chat_template.jinja").write_text("new")
    found = tokenizer.with_companions(of_model, path.parent)
    assert found.files["tokenizer_config.json"] == of_model.files["tokenizer_config.json"]
    assert found.files["chat_template.jinja"] == b"new"


LLAMA = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PROSE = "It ends here.\nA line.\n\nAnother one!\n  indented (so).\n3 items:\n- one\n\n\nword\nword\n" * 9


@pytest.mark.parametrize("pattern", [None, LLAMA])
def test_text_is_split_where_a_tokenizer_cuts_it_anyway(monkeypatch, pattern):
    """Tokenizers as GPT-2's and Llama 3's are, trained so that they merge whatever their pattern leaves together."""
    monkeypatch.setattr(tokenizer_module, "_PART_CHARACTERS", 1)
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    parts = list(tokenizer_module.text_parts(PROSE))
    assert len(parts) > 30
    assert any(part.endswith(".\n") for part in parts)
    together = [number for part in parts for number in tokenizer.encode(part).ids]
    assert together == tokenizer.encode(PROSE).ids
