"""Files that grow line by line, on a disk and in segments."""

import pytest

from raggedmoe.storage import appended
from raggedmoe.storage.appended import is_appended, open_appended, read_appended, rewrite_appended
from raggedmoe.storage.trees import list_files


@pytest.fixture(params=["disk", "objects"])
def path(request, tmp_path):
    return (tmp_path if request.param == "disk" else request.getfixturevalue("bucket") / "run") / "lines"


def append(path, *lines):
    file = open_appended(path)
    for line in lines:
        file.append(line)
    file.close()


def without(*dropped):
    return lambda content, path: b"".join(line for line in content.splitlines(True) if line not in dropped)


def test_lines_are_read_in_order_and_go_on_where_they_ended(path):
    assert not is_appended(path)
    append(path, b"a\n", b"b\n")
    append(path)
    append(path, b"c\n")
    assert is_appended(path)
    assert read_appended(path) == b"a\nb\nc\n"
    rewrite_appended(path, without(b"b\n"))
    assert read_appended(path) == b"a\nc\n"
    append(path, b"d\n")
    assert read_appended(path) == b"a\nc\nd\n"


def test_a_flush_writes_one_small_object(object_server, bucket, monkeypatch):
    monkeypatch.setattr(appended, "SEGMENT_BYTES", 100)
    file = open_appended(bucket / "lines")
    object_server.requests.clear()
    expected = b""
    for number in range(50):
        line = b"line %05d\n" % number
        expected += line
        file.append(line)
        if number % 3 == 0:
            file.flush()
            file.flush()
    file.close()
    assert object_server.count("PUT") == len(object_server.requests) == 18
    assert read_appended(bucket / "lines") == expected
    sizes = list_files(bucket / "lines")
    assert list(sizes) == [f"{number:08}" for number in range(5)]
    assert max(sizes.values()) < 150


def test_a_rewrite_that_is_killed_anywhere_keeps_what_is_to_stay(object_server, bucket, monkeypatch):
    monkeypatch.setattr(appended, "SEGMENT_BYTES", 10)
    lines = [b"line %d\n" % number for number in range(9)]
    drop_some = without(*lines[3:])
    for served in range(4):
        path = bucket / f"{served}/lines"
        for line in lines:
            append(path, line)
        with (
            object_server.fault("PUT", "lines", "serve", times=served),
            object_server.fault("PUT", "lines", "refuse"),
            pytest.raises(OSError, match="could not be written"),
        ):
            rewrite_appended(path, drop_some)
        left = read_appended(path).splitlines(True)
        assert left[:3] == lines[:3]
        assert len(left) == 9 - (0, 1, 3, 5)[served]
        rewrite_appended(path, drop_some)
        append(path, b"new\n")
        assert read_appended(path).splitlines(True) == [*lines[:3], b"new\n"]


def test_a_file_that_was_copied_from_the_other_kind_of_place_goes_on(bucket, tmp_path):
    (bucket / "lines").write_bytes(b"a\nb\n")
    (tmp_path / "lines").mkdir()
    for number, content in enumerate((b"a\n", b"b\n")):
        (tmp_path / "lines" / f"{number:08}").write_bytes(content)
    for path in (bucket / "lines", tmp_path / "lines"):
        assert read_appended(path) == b"a\nb\n"
        rewrite_appended(path, without(b"b\n"))
        append(path, b"c\n")
        assert read_appended(path) == b"a\nc\n"
    assert list(list_files(bucket)) == ["lines/00000000"]
    assert list(list_files(tmp_path)) == ["lines"]
