"""Checkpoints in an object store: as on a disk all comes back bit for bit, whatever happens to the process, the server
or the objects."""

import logging
import re
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.storage.trees import copy, download, list_files, move, remove, upload
from raggedmoe.train.checkpoint import zarr_arrays
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from tests.train.checkpoint.test_checkpoints import (
    bits,
    check_is_of,
    every_kind_of_leaf,
    opened,
    save,
    save_and_wait,
    state_at,
)


@pytest.fixture
def folder(bucket):
    return bucket / "run/checkpoints"


@pytest.fixture
def three(folder):
    """Checkpoints of steps 10, 20 and 30."""
    with opened(folder, keep_last=3) as checkpoints:
        for step in (10, 20, 30):
            save(checkpoints, step)
    return folder


def flip_bit(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "shapes"])
def test_every_kind_of_leaf_comes_back_bit_for_bit(folder, abstract):
    state = every_kind_of_leaf()
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if abstract else jnp.zeros_like(x), state)
    with opened(folder) as checkpoints:
        checkpoints.save(1, state, {})
        restored = checkpoints.restore(template)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert [bits(leaf) for leaf in jax.tree.leaves(restored.state)] == [bits(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("largest", [2**28, 64])
def test_arrays_go_where_their_templates_are_also_in_many_objects(folder, monkeypatch, largest):
    monkeypatch.setattr(zarr_arrays, "CHUNK_BYTES", largest)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rows, columns = NamedSharding(mesh, PartitionSpec("a")), NamedSharding(mesh, PartitionSpec(None, "b"))
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    saved = {
        "x": jax.device_put(values, rows),
        "columns": jax.device_put(values, columns),
        "whole": jax.device_put(values, NamedSharding(mesh, PartitionSpec())),
        "zeros": jax.device_put(np.zeros((8, 8), np.float32), rows),
        "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), rows),
        "free": jnp.asarray(values),
    }
    template = saved | {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)}
    with opened(folder) as checkpoints:
        checkpoints.save(1, saved, {})
        state = checkpoints.restore(template).state
    for name in ("x", "columns", "whole", "free"):
        np.testing.assert_array_equal(state[name], values)
    np.testing.assert_array_equal(state["zeros"], 0)
    assert [bits(state["keys"])] == [bits(saved["keys"])]
    assert state["x"].sharding == columns
    assert state["keys"].sharding.is_equivalent_to(rows, 1)
    assert not state["free"].committed


@pytest.mark.parametrize(
    ("shape", "cut"), [((), ()), ((7,), (1,)), ((4, 6), (1, 2)), ((1, 30), (1, 2)), ((3, 1), (1, 1))]
)
def test_a_large_part_is_cut_into_equal_objects(monkeypatch, shape, cut):
    monkeypatch.setattr(zarr_arrays, "CHUNK_BYTES", 8)
    assert zarr_arrays.chunk_shape(jnp.zeros(shape, jnp.float32)) == cut


def test_buffers_donated_right_after_a_save_do_not_change_it(object_server, folder):
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x - 9, state), donate_argnums=0)
    state, other = ({f"{i}": jnp.full((200_000,), i, jnp.float32) for i in range(4)} for _ in range(2))
    jax.block_until_ready(overwrite(other))
    with object_server.fault("PUT", "state-", "serve", seconds=0.2), opened(folder) as checkpoints:
        checkpoints.save(1, state, {})
        jax.block_until_ready(overwrite(state))
        restored = checkpoints.restore(state)
    for name, leaf in restored.state.items():
        np.testing.assert_array_equal(leaf, np.full(200_000, int(name)))


def test_the_manifest_is_the_last_object_and_nothing_is_read_back(object_server, folder):
    with opened(folder) as checkpoints:
        save_and_wait(checkpoints, 1)
        object_server.requests.clear()
        save_and_wait(checkpoints, 2)
    puts = [path for method, path in object_server.requests if method == "PUT"]
    assert [path.rpartition("/")[2] for path in puts[-1:]] == ["manifest.json"]
    assert len(puts) == 3  # of two arrays and the manifest
    read = [path for method, path in object_server.requests if method == "GET" and "state-" in path]
    assert read == []
    assert len(object_server.requests) < 25


