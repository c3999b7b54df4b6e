"""The commands as a user types them."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from raggedmoe.cli.bench import bench
from raggedmoe.cli.explain import explain
from raggedmoe.cli.layer_choice import layer_of, shape_of
from raggedmoe.cli.main import COMMANDS, main
from raggedmoe.cli.train import make_host_devices
from raggedmoe.cli.verify import _report, verify
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.moe.presets import PRESETS
from raggedmoe.parallel import processes
from raggedmoe.verify.check import Check

FAILED = Check(
    operation="grouped_matmul",
    implementation="cpu",
    spec="even",
    dtype="float32",
    quantity="drhs",
    error=2.0,
    bound=1.0,
    share=2.0,
    problem=None,
)


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of the console script."""
    monkeypatch.setattr(sys, "argv", ["raggedmoe", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


def test_an_interrupted_command_ends_without_waiting_for_threads(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    def end(code):  # which the real one does not return from either
        raise SystemExit(f"at once: {code}")

    monkeypatch.setitem(COMMANDS, "models", interrupted)
    monkeypatch.setattr(os, "_exit", end)
    assert run(monkeypatch, capsys, "models") == ("at once: 130", "", "raggedmoe: interrupted\n")


# One of each attention, with biases or without; the others are the same calls with other numbers.
EACH_KIND = {"deepseek-v3": [], "qwen3-235b-a22b": [pytest.mark.ci], "gpt-oss-120b": [pytest.mark.ci]}


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=EACH_KIND.get(name, [pytest.mark.slow])) for name in PRESETS]
)
def test_explain_names_a_kernel_for_every_operation_of_every_model_on_a_tpu(model, capsys):
    assert explain(model=model, hardware="tpu7x") == 0
    printed = capsys.readouterr().out
    for operation in dataclasses.fields(KernelChoice):
        assert operation.name in printed
    assert "● xla" in printed
    assert "none can run" not in printed
    assert "auto does not offer it on tpu" in printed


def test_explain_takes_the_words_of_a_run(capsys):
    words = ("olmoe-tiny", "num_experts=32", "expert_parallelism=4", "use_ragged_sort=true")
    assert explain((*words, "ragged_gather_fallback=true"), hardware="v6e") == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert re.search(r"ragged_gather, forward: .*?● xla .*? ragged_gather, backward: .*?● sparsecore", said)
    assert "rhs[32,32,64]" in said


def test_explain_speaks_of_a_backend_whose_kernels_do_not_run_here(capsys):
    assert explain(shape="T=64,D=24,F=40,E=4,K=2", hardware="v6e", moe_backend="pallas") == 0
    assert "● pallas_tpu" in capsys.readouterr().out


def test_explain_chooses_the_cpu_kernels_on_a_cpu(capsys):
    explain(shape="T=64,D=24,F=40,E=4,K=2", hardware="cpu")
    printed = capsys.readouterr().out
    assert "● cpu" in printed
    assert "24" in printed


def test_explain_for_an_old_jax_says_that_nothing_runs(capsys):
    explain(jax_version="0.4.30")
    assert "use JAX 0.10.2 or newer" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "--hardware", "tpu7"), "unknown hardware 'tpu7'.*did you mean 'tpu7x'"),
        (("explain", "--model", "deepseek-v4"), "unknown model 'deepseek-v4'.*did you mean 'deepseek-v"),
        (("explain", "--shape", "T=3"), "expected a shape like T=2048.*got 'T=3'"),
        (("explain", "--moe-backend", "gmmv2"), "unknown moe_backend 'gmmv2'.*did you mean 'gmm_v2'"),
        (("explain", "--jax", "newest"), "newest"),
        (("verify", "gather"), "unknown operation 'gather'.*did you mean 'ragged_gather'"),
        (("bench", "layers"), "unknown subject 'layers'.*did you mean 'layer'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert error.startswith("raggedmoe: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.ci
def test_verify_passes_and_prints_json(capsys):
    assert verify(operations=("ragged_gather",), quick=True, json=True) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {c["dtype"] for c in checks} == {"float32", "bfloat16"}
    assert {c["quantity"] for c in checks} == {"value", "dx", "dweights"}
    assert all(c["passed"] for c in checks)


def test_verify_reports_a_failure_and_the_worst_example():
    better = Check(**{**vars(FAILED), "share": 0.5, "error": 0.5, "spec": "one-row"})
    lines = list(_report([better, FAILED], every=False))
    assert len(lines) == 3
    assert "FAIL" in lines[-1]
    assert "even" in lines[-1]
    assert len(list(_report([better, FAILED], every=True))) == 4


@pytest.mark.ci
def test_bench_measures_one_case_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "bench.png"
    code = bench(
        subjects=("ragged_gather",), dtypes=("float32",), rounds=1, case="mixtral forward", json=True, plot=picture
    )
    assert code == 0
    timings = json.loads(capsys.readouterr().out)["timings"]
    assert {"limit", "xla"} <= {t["contender"] for t in timings}
    assert all(t["seconds"] > 0 for t in timings)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_shape_is_read_and_a_model_and_a_shape_together_are_refused():
    assert shape_of("T=1,D=2,F=3,E=4,K=2") == {"T": 1, "D": 2, "F": 3, "E": 4, "K": 2}
    with pytest.raises(ValueError, match="not both"):
        layer_of("deepseek-v3", "T=1,D=2,F=3,E=4,K=2")


def test_import_needs_no_optional_package():
    """The import loads neither plotting, nor other people's kernels, nor what only commands need."""
    optional = (
        "matplotlib",
        "tokamax",
        "torch",
        "tyro",
        "rich.progress",
        "orbax",
        "grain",
        "safetensors",
        "tokenizers",
    )
    code = f"import sys, raggedmoe; print([m for m in sys.modules if m in {optional}])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("command", "error", "code"),
    [("train", OSError("disk"), 74), ("train", ValueError("setting"), 2), ("report", OSError("disk"), 2)],
)
def test_a_disk_may_be_back_when_a_run_is_started_again_a_wrong_setting_stays(
    monkeypatch, capsys, command, error, code
):
    def raising():
        raise error

    monkeypatch.setitem(COMMANDS, command, raising)
    monkeypatch.setattr(processes, "leave", lambda code, *, failed=False: None)
    assert run(monkeypatch, capsys, command) == (code, "", f"raggedmoe: {error}\n")


@pytest.mark.parametrize(("num_processes", "made"), [(1, 8), (2, 4), (3, 3)])
def test_each_process_makes_its_share_of_the_host_devices(monkeypatch, num_processes, made):
    asked = []
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    values = {"data_parallelism": 2, "fsdp_parallelism": -1, "expert_parallelism": 4, "tensor_parallelism": 1}
    assert make_host_devices(values, num_processes) == made
    assert asked == [("jax_num_cpu_devices", made)]


@pytest.mark.parametrize(("code", "failed"), [(74, True), (75, False), (0, False)])
def test_the_other_processes_do_not_wait_for_one_that_could_not_write(monkeypatch, capsys, code, failed):
    left = []
    monkeypatch.setitem(COMMANDS, "train", lambda: code)
    monkeypatch.setattr(processes, "leave", lambda code, *, failed=False: left.append((code, failed)))
    assert run(monkeypatch, capsys, "train")[0] == code
    assert left == [(code, failed)]
