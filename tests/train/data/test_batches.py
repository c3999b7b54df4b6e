"""The split, the order, resuming, held-out batches and settings, from files of distinct content."""

import dataclasses
import itertools
import json
import logging

import jax
import numpy as np
import pytest

from raggedmoe.train.data.batches import Batches, open_data, split_documents
from raggedmoe.train.data.corpus import Document
from raggedmoe.train.data.rows import Batch
from raggedmoe.train.settings.sections import HELD_OUT, DataConfig

SIZES = (0, 1, 2, 7, 8, 9, 16, 17, 30, 41, 5, 64, 23, 12, 50, 3)  # of the files, for rows of 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of random bytes: any five in a row occur once."""
    root = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(7)
    for number, size in enumerate(SIZES):
        (root / f"{number:02}.txt").write_bytes(generator.bytes(size))
    return root


def config(folder, **changes):
    settings = {"max_target_length": 8, "held_out": 0.2, "add_eos": False, **changes}
    return DataConfig(dataset_type="text", dataset_path=(str(folder),), **settings)


def of_dataset(folder, dataset):
    """The settings of `config` for another dataset; "text" alone reads files."""
    paths = (str(folder),) if dataset == "text" else ()
    return dataclasses.replace(config(folder), dataset_type=dataset, dataset_path=paths)


def opened(folder, vocab_size=256, batch_size=4, **changes):
    return open_data(config(folder, **changes), vocab_size, batch_size)


def taken(batches, num):
    return list(itertools.islice(batches, num))


def same(first, second):
    """Whether two lists of batches are equal, in all arrays."""
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return len(first) == len(second) and all(np.array_equal(a, b) for a, b in leaves)


def row_list(batches):
    """Each row as bytes that tell it from all others."""
    return [row.tobytes() for batch in batches for row in np.stack(jax.tree.leaves(batch), axis=1)]


def fives(batches):
    """Five tokens of a document in a row, wherever they stand."""
    found = set()
    for batch in batches:
        for ids, segments in zip(batch.ids, batch.segments):
            for start in range(len(ids) - 4):
                if segments[start] == segments[start + 4] >= 0:
                    found.add(bytes(ids[start : start + 5].tolist()))
    return found


def epoch(data):
    """All rows of an epoch in the order of their numbers, in one batch."""
    return data.train.batch(range(data.train.num_rows))


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_holds_every_row_once(folder, packing):
    data = opened(folder, packing=packing, batch_size=1)
    seen = row_list(taken(data.train_batches(), data.train.num_rows))
    assert sorted(seen) == sorted(row_list([epoch(data)]))