def test_the_last_and_the_best_stay(folder):
    checkpoints = opened(folder, async_checkpointing=False, keep_last=1)
    for step, metric in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        checkpoints.save(step, state_at(step), {}, metric=metric)
    assert checkpoints.steps() == [2, 5]
    assert {name.partition("/")[0] for name in list_files(folder)} == {"step_00000002", "step_00000005"}


# Writers that die


@pytest.mark.parametrize("kind", ["refuse", "mute"])
def test_cut_off_at_any_write_the_newest_whole_checkpoint_is_used(object_server, three, monkeypatch, kind):
    """Refused as if the process had died before it, or with its answer lost."""
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "0")
    before = set(list_files(three))
    results = []
    for served in range(3):
        checkpoints = opened_without_preparing(three)
        with (
            object_server.fault("PUT", "step_00000040", "serve", times=served),
            object_server.fault("PUT|DELETE|POST", "", kind),
            pytest.raises(OSError, match="step_00000040"),
        ):
            save_and_wait(checkpoints, 40)
        restored = opened(three).restore(state_at(0))
        check_is_of(restored, restored.step)
        results.append(restored.step)
        left = set(list_files(three))
        assert left == before if restored.step == 30 else left > before
    assert results == ([30, 30, 30] if kind == "refuse" else [30, 30, 40])


def opened_without_preparing(folder) -> Checkpoints:
    """As they are in the middle of a run."""
    from raggedmoe.train.checkpoint.object_folder import ObjectFolder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectFolder, "prepare", lambda self: None)
        return opened(folder, keep_last=9)


def test_an_old_checkpoint_loses_its_manifest_before_its_arrays(object_server, three):
    with object_server.fault("POST|DELETE", "", "serve", times=1), object_server.fault("POST|DELETE", "", "refuse"):
        remove_quietly(three / "step_00000010")
    assert not (three / "step_00000010/manifest.json").exists()
    assert (three / "step_00000010").exists()
    assert opened(three).steps() == [20, 30]
    assert not (three / "step_00000010").exists()


def remove_quietly(path):
    with pytest.raises(OSError, match="could not be deleted"):
        remove(path)


def test_only_our_own_leftovers_are_removed(three):
    others = ("notes/x", "mine.partial/x", "step_x/x", "step_00000010.damaged/manifest.json")
    ours = (
        "step_00000040/state-1/x/c",
        "step_00000030/state-1/x/c",
        "step_00000050.partial",
        "step_00000060/written-1/1",
    )
    before = set(list_files(three))
    for name in (*others, *ours):
        (three / name).write_bytes(b"x")
    assert opened(three).steps() == [10, 20, 30]
    assert set(list_files(three)) == before | set(others)


def test_two_runs_that_save_the_same_step_do_not_mix(folder):
    """One of them has lost the folder, and does not know it yet."""
    first, second = (opened(folder, async_checkpointing=False) for _ in range(2))
    save(first, 1)
    name = second._place.begin(1)
    writing = second._place.start_writing(name, {"rows": jnp.zeros(3)})
    from raggedmoe.train.checkpoint.manifest import Manifest

    manifest = Manifest(step=1, metric=None, extra={}, leaves={}, files={})
    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        second._place.commit(name, manifest, writing.finish())
    check_is_of(opened(folder).restore(state_at(0)), 1)


# A server that is away, slow or refuses


def test_a_server_that_is_away_for_a_while_is_waited_for(object_server, three):
    with opened(three) as checkpoints:
        back = object_server.away_for(1.0)
        save(checkpoints, 40)
    back.join()
    check_is_of(opened(three).restore(state_at(0)), 40)


@pytest.mark.parametrize("what", ["state-", r"manifest\.json"])
@pytest.mark.parametrize("kind", ["busy", "cut", "mute"])
def test_a_write_that_fails_twice_is_repeated(object_server, three, what, kind):
    with object_server.fault("PUT", what, kind, times=2) as fault, opened(three) as checkpoints:
        save(checkpoints, 40)
    assert fault.seen == 2
    check_is_of(opened(three).restore(state_at(0)), 40)


