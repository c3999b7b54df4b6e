"""The commands for models and their checkpoints as a user types them: models, import, export, generate."""

import itertools
import json
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from raggedmoe import interop
from raggedmoe.cli.generate import _text
from raggedmoe.cli.main import main
from raggedmoe.cli.models import models
from raggedmoe.models.presets import ALIASES, PRESETS
from tests.interop.folders import (
    GOLDEN,
    INDEX,
    SINGLE,
    assert_same_params,
    change_config,
    change_header,
    change_json,
    change_tensors,
    copied,
    expected_of,
    stored,
)

NORM = "model.norm.weight"
PROMPT = 8


@pytest.fixture
def raggedmoe(monkeypatch, capsys):
    """Runs the console script: its exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["raggedmoe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize("command", ["models", "import", "export", "generate"])
def test_help_is_printed_and_is_no_failure(command, raggedmoe):
    code, out, _ = raggedmoe(command, "--help")
    assert code == 0
    assert "usage: raggedmoe" in out


# models

PUBLISHED = {  # total and active in billions, as their makers say
    "deepseek-v3": (671.0, 37.6),
    "deepseek-v2-lite": (15.7, 2.66),
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.35),
    "olmoe-1b-7b": (6.92, 1.28),
    "gpt-oss-20b": (20.9, None),  # its makers leave the embedding out of what is active
    "gpt-oss-120b": (116.8, None),
    "kimi-k2": (1026.0, 32.9),
}


@pytest.fixture
def counted(capsys):
    """The rows of `raggedmoe models --json`, by name."""

    def rows(*names):
        assert models(names=names, json=True) == 0
        return {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    return rows


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_within_half_a_percent_of_what_is_published(name, counted):
    row, (total, active) = counted(name)[name], PUBLISHED[name]
    assert row["total"] == pytest.approx(total * 1e9, rel=0.005)
    assert active is None or row["active"] == pytest.approx(active * 1e9, rel=0.005)


def test_deepseek_v3_is_counted_as_by_hand(counted):
    width, layers, dense, experts, expert_width, heads, q_rank, kv_rank = 7168, 61, 3, 256, 2048, 128, 1536, 512
    attention = (
        (width * q_rank + q_rank + q_rank * heads * (128 + 64))
        + (width * (kv_rank + 64) + kv_rank + kv_rank * heads * (128 + 128))
        + heads * 128 * width
    )
    one = 3 * width * expert_width
    moe = width * experts + experts + experts * one + one
    total = 2 * 129_280 * width + width + layers * (attention + 2 * width)
    total += dense * 3 * width * 18_432 + (layers - dense) * moe
    row = counted("deepseek-v3")["deepseek-v3"]
    assert row["total"] == total
    assert row["active"] == total - (layers - dense) * (experts - 8) * one
    # Two norms and a projection of both halves before a layer, a norm after it.
    assert row["mtp"] == attention + 2 * width + moe + 3 * width + 2 * width * width


def test_gpt_oss_20b_is_counted_as_by_hand(counted):
    width, layers, experts, expert_width = 2880, 24, 32, 2880
    queries, keys = 64 * 64, 8 * 64
    attention = (width + 1) * queries + 2 * (width + 1) * keys + (queries + 1) * width + 64
    one = (width + 1) * 2 * expert_width + (expert_width + 1) * width
    total = 2 * 201_088 * width + width
    total += layers * (attention + 2 * width + (width + 1) * experts + experts * one)
    row = counted("gpt-oss-20b")["gpt-oss-20b"]
    assert row["total"] == total
    assert row["active"] == total - layers * (experts - 4) * one


def test_counting_allocates_nothing(counted):
    arrays = len(jax.live_arrays())
    tracemalloc.start()
    row = counted("deepseek-v3")["deepseek-v3"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(jax.live_arrays()) == arrays
    assert row["bytes"] > 1e12
    assert peak < 50e6


def test_all_models_are_listed_and_none_is_cut_where_the_terminal_is_narrow(raggedmoe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = raggedmoe("models")
    assert code == 0
    assert "…" not in out
    for name in (*PRESETS, *ALIASES):
        assert name in out
    assert "671.0B" in out
    assert "37.6B" in out


def test_an_alias_is_counted_as_the_model_it_stands_for(counted):
    rows = counted("deepseek-v3", "deepseek3-671b")
    assert rows["deepseek3-671b"]["total"] == rows["deepseek-v3"]["total"]


def test_the_size_follows_the_type(raggedmoe):
    sizes = []
    for dtype in ("float32", "bfloat16"):
        code, out, _ = raggedmoe("models", "mixtral-tiny", "--json", "--dtype", dtype)
        assert code == 0
        sizes.append(json.loads(out)[0]["bytes"])
    assert 1.9 < sizes[0] / sizes[1] <= 2


def test_an_unknown_model_or_type_suggests_the_nearest(raggedmoe):
    code, _, error = raggedmoe("models", "mixtral-8x7")
    assert code == 2
    assert "did you mean 'mixtral-8x7b'" in error
    code, _, error = raggedmoe("models", "--dtype", "bfloat61")
    assert code == 2
    assert "did you mean 'bfloat16'" in error


# import and export


def test_import_and_export_give_a_checkpoint_back_bit_for_bit(raggedmoe, tmp_path):
    native, out = tmp_path / "native", tmp_path / "out"
    code, printed, _ = raggedmoe("import", GOLDEN / "mixtral", native)
    assert code == 0
    assert "imported mixtral" in printed
    code, printed, _ = raggedmoe("export", native, out)
    assert code == 0
    assert "exported mixtral" in printed
    found, expected = stored(out), stored(GOLDEN / "mixtral")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_export_changes_layout_and_type(raggedmoe, tmp_path):
    code, _, _ = raggedmoe(
        "export", GOLDEN / "qwen3_moe_tied", tmp_path / "out", "--layout", "fused", "--dtype", "float16"
    )
    assert code == 0
    tensors = stored(tmp_path / "out")
    assert tensors.keys() == stored(GOLDEN / "qwen3_moe_fused").keys()
    assert tensors["model.embed_tokens.weight"].dtype == np.float16


def test_import_takes_a_type(raggedmoe, tmp_path):
    assert raggedmoe("import", GOLDEN / "olmoe", tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    assert str(interop.load(tmp_path / "out").params["embedding"].dtype) == "bfloat16"


@pytest.mark.parametrize("command", ["import", "export"])
def test_the_path_of_the_result_is_printed_as_it_is(command, raggedmoe, tmp_path):
    out = tmp_path / ("long-" * 20) / "[bold]"
    code, printed, _ = raggedmoe(command, GOLDEN / "olmoe", out)
    assert code == 0
    assert str(out) in printed


def _outside(folder):
    change_json(folder / INDEX, lambda index: index["weight_map"].update({NORM: "../model.safetensors"}))


def _absurd(path):
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def _wrong_shape(tensors):
    tensors[NORM] = np.ones(31, np.float32)


def _extra(tensors):
    tensors["model.extra"] = np.ones(31, np.float32)


FIRST = "model-00001-of-00002.safetensors"
BREAKAGES = {
    "missing shard": ("mixtral", lambda f: (f / FIRST).unlink(), [FIRST, "model.embed_tokens.weight"]),
    "truncated file": ("olmoe", lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-1]), [SINGLE, NORM]),
    "wrong shape": ("olmoe", lambda f: change_tensors(f, _wrong_shape), [SINGLE, NORM, "[32]", "[31]"]),
    "extra tensor": ("olmoe", lambda f: change_tensors(f, _extra), [SINGLE, "model.extra"]),
    "path out of the folder": ("mixtral", _outside, [INDEX, NORM, "../model.safetensors"]),
    "absurd header": ("olmoe", lambda f: _absurd(f / SINGLE), [SINGLE, str(2**63)]),
    "unknown type": (
        "olmoe",
        lambda f: change_header(f / SINGLE, lambda header: header[NORM].update(dtype="F31")),
        [SINGLE, NORM, "F31"],
    ),
    "pickle": ("olmoe", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), ["pytorch_model.bin", "refused"]),
    "other activation": ("olmoe", lambda f: change_config(f, hidden_act="gelu"), ["config.json", "hidden_act='gelu'"]),
    "unknown family": ("olmoe", lambda f: change_config(f, model_type="olmo"), ["did you mean 'olmoe'"]),
}


@pytest.mark.parametrize("damage", BREAKAGES)
def test_a_broken_folder_is_one_message_and_nothing_is_written(damage, raggedmoe, tmp_path):
    name, change, named = BREAKAGES[damage]
    folder = copied(name, tmp_path / "broken")
    change(folder)
    code, out, error = raggedmoe("import", folder, tmp_path / "deep" / "out")
    assert code == 2
    assert out == ""
    assert error.startswith("raggedmoe: ")
    assert error.count("raggedmoe: ") == 1
    for text in named:
        assert text in error
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_folder_with_files_is_not_touched(command, raggedmoe, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    code, _, error = raggedmoe(command, GOLDEN / "olmoe", tmp_path)
    assert code == 2
    assert "expected a new or empty folder" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("export", GOLDEN / "olmoe", "OUT", "--layout", "fussed"), "did you mean 'fused'"),
        (("export", GOLDEN / "gpt_oss", "OUT", "--layout", "mxfp4"), "expected one of fused"),
        (("export", GOLDEN / "olmoe", "OUT", "--dtype", "float23"), "did you mean 'float32'"),
        (("import", GOLDEN / "olmoe", "OUT", "--dtype", "float23"), "did you mean 'float32'"),
        (("import", GOLDEN / "olmoe", "OUT", "--dtype", "float64"), "JAX_ENABLE_X64"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(arguments, said, raggedmoe, tmp_path):
    code, _, error = raggedmoe(*(tmp_path / "out" if argument == "OUT" else argument for argument in arguments))
    assert code == 2
    assert said in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_new_process_ends_with_the_exit_code_and_without_a_traceback(tmp_path):
    copied("olmoe", tmp_path / "broken")
    _absurd(tmp_path / "broken" / SINGLE)
    code = "from raggedmoe.cli.main import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "import", tmp_path / "broken", tmp_path / "out"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert SINGLE in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


# generate


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
    monkeypatch.setattr("raggedmoe.cli.generate.interop.load", lambda *arguments, **settings: None)
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


def test_what_is_imported_is_loaded_as_what_was_there(raggedmoe, tmp_path):
    assert raggedmoe("import", GOLDEN / "gpt_oss", tmp_path / "native")[0] == 0
    assert_same_params(interop.load(tmp_path / "native"), interop.load(GOLDEN / "gpt_oss"))
