import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.disk import replace_file
from raggedmoe.train.loop.metrics import LOAD, METRICS, TENSORBOARD, MetricsWriter, read_jsonl
from tests.disk_calls import DiskCalls


def write_steps(folder: Path, first: int, last: int, *, resume_step: int | None, tensorboard: bool = False) -> None:
    with MetricsWriter(folder, resume_step=resume_step, tensorboard=tensorboard) as writer:
        for step in range(first, last + 1):
            writer.train(step, {"loss": 10.0 - step})
            if step % 2 == 0:
                writer.load(step, [[step, 1], [1, step]])
                writer.held_out(step, {"loss": 20.0 - step})


def steps(path: Path) -> list[int]:
    return [values["step"] for values in read_jsonl(path)]


def tensorboard_events(folder: Path) -> list:
    """The events of all files in TensorBoard's order, read by the record format's own description."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / TENSORBOARD).iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
        assert at == len(content)
    return found


@pytest.mark.parametrize(
    "value",
    [
        0.1,
        1e-300,
        5e-324,
        -0.0,
        2**53 + 1,
        np.float32(0.1),
        np.float64(1) / 3,
        np.int64(2**62 + 1),
        jnp.float32(1e-45),
        jnp.bfloat16(0.1),
        jnp.int32(7),
    ],
    ids=repr,
)
def test_a_number_reads_back_exactly(tmp_path, value):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.train(1, {"loss": value})
    (line,) = read_jsonl(tmp_path / METRICS)
    expected = value if isinstance(value, int | float) else np.asarray(value).astype(object).item()
    assert line["loss"] == float(expected) if isinstance(line["loss"], float) else line["loss"] == int(expected)
    assert np.signbit(float(line["loss"])) == np.signbit(float(expected))
    assert isinstance(line["loss"], int) == np.issubdtype(np.asarray(value).dtype, np.integer)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, jnp.float32(np.nan), None])
def test_what_is_not_finite_is_written_as_null(tmp_path, value):
    with MetricsWriter(tmp_path, resume_step=None) as writer:
        writer.train(1, {"loss": value, "skipped": 1})
    assert (tmp_path / METRICS).read_text() == '{"kind":"train","step":1,"loss":null,"skipped":1}\n'
    (summary,) = [event.summary for event in tensorboard_events(tmp_path) if event.HasField("summary")]
    assert [value.tag for value in summary.value] == ["train/skipped"]


def test_every_kind_of_line_is_what_was_given(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.train(1, {"loss": 2.5, "tokens": 64})
        writer.held_out(1, {"loss": 2.75})
        writer.event(1, "checkpoint", "step_1 \u2192 “disk”\nand on")
        writer.load(1, np.array([[1, 2], [3, 0]], np.int32))
        writer.load(2, [[4, 5]])
    assert read_jsonl(tmp_path / METRICS) == [
        {"kind": "train", "step": 1, "loss": 2.5, "tokens": 64},
        {"kind": "eval", "step": 1, "loss": 2.75},
        {"kind": "event", "step": 1, "what": "checkpoint", "text": "step_1 → “disk”\nand on"},
    ]
    assert read_jsonl(tmp_path / LOAD) == [{"step": 1, "load": [[1, 2], [3, 0]]}, {"step": 2, "load": [[4, 5]]}]


@pytest.mark.parametrize("load", [np.ones(3), np.full((2, 2), 0.5), np.full((2, 2), np.nan), np.ones((1, 1, 1))])
def test_a_load_that_is_no_table_of_counts_is_refused(tmp_path, load):
    with (
        MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer,
        pytest.raises(ValueError, match="whole counts"),
    ):
        writer.load(1, load)


def test_a_value_may_not_take_the_name_of_the_step(tmp_path):
    with (
        MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer,
        pytest.raises(ValueError, match="got step"),
    ):
        writer.train(1, {"loss": 1.0, "step": 3})


def test_a_line_can_be_read_while_the_run_goes_on(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.train(1, {"loss": 1.0})
        writer.load(1, [[1]])
        assert steps(tmp_path / METRICS) == steps(tmp_path / LOAD) == [1]


@pytest.mark.parametrize(
    "half", [b"", b'{"kind":"train","st', b'{"kind":"train","step":3,"loss":1.5}', b"\0\0\0", b"7"]
)
def test_resuming_cuts_off_what_came_after_the_checkpoint(tmp_path, half):
    write_steps(tmp_path, 1, 6, resume_step=None)
    before = (tmp_path / METRICS).read_bytes().splitlines(keepends=True)
    for name in (METRICS, LOAD):
        with (tmp_path / name).open("ab") as file:
            file.write(half)
    write_steps(tmp_path, 5, 6, resume_step=4)
    whole = [b'{"kind":"train","step":3,"loss":1.5}\n'] if half.endswith(b"}") else []
    kept = [line for line in before if json.loads(line)["step"] <= 4]
    rest = [line for line in before if json.loads(line)["step"] > 4]
    assert (tmp_path / METRICS).read_bytes().splitlines(keepends=True) == kept + whole + rest
    assert steps(tmp_path / LOAD) == [2, 4, *([3] if whole else []), 6]


def test_a_line_that_stands_late_but_belongs_to_the_checkpoint_is_kept(tmp_path):
    with MetricsWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.train(5, {"loss": 1.0})
        writer.event(4, "checkpoint", "written in the background")
    MetricsWriter(tmp_path, resume_step=4, tensorboard=False).close()
    assert [values["kind"] for values in read_jsonl(tmp_path / METRICS)] == ["event"]


def test_cutting_off_leaves_the_old_file_if_the_machine_stops(tmp_path, monkeypatch):
    write_steps(tmp_path, 1, 6, resume_step=None)
    before = (tmp_path / METRICS).read_bytes()

    def stop(*args):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(OSError, match="no space left"):
        MetricsWriter(tmp_path, resume_step=4, tensorboard=False)
    assert (tmp_path / METRICS).read_bytes() == before


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_bytes(b"one")
    calls = DiskCalls(monkeypatch)
    replace_file(tmp_path / "run.json", b"two")
    calls.check_named_safely(tmp_path / "run.json")


def test_replacing_a_file_leaves_nothing_else_behind(tmp_path):
    replace_file(tmp_path / "run.json", b"one")
    replace_file(tmp_path / "run.json", b"two")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"run.json": b"two"}


def test_resuming_after_a_file_was_lost_goes_on(tmp_path):
    write_steps(tmp_path, 1, 4, resume_step=None)
    (tmp_path / METRICS).unlink()
    write_steps(tmp_path, 5, 6, resume_step=4)
    assert steps(tmp_path / METRICS) == [5, 6, 6]


@pytest.mark.parametrize("name", [METRICS, LOAD])
def test_a_new_run_refuses_the_folder_of_an_old_one_and_leaves_it(tmp_path, name):
    write_steps(tmp_path, 1, 2, resume_step=None)
    (tmp_path / (LOAD if name == METRICS else METRICS)).unlink()
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ValueError, match=rf"{name}: expected no such lines .* resume that one"):
        MetricsWriter(tmp_path, resume_step=None, tensorboard=False)
    assert (tmp_path / name).read_bytes() == before


def test_a_new_run_takes_a_folder_where_one_was_killed_in_its_first_line(tmp_path):
    (tmp_path / METRICS).write_bytes(b'{"kind":"tr')
    write_steps(tmp_path, 1, 1, resume_step=None)
    assert steps(tmp_path / METRICS) == [1]


@pytest.mark.ci
def test_what_was_flushed_survives_a_kill(tmp_path):
    program = """
        import os, signal, sys
        from pathlib import Path
        from raggedmoe.train.loop.metrics import MetricsWriter
        writer = MetricsWriter(Path(sys.argv[1]), resume_step=None)
        writer.train(1, {"loss": 0.1})
        writer.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_jsonl(tmp_path / METRICS) == [{"kind": "train", "step": 1, "loss": 0.1}]
    assert tensorboard_events(tmp_path)[-1].summary.value[0].simple_value == np.float32(0.1)


