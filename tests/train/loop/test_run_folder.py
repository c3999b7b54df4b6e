"""What a run's folder keeps: a whole model whenever its writer is killed, and all results of an earlier run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop import writing
from raggedmoe.models.companions import Companions
from raggedmoe.models.module import Decoder
from raggedmoe.train.loop.run_folder import lock_folder, save_model, set_aside, set_aside_finished
from tests.disk_calls import DiskCalls, record_kills
from tests.interop.folders import GOLDEN


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def models():
    """Two models of the same sizes."""
    first = interop.load(GOLDEN / "olmoe")
    params = {name: jnp.asarray(np.asarray(param) + 1) for name, param in first.params.items()}
    return first, Decoder(first.config, params=params, companions=Companions(files={"tokenizer.json": b"{}"}))


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The files of each of them."""
    return [content(save_model(tmp_path_factory.mktemp("whole"), model)) for model in models]


def names(folder):
    return {path.name for path in folder.iterdir()} - {".lock"}


@pytest.mark.parametrize("has_older", [True, False])
def test_killed_at_any_call_a_whole_model_is_left_and_the_next_run_begins_with_it(
    models, whole, tmp_path, monkeypatch, has_older
):
    run = tmp_path / "run"
    run.mkdir()
    if has_older:
        save_model(run, models[0])
    with monkeypatch.context() as patch:
        cuts = record_kills(patch, run, tmp_path)
        save_model(run, models[1])
    assert len(cuts) > 8
    for cut in cuts:
        kept = [content(cut / name) for name in ("model", "model.new", "model.old") if (cut / name).exists()]
        assert not has_older or any(found in whole for found in kept), names(cut)
        with lock_folder(cut):
            assert names(cut) == ({"model"} if has_older or whole[1] in kept else set())
            before = content(cut / "model")
            assert not before or before in whole
            with monkeypatch.context() as patch:
                patch.setattr(writing, "write_file", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    save_model(cut, models[1])
            assert content(cut / "model") == before
            save_model(cut, models[1])
        assert names(cut) == {"model"}
        assert content(cut / "model") == whole[1]


def test_a_model_is_on_the_disk_before_it_takes_the_place_of_another(models, tmp_path, monkeypatch):
    save_model(tmp_path, models[0])
    calls = DiskCalls(monkeypatch)
    save_model(tmp_path, models[1])
    calls.check_named_safely(tmp_path / "model.new")
    calls.check_named_safely(tmp_path / "model")


def test_what_a_killed_writer_left_of_a_model_is_removed_by_the_next_run(tmp_path):
    (tmp_path / ".model.new.1.partial").mkdir()
    (tmp_path / ".model.new.1.partial" / "model.safetensors").write_text("half")
    with lock_folder(tmp_path):
        assert names(tmp_path) == set()


# Earlier results


def finished_run(folder, steps=3):
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_text("trained")
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events").write_text("curves")
    for name in ("metrics.jsonl", "load.jsonl"):
        (folder / name).write_text("".join(f'{{"step":{step}}}\n' for step in range(1, steps + 1)))
    (folder / "run.json").write_text(json.dumps({"settings": {"steps": steps}}))
    (folder / "report.html").write_text("page")
    return content(folder)


def test_all_that_an_earlier_run_left_is_set_aside(tmp_path):
    before = finished_run(tmp_path)
    assert set_aside(tmp_path, checkpoints=False) == tmp_path / "earlier-1"
    assert content(tmp_path / "earlier-1") == before
    assert names(tmp_path) == {"earlier-1"}
    finished_run(tmp_path)
    assert set_aside(tmp_path, checkpoints=False) == tmp_path / "earlier-2"
    assert content(tmp_path / "earlier-1") == before


def test_setting_aside_that_was_killed_at_any_call_loses_nothing(tmp_path, monkeypatch):
    run = tmp_path / "run"
    before = finished_run(run)
    with monkeypatch.context() as patch:
        cuts = record_kills(patch, run, tmp_path)
        set_aside(run, checkpoints=False)
    assert len(cuts) >= len(names(run / "earlier-1"))
    for cut in cuts:
        set_aside(cut, checkpoints=False)
        kept = {}
        for aside in cut.iterdir():
            assert aside.name.startswith("earlier-")
            kept |= content(aside)
        assert kept == before


def test_a_run_that_was_killed_before_its_first_line_leaves_nothing_to_set_aside(tmp_path):
    for name in ("metrics.jsonl", "load.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_text("header")
    before = names(tmp_path)
    assert set_aside(tmp_path, checkpoints=False) is None
    assert names(tmp_path) == before


def test_a_finished_run_that_goes_on_before_its_end_keeps_what_it_had(tmp_path):
    before = finished_run(tmp_path)
    assert set_aside_finished(tmp_path, step=3) is None
    assert content(tmp_path) == before
    assert set_aside_finished(tmp_path, step=2) == tmp_path / "earlier-1"
    assert content(tmp_path / "earlier-1") == {k: v for k, v in before.items() if k != "tensorboard/events"}
    assert names(tmp_path) == {"earlier-1", "metrics.jsonl", "load.jsonl", "run.json", "tensorboard"}


def test_the_model_of_a_run_that_was_longer_when_it_was_killed_stays(tmp_path):
    finished_run(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"steps": 9}}))  # killed on the way from 3 to 9
    before = content(tmp_path)
    assert set_aside_finished(tmp_path, step=2) is None
    assert content(tmp_path) == before