def test_a_server_that_stays_away_is_an_error_and_nothing_is_lost(object_server, three, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_STORAGE_SECONDS", "0.5")
    checkpoints = opened(three)
    with (
        object_server.fault("PUT", "state-", "busy"),
        pytest.raises(OSError, match=r"state-\w+ could not be written"),
    ):
        save_and_wait(checkpoints, 40)
    assert checkpoints.steps() == [10, 20, 30]
    save_and_wait(checkpoints, 50)
    check_is_of(checkpoints.restore(state_at(0)), 50)


def test_steps_go_on_while_a_slow_server_takes_a_checkpoint(object_server, three):
    with object_server.fault("PUT", "state-", "serve", seconds=1.0), opened(three) as checkpoints:
        start = time.monotonic()
        save(checkpoints, 40)
        assert time.monotonic() - start < 0.7
    check_is_of(opened(three).restore(state_at(0)), 40)


def test_a_folder_that_cannot_be_written_is_an_error_at_once(object_server, folder):
    with (
        object_server.fault("PUT", "", "refuse"),
        pytest.raises(OSError, match="expected a folder for checkpoints that can be written"),
    ):
        opened(folder)


# Objects that change


def test_a_flipped_bit_in_any_object_is_named_and_the_one_before_is_used(three, caplog):
    newest = three / "step_00000030"
    names = list(list_files(newest))
    assert len(names) == 3
    for name in names:
        flip_bit(newest / name, 42 if name == "manifest.json" else 13)
        caplog.clear()
        check_is_of(opened(three).restore(state_at(0)), 20)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert f"{newest} is damaged; it stays there but is not used" in record.message
        assert name in record.message
        flip_bit(newest / name, 42 if name == "manifest.json" else 13)
    check_is_of(opened(three).restore(state_at(0)), 30)


def halve(path):
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])


def largest(path):
    sizes = list_files(path)
    return path / max(sizes, key=sizes.__getitem__)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: halve(path / "manifest.json"), r"manifest\.json is not JSON"),
        (lambda path: halve(largest(path)), r"state-\S+ has \d+ bytes, expected \d+"),
        (lambda path: remove(largest(path)), r"state-\S+ is missing"),
        (lambda path: (largest(path).parent / "1").write_bytes(b""), r"state-\S+ was not there"),
        (
            lambda path: (remove(path), copy(path.with_name("step_00000010"), path)),
            "expected step 30, as the folder is called, found 10",
        ),
    ],
    ids=["half a manifest", "short", "missing", "added", "renamed"],
)
def test_a_damaged_newest_is_named_and_the_one_before_is_used(three, caplog, harm, said):
    harm(three / "step_00000030")
    before = list_files(three)
    checkpoints = opened(three)
    check_is_of(checkpoints.restore(state_at(0)), 20)
    [record] = caplog.records
    assert re.search(said, record.message)
    assert list_files(three) == before
    assert checkpoints.steps() == [10, 20]


def test_a_damaged_checkpoint_is_set_aside_when_its_step_comes_again(three, caplog):
    halve(largest(three / "step_00000030"))
    before = list_files(three / "step_00000030")
    with opened(three) as checkpoints:
        checkpoints.restore(state_at(0))
        save(checkpoints, 30)
    check_is_of(checkpoints.restore(state_at(0)), 30)
    assert list_files(three / "step_00000030.damaged") == before
    assert "it is now" in caplog.text


# Checkpoints that move


def test_a_checkpoint_copied_from_the_store_to_a_disk_or_back_is_one_there(three, tmp_path):
    download(three, tmp_path / "down")
    with opened(tmp_path / "down") as checkpoints:
        check_is_of(checkpoints.restore(state_at(0)), 30)
        save(checkpoints, 40)
    upload(tmp_path / "down", three.with_name("up"))
    with opened(three.with_name("up")) as checkpoints:
        check_is_of(checkpoints.restore(state_at(0)), 40)
        save(checkpoints, 50)
        check_is_of(checkpoints.restore(state_at(0)), 50)
    move(three, three.with_name("other"))
    check_is_of(opened(three.with_name("other")).restore(state_at(0)), 30)
    assert opened(three).restore(state_at(0)) is None


def test_saves_from_threads_of_two_folders_do_not_disturb_each_other(bucket):
    def run(name: str) -> None:
        with opened(bucket / name) as checkpoints:
            for step in (1, 2):
                save(checkpoints, step)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("a", "b"):
        check_is_of(opened(bucket / name).restore(state_at(0)), 2)


def test_the_disk_is_not_touched(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened(folder) as checkpoints:
        save(checkpoints, 1)
        check_is_of(checkpoints.restore(state_at(0)), 1)
    assert list(Path(tmp_path).iterdir()) == []
