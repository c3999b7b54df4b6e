"""Training on a mesh: the same curve on every one, and a run that goes on on another."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe.cli.train import train
from raggedmoe.hardware import HARDWARE
from raggedmoe.sharding.axes import ONE_DEVICE
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.checkpoint import checkpoints as checkpoint
from raggedmoe.train.checkpoint.checkpoints import Checkpoints
from raggedmoe.train.loop import begin
from raggedmoe.train.loop.begin import check_processes_agree
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import CheckpointConfig
from raggedmoe.train.settings.words import read_words
from raggedmoe.train.step import programs as programs_module
from raggedmoe.train.step.fit import state_bytes
from raggedmoe.train.step.programs import compile_programs, make_init, state_template
from tests.train.runs import TINY, curve, lines
from tests.train.runs import train as train_in_process
from tests.train.step.small_step import (
    BATCH,
    EPS,
    WHOLE,
    assert_same_bits,
    first_state,
    gradients,
    small_model,
    with_losses,
)

STEPS = 10
MODEL = dataclasses.replace(small_model(aux_loss="sequence", aux_loss_weight=0.1, z_loss_weight=0.03), mtp_layers=0)
PARTS = dataclasses.replace(with_losses(WHOLE, gradient_accumulation_steps=2), model=MODEL)
SPLIT = Plan(slices=2, fsdp=2, tensor=2).logical_mesh()


def placed(state, mesh, config=PARTS):
    return jax.tree.map(lambda a, t: jax.device_put(a, t.sharding), state, state_template(config, mesh))


def run_steps(mesh, state):
    """The losses of every step, the state after them, and the gradients of the first."""
    programs, losses, first = compile_programs(PARTS, BATCH, None, mesh), [], None
    for _ in range(STEPS):
        state, report = programs.step(state, BATCH)
        first = first or jax.device_get(gradients(state))
        losses.append(report.losses)
    return jax.device_get(losses), state, first


@pytest.mark.ci
def test_ten_steps_on_a_mesh_have_the_losses_of_one_device_and_leave_the_state_in_its_place():
    """All losses of routers, several micro-batches, the loss-free rule; each device has one row of a micro-batch."""
    state = jax.tree.map(jnp.copy, first_state(PARTS))  # a step takes its state's memory, where each array has its own
    single, _, expected = run_steps(ONE_DEVICE, jax.tree.map(jnp.copy, state))
    found, state, first = run_steps(SPLIT, placed(state, SPLIT))
    for name, gradient in expected.items():  # Adam does not tell a gradient from twice that gradient
        bound = 64 * EPS * float(np.abs(gradient).max())
        np.testing.assert_allclose(first[name], gradient, rtol=0, atol=bound, err_msg=name)
    for ours, theirs in zip(found, single, strict=True):
        for name in ("loss", "aux_loss", "z_loss"):
            np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-4, err_msg=name)
        assert ours.load.sum() == theirs.load.sum()
    template = state_template(PARTS, SPLIT)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(template), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


MUON = dataclasses.replace(PARTS, optimizer=dataclasses.replace(PARTS.optimizer, opt_type="muon"))


@functools.cache
def muon_alone():
    """The programs of one device, and the losses and the state of four steps there."""
    programs, state, losses = compile_programs(MUON, BATCH, None), copied(first_state(MUON)), []
    for _ in range(4):
        state, report = programs.step(state, BATCH)
        losses.append(float(report.losses.loss))
    return programs, losses, state


def copied(state):
    return jax.tree.map(jnp.copy, state)  # a step takes its state's memory, and here several counters share one array


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        Plan(slices=2, fsdp=2, tensor=2),
        pytest.param(Plan(fsdp=2, expert=2), marks=pytest.mark.slow),
        pytest.param(Plan(expert=2), marks=pytest.mark.slow),
    ],
    ids=["8", "4", "2"],
)
def test_steps_of_muon_have_the_losses_of_one_device(plan):
    mesh = plan.logical_mesh()
    programs = compile_programs(MUON, BATCH, None, mesh)
    state = placed(copied(first_state(MUON)), mesh, MUON)
    _, losses, _ = muon_alone()
    for expected in losses:
        state, report = programs.step(state, BATCH)
        np.testing.assert_allclose(report.losses.loss, expected, rtol=1e-4)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(state_template(MUON, mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


@pytest.mark.ci
def test_steps_of_muon_go_on_from_a_checkpoint_bit_for_bit(tmp_path):
    programs, _, whole = muon_alone()
    state = copied(first_state(MUON))
    for _ in range(2):
        state, _ = programs.step(state, BATCH)
    with Checkpoints(tmp_path, CheckpointConfig(async_checkpointing=False)) as checkpoints:
        checkpoints.save(2, state, {})
        state = checkpoints.restore(state_template(MUON)).state
    for _ in range(2):
        state, _ = programs.step(state, BATCH)
    assert_same_bits(state, whole)


@pytest.mark.ci
def test_a_new_state_is_made_in_its_parts_and_is_the_same_on_every_mesh():
    key = jax.random.key(3)
    states = {mesh: make_init(WHOLE, mesh)(key) for mesh in (ONE_DEVICE, SPLIT)}
    for name, whole in jax.device_get(states[ONE_DEVICE].params).items():
        # The same draws; a part's program may round a normal number's polynomial in another place (seen on JAX 0.10.2).
        split = jax.device_get(states[SPLIT].params[name])
        np.testing.assert_allclose(split, whole, rtol=1e-6, atol=1e-9, err_msg=name)
    table = states[SPLIT].params["embedding"]
    assert len({shard.data.shape for shard in table.addressable_shards}) == 1
    assert table.addressable_shards[0].data.size < table.size


@pytest.mark.ci
@pytest.mark.parametrize(
    "there",
    [
        pytest.param(ONE_DEVICE, id="one", marks=pytest.mark.slow),
        pytest.param(Plan(fsdp=4).logical_mesh(), id="fsdp-4"),
    ],
)
def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path, there):
    state = placed(first_state(WHOLE), SPLIT, WHOLE)
    with Checkpoints(tmp_path, CheckpointConfig(async_checkpointing=False)) as checkpoints:
        checkpoints.save(1, state, {})
        restored = checkpoints.restore(state_template(WHOLE, there)).state
    assert_same_bits(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state_template(WHOLE, there)), strict=True):
        assert wanted.sharding is None or leaf.sharding == wanted.sharding


def test_processes_with_other_settings_or_data_are_refused(monkeypatch):
    config = resolve(read_words(["demo", "learning_rate=0.1"]), HARDWARE["cpu"])
    check_processes_agree(config, "abc")
    theirs = {**config.asked.values(), "learning_rate": 0.001, "the data": "def"}
    monkeypatch.setattr(begin, "broadcast_from_first", lambda mine: theirs)
    message = r"differs from process 0: learning_rate=0.1 here and 0.001 there; the data=abc here and def there; expec"
    with pytest.raises(ValueError, match=message):
        check_processes_agree(config, "abc")


@pytest.mark.ci
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(), id="one", marks=pytest.mark.slow),
        pytest.param(Plan(fsdp=4), id="fsdp-4"),
    ],
)
def test_an_evaluation_that_needs_more_than_a_step_counts(monkeypatch, plan):
    """With the optimizer's state beside it."""
    config = dataclasses.replace(WHOLE, model=dataclasses.replace(MODEL, num_layers=1, dense_layers=()))
    monkeypatch.setattr(programs_module, "_bytes_needed", lambda compiled, beside=0: beside or 1)
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: None)
    mesh = plan.logical_mesh()
    assert compile_programs(config, BATCH, None, mesh).bytes_needed == 1
    moments = state_bytes(config.model, plan).moments
    assert moments <= compile_programs(config, BATCH, BATCH, mesh).bytes_needed <= 1.01 * moments


