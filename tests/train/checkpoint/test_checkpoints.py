"""Checkpoints: all comes back bit for bit, whatever happens to the process or to the files."""

import json
import logging
import math
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.train.checkpoint import checkpoints as checkpoint
from raggedmoe.train.checkpoint import disk_folder, manifest
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from raggedmoe.train.settings.sections import CheckpointConfig
from tests.disk_calls import DiskCalls

ROWS = 3000


def state_at(step: int) -> dict:
    """A small state whose every number says its step."""
    return {"rows": jnp.asarray(np.arange(ROWS, dtype=np.float32) + step), "step": jnp.asarray(np.int32(step))}


def check_is_of(restored: checkpoint.RestoredCheckpoint | None, step: int) -> None:
    assert restored is not None
    assert restored.step == step
    assert restored.extra == {"position": step * 7}
    for name, expected in state_at(step).items():
        np.testing.assert_array_equal(restored.state[name], expected)


def opened(folder: Path, **settings) -> Checkpoints:
    return Checkpoints(folder, CheckpointConfig(**settings))


def save(checkpoints: Checkpoints, step: int, metric: float | None = None) -> None:
    checkpoints.save(step, state_at(step), {"position": step * 7}, metric=metric)


def save_and_wait(checkpoints: Checkpoints, step: int) -> None:
    save(checkpoints, step)
    checkpoints.wait()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A folder with checkpoints of steps 10, 20 and 30, which nobody changes."""
    folder = tmp_path_factory.mktemp("written")
    with opened(folder, keep_last=3) as checkpoints:
        for step in (10, 20, 30):
            save(checkpoints, step)
    return folder


@pytest.fixture
def three(written, tmp_path) -> Path:
    """Return a copy to be changed."""
    return Path(shutil.copytree(written, tmp_path / "three"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def files_of(path: Path) -> list[Path]:
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def largest_file(path: Path) -> Path:
    return max(files_of(path), key=lambda file: file.stat().st_size)


def flip_bit(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


# What is saved comes back


def every_kind_of_leaf() -> dict:
    weights = {"w.0": jnp.asarray(np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4))}
    odd = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    return {
        "params": weights,
        "optimizer": optax.adamw(1e-3).init(weights),
        "bfloat16": jnp.asarray([1.5, -0.0, np.nan], jnp.bfloat16),
        "odd": jnp.asarray(odd),
        "int32": jnp.asarray(np.int32(-5)),
        "uint32": jnp.asarray(np.array([2**32 - 1], np.uint32)),
        "bool": jnp.asarray(np.array(True)),
        "no elements": jnp.zeros((0, 3), jnp.bfloat16),
        "none": None,
        "empty": {},
        "list": [jnp.zeros((2,), jnp.float32), (jnp.ones((), jnp.int32),)],
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 3),
    }


def bits(leaf: jax.Array) -> tuple:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
    return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "shapes"])
def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path, abstract):
    state = every_kind_of_leaf()
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if abstract else jnp.zeros_like(x), state)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        restored = checkpoints.restore(template)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert [bits(leaf) for leaf in jax.tree.leaves(restored.state)] == [bits(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("state", [{}, None], ids=["dict", "none"])
def test_a_state_without_arrays_is_saved_too(tmp_path, state):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"position": 3})
        assert checkpoints.restore(state).extra == {"position": 3}


def test_a_bare_array_is_a_state(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, jnp.arange(3), {})
        np.testing.assert_array_equal(checkpoints.restore(jnp.arange(3)).state, [0, 1, 2])


def test_extra_comes_back_as_it_was_when_saved(tmp_path):
    extra = {"position": {"file": 3, "row": [1, 2]}, "loss": math.inf, "big": 2**70, "flag": True, "name": "é\n"}
    expected = json.loads(json.dumps(extra))
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, {}, extra)
        extra["position"]["row"].append(9)
        assert checkpoints.restore({}).extra == expected


def test_buffers_donated_right_after_a_save_do_not_change_it(tmp_path):
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x - 9, state), donate_argnums=0)
    state, other = ({f"{i}": jnp.full((200_000,), i, jnp.float32) for i in range(4)} for _ in range(2))
    jax.block_until_ready(overwrite(other))  # compiled before, so that the next one comes at once
    assert all(leaf.is_deleted() for leaf in other.values())
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        jax.block_until_ready(overwrite(state))
        restored = checkpoints.restore(state)
    for name, leaf in restored.state.items():
        np.testing.assert_array_equal(leaf, np.full(200_000, int(name)))


def test_arrays_go_where_their_templates_are(tmp_path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rows, columns = NamedSharding(mesh, PartitionSpec("a")), NamedSharding(mesh, PartitionSpec(None, "b"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    saved = {
        "x": jax.device_put(values, rows),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        "free": jnp.asarray(values),
    }
    template = saved | {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)}
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, saved, {})
        state = checkpoints.restore(template).state
    np.testing.assert_array_equal(state["x"], values)
    assert state["x"].sharding == columns
    assert state["keys"].sharding.is_equivalent_to(rows, 1)
    assert not state["free"].committed  # tied to one device it could not be used with the others any more


def test_saving_and_restoring_says_nothing(tmp_path, capfd, caplog):
    with opened(tmp_path) as checkpoints:
        save(checkpoints, 1)
        check_is_of(checkpoints.restore(state_at(0)), 1)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    assert opened(tmp_path / "new" / "deep").restore(state_at(0)) is None


# Which ones stay


@pytest.mark.parametrize(
    ("settings", "metrics", "kept"),
    [
        ({"keep_last": 2}, [None] * 5, [4, 5]),
        ({"keep_last": 1}, [3.0, 1.0, 2.0, 4.0, 5.0], [2, 5]),
        ({"keep_last": 1, "keep_best": False}, [3.0, 1.0, 2.0, 4.0, 5.0], [5]),
        ({"keep_last": 1}, [2.0, 1.0, 1.0, 1.0, 3.0], [2, 5]),
        ({"keep_last": 1}, [math.nan, 9.0, None, -math.inf, math.nan], [2, 5]),
        ({"keep_last": 2}, [5.0, 4.0, 3.0, 2.0, 1.0], [4, 5]),
    ],
    ids=["last", "best", "without best", "earlier of equals", "not numbers", "best is last"],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_the_last_and_the_best_stay(tmp_path, settings, metrics, kept, restarts):
    checkpoints = opened(tmp_path, async_checkpointing=False, **settings)
    for step, metric in enumerate(metrics, start=1):
        if restarts:
            checkpoints = opened(tmp_path, async_checkpointing=False, **settings)
        checkpoints.save(step, {}, {}, metric=metric)
    assert checkpoints.steps() == kept
    assert names(tmp_path) == {f"step_{step:08}" for step in kept}


def test_only_our_own_leftovers_are_removed(three):
    (three / "step_00000040.partial" / "state").mkdir(parents=True)
    (three / "step_00000040.partial" / "state" / "half").write_text("…")
    for other in ("notes", "mine.partial", "step_x.partial", "step_00000010.damaged"):
        (three / other).mkdir()
    before = names(three)
    checkpoints = opened(three)
    assert names(three) == before - {"step_00000040.partial"}
    assert checkpoints.steps() == [10, 20, 30]


def test_an_old_checkpoint_loses_its_name_before_its_files(three, monkeypatch):
    monkeypatch.setattr(disk_folder, "remove_or_warn", lambda path: None)  # killed before it
    with opened(three, keep_last=3) as checkpoints:
        save(checkpoints, 40)
    assert checkpoints.steps() == [20, 30, 40]
    assert names(three) - {f"step_000000{step}" for step in (20, 30, 40)} == {"step_00000010.partial"}


@pytest.mark.parametrize("step", [10, 25, 30])
def test_a_step_that_is_not_after_the_newest_is_refused(three, step):
    with pytest.raises(ValueError, match=f"step={step}: expected one after 30"):
        save(opened(three), step)
    assert opened(three).steps() == [10, 20, 30]


# Processes that die


@pytest.mark.ci
def test_killed_at_any_moment_every_restart_resumes(tmp_path):
    script = Path(__file__).parent.with_name("killed_writer.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "5", "0"], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    halves, resumed = map(int, ran.stdout.split())
    assert halves > 0, "no kill came in the middle of a write: the test shows nothing"
    assert resumed > 0, "no child saved anything: the test shows nothing"


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    calls = DiskCalls(monkeypatch)
    save(opened(tmp_path, async_checkpointing=False), 1)
    calls.check_named_safely(tmp_path / "step_00000001")


# Files that change


def test_a_flipped_bit_in_any_file_is_named_and_the_one_before_is_used(three, caplog):
    rng = random.Random(0)
    newest = three / "step_00000030"
    files = files_of(newest)
    assert {"manifest.json", "_METADATA", "manifest.ocdbt"} <= {file.name for file in files}
    before = sorted(three.rglob("*"))
    for file in files:
        bit = rng.randrange(8 * file.stat().st_size)
        flip_bit(file, bit)
        caplog.clear()
        check_is_of(opened(three).restore(state_at(0)), 20)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert str(newest) in record.message
        assert str(file.relative_to(newest)) in record.message
        flip_bit(file, bit)
    assert sorted(three.rglob("*")) == before
    check_is_of(opened(three).restore(state_at(0)), 30)


def test_bits_all_over_the_manifest_are_checked(written, tmp_path):
    raw = (written / "step_00000030" / "manifest.json").read_bytes()
    file = tmp_path / "manifest.json"
    file.write_bytes(raw)
    assert manifest.read_manifest(tmp_path).step == 30
    for bit in range(0, 8 * len(raw), 149):
        flip_bit(file, bit)
        with pytest.raises(manifest.DamagedCheckpointError, match=r"manifest\.json"):
            manifest.read_manifest(tmp_path)
        flip_bit(file, bit)


def shorten(path: Path) -> None:
    file = largest_file(path / "state")
    file.write_bytes(file.read_bytes()[:-1])


def add_a_file(path: Path) -> None:
    (path / "state" / "added").write_text("")


def empty_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("")


def shorten_the_manifest(path: Path) -> None:
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:-1])


def rename_from_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_00000010"), path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (shorten, r"state/\S+ has \d+ bytes, expected \d+"),
        (lambda path: largest_file(path / "state").unlink(), r"state/\S+ is missing"),
        (add_a_file, "state/added was not there"),
        (lambda path: shutil.rmtree(path / "state"), "state/_METADATA is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (empty_the_manifest, "manifest.json is not JSON"),
        (shorten_the_manifest, "manifest.json does not match its checksum"),
        (lambda path: (path / "manifest.json").write_text("[]"), "expected a JSON object, found list"),
        (lambda path: (path / "manifest.json").write_text("{}"), "does not match its checksum"),
        (rename_from_another_step, "expected step 30, as the folder is called, found 10"),
    ],
    ids=[
        "short",
        "missing",
        "added",
        "no state",
        "no manifest",
        "empty",
        "short manifest",
        "list",
        "object",
        "renamed",
    ],
)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(three, caplog, harm, said):
    harm(three / "step_00000030")
    checkpoints = opened(three)
    check_is_of(checkpoints.restore(state_at(0)), 20)
    [record] = caplog.records
    assert "step_00000030 is damaged; it stays there but is not used" in record.message
    assert re.search(said, record.message)
    assert names(three) == {"step_00000010", "step_00000020", "step_00000030"}
    assert checkpoints.steps() == [10, 20]


def test_orbax_alone_reads_a_flipped_bit_without_a_word(three):
    """Why there are checksums of our own. When this fails, orbax has got some, and ours may go."""
    state = three / "step_00000030" / "state"
    file = largest_file(state)
    flip_bit(file, 8 * (file.stat().st_size // 2))
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in state_at(0)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reading:
        read = reading.restore(state, args=ocp.args.PyTreeRestore(item=state_at(0), restore_args=how))
    assert (read["rows"] != np.asarray(state_at(30)["rows"])).sum() == 1


def test_if_all_are_damaged_nothing_starts_anew(three):
    for path in three.iterdir():
        shorten(path)
    with pytest.raises(ValueError, match="all 3 are damaged") as error:
        opened(three).restore(state_at(0))
    assert all(name in str(error.value) for name in names(three))


def test_a_damaged_checkpoint_is_set_aside_when_its_step_comes_again(three, caplog):
    (three / "step_00000030.damaged").mkdir()  # from an earlier time
    shorten(three / "step_00000030")
    content = {
        file.relative_to(three / "step_00000030"): file.read_bytes() for file in files_of(three / "step_00000030")
    }
    with opened(three) as checkpoints:
        checkpoints.restore(state_at(0))
        save(checkpoints, 30)
    check_is_of(checkpoints.restore(state_at(0)), 30)
    aside = three / "step_00000030.damaged.2"
    assert {file.relative_to(aside): file.read_bytes() for file in files_of(aside)} == content
    assert "it is now" in caplog.text


def test_damaged_checkpoints_neither_count_nor_go(three):
    shorten(three / "step_00000030")
    with opened(three, keep_last=2) as checkpoints:
        checkpoints.restore(state_at(0))
        (three / "step_00000010" / "manifest.json").write_text("")  # seen when the metrics are read
        save(checkpoints, 25)
    assert checkpoints.steps() == [20, 25]
    assert names(three) == {f"step_000000{step}" for step in (10, 20, 25, 30)}


def test_another_format_is_no_damage(three, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", 2)
    with pytest.raises(ValueError, match="expected a checkpoint of format 2, found 1"):
        opened(three).restore(state_at(0))


# Errors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"rows": jax.ShapeDtypeStruct((ROWS + 1,), jnp.float32)},
            f"rows: expected float32[{ROWS + 1}], found float32[{ROWS}]",
        ),
        (
            {"rows": jax.ShapeDtypeStruct((ROWS,), jnp.bfloat16)},
            f"rows: expected bfloat16[{ROWS}], found float32[{ROWS}]",
        ),
        ({"more": {"x": jax.ShapeDtypeStruct((2, 3), jnp.int32)}}, "more/x: expected int32[2, 3], found nothing"),
        ({"rows": None}, f"rows: expected nothing, found float32[{ROWS}]"),
    ],
    ids=["shape", "type", "more", "less"],
)
def test_another_state_is_an_error_that_lists_what_differs(written, change, said):
    with pytest.raises(ValueError, match="step_00000030") as error:
        opened(written).restore(state_at(0) | change)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [said]


def test_keys_of_another_kind_are_another_state(tmp_path):
    with opened(tmp_path) as checkpoints:
        checkpoints.save(1, {"key": jax.random.key(0)}, {})
        with pytest.raises(ValueError, match=r"key: expected key<rbg>\[\], found key<fry>\[\]"):
            checkpoints.restore({"key": jax.random.key(0, impl="rbg")})


@pytest.mark.parametrize(
    ("state", "extra", "said"),
    [
        ({"lr": 0.1}, {}, "lr: expected an array in the state, got float"),
        ({"lr": np.zeros(3)}, {}, "lr: expected a JAX array in the state, got ndarray"),
        ({"lr": jnp.asarray(0.1)}, {}, "lr: expected an array with a type of its own, got a weakly typed float32"),
        ({"a/b": jnp.arange(2), "a": {"b": jnp.arange(2)}}, {}, "a/b: expected one array of that name, got two"),
        ({}, {"at": [1, (2, 3)]}, r"extra\['at'\]\[1\]: expected what JSON gives back as it is .* got tuple"),
        ({}, {"at": {1: 2}}, r"extra\['at'\]: expected keys that are strings, got 1"),
        ({}, {"at": np.int32(1)}, r"extra\['at'\]: .* got int32"),
    ],
    ids=["float", "numpy", "weak", "twice", "tuple", "key", "scalar"],
)
def test_what_would_not_come_back_the_same_is_refused(tmp_path, state, extra, said):
    with pytest.raises(ValueError, match=said):
        opened(tmp_path).save(1, state, extra)
    assert names(tmp_path) == set()


def no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "call", [lambda c: save(c, 2), lambda c: c.wait(), lambda c: c.restore({})], ids=["save", "wait", "restore"]
)
def test_a_failure_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch, call):
    checkpoints = opened(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(disk_folder, "write_manifest", no_space)
        save(checkpoints, 1)
        with pytest.raises(OSError, match="No space left"):
            call(checkpoints)
    assert names(tmp_path) == set()
    save(checkpoints, 2)  # and it is over with that
    checkpoints.wait()
    assert checkpoints.steps() == [2]


# Of the arrays that fail together orbax waits for the first only; the others find its event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_takes_no_more_is_an_error_until_it_does_again(tmp_path):
    checkpoints = opened(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the rows need more: orbax's own writes fail
    try:
        with pytest.raises(Exception, match="File too large"):
            save_and_wait(checkpoints, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.steps() == []
    save_and_wait(checkpoints, 2)
    check_is_of(checkpoints.restore(state_at(0)), 2)


def test_leaving_waits_for_the_save(tmp_path):
    with opened(tmp_path) as checkpoints:
        save(checkpoints, 1)
    assert names(tmp_path) == {"step_00000001"}


def test_an_error_under_way_is_not_hidden_by_a_failed_save(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_folder, "write_manifest", no_space)

    def run() -> None:
        with opened(tmp_path) as checkpoints:
            save(checkpoints, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()


def test_a_second_signal_does_not_wait_for_a_save_which_nobody_resumes_from(three, tmp_path, monkeypatch):
    written, going_on, plain = threading.Event(), threading.Event(), disk_folder.write_manifest

    def slowly(*args):
        written.set()
        going_on.wait(60)
        plain(*args)

    monkeypatch.setattr(disk_folder, "write_manifest", slowly)
    checkpoints = opened(three)

    def run() -> None:
        with checkpoints:
            save(checkpoints, 40)
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert not (three / "step_00000040").exists()
        assert written.wait(60)  # all but the manifest: nothing moves while it is copied
        left = opened(shutil.copytree(three, tmp_path / "left"))  # as the process would leave it
        check_is_of(left.restore(state_at(0)), 30)
        assert names(tmp_path / "left") == {"step_00000010", "step_00000020", "step_00000030"}
    finally:
        going_on.set()
        checkpoints.wait()


def test_a_save_that_is_not_asynchronous_raises_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_folder, "write_manifest", no_space)
    with pytest.raises(OSError, match="No space left"):
        save(opened(tmp_path, async_checkpointing=False), 1)
    assert names(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="expected a folder for checkpoints that can be written"):
        opened(tmp_path / "file" / "checkpoints")
