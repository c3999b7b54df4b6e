"""The scripts of examples/ run, at small sizes, and say what they promise."""

import json
import re
import runpy
from pathlib import Path

import pytest

from raggedmoe import interop
from tests.train.loop.test_model_folder import folder, text  # noqa: F401  (fixtures)

pytestmark = pytest.mark.ci
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a script in this process, in an empty folder, and returns what it printed."""

    def run_script(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_the_layer_learns_in_a_model(run):
    printed = run("layer_in_a_model.py", "--steps", 151, "--dim", 32, "--experts", 4)
    accuracies = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 4
    assert accuracies[-1] > accuracies[0] + 15


def test_the_operations_give_what_ragged_dot_gives(run):
    printed = run("ragged_operations.py", "--rows", 64, "--experts", 4, "--dim", 16)
    differences = [float(number) for number in re.findall(r"gradient (\S+)$", printed, re.M)]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_a_folder_is_fine_tuned_and_written_back(run, folder, text, tmp_path):  # noqa: F811
    small = ("--steps", 2, "--length", 16, "--batch", 2)
    printed = run("finetune_hf_folder.py", folder, text, *small, "--out", "tuned")
    assert re.findall(r"^after step (\d+): held-out loss \d", printed, re.M) == ["0", "2"]
    tuned = interop.load(tmp_path / "tuned")
    assert tuned.config.num_layers == interop.load(folder).config.num_layers
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_adapters_are_trained_on_conversations_and_merged(run, folder, tmp_path):  # noqa: F811
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }} <stop> {% endfor %}")
    talk = {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four"}]}
    (tmp_path / "talks.jsonl").write_text("\n".join(20 * [json.dumps(talk)]))
    small = ("--rank", 2, "--steps", 2, "--length", 16, "--batch", 2)
    printed = run("lora_on_chat.py", folder, "talks.jsonl", *small, "--out", "tuned")
    assert re.findall(r"^after step (\d+): held-out loss \d", printed, re.M) == ["0", "2"]
    before, after = interop.load(folder).params, interop.load(tmp_path / "tuned").params
    assert before.keys() == after.keys()
    changed = {name.split(".", 3)[-1] for name in before if (before[name] != after[name]).any()}
    matrices = {"attention": ("wq", "wk", "wv", "wo"), "mlp": ("wi_0", "wi_1", "wo"), "moe": ("wi_0", "wi_1", "wo")}
    assert changed == {f"{part}.{name}" for part, names in matrices.items() for name in names}


def test_a_mesh_of_ones_own_gives_what_one_device_gives(run):
    printed = run("own_mesh.py", "--dim", 16, "--experts", 4, "--tokens", 4)
    assert "wi_0: P('chips', None, 'hosts') of (4, 32, 16)" in printed
    alone, split = re.search(r"loss (\S+) on one device, (\S+) on 4", printed).groups()
    difference, largest = re.search(r"gradient: (\S+), of up to (\S+)", printed).groups()
    assert abs(float(alone) - float(split)) < 1e-5 * float(alone)
    assert float(difference) < 1e-5 * float(largest)


def test_a_big_run_is_planned(run):
    printed = run("plan_a_big_run.py", "deepseek-v3", "--expert", 1, 8, 3)
    assert printed.count("(fits)") == 2
    sent = [float(number) for number in re.findall(r"layer ([\d.]+) GB", printed)]
    assert sent[0] > sent[1] > 0
    assert re.search(
        r"^expert +3: expert_parallelism=3 = 3 devices, but there are 512; use degrees whose", printed, re.M
    )


def test_the_docs_name_every_example():
    pages = (EXAMPLES.parent / "README.md").read_text() + (EXAMPLES.parent / "docs" / "howto.md").read_text()
    assert all(f"examples/{path.name})" in pages for path in EXAMPLES.glob("*.py"))
