"""Reading documents: the standard library, files and folders, bytes and tokenizers, and what is wrong with them."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from raggedmoe.train.data import tokenizer as tokenizer_module
from raggedmoe.train.data.corpus import read_standard_library, read_text_files
from raggedmoe.train.data.tokenizer import BYTES, load_tokenizer, text_parts

TEXT = "The first line of words\nand a second one, with_names;\n\n  indented 12\nlast" * 4


def read(*paths, suffixes=(".txt", ".py"), tokenizer=None, vocab_size=512):
    made = BYTES if tokenizer is None else load_tokenizer(Path(tokenizer), vocab_size)
    return read_text_files([str(path) for path in paths], suffixes, made)


def written(folder, **contents):
    """Files in a folder, `__` in a name being a slash and `_` a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def texts(found):
    return {document.name: bytes(document.tokens) for document in found.documents}


@pytest.fixture(scope="module")
def merging():
    """A small tokenizer with merges, which puts a start token before a prompt, cuts it to 3 tokens and pads it to 9."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def tokenizer_file(merging, tmp_path):
    path = tmp_path / "tokenizer.json"
    altered = Tokenizer.from_str(merging.to_str())
    altered.enable_truncation(3)
    altered.enable_padding(length=9)
    altered.save(str(path))
    return path


def plain_tokens(merging, text):
    return merging.encode(text, add_special_tokens=False).ids


def test_the_standard_library_has_its_modules_and_neither_tests_nor_packages():
    names = {document.name for document in read_standard_library().documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages", "__pycache__"} & set(name.split("/"))]


def test_the_standard_library_is_read_byte_by_byte():
    found = texts(read_standard_library())["json/decoder.py"]
    assert found == Path(json.decoder.__file__).read_bytes()


def test_a_python_without_sources_is_an_error_that_names_other_data(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"found no \.py file to read.*dataset='text'"):
        read_standard_library()


def test_an_unreadable_file_of_the_standard_library_is_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    written(tmp_path, good_py=b"x = 1")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert texts(read_standard_library()) == {"good.py": b"x = 1"}
    assert "gone.py" in caplog.text


def test_a_folder_gives_its_files_with_those_suffixes_and_nothing_hidden(tmp_path):
    written(tmp_path, b_txt=b"b", a_TXT=b"a", c_dat=b"c", sub__d_py=b"d", _hidden_txt=b"e", _git__f_txt=b"f")
    assert texts(read(tmp_path)) == {"a.TXT": b"a", "b.txt": b"b", "sub/d.py": b"d"}


def test_a_file_that_is_named_needs_no_suffix(tmp_path):
    written(tmp_path, words_dat=b"words")
    assert texts(read(tmp_path / "words.dat")) == {"words.dat": b"words"}


def test_a_file_that_is_found_twice_is_one_document(tmp_path):
    written(tmp_path, sub__a_txt=b"once")
    (tmp_path / "link.txt").symlink_to(tmp_path / "sub/a.txt")
    found = read(tmp_path / "sub/a.txt", tmp_path, tmp_path / "sub")
    assert [bytes(document.tokens) for document in found.documents] == [b"once"]


def test_a_link_to_a_folder_is_not_followed(tmp_path):
    written(tmp_path, inside__a_txt=b"a", outside__b_txt=b"b")
    (tmp_path / "inside/link").symlink_to(tmp_path / "outside")
    assert texts(read(tmp_path / "inside")) == {"a.txt": b"a"}


def test_empty_files_are_no_documents(tmp_path):
    written(tmp_path, a_txt=b"", b_txt=b"b")
    assert texts(read(tmp_path)) == {"b.txt": b"b"}


def test_bytes_that_are_no_text_are_read_as_they_are(tmp_path):
    written(tmp_path, a_txt=bytes(range(256)))
    assert texts(read(tmp_path)) == {"a.txt": bytes(range(256))}


def test_a_tokenizer_adds_no_special_token_and_neither_cuts_nor_pads(tmp_path, merging, tokenizer_file):
    written(tmp_path, a_txt=TEXT.encode(), b_txt=b"one")
    first, second = read(tmp_path, tokenizer=tokenizer_file).documents
    assert first.tokens.tolist() == plain_tokens(merging, TEXT)
    assert second.tokens.tolist() == plain_tokens(merging, "one")


@pytest.mark.parametrize(("part", "call"), [(1, 1), (30, 60), (50, 10**6)])
def test_a_long_text_in_parts_has_the_tokens_of_the_whole(part, call, tmp_path, merging, tokenizer_file, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_PART_CHARACTERS", part)
    monkeypatch.setattr(tokenizer_module, "CALL_CHARACTERS", call)
    written(tmp_path, a_txt=TEXT.encode(), b_txt=b"one", c_txt=TEXT[::-1].encode())
    found = read(tmp_path, tokenizer=tokenizer_file)
    expected = [plain_tokens(merging, text) for text in (TEXT, "one", TEXT[::-1])]
    assert [document.tokens.tolist() for document in found.documents] == expected


def test_long_texts_are_cut_into_parts():
    text = "word\n" * 2**17
    parts = list(text_parts(text))
    assert len(parts) > 1
    assert "".join(parts) == text


def test_the_given_tokenizer_is_kept_word_for_word(tmp_path, tokenizer_file):
    written(tmp_path, a_txt=b"text")
    assert read(tmp_path, tokenizer=tokenizer_file).tokenizer.text == tokenizer_file.read_text()


def test_tokens_of_a_vocabulary_above_65536_are_whole(tmp_path):
    vocab = {"low": 3, "high": 70_001}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="low"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    written(tmp_path, a_txt=b"low high")
    found = read(tmp_path, tokenizer=tmp_path / "words.json", vocab_size=70_002)
    assert found.documents[0].tokens.tolist() == [3, 70_001]
    assert found.tokenizer.vocab_size == 70_002


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere: expected a file or folder"):
        read(tmp_path / "nowhere")


def test_a_folder_without_such_files_is_named_with_the_suffixes(tmp_path):
    written(tmp_path, a_dat=b"a")
    with pytest.raises(ValueError, match=r"expected files that end in \.txt, \.py, found none"):
        read(tmp_path)


def test_files_that_are_all_empty_are_an_error(tmp_path):
    written(tmp_path, a_txt=b"", b_txt=b"")
    with pytest.raises(ValueError, match="expected text, got 2 empty files"):
        read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ValueError, match=r"pipe\.txt: expected a file"):
        read(tmp_path)


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"gone\.txt: expected to read it, got No such file"):
        read(tmp_path)


def test_links_that_lead_to_themselves_are_named(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")
    for given in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ValueError, match=r"a\.txt: expected to read it, got Too many levels of symbolic links"):
            read(given)


def test_a_path_that_the_system_does_not_take_is_named(tmp_path):
    with pytest.raises(ValueError, match="xxx: expected to read it, got File name too long"):
        read(tmp_path / ("x" * 300))


def test_an_unreadable_folder_is_named(tmp_path, monkeypatch):
    written(tmp_path, a_txt=b"a", sub__b_txt=b"b")
    scan = os.scandir

    def refusing(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ValueError, match="sub: expected to read it, got Permission denied"):
        read(tmp_path)


def test_a_file_that_is_no_utf8_is_named_with_the_place_if_a_tokenizer_reads_it(tmp_path, tokenizer_file):
    written(tmp_path, a_txt=b"good", b_txt=b"bad \xff")
    with pytest.raises(ValueError, match=r"b\.txt: expected UTF-8.*got 0xff at byte 4"):
        read(tmp_path, tokenizer=tokenizer_file)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, tokenizer_file, merging):
    written(tmp_path, a_txt=b"text")
    size = merging.get_vocab_size()
    with pytest.raises(ValueError, match=f"below the model's vocabulary of {size - 1}, got one of {size - 1}"):
        read(tmp_path, tokenizer=tokenizer_file, vocab_size=size - 1)


def test_a_tokenizer_that_just_fits_is_taken(tmp_path, tokenizer_file, merging):
    written(tmp_path, a_txt=b"text")
    size = merging.get_vocab_size()
    assert read(tmp_path, tokenizer=tokenizer_file, vocab_size=size).tokenizer.vocab_size == size


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{}", "expected a tokenizer of the tokenizers package"), (b"\xff", "expected UTF-8"), (None, "found no file")],
)
def test_what_is_no_tokenizer_is_named(tmp_path, content, message):
    written(tmp_path, a_txt=b"text")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: .*{message}"):
        read(tmp_path, tokenizer=path)


def test_text_of_which_the_tokenizer_makes_nothing_is_an_error(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    written(tmp_path, a_txt=b"  \n ")
    with pytest.raises(ValueError, match="expected tokens for the text of 1 files, got none"):
        read(tmp_path, tokenizer=tmp_path / "words.json")


def test_without_the_tokenizers_package_the_error_says_what_to_install(tmp_path, tokenizer_file, monkeypatch):
    written(tmp_path, a_txt=b"text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'raggedmoe\[text\]'"):
        read(tmp_path, tokenizer=tokenizer_file)
