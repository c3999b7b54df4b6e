"""Folders of tokens in an object store: copied once, checked, and then those that were written."""

import errno
import fcntl
import logging
import os
import platform
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from raggedmoe.storage import trees
from raggedmoe.storage.trees import upload
from raggedmoe.train.data import token_copy
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.data.token_copy import SETTING
from raggedmoe.train.data.token_files import open_tokens, write_tokens
from raggedmoe.train.data.tokenizer import BYTES_THAT_END
from raggedmoe.train.settings.sections import DataConfig
from raggedmoe_command import compilation_cache


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    monkeypatch.setenv(SETTING, str(tmp_path / "copies"))
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(f"Text number {number}. " * 9)
    write_tokens([str(tmp_path / "text")], tmp_path / "tokens", BYTES_THAT_END, suffixes=(".txt",), held_out=0.2)
    return tmp_path / "tokens"


def copies_in(root):
    """List the copies, without the files that lock them."""
    return [path for path in (root / "copies").iterdir() if not path.name.endswith(".lock")]


def first_batch(folder):
    config = DataConfig(dataset_type="tokens", dataset_path=(str(folder),), max_target_length=32)
    data = open_data(config, 512, 4)
    return data.fingerprint, next(data.train_batches())


def test_a_run_reads_from_a_copy_what_it_would_from_the_folder_and_copies_once(tokens, bucket, object_server, tmp_path):
    upload(tokens, bucket / "tokens")
    here, there = first_batch(tokens), first_batch(bucket / "tokens")
    assert there[0] == here[0]
    for name, array in vars(here[1]).items():
        np.testing.assert_array_equal(getattr(there[1], name), array, err_msg=name)
    object_server.requests.clear()
    opened, whole = open_tokens(bucket / "tokens", 512), open_tokens(tokens, 512)
    np.testing.assert_array_equal(opened.held_out.tokens, whole.held_out.tokens)
    assert [path for _, path in object_server.requests if ".tokens" in path or ".ends" in path] == []
    assert len(copies_in(tmp_path)) == 1


def test_a_folder_that_is_another_now_is_copied_anew(tokens, bucket, tmp_path):
    upload(tokens, bucket / "tokens")
    before = open_tokens(bucket / "tokens", 512)
    write_tokens([str(tmp_path / "text")], tmp_path / "other", BYTES_THAT_END, suffixes=(".txt",), held_out=0.5)
    upload(tmp_path / "other", bucket / "tokens")
    after = open_tokens(bucket / "tokens", 512)
    assert after.fingerprint == open_tokens(tmp_path / "other", 512).fingerprint != before.fingerprint


def test_two_that_begin_at_once_copy_once(tokens, bucket, tmp_path, monkeypatch):
    upload(tokens, bucket / "tokens")
    downloads = []

    def download(*places):
        downloads.append(places)
        time.sleep(0.3)
        trees.download(*places)

    monkeypatch.setattr(token_copy, "download", download)
    with ThreadPoolExecutor(3) as threads:
        opened = [threads.submit(open_tokens, bucket / "tokens", 512) for _ in range(3)]
        assert len({future.result().fingerprint for future in opened}) == 1
    assert (len(downloads), len(copies_in(tmp_path))) == (1, 1)


def test_without_locks_each_copies_for_itself_one_is_kept_and_a_warning_says_so(
    tokens, bucket, tmp_path, monkeypatch, caplog
):
    upload(tokens, bucket / "tokens")
    begun = threading.Barrier(3)

    def no_lock(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def download(*places):
        begun.wait(timeout=60)  # all are on their way before one is done
        trees.download(*places)

    monkeypatch.setattr(fcntl, "flock", no_lock)
    expected = open_tokens(bucket / "tokens", 512).fingerprint
    (first,) = copies_in(tmp_path)
    shutil.rmtree(first)
    monkeypatch.setattr(token_copy, "download", download)
    with ThreadPoolExecutor(3) as threads:
        opened = [threads.submit(open_tokens, bucket / "tokens", 512) for _ in range(3)]
        assert {future.result().fingerprint for future in opened} == {expected}
    assert copies_in(tmp_path) == [first]
    (warning,) = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "has no locks" in text]
    assert f"set {SETTING} to a folder on a local disk" in warning


def test_what_a_killed_process_left_is_removed_and_what_another_machine_writes_stays(tokens, bucket, tmp_path):
    upload(tokens, bucket / "tokens")
    open_tokens(bucket / "tokens", 512)
    (whole,) = copies_in(tmp_path)
    ours, theirs = (whole.with_name(f".{whole.name}.{node}.0.partial") for node in (platform.node(), "elsewhere"))
    whole.rename(ours)
    theirs.mkdir()
    open_tokens(bucket / "tokens", 512)
    assert sorted(copies_in(tmp_path)) == sorted([whole, theirs])


def test_copies_are_in_the_users_cache_folder_as_compiled_programs_are(monkeypatch, tmp_path):
    monkeypatch.delenv(SETTING, raising=False)
    for cache in ({"XDG_CACHE_HOME": str(tmp_path)}, {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}):
        for name, value in cache.items():
            monkeypatch.setenv(name, value)
        assert token_copy.copies_root() == compilation_cache.cache_root(cache) / "tokens"


def test_a_flipped_byte_is_refused_and_leaves_no_copy(tokens, bucket, tmp_path):
    content = bytearray((tokens / "train.tokens").read_bytes())
    content[100] ^= 1
    (tokens / "train.tokens").write_bytes(content)
    upload(tokens, bucket / "tokens")
    with pytest.raises(ValueError, match=r"expected the digest [0-9a-f]+ of train, as tokens.json has it, got"):
        open_tokens(bucket / "tokens", 512)
    assert copies_in(tmp_path) == []


def test_a_disk_without_room_is_named_before_anything_is_copied(tokens, bucket, monkeypatch):
    upload(tokens, bucket / "tokens")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match=rf"got 10 free ones; set {SETTING} to a folder on a larger disk"):
        open_tokens(bucket / "tokens", 512)