def test_a_folder_that_a_process_does_not_see_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(checkpoint, "broadcast_from_first", lambda mine: "step_000000000007.partial")
    monkeypatch.setattr(checkpoint, "VISIBLE_SECONDS", 0.1)
    with pytest.raises(OSError, match=r"expected a folder that all processes see, .* is not seen by process 1; name"):
        Checkpoints(tmp_path)


# --- Whole runs

ROWS = 8
WORDS = (*TINY[:-1], "checkpoint_period=5", "eval_interval=5", "eval_steps=2", "tensorboard=false")
CONSTANT = ("warmup_steps=0", "schedule=constant")  # a schedule that does not ask for the last step
ON_DEVICES = {
    1: (),
    2: ("expert_parallelism=2",),
    4: ("fsdp_parallelism=2", "tensor_parallelism=2"),
    8: ("data_parallelism=2", "expert_parallelism=-1", "use_ring_of_experts=true"),
}


def trained(folder, num_devices, *words, steps=STEPS, batch=None):
    placing = (
        f"per_device_batch_size={batch or ROWS // num_devices}",
        *ON_DEVICES[num_devices],
        f"base_output_directory={folder}",
        "run_name=run",
    )
    assert train((*WORDS, *CONSTANT, f"steps={steps}", *placing, *words)) == 0
    return curve(folder / "run")


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("single"), 1)