def test_the_second_epoch_has_the_same_rows_in_another_order(folder):
    data = opened(folder, batch_size=1)
    batches = data.train_batches()
    first, second = (row_list(taken(batches, data.train.num_rows)) for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_batch_goes_on_into_the_next_epoch(folder):
    data = opened(folder, batch_size=5)
    num = data.train.num_rows
    assert num % 5
    assert sorted(row_list(taken(data.train_batches(), num))) == sorted(5 * row_list([epoch(data)]))


@pytest.mark.parametrize("dataset", ["text", "synthetic"])
def test_the_same_settings_give_the_same_batches_and_another_seed_others(folder, dataset):
    settings = of_dataset(folder, dataset)
    first, second = (taken(open_data(settings, 300, 4).train_batches(), 5) for _ in range(2))
    other = taken(open_data(dataclasses.replace(settings, data_seed=1), 300, 4).train_batches(), 5)
    assert same(first, second)
    assert not same(first, other)


def test_the_first_epoch_of_the_next_seed_is_not_the_second_of_this(folder):
    # One document, so that the rows are the same; grain alone adds the epoch's number to the seed.
    data, other = (opened(folder / "11.txt", batch_size=1, held_out=0.0, data_seed=seed) for seed in (0, 1))
    num = data.train.num_rows
    second = row_list(taken(data.train_batches(), 2 * num)[num:])
    assert row_list(taken(other.train_batches(), num)) != second


@pytest.mark.parametrize("dataset", ["text", "synthetic"])
@pytest.mark.parametrize("done", [0, 3, 40])
def test_a_new_iterator_goes_on_where_the_state_was_taken(folder, dataset, done):
    settings = of_dataset(folder, dataset)
    batches = open_data(settings, 300, 4).train_batches()
    taken(batches, done)
    state = json.dumps(batches.get_state())
    resumed = open_data(settings, 300, 4).train_batches()
    resumed.set_state(json.loads(state))
    assert same(taken(batches, 15), taken(resumed, 15))
    assert len(state) < 100


def test_setting_the_state_of_an_iterator_in_use_drops_what_it_had_prepared(folder):
    batches = opened(folder).train_batches()
    state = batches.get_state()
    first = taken(batches, 5)
    batches.set_state(state)
    assert same(first, taken(batches, 5))


def test_fewer_rows_than_a_batch_are_repeated_with_a_warning(folder, caplog):
    with caplog.at_level(logging.WARNING):
        data = opened(folder / "09.txt", batch_size=16, held_out=0.0)
    batch = next(data.train_batches())
    assert batch.ids.shape == (16, 8)
    assert set(row_list([batch])) == set(row_list([epoch(data)]))
    assert "a batch of 16 sequences is more than the 5 rows" in caplog.text


def test_batches_are_arrays_of_one_shape_and_the_types_that_a_step_expects(folder):
    for data in (opened(folder), open_data(DataConfig(dataset_type="synthetic", max_target_length=8), 300, 4)):
        batch = next(data.train_batches())
        types = {name: (type(values), values.shape, values.dtype.name) for name, values in vars(batch).items()}
        whole = dict.fromkeys(("ids", "targets", "segments", "positions"), (np.ndarray, (4, 8), "int32"))
        assert types == whole | {"weights": (np.ndarray, (4, 8), "float32")}


def test_a_batch_is_a_tree(folder):
    batch = next(opened(folder).train_batches())
    doubled = jax.tree.map(lambda values: 2 * values, batch)
    assert isinstance(doubled, Batch)
    np.testing.assert_array_equal(doubled.ids, 2 * batch.ids)


def test_the_iterator_keeps_its_protocol(folder):
    assert isinstance(opened(folder).train_batches(), Batches)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_sees_nothing_of_what_is_held_out(folder, packing, seed):
    data = opened(folder, packing=packing, data_seed=seed)
    held_out = fives(data.held_out_batches(100)[HELD_OUT])
    assert held_out
    assert not held_out & fives([epoch(data)])


def test_together_both_sides_have_every_byte(folder):
    data = opened(folder)
    assert data.num_tokens + len(data.held_out.tokens) == sum(SIZES)


def test_held_out_batches_are_the_same_in_every_run(folder):
    assert same(*(opened(folder).held_out_batches(3)[HELD_OUT] for _ in range(2)))


def test_held_out_batches_are_no_more_than_the_rows_fill_and_hold_each_row_once(folder):
    data = opened(folder, batch_size=4)
    batches = data.held_out_batches(100)[HELD_OUT]
    rows = data.held_out.num_rows
    assert rows % 4
    assert len(batches) == -(-rows // 4)
    learned = sum(batch.weights.sum() for batch in batches)
    assert learned == data.held_out.batch(range(rows)).weights.sum()


def test_the_last_held_out_batch_is_filled_up_with_padding(folder):
    data = opened(folder, batch_size=4)
    last = data.held_out_batches(100)[HELD_OUT][-1]
    full = data.held_out.num_rows % 4
    empty = slice(full, None)
    assert full
    assert last.ids.shape == (4, 8)
    assert (last.segments[empty] == -1).all()
    assert not last.weights[empty].any()


def test_few_held_out_batches_are_spread_over_all_rows(folder):
    data = opened(folder, batch_size=2, held_out=0.5)
    rows = row_list([data.held_out.batch(range(data.held_out.num_rows))])
    chosen = [rows.index(row) for row in row_list(data.held_out_batches(2)[HELD_OUT])]
    assert chosen == sorted(set(chosen))
    assert max(chosen) >= len(rows) * 3 // 4
    assert max(np.diff(chosen)) <= -(-len(rows) // 4)


@pytest.mark.parametrize("dataset", ["stdlib", "synthetic"])
def test_nothing_held_out_gives_no_held_out_batches(dataset):
    assert open_data(DataConfig(dataset_type=dataset, held_out=0.0), 256, 16).held_out_batches(3) == {}


def test_synthetic_rows_held_out_are_not_those_to_train_on():
    data = open_data(DataConfig(dataset_type="synthetic", max_target_length=256), 300, 16)
    train, held_out = ({row.tobytes() for row in rows.batch(range(500)).ids} for rows in (data.train, data.held_out))
    assert not train & held_out


def documents_of(*sizes):
    return [Document(name=f"{n}", tokens=np.full(size, n, np.uint8)) for n, size in enumerate(sizes)]


def num_tokens(documents):
    return sum(len(document.tokens) for document in documents)


def test_many_documents_are_split_near_the_share():
    train, held_out = split_documents(documents_of(*[10] * 200), share=0.1, seed=0)
    assert (len(train), len(held_out)) == (180, 20)


def test_the_split_does_not_depend_on_the_order_of_reading():
    documents = documents_of(*range(1, 50))
    names = [[d.name for d in side] for side in split_documents(documents, share=0.1, seed=0)]
    assert [[d.name for d in side] for side in split_documents(documents[::-1], share=0.1, seed=0)] == names


@pytest.mark.parametrize("seed", range(5))
def test_a_document_that_is_most_of_the_data_is_trained_on(seed):
    train, held_out = split_documents(documents_of(1000, *[10] * 9), share=0.05, seed=seed)
    assert "0" in {document.name for document in train}
    assert 0 < num_tokens(held_out) <= 90


@pytest.mark.parametrize("sizes", [(100,), (60, 50), (90, 1)])
def test_the_end_of_the_longest_is_held_out_where_no_document_is_small_enough(sizes):
    documents = [Document(name=f"{n}", tokens=np.arange(size, dtype=np.uint8)) for n, size in enumerate(sizes)]
    train, held_out = split_documents(documents, share=0.1, seed=0)
    kept = next(document for document in train if document.name == "0")
    assert [document.name for document in held_out] == ["0"]
    assert len(held_out[0].tokens) == round(sum(sizes) * 0.1)
    np.testing.assert_array_equal(np.concatenate([kept.tokens, held_out[0].tokens]), documents[0].tokens)


def test_what_is_learned_of_the_longest_is_cut_with_it():
    learned = np.arange(100) % 3 == 0
    documents = [Document(name="0", tokens=np.arange(100, dtype=np.uint8), learned=learned)]
    (kept,), (end,) = split_documents(documents, share=0.1, seed=0)
    np.testing.assert_array_equal(kept.learned, learned[:90])
    np.testing.assert_array_equal(end.learned, learned[90:])


@pytest.mark.parametrize("answer", [slice(50), slice(95, 100), slice(90, 91)])
def test_a_conversation_with_nothing_to_learn_on_one_side_is_not_cut(answer):
    learned = np.zeros(100, bool)
    learned[answer] = True
    documents = [Document(name="chat:1", tokens=np.arange(100, dtype=np.uint8), learned=learned)]
    with pytest.raises(ValueError, match=r"in the last 10 tokens of chat:1, .* got none on one side; set held_out=0"):
        split_documents(documents, share=0.1, seed=0)


def test_the_fingerprint_is_the_same_for_the_same_content_elsewhere(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert opened(folder).fingerprint == opened(tmp_path).fingerprint


def test_the_fingerprint_changes_with_one_byte_of_a_file(folder, tmp_path):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = bytearray((tmp_path / "09.txt").read_bytes())
    changed[20] ^= 1
    (tmp_path / "09.txt").write_bytes(changed)
    assert opened(folder).fingerprint != opened(tmp_path).fingerprint


def test_the_fingerprint_changes_with_every_setting_that_the_order_depends_on(folder):
    changes = ({}, {"data_seed": 1}, {"max_target_length": 9}, {"batch_size": 5}, {"packing": False}, {"held_out": 0.3})
    assert len({opened(folder, **change).fingerprint for change in changes}) == len(changes)


def test_the_fingerprint_of_synthetic_data_changes_with_the_vocabulary():
    settings = DataConfig(dataset_type="synthetic")
    assert open_data(settings, 300, 4).fingerprint != open_data(settings, 301, 4).fingerprint


def test_the_description_counts_files_bytes_and_both_sides(folder):
    data = opened(folder)
    held_out = len(SIZES) - 1 - data.num_documents
    assert data.describe() == f"text: 15 files, 288 bytes; {data.num_documents} to train on, {held_out} held out"


@pytest.mark.parametrize(
    ("name", "share", "line"),
    [
        ("11.txt", 0.25, "text: 1 file, 64 bytes; the last 16 bytes of 11.txt held out"),
        ("11.txt", 0.0, "text: 1 file, 64 bytes; all to train on"),
    ],
)
def test_the_description_of_a_single_file_says_what_is_held_out(folder, name, share, line):
    assert opened(folder / name, held_out=share).describe() == line


def test_the_description_of_synthetic_data_has_the_vocabulary():
    described = open_data(DataConfig(dataset_type="synthetic"), 129280, 16).describe()
    assert described == "synthetic: endless rows, a vocabulary of 129,280"


def test_bytes_are_stored_with_a_tokenizer_and_synthetic_tokens_with_none(folder):
    assert json.loads(opened(folder).tokenizer.text)["model"]["type"] == "BPE"
    assert open_data(DataConfig(dataset_type="synthetic"), 300, 16).tokenizer is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_type": "stdlb"}, "dataset_type: expected one of stdlib, text, chat, hf, tokens, .*got 'stdlb'"),
        ({"dataset_type": "text"}, "dataset_type=text: expected dataset_path with files or folders, got none"),
        ({"dataset_path": ("a",)}, "dataset_type=stdlib reads no dataset_path=a; .*use dataset_type=text"),
        ({"dataset_type": "synthetic", "tokenizer_path": "t.json"}, "synthetic reads no tokenizer_path=t.json"),
        ({"dataset_suffixes": ("txt",)}, r"expected dataset_suffixes such as \.txt, got txt"),
        ({"max_target_length": 1}, "expected max_target_length >= 2, got 1"),
        ({"per_device_batch_size": 0}, "expected per_device_batch_size >= 1, got 0"),
        ({"held_out": -0.1}, "expected 0 <= held_out <= 0.5, got -0.1"),
        ({"held_out": 0.6}, "expected 0 <= held_out <= 0.5, got 0.6"),
        ({"held_out": float("nan")}, "held_out: expected a finite number, got nan"),
    ],
)
def test_a_bad_setting_is_refused_when_it_is_made(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


@pytest.mark.parametrize("packing", [True, False])
def test_a_sequence_longer_than_the_data_is_an_error_with_the_longest_possible(folder, packing):
    with pytest.raises(ValueError, match="max_target_length=65 is more than the 64 bytes to train on; use at most 64"):
        opened(folder / "11.txt", held_out=0.0, max_target_length=65, packing=packing)


def test_a_sequence_as_long_as_the_data_is_one_row(folder):
    data = opened(folder / "11.txt", held_out=0.0, max_target_length=64, batch_size=1)
    assert bytes(next(data.train_batches()).ids[0].tolist()) == (folder / "11.txt").read_bytes()


def test_files_of_one_byte_are_an_error(folder):
    with pytest.raises(ValueError, match="expected files of two bytes or more, got 1 with one each"):
        opened(folder / "01.txt", held_out=0.0)


def test_too_little_to_hold_anything_out_is_an_error(folder):
    with pytest.raises(
        ValueError, match="expected enough to hold out 20%, got 3 tokens in 1 documents; set held_out=0"
    ):
        opened(folder / "15.txt")


@pytest.mark.parametrize("dataset", ["stdlib", "text"])
def test_a_model_without_room_for_bytes_is_refused(folder, dataset):
    settings = of_dataset(folder, dataset)
    with pytest.raises(ValueError, match="vocabulary of 256 or more for bytes, got 255"):
        open_data(settings, 255, 4)


def test_a_model_without_two_tokens_is_refused_for_synthetic_data():
    with pytest.raises(ValueError, match="vocabulary of 2 or more, got 1"):
        open_data(DataConfig(dataset_type="synthetic"), 1, 16)


@pytest.mark.parametrize("packing", [True, False])
def test_each_document_ends_with_a_token_that_is_learned_and_begins_nothing(tmp_path, packing):
    texts = {"a.txt": b"first", "b.txt": b"the second one", "c.txt": b"3"}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    data = opened(tmp_path, packing=packing, held_out=0.0, add_eos=True)
    rows = epoch(data)
    is_end = np.asarray(rows.targets) == 255
    assert is_end.sum() == len(texts)  # learned once each
    assert (np.asarray(rows.weights)[is_end] == 1).all()
    before = np.asarray(rows.ids)[is_end]
    assert sorted(map(chr, before)) == sorted(chr(text[-1]) for text in texts.values())
    # What comes after an end is another document, of another segment, and not learned from it.
    assert (np.asarray(rows.weights)[np.asarray(rows.ids) == 255] == 0).all()
    tokens = np.asarray(rows.ids)[np.asarray(rows.segments) >= 0]
    assert sorted(bytes(tokens.astype(np.uint8)).split(b"\xff")[:-1]) == sorted(texts.values())


def test_only_where_a_text_ends_it_ends(tmp_path):
    """The end of one long file is held out: the part to train on is cut off, and does not end there."""
    (tmp_path / "a.txt").write_bytes(b"x" * 40)
    data = opened(tmp_path, held_out=0.25, add_eos=True)
    assert not (np.asarray(epoch(data).targets) == 255).any()
    held_out = data.held_out.batch(range(data.held_out.num_rows))
    assert (np.asarray(held_out.targets) == 255).sum() == 1


def test_without_ends_the_data_are_those_of_runs_before_there_were_any(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"some text of a file")
    (tmp_path / "b.txt").write_bytes(b"and of another one")
    without, with_ends = (opened(tmp_path, add_eos=add_eos).fingerprint for add_eos in (False, True))
    assert without == "976684652f14d22660bdfd15f7a9431a"
    assert with_ends != without


def test_text_with_the_byte_that_ends_one_is_warned_of(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"no\xfftext")
    opened(tmp_path, add_eos=True, held_out=0.0)
    assert "a.txt and 0 other files have the byte 0xff" in caplog.text


def test_named_sets_are_evaluated_on_beside_what_is_held_out(folder, tmp_path):
    for name, content in (("code", "if x:\n    y()\n" * 9), ("news", "It rained. " * 30)):
        (tmp_path / f"{name}.txt").write_text(content)
    named = (f"code={tmp_path / 'code.txt'}", f"news={tmp_path / 'news.txt'}", f"both={tmp_path / 'code.txt'}")
    data = opened(folder, eval_paths=(*named, f"both={tmp_path / 'news.txt'}"))
    assert list(data.evaluated) == [HELD_OUT, "code", "news", "both"]
    assert data.describe().endswith("held out; evaluated on code, news, both")
    assert len(data.evaluated["both"].tokens) == sum(len(data.evaluated[name].tokens) for name in ("code", "news"))
    assert bytes(data.evaluated["code"].tokens).startswith(b"if x:")
    plain = opened(folder)
    assert same(plain.held_out_batches(3)[HELD_OUT], data.held_out_batches(3)[HELD_OUT])
    assert plain.fingerprint == data.fingerprint[: len(plain.fingerprint)] != data.fingerprint
    assert same([next(plain.train_batches())], [next(data.train_batches())])
    for changed in (named[:2], (named[0], named[1].replace("news=", "other="))):
        assert opened(folder, eval_paths=changed).fingerprint not in (plain.fingerprint, data.fingerprint)
    assert list(opened(folder, eval_paths=named[:2], held_out=0.0).evaluated) == ["code", "news"]
    stdlib = open_data(DataConfig(dataset_type="stdlib", eval_paths=named[:1]), 256, 2)
    assert bytes(stdlib.evaluated["code"].tokens) == b"if x:\n    y()\n" * 9 + b"\xff"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("a.txt", "eval_paths=a.txt: expected NAME=PATH, .* got 'a.txt'"),
        ("held-out=a.txt", "a name of letters and digits other than held-out"),
        ("a b=c", "expected NAME=PATH"),
        ("code=", "expected NAME=PATH"),
    ],
)
def test_a_set_without_a_name_or_a_path_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(dataset_type="text", dataset_path=("a",), eval_paths=(entry,))


def test_files_that_are_trained_on_are_no_set_to_evaluate_on(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "other.txt").write_text("some other text")
    for path in (folder, folder / "04.txt", tmp_path / "link" / "04.txt"):
        with pytest.raises(ValueError, match=r"eval_paths=it=.*: expected files that are not trained on, got /.*\.txt"):
            opened(folder, eval_paths=(f"other={tmp_path / 'other.txt'}", f"it={path}"))
    python = DataConfig(dataset_type="stdlib", eval_paths=(f"it={json.__file__}",))
    with pytest.raises(
        ValueError, match=r"got /.*json/__init__\.py, which dataset_type=stdlib reads as well; name other"
    ):
        open_data(python, 256, 2)


def test_a_set_of_nothing_to_learn_is_named(folder, tmp_path):
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(ValueError, match="eval_paths: expected documents of two tokens or more as tiny, got none"):
        opened(folder, eval_paths=(f"tiny={tmp_path / 'one.txt'}",), add_eos=False)
    with pytest.raises(ValueError, match="dataset_type=synthetic reads no eval_paths"):
        DataConfig(dataset_type="synthetic", eval_paths=("a=b",))
