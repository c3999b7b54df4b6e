"""Datasets of Hugging Face: the rows of parquet and arrow files, the split that is read, texts and conversations."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from raggedmoe.cli.tokenize import tokenize_
from raggedmoe.train.data import hf_files
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.data.token_files import open_tokens
from raggedmoe.train.settings.sections import DataConfig
from raggedmoe.train.settings.words import read_words
from tests.train.data.test_chat import LONG, PLAIN, SHORT, folder, rows_of, texts_of

__all__ = ["folder"]  # the fixture: a tokenizer with a chat template
TEXTS = [f"text {number}\n" * (number + 1) for number in range(30)]


def write_parquet(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, **options)


def write_stream(path, columns):
    """Write an arrow file as `datasets` does, in batches of a few rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_indexed(path, columns):
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def opened(path, **changes):
    settings = {"dataset_type": "hf", "max_target_length": 16, "held_out": 0.0, "add_eos": False, **changes}
    return open_data(DataConfig(dataset_path=(str(path),), **settings), 512, 1)


def texts_in(data):
    bounds = data.train.bounds
    return sorted(bytes(data.train.tokens[a:b]).decode() for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize(
    ("name", "write"), [("a.parquet", write_parquet), ("a.arrow", write_stream), ("b.arrow", write_indexed)]
)
def test_each_row_is_a_document_in_whatever_form_the_file_is(tmp_path, monkeypatch, name, write):
    monkeypatch.setattr(hf_files, "ROWS", 4)
    write(tmp_path / name, {"id": list(range(32)), "text": [*TEXTS, None, ""]})
    data = opened(tmp_path)
    assert texts_in(data) == sorted(TEXTS)
    assert data.describe().startswith("hf: 30 rows, ")
    assert texts_in(opened(tmp_path / name)) == sorted(TEXTS)


def test_the_split_to_train_on_is_read(tmp_path):
    """As a hub's folder has it, as `datasets` saves several splits, and as a hub converts others' data."""
    for layout in ("data/{}-00000-of-00001-0f3b.parquet", "{}/data-00000-of-00001.arrow", "default/{}/0000.parquet"):
        root = tmp_path / layout.replace("/", "_")
        for split, text in (("train", "a"), ("test", "b"), ("train_sft", "c")):
            path = root / layout.format(split)
            (write_parquet if path.suffix == ".parquet" else write_stream)(path, {"text": [text * 20]})
        assert texts_in(opened(root)) == ["a" * 20]
        assert texts_in(opened(root, dataset_split="train_sft")) == ["c" * 20]
        with pytest.raises(ValueError, match="the split 'validation', got those of test, train, train_sft; use"):
            opened(root, dataset_split="validation")
    assert texts_in(opened(root / "default" / "test")) == ["b" * 20]
    assert texts_in(opened(root / "default" / "test" / "0000.parquet")) == ["b" * 20]


def test_files_without_a_split_are_all_read_and_what_was_computed_from_them_is_not(tmp_path):
    for name in ("data-00000-of-00002.arrow", "data-00001-of-00002.arrow", "cache-0f3b.arrow", "indices.arrow"):
        write_stream(tmp_path / name, {"text": [name]})
    assert texts_in(opened(tmp_path)) == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_parquet(tmp_path / "more" / "books.parquet", {"text": ["books"]})
    assert len(texts_in(opened(tmp_path))) == 3


def test_a_file_that_is_found_by_two_paths_or_a_link_is_read_once(tmp_path):
    write_parquet(tmp_path / "data" / "a.parquet", {"text": TEXTS})
    (tmp_path / "data" / "b.parquet").symlink_to(tmp_path / "data" / "a.parquet")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    paths = (str(tmp_path / "data"), str(tmp_path / "link"), str(tmp_path / "link" / "a.parquet"))
    config = DataConfig(dataset_type="hf", dataset_path=paths, max_target_length=16, held_out=0.0, add_eos=False)
    assert texts_in(open_data(config, 512, 1)) == sorted(TEXTS)


def test_the_split_to_train_on_is_not_that_of_sets_to_evaluate_on(tmp_path):
    for split, text in (("train_sft", "a"), ("test_sft", "b")):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", {"text": [text * 20]})
    write_parquet(tmp_path / "other" / "test-00000-of-00001.parquet", {"text": ["c" * 20]})
    sets = (f"same={tmp_path / 'test_sft-00000-of-00001.parquet'}", f"other={tmp_path / 'other'}")
    data = opened(tmp_path, dataset_split="train_sft", eval_paths=sets)
    assert texts_in(data) == ["a" * 20]
    assert {name: bytes(rows.tokens) for name, rows in data.evaluated.items()} == {
        "same": b"b" * 20,
        "other": b"c" * 20,
    }
    trained = tmp_path / "train_sft-00000-of-00001.parquet"
    with pytest.raises(ValueError, match=r"eval_paths=it=.*: expected files that are not trained on, got .*train_sft"):
        opened(tmp_path, dataset_split="train_sft", eval_paths=(f"it={trained}",))


def test_splits_of_which_none_is_to_train_on_have_to_be_named(tmp_path):
    for split in ("train_sft", "test_sft"):
        write_parquet(tmp_path / f"{split}-00000-of-00001.parquet", {"text": [split]})
    with pytest.raises(ValueError, match="the split 'train', got those of test_sft, train_sft; use dataset_split"):
        opened(tmp_path)


def chat_of(folder, path, **changes):
    settings = {"max_target_length": 128, "add_eos": True, "packing": False, **changes}
    return opened(path, tokenizer_path=str(folder / "tokenizer.json"), **settings)


def test_conversations_are_those_of_the_same_lines_of_jsonl(folder, tmp_path):
    lines = [{"messages": talk} for talk in (SHORT, LONG)] + [{"messages": LONG[:3]}]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = (
        "dataset_type=chat",
        f"tokenizer_path={folder / 'tokenizer.json'}",
        "max_target_length=128",
        "packing=false",
    )
    config = read_words((*words, f"dataset_path={folder / 'chat.jsonl'}", "held_out=0")).data
    expected = texts_of(open_data(config, 300, 1))
    write_parquet(tmp_path / "data" / "messages.parquet", {"messages": [line["messages"] for line in lines]})
    write_stream(tmp_path / "other" / "talks.arrow", {"talk": [line["messages"] for line in lines], "text": ["x"] * 3})
    assert texts_of(chat_of(folder, tmp_path / "data")) == expected
    assert texts_of(chat_of(folder, tmp_path / "other", dataset_column="talk")) == expected
    pairs = {"prompt": ["2 + 2 ="], "completion": [" 4"], "text": ["not read"]}
    write_parquet(tmp_path / "pairs.parquet", pairs)
    assert texts_of(chat_of(folder, tmp_path / "pairs.parquet")) == [("2 + 2 = 4<|im_end|>", " 4<|im_end|>")]
    texts = chat_of(folder, tmp_path / "pairs.parquet", dataset_column="text", max_target_length=9)
    assert texts_of(texts)[0][0] == "not read<|im_end|>"


def test_tools_are_read_beside_a_column_of_messages_that_is_named(folder, tmp_path):
    tools = [[{"name": "add"}], None]
    (folder / "chat_template.jinja").write_text("{% for tool in tools or [] %}{{ tool['name'] }}{% endfor %}" + PLAIN)
    for name in ("talk", "messages"):
        write_parquet(tmp_path / name / "a.parquet", {name: [SHORT, LONG], "tools": tools, "body": ["x", None]})
    found = texts_of(chat_of(folder, tmp_path / "talk", dataset_column="talk"))
    assert found == texts_of(chat_of(folder, tmp_path / "messages"))
    assert [text.startswith("add") for text, _ in found].count(True) == 1
    rows = hf_files.read_rows(tmp_path / "talk" / "a.parquet", "body")
    assert list(rows) == [{"text": "x"}, {"text": None}]


def test_what_is_wrong_is_named(folder, tmp_path):
    write_parquet(tmp_path / "one.parquet", {"content": ["x"], "messages": [[{"role": "user", "content": "x"}]]})
    with pytest.raises(ValueError, match=r"one\.parquet: expected a column txt, got content, messages; see"):
        opened(tmp_path / "one.parquet", dataset_column="txt")
    with pytest.raises(ValueError, match=r"chat or hf\): expected the tokenizer of a model, got bytes"):
        opened(tmp_path / "one.parquet")
    with pytest.raises(ValueError, match=r"one\.parquet, row 1: expected an assistant message"):
        chat_of(folder, tmp_path / "one.parquet")
    write_parquet(tmp_path / "two.parquet", {"content": [1, 2]})
    with pytest.raises(ValueError, match=r"two\.parquet: expected a column text, messages, or prompt and completion"):
        opened(tmp_path / "two.parquet")
    with pytest.raises(ValueError, match=r"two\.parquet, row 1: expected text, or a list of messages, got 1"):
        opened(tmp_path / "two.parquet", dataset_column="content")
    for name in ("three.parquet", "three.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 and no more than that")
        with pytest.raises(ValueError, match=r"three.*: expected a parquet or an arrow file, got: "):
            opened(tmp_path / name)
    write_parquet(tmp_path / "both" / "text.parquet", {"text": ["x"]})
    write_parquet(tmp_path / "both" / "chat.parquet", {"messages": [SHORT]})
    with pytest.raises(ValueError, match="expected texts, or conversations, got files of both"):
        chat_of(folder, tmp_path / "both")
    write_parquet(tmp_path / "empty.parquet", {"text": ["", None]})
    with pytest.raises(ValueError, match="expected text, got 2 empty rows"):
        opened(tmp_path / "empty.parquet")


def test_tokenize_reads_datasets_and_of_them_the_split(tmp_path):
    half = len(TEXTS) // 2
    write_parquet(tmp_path / "set" / "train-00000-of-00002.parquet", {"text": TEXTS[:half]}, row_group_size=4)
    write_parquet(tmp_path / "set" / "train-00001-of-00002.parquet", {"text": TEXTS[half:]})
    write_parquet(tmp_path / "set" / "test-00000-of-00001.parquet", {"text": ["not this"], "more": ["that"]})
    (tmp_path / "set" / "README.md").write_text("a text too")

    def written(name, **options):
        assert tokenize_((str(tmp_path / "set"), str(tmp_path / name)), held_out=0.0, **options) == 0
        part = open_tokens(tmp_path / name, 512).train
        return sorted(bytes(part.tokens[a:b])[:-1].decode() for a, b in itertools.pairwise(part.bounds))

    assert written("all") == sorted([*TEXTS, "a text too"])
    assert written("test", suffixes=(".parquet",), split="test", column="more") == ["that"]
    write_parquet(tmp_path / "set" / "train-00001-of-00002.parquet", {"messages": [SHORT]})
    with pytest.raises(ValueError, match=r"row 1: expected text, got messages; .*dataset_type=hf; or name a column"):
        written("chat")


def test_words_of_maxtext_say_the_same():
    for words in (
        ("hf_path=parquet", "hf_train_files=a.parquet,b.parquet"),
        ("hf_train_files=['a.parquet', 'b.parquet']",),
    ):
        assert read_words(("dataset_type=hf", *words)).data.dataset_path == ("a.parquet", "b.parquet")
    data = read_words(("dataset_type=hf", "hf_path=mine", "hf_data_dir=data", "train_split=test")).data
    assert (data.dataset_path, data.dataset_split, data.dataset_column) == (("mine/data",), "test", None)
    for column, expected in (("['prompt','completion']", None), ("['messages']", "messages"), ("text", "text")):
        assert read_words((f"train_data_columns={column}",)).data.dataset_column == expected
    assert read_words(("hf_eval_files=a.parquet,b.parquet",)).data.named_eval_paths == {
        "eval": ("a.parquet", "b.parquet")
    }
    with pytest.raises(ValueError, match=r"hf_train_files=.*patterns are not expanded; name the files"):
        read_words(("hf_train_files=x/*.parquet",))
    with pytest.raises(ValueError, match="hf_path=json: parquet and arrow files are read; use dataset_type=chat"):
        read_words(("hf_path=json",))


def test_datasets_writes_what_is_read(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": TEXTS}), test=datasets.Dataset.from_dict({"text": ["no"] * 9})
    )
    texts.save_to_disk(tmp_path / "texts", num_shards={"train": 3, "test": 1})
    assert texts_in(opened(tmp_path / "texts")) == sorted(TEXTS)
    assert texts_in(opened(tmp_path / "texts", dataset_split="test")) == ["no"] * 9
    chats = datasets.Dataset.from_list([{"messages": LONG}, {"messages": SHORT}])
    chats.save_to_disk(tmp_path / "chats")
    datasets.load_from_disk(tmp_path / "chats").map(lambda row: {"messages": row["messages"][:1]})  # is cached there
    chats.to_parquet(tmp_path / "chats.parquet")
    saved, exported = (chat_of(folder, tmp_path / name) for name in ("chats", "chats.parquet"))
    assert texts_of(saved) == texts_of(exported)
    assert len(texts_of(saved)) == 2
    np.testing.assert_array_equal(np.sort(rows_of(saved).ids, 0), np.sort(rows_of(exported).ids, 0))