def assert_same_curve(found, expected):
    """Float32 sums in another order: a few roundings, which ten steps of Adam enlarge."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected):
        assert (ours["kind"], ours["step"], ours.get("tokens")) == (
            theirs["kind"],
            theirs["step"],
            theirs.get("tokens"),
        )
        np.testing.assert_allclose(ours["loss"], theirs["loss"], rtol=1e-4)
        if theirs["step"] == 1 and theirs["kind"] == "train":  # a gradient summed twice leaves Adam's curve as it is
            np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_a_run_has_the_same_curve_on_every_mesh(single, num_devices, tmp_path):
    assert_same_curve(trained(tmp_path, num_devices), single)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["devices"] == num_devices


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_another_mesh_and_not_with_another_batch(single, tmp_path):
    trained(tmp_path, 4, steps=5)
    message = r"per_device_batch_size × devices=8 is now 16: on 2 use per_device_batch_size=4"
    with pytest.raises(ValueError, match=message):
        train(
            (
                *WORDS,
                *CONSTANT,
                *ON_DEVICES[2],
                f"base_output_directory={tmp_path}",
                "run_name=run",
                "per_device_batch_size=8",
            )
        )
    assert_same_curve(trained(tmp_path, 2), single)
    events = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line.get("what") == "resumed"]
    assert [event["text"] for event in events] == ["step_00000005"]


@pytest.mark.slow
def test_the_command_makes_the_host_devices_that_the_degrees_ask_for(tmp_path):
    words = (*WORDS, "steps=1", "fsdp_parallelism=2", "per_device_batch_size=1", f"base_output_directory={tmp_path}")
    found = train_in_process(tmp_path / "cache", *words)
    assert found.returncode == 0, found.stderr
    assert "made 2 host devices of this CPU" in found.stdout
    assert "cpu × 2 (fsdp 2)" in found.stdout


@pytest.mark.slow
def test_steps_that_drop_rows_are_run_again_with_more_room(single, tmp_path):
    """Half the room of an even share drops rows in the first step, twice as much in some later one."""
    found = trained(tmp_path, 2, "ragged_buffer_factor=0.5", "rerun_on_overflow=true")
    assert_same_curve(found, single)
    assert sum(line["dropped"] for line in found if line["kind"] == "train") == 0
    events = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line.get("what") == "rerun"]
    assert [event["step"] for event in events][:1] == [1]
    assert events[0]["text"].endswith("with ragged_buffer_factor=0.5: run again with 1.0")
    assert events[-1]["text"].endswith("with ragged_buffer_factor=1.0: run again with room for all")


@pytest.mark.slow
def test_without_a_rerun_drops_are_counted(tmp_path):
    found = trained(tmp_path, 2, "ragged_buffer_factor=0.5", steps=2)
    assert all(line["dropped"] > 0 for line in found if line["kind"] == "train")
