"""Runs that train adapters beside experts in 8 bits or fewer: of a DeepSeek-V3 in blocks of fp8, a gpt-oss in mxfp4."""

import dataclasses
import json
import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import Decoder, interop, merge_lora
from raggedmoe.cli.convert import export
from raggedmoe.cli.plan import plan
from raggedmoe.cli.train import run_training
from raggedmoe.hardware import hardware_by_name
from raggedmoe.kernels.qarray import QArray
from raggedmoe.launch import stop_signals
from raggedmoe.lora import is_adapter
from raggedmoe.models.parameters import param_specs
from raggedmoe.train.loop.log import RunLog
from raggedmoe.train.loop.saved_run import find_model
from raggedmoe.train.settings.model_defaults import keep_earlier_defaults
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step.fit import state_bytes
from tests.interop.folders import EXPERTS, bits, quantised_in, stored_quantised, write_fp8, write_mxfp4
from tests.models.drawn import drawn_params, tiny
from tests.train.loop.test_loop import TEXT
from tests.train.runs import curve, share_programs

STEPS = 4
SETTINGS = (
    "lora_rank=2",
    "max_target_length=16",
    "per_device_batch_size=2",
    "tokenizer_path=bytes",
    *TEXT,
    f"steps={STEPS}",
    "checkpoint_period=2",
    "eval_interval=2",
    "eval_steps=1",
)
FORMS = ("fp8", "mxfp4")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with the experts in 8 and in 4 bits, and the first of them in bfloat16."""
    folder = tmp_path_factory.mktemp("bases")
    v3 = tiny("deepseek-v3-tiny", num_layers=2, mtp_layers=0, param_dtype=jnp.bfloat16)
    gpt = tiny("gpt-oss-tiny", num_layers=2, param_dtype=jnp.bfloat16)
    gpt = dataclasses.replace(gpt, moe=dataclasses.replace(gpt.moe, expert_dim=64))
    for name, config in (("v3", v3), ("gpt", gpt)):
        interop.save(Decoder(config, params=drawn_params(config)), folder / name)
    return {
        "plain": folder / "v3",
        "fp8": write_fp8(folder / "v3", folder / "fp8", (16, 32)),
        "mxfp4": write_mxfp4(folder / "gpt", folder / "mxfp4"),
    }


@pytest.fixture(scope="module")
def run(bases, tmp_path_factory):
    """Trains beside one of the bases, each way once."""
    outcomes = {}

    def train(form, *more):
        if (form, *more) not in outcomes:
            with pytest.MonkeyPatch.context() as patch:
                share_programs(patch)
                folder = tmp_path_factory.mktemp(form)
                place = (f"load_parameters_path={bases[form]}", f"base_output_directory={folder}", "run_name=run")
                given = {word.partition("=")[0] for word in more}
                settings = (word for word in SETTINGS if word.partition("=")[0] not in given)
                outcome = run_training((*place, *settings, *more))
            assert outcome.code == 0, outcome.text
            outcomes[form, *more] = outcome
        return outcomes[form, *more]

    return train


def of_form(*names):
    return pytest.mark.parametrize("form", [pytest.param(name, marks=pytest.mark.ci) for name in names or FORMS])


@of_form()
def test_experts_stay_as_they_are_stored_and_checkpoints_have_the_adapters_alone(form, run, bases):
    outcome = run(form)
    specs = param_specs(outcome.model.config)
    kept = interop.load(bases[form], keep_quantised=True, param_dtype="float32").params
    for name, array in kept.items():
        if specs[name].updated_by is None:
            for ours, theirs in zip(*map(jax.tree.leaves, (outcome.model.params[name], array)), strict=True):
                np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
    quantised = {name for name, array in outcome.model.params.items() if isinstance(array, QArray)}
    assert quantised == quantised_in(specs, form) != set()
    learned = {name for name, spec in specs.items() if spec.updated_by is not None}
    stored = find_model(f"{outcome.folder}@{STEPS}").run.open_checkpoint()
    names = {name.partition("params/")[2] for name in stored.manifest.leaves if "params/" in name}
    assert names == learned
    assert all(np.asarray(outcome.model.params[name]).any() for name in learned if is_adapter(name))
    losses = outcome.metrics.series("loss").values
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@of_form()
def test_the_memory_that_is_stated_is_that_of_the_arrays(form, run, bases, capsys):
    outcome = run(form)
    words = (str(bases[form]), *SETTINGS)
    step = resolve(read_words(words), hardware_by_name("cpu")).step
    stated = state_bytes(step.model, optimizer=step.optimizer, kept=step.kept)
    params = outcome.model.params
    assert stated.params == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    learned = sum(params[name].nbytes for name, spec in param_specs(step.model).items() if spec.trained)
    assert (stated.gradients, stated.moments) == (learned, 2 * learned)
    capsys.readouterr()  # what the run printed, where this is the first test that asks for it
    assert plan(words, json=True) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["state_bytes"] == stated.total
    quantised = {name: array for name, array in params.items() if isinstance(array, QArray)}
    for name, array in quantised.items():
        assert planned["parameters"][name]["bytes"] == sum(leaf.nbytes for leaf in jax.tree.leaves(array)), name
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(list(quantised.values())))
    stored = stored_quantised(bases[form])
    of_scales = ("_scale_inv", "_scales", "_blocks")
    in_file = sum(
        tensor.nbytes for name, tensor in stored.items() if name.endswith(of_scales) or f"{name}_scale_inv" in stored
    )
    # Blocks of 16 rows that the end of a matrix of 24, or of one of 4 heads of 24, cuts are held in 8 rows: of two
    # layers 3 × 2 scales for 2 × 2, and 12 for 6.
    assert held == in_file + (2 * (2 + 6) * 4 if form == "fp8" else 0)


@of_form("fp8")
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(form, run, bases, tmp_path, shared_programs, monkeypatch):
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", 0.0)
    whole, step = run(form), RunLog.step

    def step_and_stop(log, number, report):
        step(log, number, report)
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    words = (f"load_parameters_path={bases[form]}", *SETTINGS, f"base_output_directory={tmp_path}", "run_name=run")
    monkeypatch.setattr(RunLog, "step", step_and_stop)
    assert run_training(words).code == 75
    monkeypatch.setattr(RunLog, "step", step)
    resumed = run_training(words)
    assert resumed.code == 0, resumed.text
    assert curve(resumed.folder) == curve(whole.folder)
    for name, value in whole.model.params.items():
        for ours, theirs in zip(*map(jax.tree.leaves, (resumed.model.params[name], value)), strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), name


@pytest.mark.slow
@of_form()
def test_the_losses_are_those_beside_the_dequantised_base(form, run):
    """In float32, which holds what the experts stand for to the last bit."""
    kept, widened = run(form), run(form, "keep_quantised=false")
    assert not any(isinstance(array, QArray) for array in widened.model.params.values())
    losses, expected = (outcome.metrics.series("loss").values for outcome in (kept, widened))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert kept.model.companions.base == widened.model.companions.base  # one fingerprint


@of_form()
def test_the_model_is_found_again_dequantised_or_not(form, run):
    outcome = run(form)
    for place in (outcome.folder / "model", f"{outcome.folder}@{STEPS}"):
        found = find_model(place).load(keep_quantised=True)
        for name, array in outcome.model.params.items():
            for ours, theirs in zip(*map(jax.tree.leaves, (found.params[name], array)), strict=True):
                np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
    dequantised = find_model(outcome.folder).load()
    assert not any(isinstance(array, QArray) for array in dequantised.params.values())
    assert dequantised.companions.base == outcome.model.companions.base


@of_form()
def test_adapters_are_merged_with_what_the_experts_stand_for(form, run, bases, tmp_path):
    outcome = run(form)
    assert export(str(outcome.folder), str(tmp_path / "merged"), merge=True) == 0
    exported, merged = interop.load(tmp_path / "merged").params, merge_lora(outcome.model).params
    base, params = interop.load(bases[form], param_dtype="float32").params, outcome.model.params
    assert exported.keys() == merged.keys() == base.keys()
    for name, weight in base.items():
        expected = np.asarray(weight, np.float64)
        if name.endswith(EXPERTS):
            first, second = (np.asarray(params[f"{name}_lora_{part}"], np.float64) for part in "ab")
            along = "...rd,...rf->...fd" if not name.endswith("wo") else "...rf,...rd->...fd"
            expected = expected + 16 * np.einsum(along, first, second)
        elif f"{name}_lora_b" in params or name.endswith(("k_b", "v_b")):
            continue  # of attention, as without quantisation
        for found in (exported[name], merged[name]):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def refused(bases, form, *words):
    config = read_words((str(bases[form]), *SETTINGS, "keep_quantised=true", *words))
    with pytest.raises(ValueError, match="keep_quantised=true") as raised:
        resolve(config, hardware_by_name("cpu"), 8)
    return str(raised.value)


def test_what_cannot_stay_quantised_is_refused_where_that_is_asked_for(bases):
    assert "raggedmoe quantise" in refused(bases, "plain")
    assert "one batched matmul of all experts" in refused(bases, "fp8", "moe_backend=dense")
    assert "it quantises arrays" in refused(bases, "fp8", "quantization=fp8")
    assert "takes no quantised operands" in refused(bases, "fp8", "moe_backend=megablox")
    assert "cannot be used with width_chunks=2" in refused(bases, "fp8", "width_chunks=2")
    cut = refused(bases, "fp8", "tensor_parallelism=8")
    assert re.search(r"scales of stacks\S+wi_0: its expert_dim=\d is not divisible by tensor_parallelism=8", cut)


def test_it_is_dequantised_and_said_where_nothing_is_asked_for(bases):
    for words, reason in (
        (("moe_backend=dense",), "one batched matmul of all experts"),
        (("width_chunks=2",), "width_chunks=2: what shares a scale"),
    ):
        resolved = resolve(read_words((str(bases["fp8"]), *SETTINGS, *words)), hardware_by_name("cpu"))
        assert not resolved.step.kept
        assert any("are dequantised" in note and reason in note for note in resolved.notes)
    for form, num in (("fp8", 21), ("plain", 0)):
        resolved = resolve(read_words((str(bases[form]), *SETTINGS)), hardware_by_name("cpu"))
        assert len(resolved.step.kept) == num
        assert not any("are dequantised" in note for note in resolved.notes)


def test_without_adapters_nothing_stays_quantised_and_a_run_of_before_is_told_nothing(bases):
    words = (str(bases["fp8"]), *(word for word in SETTINGS if "lora" not in word))
    asked, earlier = (
        resolve(config, hardware_by_name("cpu"))
        for config in (
            read_words((*words, "keep_quantised=true")),
            keep_earlier_defaults(read_words(words), {"steps": STEPS}),
        )
    )
    assert any("keep_quantised=true: changes nothing" in note for note in asked.notes)
    assert earlier.asked.execution.keep_quantised is False
    assert not any("keep_quantised" in note for note in earlier.notes)
    assert not asked.step.kept


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [("fsdp_parallelism=2",), ("expert_parallelism=2", "fsdp_parallelism=2")])
def test_a_mesh_trains_the_adapters_of_one_device(run, degrees):
    num = 2 ** len(degrees)
    whole = run("fp8", "per_device_batch_size=4")
    outcome = run("fp8", *degrees, f"per_device_batch_size={4 // num}")
    losses, expected = (each.metrics.series("loss").values for each in (outcome, whole))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, array in whole.model.params.items():
        if isinstance(array, QArray):
            for ours, theirs in zip(*map(jax.tree.leaves, (outcome.model.params[name], array)), strict=True):
                np.testing.assert_array_equal(bits(ours), bits(theirs), err_msg=name)
    assert outcome.model.companions.base == whole.model.companions.base
