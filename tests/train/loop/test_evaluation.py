"""Evaluation during a run: on several named sets, each with its own loss, and by a sample of text."""

import json
from html import escape

import jax
import numpy as np
import pytest

from raggedmoe.cli.train import train
from raggedmoe.interop import load
from raggedmoe.models.generate import generate
from raggedmoe.train.loop.record import read_run
from raggedmoe.train.loop.sample import SAMPLING, SEED
from raggedmoe.train.report.build import write_report
from raggedmoe.train.report.comparison import write_comparison
from tests.train.runs import TINY, curve, lines

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("shared_programs")]
STEPS = 4
CODE, NEWS = "def f(x):\n    return x\n" * 9, "It rained again today. " * 9


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, content in (("code", CODE), ("news", NEWS), ("train", "Some words to learn. " * 40)):
        (folder / f"{name}.txt").write_text(content)
    return folder


def words(texts, tmp_path, name, *more):
    data = ("dataset_type=text", f"dataset_path={texts / 'train.txt'}", "add_eos=false", "tensorboard=false")
    folder = (f"base_output_directory={tmp_path}", f"run_name={name}")
    steps = () if any(word.startswith("steps=") for word in more) else (f"steps={STEPS}",)
    return (*TINY, *data, *steps, "eval_interval=2", "checkpoint_period=2", "eval_steps=99", *folder, *more)


def named(texts, *names):
    return "eval_paths=" + ",".join(f"{name}={texts / name}.txt" for name in names)


def loss_by_hand(model, text):
    """The mean loss of a text's bytes in rows of 16, from the logits in float64."""
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    rows = np.pad(tokens, (0, -len(tokens) % 16)).reshape(-1, 16)
    logits = np.asarray(jax.jit(model)(rows), np.float64).reshape(rows.size, -1)[: len(tokens) - 1]
    top = logits.max(-1)
    sums = np.log(np.exp(logits - top[:, None]).sum(-1)) + top
    return np.mean(sums - logits[np.arange(len(tokens) - 1), tokens[1:]])


def test_each_named_set_has_its_loss_in_the_line_of_an_evaluation(texts, tmp_path, capsys):
    run = words(texts, tmp_path, "run", named(texts, "code", "news"))
    assert train(run) == 0
    assert "; code " in capsys.readouterr().out
    found = [line for line in curve(tmp_path / "run") if line["kind"] == "eval"]
    assert [line["step"] for line in found] == [0, 2, 4]
    model = load(tmp_path / "run" / "model")
    for name, text in (("code", CODE), ("news", NEWS)):
        assert found[-1][f"loss/{name}"] == pytest.approx(loss_by_hand(model, text), rel=1e-5)
    assert found[-1]["loss"] not in (found[-1]["loss/code"], found[-1]["loss/news"])

    # What is evaluated changes nothing of what is learned; in another order, each set has the same loss.
    alone = words(texts, tmp_path, "alone", named(texts, "news", "code"), "held_out=0")
    assert train(alone) == 0
    assert "held-out loss on news " in capsys.readouterr().out
    assert train(words(texts, tmp_path, "plain")) == 0
    plain = [line for line in curve(tmp_path / "plain") if line["kind"] == "eval"]
    assert [line["loss"] for line in plain] == [line["loss"] for line in found]
    assert [line["loss"] for line in curve(tmp_path / "plain")] == [line["loss"] for line in curve(tmp_path / "run")]
    first = next(line for line in curve(tmp_path / "alone") if line["kind"] == "eval")
    assert first["loss"] == first["loss/news"] == found[0]["loss/news"]
    assert first["loss/code"] == found[0]["loss/code"]

    page = write_report(tmp_path / "run").read_text()
    assert "Loss by held-out set (nats per token)" in page
    assert f"news {found[-1]['loss/news']:.3f}" in page
    page = write_comparison([read_run(tmp_path / "run"), read_run(tmp_path / "plain")]).read_text()
    assert f"Held-out loss (nats per token): {'code'}" in page
    assert "Loss on news" in page


