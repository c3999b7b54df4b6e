"""The examples of README and the docs: Python is executed, and the words of every command are ones that it takes."""

import functools
import json
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.cli import main as cli
from raggedmoe.hardware import HARDWARE
from raggedmoe.models.presets import ALIASES, PRESETS
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from tests.cli.test_generate import byte_level_tokenizer
from tests.interop.test_quantized import fp8_folder
from tests.models.drawn import GOLDEN
from tests.train.runs import share_programs

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if path.name not in ("log.md", "mutants.md")
)


def blocks(page, *kinds):
    """The text of a page's code blocks of these kinds; "" is one without a word."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.M | re.S)
    return [text for kind, text in found if kind in kinds]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_is_of_a_kind_that_is_read_here(page):
    """Python without its word, an indented block or a block of another kind would be run by no test."""
    fences = re.findall(r"^ *```.*$", page.read_text(), flags=re.M)
    assert set(fences) <= {"```", "```python", "```sh", "```toml"}
    assert len(fences) == 2 * len(blocks(page, "", "python", "sh", "toml"))
    assert not re.search(r"^(from raggedmoe|import |>>> )", "\n".join(blocks(page, "", "sh")), flags=re.M)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


def marks_of(page):
    if page.name == "compile.md":
        return [pytest.mark.tpu, pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")]
    return [] if page.name == "README.md" else [pytest.mark.ci]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name, marks=marks_of(page)) for page in WITH_PYTHON])
def test_python_examples_run(page, tmp_path, monkeypatch):
    """The reader's arrays and a checkpoint's folder are there; what an example calls, its page imports."""
    monkeypatch.chdir(tmp_path)
    Path("Qwen3-30B-A3B").symlink_to(GOLDEN / "qwen3_moe", target_is_directory=True)
    if "DeepSeek-V3" in page.read_text():
        fp8_folder(Path("DeepSeek-V3"), (16, 32))
    query = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 4, 8)), jnp.float32)
    names = {
        "x": jnp.ones((2, 16, 512)),
        "ids": jnp.arange(12).reshape(2, 6),
        "query": query,
        **dict.fromkeys(("key", "value", "cache_k", "cache_v"), query[:, :, :2]),
        "positions": jnp.full((2, 6), 3),
        "segments": jnp.zeros((2, 6), jnp.int32),
        "sinks": jnp.zeros(4),
    }
    for number, text in enumerate(blocks(page, "python")):
        if page.name == "README.md" and "raggedmoe.train(" in text:
            continue  # tests/train/loop/test_python_run.py runs it
        exec(compile(text, f"{page.name}, example {number}", "exec"), names)


@pytest.mark.parametrize(
    ("page", "text"), [pytest.param(page, text, id=page.name) for page in PAGES for text in blocks(page, "toml")]
)
def test_files_of_settings_make_a_run(page, text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    resolve(read_words([str(tmp_path / "run.toml")]), HARDWARE["cpu"])


def commands(page):
    """The lines of a page that call `raggedmoe`, without prompt, comment and what they write to."""
    for text in blocks(page, "sh", ""):
        for line in text.replace("\\\n", " ").splitlines():
            line = re.sub(r"^(RAGGEDMOE_\w+=\S+ )+", "", line.removeprefix("$ "))
            if line.startswith("raggedmoe "):
                words = shlex.split(line, comments=True)
                yield words[: words.index(">")] if ">" in words else words


LINES = [pytest.param(words, id=" ".join(words)) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("words", LINES)
def test_commands_have_words_that_they_take(words, monkeypatch):
    """The command's own parser reads them; the settings among them make a run's configuration."""
    read = {}

    def recorder(function):
        @functools.wraps(function)
        def record(**arguments):
            read.update(arguments)
            return 0

        return record

    monkeypatch.setattr(cli, "COMMANDS", {name: recorder(function) for name, function in cli.COMMANDS.items()})
    monkeypatch.setattr("sys.argv", [word for word in words if word != "…"])
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main()
    assert read
    typed = [word for value in read.values() if isinstance(value, tuple) for word in value if isinstance(word, str)]
    if words[1] == "train" or any("=" in word for word in typed):
        typed = [word for word in typed if word in (*PRESETS, *ALIASES) or "=" in word]
        typed = [word for word in typed if not word.startswith(("dataset_", "tokenizer_"))]
        settings = read_words([*typed, "dataset_type=synthetic"])
        resolve(settings, HARDWARE["cpu"], max(8, settings.mesh.num_devices))


# Commands that are only read, by how they begin, and why; all others are run.
ONLY_READ = {
    "raggedmoe compile": "libtpu takes minutes, and models of this size do on a CPU; tests/cli/test_compile.py runs it",
    "raggedmoe bench": "measures for minutes; tests/cli/test_bench.py runs it",
    "raggedmoe demo": "tests/cli/test_demo.py runs it",
    "raggedmoe launch --processes": "starts processes of its own; tests/launch runs it",
    "raggedmoe train olmoe-tiny": "a preset that takes minutes to compile and train, or an object store",
    "raggedmoe train olmoe-1b-7b": "as the line before; tests/train/step/test_quantized_step.py trains in 8 bits",
    "raggedmoe train deepseek": "a preset of many devices, or of many GB",
    "raggedmoe train demo steps=300": "minutes; README has the same: a run, and one that begins with its checkpoint",
    "raggedmoe train out/whole/run.json": "as the line before",
    "raggedmoe report out/whole out/half": "tests/train/report compares runs",
    "raggedmoe train path/to/folder": "README's chain trains a folder; tests/train/data has the kinds of data",
    "raggedmoe generate out/tuned": "a run of the line before; tests/train/loop/test_lora_run.py exports one",
    "raggedmoe export out/tuned": "as the line before",
    "raggedmoe train s3://": "needs an object store; tests/train/loop/test_object_run.py has one",
    "raggedmoe report s3://": "as the line before",
    "raggedmoe generate s3://": "as the line before",
}
SHORT_RUN = ("steps=100", "checkpoint_period=100", "max_target_length=16", "per_device_batch_size=1")
TINY_MODEL = ("num_layers=2", "base_emb_dim=32", "base_moe_mlp_dim=16", "num_experts=4", "num_experts_per_tok=2")
LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?()[]{}+-*/_"


def is_run(words):
    # "…" stands for words of the reader's own.
    return "…" not in words and not " ".join(words).startswith(tuple(ONLY_READ))


def shortened(words):
    """The words of a command, with settings and options that make it take seconds."""
    more = {"generate": ["--max-new-tokens", "4"], "tokenize": []}.get(words[1], [])
    if words[1] == "train":
        more = [*SHORT_RUN, *(TINY_MODEL if len(words) == 2 else ())]
        if "init_state=all" in words:
            more = ["steps=102"]
    replaced = {word.partition("=")[0] for word in more if "=" in word}
    return [*(word for word in words if word.partition("=")[0] not in replaced), *more]


def test_what_is_only_read_is_in_the_docs():
    lines = [" ".join(words) for page in PAGES for words in commands(page)]
    assert [start for start in ONLY_READ if not any(line.startswith(start) for line in lines)] == []


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """A reader's folder: a model with a tokenizer under the names that the docs give it, and texts."""
    monkeypatch.chdir(tmp_path)
    share_programs(monkeypatch)
    model = Path(shutil.copytree(GOLDEN / "qwen3_moe", "path/to/Qwen3-30B-A3B"))
    byte_level_tokenizer(dict(enumerate(LETTERS[:80]))).save(str(model / "tokenizer.json"))
    for name in ("Qwen3-30B-A3B", "path/to/folder"):
        Path(name).symlink_to(model.absolute(), target_is_directory=True)
    text = "Once upon a time there was a mixture of experts. " * 50
    Path("books").mkdir()
    for name in ("books/one.txt", "held_out.txt"):
        Path(name).write_text(text)
    Path("more.jsonl").write_text(json.dumps({"text": text}) + "\n")


WITH_COMMANDS = [page for page in PAGES if any(is_run(words) for words in commands(page))]


@pytest.mark.ci
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_commands_run_in_their_order(page, reader, monkeypatch, capsys):
    """Each goes on from what those before it on the page have written."""
    for words in filter(is_run, commands(page)):
        monkeypatch.setattr("sys.argv", shortened(words))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code, f"{sys.argv}: {capsys.readouterr().err}"
