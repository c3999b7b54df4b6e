"""A run that trains adapters: what its checkpoints hold, that it goes on exactly, and what becomes of its model."""

import dataclasses
import os
import shutil
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import Decoder, interop, merge_lora
from raggedmoe.cli.convert import export
from raggedmoe.cli.train import run_training
from raggedmoe.hardware import hardware_by_name
from raggedmoe.launch import stop_signals
from raggedmoe.lora import is_adapter
from raggedmoe.models.parameters import param_specs
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.loop import begin
from raggedmoe.train.loop.log import RunLog
from raggedmoe.train.loop.saved_run import find_model
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step.programs import ONE_DEVICE
from tests.interop.folders import assert_same_params, change_json
from tests.models.drawn import drawn_params, tiny
from tests.train.loop.test_loop import TEXT
from tests.train.runs import curve, lines, share_programs

STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A checkpoint in bfloat16, as Hugging Face has them."""
    config = tiny("deepseek-v3-tiny", num_layers=2, mtp_layers=0, param_dtype=jnp.bfloat16)
    folder = tmp_path_factory.mktemp("base") / "model"
    interop.save(Decoder(config, params=drawn_params(config)), folder)
    return folder


SETTINGS = (
    "lora_rank=2",
    "lora_router=trained",
    "weight_dtype=bfloat16",
    "max_target_length=16",
    "per_device_batch_size=2",
    "tokenizer_path=bytes",
    *TEXT,
    f"steps={STEPS}",
    "checkpoint_period=2",
    "eval_interval=3",
    "eval_steps=1",
    "load_period=3",
)


@pytest.fixture
def words(base, shared_programs, monkeypatch, tmp_path):
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)
    return (f"load_parameters_path={base}", *SETTINGS, f"base_output_directory={tmp_path}")


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A whole run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch)
        words = (f"load_parameters_path={base}", *SETTINGS, f"base_output_directory={folder}", "run_name=run")
        outcome = run_training(words)
    assert outcome.code == 0, outcome.text
    return outcome


def test_only_what_learns_is_in_a_checkpoint_and_the_rest_stays_as_it_was(base, whole):
    stored = find_model(f"{whole.folder}@{STEPS}").run.open_checkpoint()
    names = {name.partition("params/")[2] or name for name in stored.manifest.leaves if "params" in name}
    specs = param_specs(whole.model.config)
    moved = {name for name, spec in specs.items() if spec.updated_by is not None}
    assert len(names) == len(moved)
    before = interop.load(base).params
    for name, spec in specs.items():
        if spec.updated_by is None:
            assert np.asarray(whole.model.params[name]).tobytes() == np.asarray(before[name]).tobytes(), name
    routers = [name for name in moved if name.endswith("router_kernel")]
    assert all(np.asarray(whole.model.params[name]).any() for name in moved if is_adapter(name))
    assert all(not np.array_equal(whole.model.params[name], before[name]) for name in routers)
    assert whole.model.config.param_dtype == jnp.bfloat16


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(words, whole, monkeypatch):
    step = RunLog.step

    def step_and_stop(log, number, report):
        step(log, number, report)
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunLog, "step", step_and_stop)
    stopped = run_training((*words, "run_name=run"))
    assert stopped.code == 75
    monkeypatch.setattr(RunLog, "step", step)
    resumed = run_training((*words, "run_name=run"))
    assert resumed.code == 0, resumed.text
    assert any("resumed" in line.values() for line in lines(resumed.folder / "metrics.jsonl"))
    assert curve(resumed.folder) == curve(whole.folder)
    for name, value in whole.model.params.items():
        assert np.asarray(resumed.model.params[name]).tobytes() == np.asarray(value).tobytes(), name


@pytest.mark.slow
def test_a_mesh_trains_the_adapters_of_one_device_beside_the_same_base(words, whole):
    kept = [word for word in words if not word.startswith("per_device_batch_size")]
    outcome = run_training((*kept, "fsdp_parallelism=2", "per_device_batch_size=1", "run_name=mesh"))
    assert outcome.code == 0, outcome.text
    assert outcome.model.companions.base == whole.model.companions.base
    losses, expected = (run.metrics.series("loss").values for run in (outcome, whole))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    resumed = run_training((*words, "run_name=mesh"))  # on one device, all steps done
    assert resumed.code == 0, resumed.text


def test_a_base_that_changed_is_refused(words, whole, tmp_path, monkeypatch):
    loaded = interop.load

    def load_another(folder, **options):
        model = loaded(folder, **options)
        embedding = model.variables["embedding"]
        embedding.set_value(embedding.get_value().at[3, 5].multiply(1.5))
        return model

    monkeypatch.setattr(interop, "load", load_another)
    shutil.copytree(whole.folder, tmp_path / "run")
    with pytest.raises(ValueError, match="beside other weights"):
        run_training((*words, "run_name=run"))


def test_adapters_are_resumed_beside_weights_of_another_type(words, whole, tmp_path):
    """As on a chip with other activations: the same base is known again, and what learns is as it was."""
    shutil.copytree(whole.folder, tmp_path / "run")
    words = tuple(word for word in words if not word.startswith("weight_dtype"))
    config = resolve(read_words((*words, "run_name=run")), hardware_by_name("cpu"))
    assert config.step.model.param_dtype == jnp.float32
    data = open_data(config.data, config.step.model.vocab_size, config.batch_size)
    with begin.open_checkpoints(config) as checkpoints:
        start = begin.find_start(config, data, checkpoints, ONE_DEVICE)
    assert (start.resumed, start.step) == (True, STEPS)
    assert start.state.frozen["embedding"].dtype == jnp.float32
    for name, value in start.state.params.items():
        assert np.array_equal(value, whole.model.params[name]), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_folder_of_adapters_is_written_again_in_another_type(whole, tmp_path, dtype):
    model = interop.load(whole.folder / "model", param_dtype=dtype)
    interop.save_native(model, tmp_path / "again")
    again = interop.load(tmp_path / "again")
    assert again.config == model.config
    assert_same_params(again, model)
    assert again.companions.base == whole.model.companions.base


def test_a_folder_of_an_older_version_has_a_fingerprint_without_a_type(whole, tmp_path):
    shutil.copytree(whole.folder / "model", tmp_path / "older")
    typed = whole.model.companions.base.fingerprint
    change_json(tmp_path / "older" / "raggedmoe.json", lambda written: written["base"].update(fingerprint=typed[-16:]))
    found = interop.load(tmp_path / "older")
    assert_same_params(found, whole.model)
    assert found.companions.base.fingerprint == typed  # as it is written from now on


def test_the_models_folder_has_adapters_and_finds_the_base_again(whole, base, tmp_path):
    folder = whole.folder / "model"
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = whole.model.config
    small = sum(4 * spec.num_elements for spec in param_specs(config).values() if spec.updated_by is not None)
    assert small <= size < small + 10_000
    for place in (folder, f"{whole.folder}@{STEPS}"):
        found = find_model(place).load()
        assert found.config.lora == config.lora
        for name, value in whole.model.params.items():
            assert np.array_equal(found.params[name], value), name
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    text = (moved / "raggedmoe.json").read_text()
    (moved / "raggedmoe.json").write_text(text.replace(str(base), str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="found no folder there"):
        interop.load(moved)


def test_adapters_are_exported_merged_or_not_at_all(whole, tmp_path):
    with pytest.raises(ValueError, match="--merge"):
        export(str(whole.folder), str(tmp_path / "unmerged"))
    assert export(str(whole.folder), str(tmp_path / "merged"), merge=True) == 0
    expected = merge_lora(whole.model)
    found = interop.load(tmp_path / "merged")
    assert found.config.lora is None
    for name, value in expected.params.items():
        assert np.array_equal(found.params[name], value), name


def test_a_branch_takes_the_adapters_and_a_run_of_whole_weights_is_refused(words, whole, base):
    words = (f"model_name={base}", *words[1:])
    outcome = run_training((*words, f"init_from={whole.folder}", "run_name=branch"))
    assert outcome.code == 0, outcome.text
    kept = [word for word in words if not word.startswith("lora_")]
    with pytest.raises(ValueError, match="one of adapters"):
        run_training((*kept, f"init_from={whole.folder}", "run_name=plain"))


@pytest.mark.parametrize(
    ("chip", "words", "dtype"),
    [
        ("cpu", (), "float32"),
        ("h100", (), "bfloat16"),
        ("h100", ("dtype=float32",), "float32"),
        ("cpu", ("weight_dtype=bfloat16",), "bfloat16"),
    ],
)
def test_frozen_weights_have_the_type_that_they_are_stored_in_unless_activations_are_wider(base, chip, words, dtype):
    config = read_words((str(base), "lora_rank=2", "dataset_type=synthetic", *words))
    resolved = resolve(config, hardware_by_name(chip))
    assert resolved.step.model.param_dtype == jnp.dtype(dtype)
    assert resolved.asked.overrides.weight_dtype == dtype
    whole = resolve(read_words((str(base), "dataset_type=synthetic")), hardware_by_name(chip))
    assert whole.step.model.param_dtype == jnp.float32
    # Adapters learn with ten times the rate of loaded weights.
    assert resolved.asked.optimizer.learning_rate == pytest.approx(10 * whole.asked.optimizer.learning_rate)


def test_adapters_without_parameters_to_stand_beside_are_refused(words):
    with pytest.raises(ValueError, match="from_scratch"):
        run_training((*words, "from_scratch=true", "run_name=none"))
    with pytest.raises(ValueError, match="preset"):
        run_training((*words[1:], "demo", "lora_rank=2", "run_name=none"))
    with pytest.raises(ValueError, match="lora_targets"):
        run_training((*words, "lora_targets=attention.nothing", "run_name=none"))


def test_a_folder_with_adapters_is_not_begun_from_scratch(words, whole):
    kept = [word for word in words[1:] if not word.startswith("lora_")]
    with pytest.raises(ValueError, match="from_scratch=true: expected a model of weights alone"):
        run_training((*kept, f"model_name={whole.folder / 'model'}", "from_scratch=true", "run_name=none"))


def test_adapters_are_trained_on_from_their_own_folder(words, whole):
    kept = [word for word in words[1:] if not word.startswith("lora_")]
    outcome = run_training((*kept, f"load_parameters_path={whole.folder / 'model'}", "run_name=more"))
    assert outcome.code == 0, outcome.text
    assert outcome.model.config.lora == whole.model.config.lora
    assert dataclasses.replace(outcome.model.companions.base) == whole.model.companions.base


def _with_word(words, word):
    """Give a setting another value."""
    name = word.partition("=")[0]
    return (*(other for other in words if not other.startswith(f"{name}=")), word)


@pytest.mark.parametrize("word", ["lora_alpha=64", "lora_rank=3", "lora_targets=attention", "lora_router=frozen"])
def test_adapters_of_a_folder_that_are_not_those_of_the_settings_are_refused(words, whole, base, word):
    """With another factor, they would compute something else."""
    words = (f"model_name={base}", *words[1:], f"load_parameters_path={whole.folder / 'model'}")
    with pytest.raises(
        ValueError, match=r"lora_rank=2 lora_alpha=32.0 .*model itself \(model_name\) without lora_rank"
    ):
        run_training((*_with_word(words, word), "run_name=other"))


@pytest.mark.parametrize("word", ["lora_alpha=64", "lora_rank=3", "lora_router=frozen"])
def test_a_branch_with_other_adapters_than_its_parents_is_refused(words, whole, base, word):
    words = (f"model_name={base}", *words[1:])
    with pytest.raises(ValueError, match=f"init_from=.*{word}.*, got one of lora_rank=2 lora_alpha=32.0 "):
        run_training((*_with_word(words, word), f"init_from={whole.folder}", "run_name=other"))


def test_what_frozen_routers_do_not_read_is_said(base):
    said = ("bias_update_rate=0.5", "opt_type=muon", "muon_beta=0.9")
    frozen, trained = (
        resolve(read_words((str(base), "lora_rank=2", f"lora_router={router}", *said)), hardware_by_name("cpu")).notes
        for router in ("frozen", "trained")
    )
    for word in said:
        assert any(note.startswith(f"{word}: changes nothing: ") for note in frozen), word
        assert not any(note.startswith(f"{word}: changes nothing: ") for note in trained), word
