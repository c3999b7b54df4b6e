"""`raggedmoe generate` as a user types it."""

import itertools
import json
import sys

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from raggedmoe.cli.generate import _text
from tests.interop.folders import GOLDEN, change_config, copied, expected_of

PROMPT = 8


def byte_level_tokenizer(byte_of):
    """A tokenizer whose token n is the byte ``byte_of[n]``; no other byte has a token."""
    visible = [n for n in range(256) if chr(n).isprintable() and n not in (32, 160, 173) and (n < 127 or n > 160)]
    letters, spare = {}, 256
    for byte in range(256):
        # GPT-2's table: bytes that cannot be seen are written as letters that can.
        letters[byte] = chr(byte) if byte in visible else chr(spare)
        spare += byte not in visible
    tokenizer = Tokenizer(BPE({letters[byte]: n for n, byte in byte_of.items()}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A golden model with a tokenizer in which its greedy text has a character of two bytes; and its tokens."""
    folder = copied("mixtral", tmp_path_factory.mktemp("spoken") / "mixtral")
    expected = expected_of("mixtral")
    prompt, new = expected["ids"][0, :PROMPT].tolist(), expected["greedy"][0].tolist()
    first, second = next(pair for pair in itertools.pairwise(new) if pair[0] != pair[1])
    plain = iter(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?()[]{}+-*/")
    special = {first: 0xC3, second: 0xA9}
    byte_of = {n: special[n] if n in special else next(plain) for n in range(80)}
    byte_level_tokenizer(byte_of).save(str(folder / "tokenizer.json"))
    return folder, prompt, new, byte_of


def test_ids_are_continued_as_transformers_continues_them(spoken, raggedmoe):
    folder, prompt, new, _ = spoken
    code, out, error = raggedmoe(
        "generate", folder, "--ids", "--prompt", ",".join(map(str, prompt)), "--max-new-tokens", 32
    )
    assert code == 0
    assert [int(token) for token in out.split()] == new
    assert "32 tokens" in error


def test_a_text_is_continued_with_its_tokenizer_and_whole_characters(spoken, raggedmoe):
    folder, prompt, new, byte_of = spoken
    text = bytes(byte_of[n] for n in prompt).decode()
    code, out, _ = raggedmoe("generate", folder, "--prompt", text, "--max-new-tokens", 32)
    assert code == 0
    expected = bytes(byte_of[n] for n in new).decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")
    assert "é" in expected
    assert out == expected + "\n"


def test_generation_ends_at_the_end_of_sequence_token(spoken, raggedmoe, tmp_path):
    _, prompt, new, _ = spoken
    end = new[5]
    copied("mixtral", tmp_path / "ending")
    for name, value in (("config.json", 79 if end != 79 else 78), ("generation_config.json", [end])):
        path = tmp_path / "ending" / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), "eos_token_id": value}))
    code, out, _ = raggedmoe(
        "generate", tmp_path / "ending", "--ids", "--prompt", " ".join(map(str, prompt)), "--max-new-tokens", 32
    )
    assert code == 0
    assert [int(token) for token in out.split()] == new[: new.index(end) + 1]


def test_an_imported_folder_keeps_tokenizer_and_end_of_sequence(spoken, raggedmoe, tmp_path):
    _, prompt, new, byte_of = spoken
    folder = copied("mixtral", tmp_path / "source")
    (folder / "tokenizer.json").write_bytes((spoken[0] / "tokenizer.json").read_bytes())
    change_config(folder, eos_token_id=new[3])
    assert raggedmoe("import", folder, tmp_path / "native")[0] == 0
    text = bytes(byte_of[n] for n in prompt).decode()
    code, out, error = raggedmoe("generate", tmp_path / "native", "--prompt", text, "--max-new-tokens", 32)
    assert code == 0
    assert f"{new.index(new[3]) + 1} tokens" in error
    assert out.strip("\n") == bytes(byte_of[n] for n in new[: new.index(new[3]) + 1]).decode(errors="ignore")


@pytest.mark.ci
def test_samples_follow_the_seed(spoken, raggedmoe):
    folder, prompt, _, _ = spoken

    def sample(seed):
        code, out, _ = raggedmoe(
            "generate", folder, "--ids", "--prompt", ",".join(map(str, prompt)),
            "--max-new-tokens", 32, "--temperature", 1.5, "--seed", seed,
        )  # fmt: skip
        assert code == 0
        return out

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_each_token_is_shown_before_the_next_is_made(spoken, raggedmoe, monkeypatch):
    folder, _, _, byte_of = spoken
    events = []
    plain = [n for n, byte in byte_of.items() if byte < 128][:3]

    class Screen:
        encoding = "utf-8"

        def write(self, text):
            events.append(text)

        def flush(self):
            events.append("flush")

    def made(*arguments, **settings):
        for token in plain:
            events.append("made")
            yield [token]

    monkeypatch.setattr("raggedmoe.cli.generate.generation.generate", made)
    monkeypatch.setattr("raggedmoe.train.loop.saved_run.interop.load", lambda *arguments, **settings: None)
    monkeypatch.setattr(sys, "stdout", Screen())
    raggedmoe("generate", folder, "--prompt", "ab")
    shown = [chr(byte_of[n]) for n in plain]
    kept = [event for event in events[events.index("made") :] if event in ("made", "flush", *shown)]
    assert kept[:9] == ["made", shown[0], "flush", "made", shown[1], "flush", "made", shown[2], "flush"]


def test_half_a_character_is_held_back_until_it_is_whole():
    tokenizer = byte_level_tokenizer({0: ord("a"), 1: 0xE2, 2: 0x82, 3: 0xAC})
    assert list(_text(tokenizer, iter([0, 1, 2, 3, 0]))) == ["a", "", "", "€", "a"]


def test_a_byte_that_begins_no_character_is_shown_as_a_replacement():
    tokenizer = byte_level_tokenizer({0: ord("a"), 1: 0xE2})
    assert "".join(_text(tokenizer, iter([0, 1, 0]))) == "a\N{REPLACEMENT CHARACTER}a"


def test_without_a_tokenizer_the_error_says_where_it_belongs(raggedmoe):
    code, _, error = raggedmoe("generate", GOLDEN / "mixtral", "--prompt", "hello")
    assert code == 2
    assert error.count("\n") == 1
    assert "tokenizer.json" in error
    assert "--ids" in error


def test_a_broken_tokenizer_is_one_line_with_the_file(raggedmoe, tmp_path):
    folder = copied("mixtral", tmp_path / "mixtral")
    (folder / "tokenizer.json").write_text("{}")
    code, _, error = raggedmoe("generate", folder, "--prompt", "hello")
    assert code == 2
    assert error.count("\n") == 1
    assert "tokenizer.json" in error


def test_without_the_tokenizers_package_the_error_says_what_to_install(spoken, raggedmoe, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, error = raggedmoe("generate", spoken[0], "--prompt", "hello")
    assert code == 2
    assert "pip install 'raggedmoe[text]'" in error


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_broken_json_file_beside_the_model_is_one_line_with_the_file(name, raggedmoe, tmp_path):
    folder = copied("mixtral", tmp_path / "mixtral")
    (folder / name).write_text("[]")
    code, _, error = raggedmoe("generate", folder, "--ids", "--prompt", "1")
    assert code == 2
    assert f"{name}: expected a JSON object" in error


@pytest.mark.parametrize("ends", ["x", 1.5, [1, "x"], {"a": 1}, True])
def test_an_end_of_sequence_that_is_no_token_is_refused(ends, raggedmoe, tmp_path):
    folder = copied("mixtral", tmp_path / "mixtral")
    change_config(folder, eos_token_id=ends)
    code, _, error = raggedmoe("generate", folder, "--ids", "--prompt", "1")
    assert code == 2
    assert "config.json: expected eos_token_id" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "1,x", "--ids"), "expected token numbers"),
        (("--prompt", "", "--ids"), "expected token numbers"),
        (("--prompt", "99", "--ids"), "from 0 to 79"),
        (("--prompt", "1", "--ids", "--max-new-tokens", "0"), "max_new_tokens"),
        (("--prompt", "1", "--ids", "--max-new-tokens", "64"), "64 positions"),
        (("--prompt", "1", "--ids", "--temperature", "-1"), "temperature"),
        (("--prompt", "1", "--ids", "--top-k", "3"), "temperature > 0"),
        (("--prompt", "1", "--ids", "--dtype", "bf16"), "did you mean 'bfloat16'"),
    ],
)
def test_a_wrong_option_of_generate_is_one_line(arguments, said, raggedmoe):
    code, out, error = raggedmoe("generate", GOLDEN / "mixtral", *arguments)
    assert code == 2
    assert out == ""
    assert said in error
    assert error.count("\n") == 1