def test_the_first_named_set_decides_which_checkpoint_is_best(texts, tmp_path):
    assert train(words(texts, tmp_path, "run", named(texts, "news", "code"), "held_out=0", "keep_last=1")) == 0
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert described["settings"]["eval_paths"] == [f"news={texts / 'news'}.txt", f"code={texts / 'code'}.txt"]
    events = lines(tmp_path / "run" / "metrics.jsonl")
    saved = [line["text"] for line in events if line.get("what") == "checkpoint"]
    losses = [line["loss/news"] for line in events if line["kind"] == "eval"]
    assert saved == [f"held-out loss {loss:.4f}" for loss in losses[1:]]


def test_a_run_goes_on_with_the_sets_that_it_had(texts, tmp_path):
    same = (named(texts, "code"), "schedule_steps=4")
    assert train(words(texts, tmp_path, "run", *same, "steps=2")) == 0
    assert train(words(texts, tmp_path, "run", *same)) == 0
    assert [line["step"] for line in curve(tmp_path / "run") if "loss/code" in line] == [0, 2, 4]
    with pytest.raises(ValueError, match=r"is of a run with other settings: eval_paths=.*is now"):
        train(words(texts, tmp_path, "run", named(texts, "news"), "schedule_steps=4"))


def samples(folder):
    return [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "sample"]


def test_each_evaluation_has_a_sample_of_text_and_training_knows_nothing_of_it(texts, tmp_path, capsys):
    data = (f"dataset_path={texts}", "held_out=0.1")
    base = [word for word in words(texts, tmp_path, "run") if not word.startswith("dataset_path=")]
    assert train((*base, *data, "sample_tokens=12")) == 0
    found = samples(tmp_path / "run")
    assert [line["step"] for line in found] == [0, 2, 4]
    assert len({line["prompt"] for line in found}) == 1
    assert any(found[0]["prompt"] in text for text in (CODE, NEWS, "Some words to learn. " * 40))
    shown = f"goes on {json.dumps(found[-1]['text'], ensure_ascii=False)}"
    assert shown in capsys.readouterr().out
    page = write_report(tmp_path / "run").read_text()
    assert "What the model wrote after 3 evaluations." in page
    assert escape(found[-1]["text"]) in page

    # The last is what the finished model writes.
    model = load(tmp_path / "run" / "model")
    prompt = list(found[-1]["prompt"].encode())
    made = [token for (token,) in generate(model, [prompt], max_new_tokens=12, sampling=SAMPLING, seed=SEED)]
    assert bytes(made).decode(errors="replace") == found[-1]["text"]

    without = [word.replace("run_name=run", "run_name=without") for word in base]
    assert train((*without, *data)) == 0
    assert not samples(tmp_path / "without")
    assert curve(tmp_path / "without") == curve(tmp_path / "run")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "without")]
    assert weights[0] == weights[1]


def test_a_run_that_goes_on_writes_the_same_samples(texts, tmp_path):
    asked = ("sample_tokens=12", "sample_prompt=It rained", "schedule_steps=4")
    assert train(words(texts, tmp_path, "whole", *asked)) == 0
    assert train(words(texts, tmp_path, "run", *asked, "steps=2")) == 0
    assert train(words(texts, tmp_path, "run", *asked)) == 0
    assert samples(tmp_path / "run") == samples(tmp_path / "whole")
    assert [line["prompt"] for line in samples(tmp_path / "run")] == ["It rained"] * 3


@pytest.mark.slow
def test_a_run_on_a_mesh_samples_too(texts, tmp_path):
    asked = ("sample_tokens=6", "sample_prompt=It rained", "steps=1", "eval_interval=0")
    mesh = ("fsdp_parallelism=2", "expert_parallelism=2", "moe_backend=ragged_dot")
    base = [word for word in words(texts, tmp_path, "run", *asked) if word != "eval_interval=2"]
    assert train((*base, *mesh)) == 0
    assert [line["step"] for line in samples(tmp_path / "run")] == [0, 1]
    assert all(line["text"] for line in samples(tmp_path / "run"))
