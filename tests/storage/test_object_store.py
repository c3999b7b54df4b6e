"""Requests to an object store: whole objects, conditions that are kept, and a server that is away, slow or refuses."""

import sys
import threading
import time

import pytest

from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.storage.object_store import ChangedObjectError
from raggedmoe.storage.trees import copy, list_files, move, remove, replace_file, sha256, upload


def test_what_is_written_is_read(bucket, tmp_path):
    content = bytes(range(256)) * 70_000  # in several parts
    (bucket / "runs/a").write_bytes(content)
    assert (bucket / "runs/a").read_bytes() == content
    (tmp_path / "file").write_bytes(content)
    assert sha256(bucket / "runs/a") == sha256(tmp_path / "file")
    upload(tmp_path, bucket / "up")
    assert list_files(bucket) == {"runs/a": len(content), "up/file": len(content)}


def test_paths_are_as_those_of_a_disk(bucket):
    folder = as_path(f"{bucket}runs//demo/")
    assert folder == bucket / "runs" / "demo"
    assert (folder.name, folder.parent, folder.with_name("x")) == ("demo", bucket / "runs", bucket / "runs/x")
    assert str((folder / "a/b").relative_to(folder)) == "a/b"
    replace_file(folder / "a/b", b"1")
    replace_file(folder / "ab", b"2")
    assert [path.name for path in folder.iterdir()] == ["a", "ab"]
    assert [(folder / name).is_dir() for name in ("a", "ab", "none")] == [True, False, False]
    assert [(folder / name).is_file() for name in ("a", "ab", "none")] == [False, True, False]
    assert [(folder / name).exists() for name in ("a", "ab", "none")] == [True, True, False]
    assert (bucket.parent, bucket.name) == (bucket, "")


def test_folders_are_copied_moved_and_removed(bucket):
    for name in ("a/x", "a/y/z", "ab"):
        replace_file(bucket / name, name.encode())
    copy(bucket / "a", bucket / "b")
    move(bucket / "a", bucket / "c/d")
    move(bucket / "ab", bucket / "e")
    assert list(list_files(bucket)) == ["b/x", "b/y/z", "c/d/x", "c/d/y/z", "e"]
    assert (bucket / "c/d/y/z").read_bytes() == b"a/y/z"
    remove(bucket / "b")
    remove(bucket / "none")
    assert list(list_files(bucket)) == ["c/d/x", "c/d/y/z", "e"]


@pytest.mark.parametrize("kind", ["serve", "mute", "cut"])
def test_of_several_writers_one_creates_an_object_and_one_updates_it(object_server, bucket, kind):
    """Also if answers are lost: whoever wrote it is told so."""
    store, results = bucket.bucket, []

    def write(number: int) -> None:
        try:
            results.append((number, store.create("lock", b"%d" % number)))
        except FileExistsError:
            results.append((number, None))

    with object_server.fault("PUT", "lock", kind, times=3):
        threads = [threading.Thread(target=write, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    [(number, version)] = [result for result in results if result[1] is not None]
    assert (bucket / "lock").read_bytes() == b"%d" % number
    with object_server.fault("PUT", "lock", kind, times=1):
        assert store.update("lock", b"new", version) != version
    with pytest.raises(ChangedObjectError, match="it has changed"):
        store.update("lock", b"other", version)
    assert (bucket / "lock").read_bytes() == b"new"


@pytest.mark.parametrize("kind", ["busy", "cut", "mute"])
def test_a_write_that_fails_for_a_while_is_repeated(object_server, bucket, kind):
    with object_server.fault("PUT", "/a", kind, times=3) as fault:
        (bucket / "a").write_bytes(b"once")
    assert fault.seen == 3
    assert (bucket / "a").read_bytes() == b"once"


def test_a_server_that_is_away_for_a_while_is_waited_for(object_server, bucket):
    (bucket / "a").write_bytes(b"old")
    back = object_server.away_for(1.5)
    start = time.monotonic()
    (bucket / "a").write_bytes(b"new")
    assert time.monotonic() - start > 1
    back.join()
    assert (bucket / "a").read_bytes() == b"new"


def test_a_server_that_stays_away_is_an_error_that_names_the_object(object_server, bucket, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "1")
    with object_server.away():
        for request in (
            lambda: (bucket / "a").write_bytes(b""),
            lambda: (bucket / "a").read_bytes(),
            lambda: bucket.bucket.create("a", b""),
            lambda: list_files(bucket),
            lambda: bucket.bucket.delete(["a"]),
        ):
            with pytest.raises(OSError, match=f"s3://{bucket.bucket_name}/a? ?could not be"):
                request()


def test_a_server_that_was_waited_for_in_vain_is_not_waited_for_again_until_it_answers(
    object_server, bucket, monkeypatch
):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "1")
    with object_server.fault("PUT", "", "busy"):
        seconds = []
        for write in (*[(bucket / "a").write_bytes] * 2, lambda text: bucket.bucket.create("b", text)):
            start = time.monotonic()
            with pytest.raises(OSError, match="could not be written"):
                write(b"x")
            seconds.append(time.monotonic() - start)
    assert seconds[0] > 0.5 > max(seconds[1:])
    (bucket / "a").write_bytes(b"1")
    with object_server.fault("PUT", "/a", "busy", times=2):
        (bucket / "a").write_bytes(b"2")
    assert (bucket / "a").read_bytes() == b"2"


def test_a_refused_write_is_an_error_at_once_and_the_object_stays(object_server, bucket):
    (bucket / "a").write_bytes(b"old")
    with object_server.fault("PUT", "/a", "refuse") as fault, pytest.raises(OSError, match="/a could not be written"):
        (bucket / "a").write_bytes(b"new")
    assert fault.seen == 1
    assert (bucket / "a").read_bytes() == b"old"


def test_what_is_not_there_is_no_file(bucket):
    for path in (bucket / "none", ObjectPath("bucket-none", "x")):
        with pytest.raises(FileNotFoundError, match=r"no such (object|bucket).*s3://"):
            path.read_bytes()
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        (ObjectPath("bucket-none", "x")).write_bytes(b"")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("gs://bucket/runs", "x-goog-if-generation-match"),
        ("az://bucket/runs", "no tests start a server"),
        ("new://bucket/runs", "no tests start a server"),
        ("s3://", "expected s3://BUCKET/FOLDER"),
        ("s3://bucket/a/../b", "expected s3://BUCKET/FOLDER"),
    ],
)
def test_other_places_are_refused_with_the_reason(place, said):
    with pytest.raises(ValueError, match=said):
        as_path(place)


def test_a_time_to_repeat_that_is_no_number_is_refused(bucket, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "long")
    with pytest.raises(ValueError, match="expected a number of seconds, got 'long'"):
        (bucket / "a").read_bytes()


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ValueError, match=r"needs the obstore package; pip install 'raggedmoe\[s3\]'"):
        ObjectPath("bucket-that-nobody-opened", "x").read_bytes()
