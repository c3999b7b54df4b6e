"""Tokens in files: those of the text in memory, split by documents, mapped and not read."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from raggedmoe.cli.tokenize import tokenize_
from raggedmoe.train.data import token_files
from raggedmoe.train.data import tokenizer as tokenizers_here
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.data.rows import token_rows
from raggedmoe.train.data.token_files import open_tokens, train_tokenizer, write_tokens
from raggedmoe.train.data.tokenizer import BYTES_THAT_END
from raggedmoe.train.settings.sections import DataConfig

LINES = "Text number {}\nhas naïve lines, 七,\nand words. "
TEXTS = {f"{number:02}.txt": LINES.format(number) * (number % 5) for number in range(30)}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    lines = [json.dumps({"text": f"line {number}", "more": 1}) for number in range(9)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n\n")
    return folder


def written(source, out, tokenizer=BYTES_THAT_END, **changes):
    settings = {"suffixes": (".txt", ".jsonl"), "held_out": 0.2, **changes}
    write_tokens([str(source)], out, tokenizer, **settings)
    return open_tokens(out, 512)


def documents(part):
    return [part.tokens[begin:end] for begin, end in zip(part.bounds, part.bounds[1:])]


def all_texts():
    return sorted([text for text in TEXTS.values() if text] + [f"line {number}" for number in range(9)])


def test_both_parts_together_have_every_document_once_with_its_end(source, tmp_path):
    folder = written(source, tmp_path / "tokens")
    found = [bytes(document) for part in (folder.train, folder.held_out) for document in documents(part)]
    assert all(document.endswith(b"\xff") for document in found)
    assert sorted(document[:-1].decode() for document in found) == all_texts()
    assert 1 <= len(folder.held_out.bounds) - 1 <= 15


@pytest.mark.parametrize(("part", "call", "block"), [(1, 1, 7), (20, 60, 10), (2**18, 2**21, 2**22)])
def test_in_whichever_pieces_a_text_is_read_its_tokens_are_those_of_the_whole(
    source, tmp_path, monkeypatch, part, call, block
):
    tokenizer = train_tokenizer([str(source)], (".txt",), 300)
    assert tokenizer.vocab_size == 300
    expected = sorted([*tokenizer.library.encode(text).ids, tokenizer.end] for text in all_texts())
    monkeypatch.setattr(tokenizers_here, "_PART_CHARACTERS", part)
    monkeypatch.setattr(token_files, "CALL_CHARACTERS", call)
    monkeypatch.setattr(token_files, "BLOCK_BYTES", block)
    folder = written(source, tmp_path / "tokens", tokenizer, held_out=0.0)
    assert folder.held_out is None
    assert sorted(document.tolist() for document in documents(folder.train)) == expected
    assert folder.tokenizer.end == tokenizer.end


def opened(folder, **changes):
    settings = {"max_target_length": 16, **changes}
    return open_data(DataConfig(dataset_type="tokens", dataset_path=(str(folder),), **settings), 512, 2)


def test_rows_are_those_of_the_same_documents_in_memory(source, tmp_path):
    folder = written(source, tmp_path / "tokens", held_out=0.0)
    for packing in (True, False):
        data = opened(tmp_path / "tokens", packing=packing)
        expected = token_rows(documents(folder.train), sequence_length=16, packing=packing)
        assert data.train.num_rows == expected.num_rows
        ours, theirs = (rows.batch(range(rows.num_rows)) for rows in (data.train, expected))
        for name in vars(ours):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
        assert data.held_out is None


def test_a_run_goes_on_where_it_was_with_the_same_files_only(source, tmp_path):
    written(source, tmp_path / "tokens")
    data = opened(tmp_path / "tokens")
    batches = data.train_batches()
    for _ in range(5):
        next(batches)
    state, expected = batches.get_state(), next(batches)
    again = opened(tmp_path / "tokens")
    assert again.fingerprint == data.fingerprint
    resumed = again.train_batches()
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed).ids, expected.ids)
    (source / "00.txt").write_text("another")
    written(source, tmp_path / "other")
    assert opened(tmp_path / "other").fingerprint != data.fingerprint
    assert opened(tmp_path / "tokens", data_seed=1).fingerprint != data.fingerprint


def test_named_sets_are_folders_of_the_same_tokens(source, tmp_path):
    folder = written(source, tmp_path / "tokens")
    whole = written(source, tmp_path / "whole", held_out=0.0)
    data = opened(tmp_path / "tokens", eval_paths=(f"part={tmp_path / 'tokens'}", f"all={tmp_path / 'whole'}"))
    assert list(data.evaluated) == ["held-out", "part", "all"]
    np.testing.assert_array_equal(data.evaluated["part"].tokens, folder.held_out.tokens)
    np.testing.assert_array_equal(data.evaluated["all"].tokens, whole.train.tokens)
    written(source, tmp_path / "other", train_tokenizer([str(source)], (".txt",), 300))
    with pytest.raises(ValueError, match=r"eval_paths=other=.*: expected tokens of the tokenizer that made those"):
        opened(tmp_path / "tokens", eval_paths=(f"other={tmp_path / 'other'}",))


def test_tokens_that_are_trained_on_are_no_set_to_evaluate_on(source, tmp_path):
    written(source, tmp_path / "whole", held_out=0.0)
    shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    for name in ("whole", "copy"):
        with pytest.raises(ValueError, match=rf"eval_paths=it=.*{name}: expected tokens that are not trained on, got"):
            opened(tmp_path / "whole", eval_paths=(f"it={tmp_path / name}",))


def test_a_large_file_takes_little_memory(tmp_path):
    line = "A line of words that goes on for a while.\n"
    (tmp_path / "large.txt").write_text(line * 10**6)  # 42 MB
    tracemalloc.start()
    write_tokens([str(tmp_path / "large.txt")], tmp_path / "out", BYTES_THAT_END, suffixes=(), held_out=0.0)
    data = opened(tmp_path / "out")
    data.train.batch([0, 10**6, 2 * 10**6])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.num_tokens == 10**6 * len(line) + 1
    # The rows are computed from their numbers. The text is 42 MB.
    assert peak < 60 * 2**20


def test_what_was_read_of_mapped_tokens_is_given_back(tmp_path):
    (tmp_path / "large.txt").write_text("A line of words that goes on for a while.\n" * 10**6)
    write_tokens([str(tmp_path / "large.txt")], tmp_path / "out", BYTES_THAT_END, suffixes=(), held_out=0.0)
    data = opened(tmp_path / "out", max_target_length=4096)
    before = mapped_memory()
    for row in range(0, data.train.num_rows, 2):
        data.train.batch([row, row + 1])
    assert mapped_memory() - before < 8 * 2**20  # of 42 MB that were read


def mapped_memory():
    """The memory of this process that is of files."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_a_tokenizer_is_trained_on_a_sample_of_much_text(source, monkeypatch):
    whole = train_tokenizer([str(source)], (".txt", ".jsonl"), 300)
    monkeypatch.setattr(token_files, "SAMPLE_BYTES", 600)
    sample, again = (train_tokenizer([str(source)], (".txt", ".jsonl"), 300) for _ in range(2))
    assert sample.text == again.text != whole.text
    assert sample.vocab_size < whole.vocab_size


