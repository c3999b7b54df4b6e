"""`raggedmoe quantise` and `raggedmoe generate --keep-quantised` as a user types them."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.train.data.rows import token_rows
from raggedmoe.train.loop.text_loss import text_loss
from tests.cli.test_generate import byte_level_tokenizer
from tests.interop.folders import GOLDEN, copied
from tests.interop.test_kept_weights import powers_of_two

TEXT = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A golden model with a tokenizer of the letters of the text."""
    folder = copied("mixtral", tmp_path_factory.mktemp("spoken") / "mixtral")
    letters = sorted(set(TEXT))
    others = [byte for byte in range(256) if byte not in letters]
    byte_level_tokenizer(dict(enumerate([*letters, *others][:80]))).save(str(folder / "tokenizer.json"))
    return folder, letters


def test_it_writes_what_is_read_and_says_what_it_costs(spoken, raggedmoe, tmp_path):
    folder, letters = spoken
    (tmp_path / "text.txt").write_bytes(TEXT)
    out = tmp_path / "out"
    code, printed, _ = raggedmoe(
        "quantise", folder, out, "--to", "int8", "--text", tmp_path / "text.txt", "--sequence-length", 32
    )
    assert code == 0
    file = json.loads((out / "quantisation.json").read_text())
    assert len(file["tensors"]) == 2 * (4 + 3 * 8)
    assert "quantised 56 matrices to int8" in printed
    worst = max((tensor for tensor in file["tensors"] if tensor["param"] == "moe.wo"), key=lambda t: t["relative"])
    line = next(line for line in printed.splitlines() if line.startswith("moe.wo "))
    assert line.split()[1] == "16"
    assert f"{worst['relative']:.3%}" in line
    tokens = np.asarray([letters.index(byte) for byte in TEXT])
    rows = token_rows([tokens], sequence_length=32, packing=True)
    for model, when in ((interop.load(folder), "before"), (interop.load(out, keep_quantised=True), "after")):
        assert file["loss"][when] == pytest.approx(text_loss(model, rows).loss, rel=1e-6)
        assert re.search(rf"{file['loss'][when]:.4f} {when}", printed)
    assert file["loss"]["tokens"] == len(TEXT) - 1


def test_the_loss_of_a_text_is_that_of_its_tokens(spoken):
    """Beside the logits of whole rows: no token is counted twice, none left out, and padding adds nothing."""
    folder, letters = spoken
    model = interop.load(folder)
    tokens = np.asarray([letters.index(byte) for byte in TEXT])
    found = text_loss(model, token_rows([tokens], sequence_length=32, packing=True))
    total = 0.0
    for start in range(0, len(tokens) - 1, 32):
        row = tokens[start : start + 33]
        logits = np.asarray(model(jnp.asarray(row[None, :-1])), np.float64)[0]
        total += float((np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(row) - 1), row[1:]]).sum())
    assert found.num_targets == len(tokens) - 1
    assert found.loss == pytest.approx(total / (len(tokens) - 1), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "fp9"), "'fp9': expected one of fp8, int8"),
        (("--to", "fp8", "--text", "x"), "expected the model's tokenizer.json to read --text"),
        (("--to", "fp8", "--sequence-length", "1"), "sequence_length of 2 or more, got 1"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(words, message, raggedmoe, tmp_path):
    code, _, error = raggedmoe("quantise", GOLDEN / "mixtral", tmp_path / "out", *words)
    assert code == 2
    assert message in error
    assert not (tmp_path / "out").exists()


def test_kept_quantised_matrices_generate_the_text_of_widened_ones(raggedmoe, tmp_path):
    folder = powers_of_two(tmp_path)
    texts = []
    for options in ((), ("--keep-quantised",)):
        code, out, _ = raggedmoe("generate", folder, "--ids", "--prompt", "5,9,2,17", "--max-new-tokens", 12, *options)
        assert code == 0
        texts.append(out.split())
    assert texts[0] == texts[1]
    assert len(texts[0]) == 12
    code, _, error = raggedmoe(
        "generate", GOLDEN / "mixtral", "--ids", "--prompt", "5", "--max-new-tokens", 1, "--keep-quantised"
    )
    assert code == 2
    assert "expected matrices that are quantised" in error