@pytest.mark.parametrize("line", [b"{half", b"[1]", b"\xff\xfe", b'{"a":1}{"a":2}', b"[" * 100_000])
def test_a_malformed_line_is_named(tmp_path, line):
    path = tmp_path / METRICS
    path.write_bytes(b'{"kind":"train","step":1}\n' + line + b'\n{"kind":"train","step":2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected a JSON object, got .*; remove the line"):
        read_jsonl(path)
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path, resume_step=5, tensorboard=False)


def test_a_whole_last_line_that_is_malformed_is_named_too(tmp_path):
    (tmp_path / METRICS).write_bytes(b'{"step":1}\n{half\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(tmp_path / METRICS)


@pytest.mark.parametrize("step", ["null", '"4"', "4.5"])
def test_resuming_refuses_a_line_without_a_step(tmp_path, step):
    (tmp_path / METRICS).write_text(f'{{"step":1}}\n{{"step":{step}}}\n')
    with pytest.raises(ValueError, match="line 2: expected a whole number as step"):
        MetricsWriter(tmp_path, resume_step=5, tensorboard=False)


def test_nan_of_another_writer_reads_as_none(tmp_path):
    (tmp_path / METRICS).write_text('{"step":1,"loss":NaN}\n\n{"step":2,"loss":-Infinity}')
    assert read_jsonl(tmp_path / METRICS) == [{"step": 1, "loss": None}, {"step": 2, "loss": None}]


def test_tensorboard_reads_the_scalars(tmp_path):
    write_steps(tmp_path, 1, 2, resume_step=None, tensorboard=True)
    found = [
        (event.step, value.tag, value.simple_value)
        for event in tensorboard_events(tmp_path)
        for value in event.summary.value
    ]
    assert found == [(1, "train/loss", 9.0), (2, "train/loss", 8.0), (2, "held_out/loss", 18.0)]


def test_tensorboard_checksums_are_right(tmp_path):
    write_steps(tmp_path, 1, 1, resume_step=None, tensorboard=True)
    (path,) = (tmp_path / TENSORBOARD).iterdir()
    content, at, records = path.read_bytes(), 0, 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        for start, size in ((at, 8), (at + 12, length)):
            (stored,) = struct.unpack_from("<I", content, start + size)
            assert stored == masked_crc32c(content[start : start + size])
        at, records = at + 16 + length, records + 1
    assert records == 2


def masked_crc32c(data: bytes) -> int:
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_tensorboard_hides_what_was_cut_off(tmp_path):
    write_steps(tmp_path, 1, 6, resume_step=None, tensorboard=True)
    write_steps(tmp_path, 5, 5, resume_step=4, tensorboard=True)
    events = tensorboard_events(tmp_path)
    (start,) = [event for event in events if event.HasField("session_log")]
    assert start.session_log.status == start.session_log.START
    assert start.step == 5
    # Within one second, the names of tensorboardX alone would have been the same: the first file is still there.
    assert [event.step for event in events if event.HasField("summary")] == [1, 2, 2, 3, 4, 4, 5, 6, 6, 5]


def test_missing_tensorboard_is_an_error_that_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'raggedmoe\[train\]'"):
        MetricsWriter(tmp_path / "run", resume_step=None)
    assert not (tmp_path / "run").exists()
    write_steps(tmp_path / "run", 1, 1, resume_step=None, tensorboard=False)


def test_closing_twice_does_no_harm(tmp_path):
    writer = MetricsWriter(tmp_path, resume_step=None)
    writer.close()
    writer.close()