def test_the_command_trains_a_tokenizer_and_says_what_it_wrote(source, tmp_path, capsys):
    out = tmp_path / "tokens"
    assert tokenize_((str(source), str(out)), train_vocab_size=280, suffixes=(".txt",)) == 0
    assert "documents to train on" in capsys.readouterr().out
    assert Tokenizer.from_file(str(out / "tokenizer.json")).get_vocab_size() == 280
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0
    again = tmp_path / "again"
    assert tokenize_((str(source), str(again)), tokenizer=out, suffixes=(".txt",)) == 0
    assert (again / "train.tokens").read_bytes() == (out / "train.tokens").read_bytes()


def test_what_is_wrong_is_named(source, tmp_path):
    written(source, tmp_path / "tokens")
    with pytest.raises(ValueError, match="use vocab_size=256"):
        open_tokens(tmp_path / "tokens", 99)
    with pytest.raises(ValueError, match="expected a folder that `raggedmoe tokenize` wrote"):
        open_tokens(source, 256)
    path = tmp_path / "tokens" / "train.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"train\.tokens: expected \d+ bytes, got \d+; is the copy complete"):
        open_tokens(tmp_path / "tokens", 256)
    for content, message in (
        (b'{"txt": 1}', 'line 1: expected {"text"'),
        (b"{", "line 1: expected JSON"),
    ):
        (source / "lines.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            written(source, tmp_path / "no")
    (source / "lines.jsonl").unlink()
    for content in (b"bad \xff", b"half \xc3"):
        (source / "bad.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad\.txt: expected UTF-8"):
            written(source, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    for options, message in (
        ({"train_vocab_size": 9}, "expected a vocabulary of 257 or more"),
        ({"train_vocab_size": 300, "tokenizer": source}, "got both"),
        ({"held_out": 0.9}, "expected 0 <= --held-out <= 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            tokenize_((str(source), str(tmp_path / "no")), **options)
    with pytest.raises(ValueError, match="expected files or folders, and then the folder to write"):
        tokenize_((str(source),))
    with pytest.raises(ValueError, match="dataset_type=tokens: expected one folder, got a,b"):
        DataConfig(dataset_type="tokens", dataset_path=("a", "b"))
    with pytest.raises(ValueError, match="dataset_type=tokens reads no tokenizer_path=x"):
        DataConfig(dataset_type="tokens", dataset_path=("a",), tokenizer_path="x")
