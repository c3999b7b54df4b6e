"""Models in an object store: read where they are, and written such that there always is a whole one."""

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop.folder import INDEX
from raggedmoe.interop.writing import remove_unnamed_objects
from raggedmoe.models.module import Decoder
from raggedmoe.storage import object_store
from raggedmoe.storage.trees import download, list_files, upload
from tests.interop.folders import GOLDEN


@pytest.fixture(scope="module")
def models():
    """Two models of the same sizes."""
    first = interop.load(GOLDEN / "olmoe")
    return first, Decoder(first.config, params={n: jnp.asarray(np.asarray(p) + 1) for n, p in first.params.items()})


def check_equal(model, expected):
    assert model.config == expected.config
    assert model.params.keys() == expected.params.keys()
    for name, param in model.params.items():
        np.testing.assert_array_equal(param, expected.params[name])


@pytest.mark.parametrize("part_bytes", [2**23, 1000])
def test_a_hugging_face_folder_is_read_where_it_is(bucket, models, monkeypatch, part_bytes):
    upload(GOLDEN / "olmoe", bucket / "olmoe")
    monkeypatch.setattr(object_store, "PART_BYTES", part_bytes)
    check_equal(interop.load(f"{bucket / 'olmoe'}"), models[0])


def test_a_model_in_several_files_comes_back_and_goes_to_a_disk(bucket, models, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    interop.save_native(models[0], bucket / "model", shard_bytes=50_000, companions=tmp_path)
    assert len(list_files(bucket / "model")) > 4
    check_equal(interop.load(bucket / "model"), models[0])
    download(bucket / "model", tmp_path / "model")
    check_equal(interop.load(tmp_path / "model"), models[0])
    interop.save(interop.load(bucket / "model"), tmp_path / "out", companions=bucket / "model")
    check_equal(interop.load(tmp_path / "out"), models[0])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_cut_off_at_any_write_the_model_before_is_whole(object_server, bucket, models, monkeypatch):
    interop.save_native(models[0], bucket / "model")
    before = set(list_files(bucket / "model"))
    for served in range(5):  # raggedmoe.json, the tensors in three requests, the index
        with (
            monkeypatch.context() as patch,
            object_server.fault("PUT|POST", "", "serve", times=served),
            object_server.fault("PUT|POST|DELETE", "", "refuse"),
        ):
            patch.setenv("RAGGEDMOE_STORAGE_SECONDS", "0")
            with pytest.raises(OSError, match="could not be written"):
                interop.save_native(models[1], bucket / "model")
        check_equal(interop.load(bucket / "model"), models[0])
    assert len(list_files(bucket / "model")) > len(before)
    remove_unnamed_objects(bucket / "model")
    assert set(list_files(bucket / "model")) == before
    interop.save_native(models[1], bucket / "model")
    check_equal(interop.load(bucket / "model"), models[1])
    assert len(list_files(bucket / "model")) == len(before)


def test_a_model_whose_first_writer_was_killed_is_not_there(bucket, models):
    interop.save_native(models[0], bucket / "model")
    (bucket / "model").bucket.delete([(bucket / "model" / INDEX).key])
    with pytest.raises(ValueError, match="found neither"):
        interop.load(bucket / "model")


def test_a_short_object_is_named(bucket, models):
    interop.save_native(models[0], bucket / "model")
    [tensors] = [name for name in list_files(bucket / "model") if name.endswith(".safetensors")]
    path = bucket / "model" / tensors
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{tensors}: .*truncated"):
        interop.load(bucket / "model")


def test_a_place_that_is_not_there_or_of_another_kind_is_refused(bucket, models):
    for place, said in ((f"{bucket / 'none'}", "config.json"), ("gs://bucket/model", "x-goog-if-generation-match")):
        with pytest.raises((ValueError, OSError), match=said):
            interop.load(place)
    with pytest.raises(ValueError, match="expected a folder of this machine to export to"):
        interop.save(models[0], bucket / "out")
