"""A folder is whole or not there."""

import fcntl
import os
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from raggedmoe import interop
from raggedmoe.interop import writing
from raggedmoe.models.module import Decoder
from tests.disk_calls import DiskCalls
from tests.interop.folders import GOLDEN

SAVES = {"hugging face": interop.save, "native": interop.save_native}
every_save = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)


@every_save
def test_a_folder_with_files_is_not_overwritten(save, tmp_path, golden_model):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        save(golden_model("olmoe"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@every_save
def test_a_file_is_not_overwritten(save, tmp_path, golden_model):
    (tmp_path / "file").write_text("keep")
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        save(golden_model("olmoe"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "keep"


@every_save
def test_an_empty_folder_is_filled(save, tmp_path, golden_model):
    (tmp_path / "out").mkdir()
    save(golden_model("olmoe"), tmp_path / "out")
    assert interop.load(tmp_path / "out").config == golden_model("olmoe").config
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@every_save
def test_folders_above_it_are_made(save, tmp_path, golden_model):
    save(golden_model("olmoe"), tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b" / "model.safetensors").is_file()


@every_save
def test_a_disk_that_is_full_halfway_leaves_nothing(save, tmp_path, golden_model, monkeypatch):
    whole, written = writing.write_file, []

    def failing(path, tensors, metadata, advance):
        def note(num_bytes):
            written.append(num_bytes)
            if len(written) == 5:
                raise OSError(28, "No space left on device")

        whole(path, tensors, metadata, note)

    monkeypatch.setattr(writing, "write_file", failing)
    with pytest.raises(OSError, match="No space left"):
        save(golden_model("olmoe"), tmp_path / "out")
    assert len(written) == 5
    assert list(tmp_path.iterdir()) == []


@every_save
def test_an_interrupted_save_of_the_second_file_leaves_nothing(save, tmp_path, golden_model, monkeypatch):
    whole, files = writing.write_file, []

    def failing(path, *arguments):
        files.append(path.name)
        if len(files) == 2:
            raise KeyboardInterrupt
        whole(path, *arguments)

    monkeypatch.setattr(writing, "write_file", failing)
    with pytest.raises(KeyboardInterrupt):
        save(golden_model("olmoe"), tmp_path / "out", shard_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


@every_save
def test_every_file_is_on_the_disk_before_the_folder_gets_its_name(save, tmp_path, golden_model, monkeypatch):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    calls = DiskCalls(monkeypatch)
    save(golden_model("olmoe"), tmp_path / "out", companions=tmp_path / "source", shard_bytes=50_000)
    calls.check_named_safely(tmp_path / "out")


def test_what_killed_writers_left_is_removed_and_what_another_writes_is_not(tmp_path):
    dead = [tmp_path / f".out.{process}.partial" for process in (2**22 + 1, os.getpid())]
    others = [tmp_path / name for name in (".out.more.1.partial", ".out.partial", ".in.1.partial", "out.1.partial")]
    alive = tmp_path / f".out.{2**22 + 2}.partial"
    for folder in (*dead, *others, alive):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # as its writer does; the system takes it back from one that is killed
        with writing.new_folder(tmp_path / "out") as partial:
            assert list(partial.iterdir()) == []
    finally:
        os.close(descriptor)
    assert set(tmp_path.iterdir()) == {alive, tmp_path / "out", *others}


def test_a_writer_holds_the_lock_by_which_others_know_that_it_lives(tmp_path):
    with writing.new_folder(tmp_path / "out") as partial:
        descriptor = os.open(partial, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    (tmp_path / ".out.1.partial").mkdir()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with writing.new_folder(tmp_path / "out") as partial:
        (partial / "config.json").write_text("{}")
    assert {path.name for path in tmp_path.iterdir()} == {".out.1.partial", "out"}


@every_save
def test_a_tokenizer_goes_along_and_weights_do_not(save, tmp_path, golden_model):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("")
    (source / "config.json").write_text('{"eos_token_id": [5, 6]}')
    save(golden_model("olmoe"), tmp_path / "out", companions=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "generation_config.json"} <= names
    assert "pytorch_model.bin" not in names


def test_an_unknown_layout_suggests_the_nearest_and_writes_nothing(tmp_path, golden_model):
    with pytest.raises(ValueError, match="did you mean 'fused'"):
        interop.save(golden_model("olmoe"), tmp_path / "out", layout="fusd")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_the_family_cannot_say_is_refused_and_writes_nothing(tmp_path, golden_model):
    model = golden_model("qwen3_moe")
    other = Decoder(replace(model.config, activation="gelu"), params=model.params)
    with pytest.raises(ValueError, match="activation='gelu'"):
        interop.save(other, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_shown_on_a_terminal_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    interop.load(GOLDEN / "olmoe", progress=True)
    assert "loading" in capsys.readouterr().err


@pytest.mark.parametrize(("terminal", "progress"), [("", True), ("1", False)])
def test_no_bar_is_shown_in_a_pipe_or_where_none_is_asked_for(terminal, progress, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", terminal)
    interop.load(GOLDEN / "olmoe", progress=progress)
    assert capsys.readouterr().err == ""


def test_progress_is_told_of_every_byte(tmp_path, golden_model, monkeypatch):
    seen = []

    @contextmanager
    def counting(what, total, shown):
        seen.append([what, total, 0])

        def advance(num_bytes):
            seen[-1][2] += num_bytes

        yield advance

    monkeypatch.setattr(writing, "bytes_bar", counting)
    # raggedmoe.interop.load is the function; its module is found by name only.
    monkeypatch.setattr(sys.modules["raggedmoe.interop.load"], "bytes_bar", counting)
    interop.save(interop.load(GOLDEN / "mixtral"), tmp_path / "out")
    assert [what for what, _, _ in seen] == ["loading", "writing"]
    assert all(total == done > 0 for _, total, done in seen)
