"""`raggedmoe explain`: which kernels would run, and why."""

import dataclasses
import re

import pytest

from raggedmoe.cli.explain import explain
from raggedmoe.kernels.registry import KernelChoice
from raggedmoe.models.families.llama4 import LAYERS
from raggedmoe.models.presets import PRESETS

# One of each attention, with biases or without; the others are the same calls with other numbers.
EACH_KIND = {"deepseek-v3": [], "qwen3-235b-a22b": [pytest.mark.ci], "gpt-oss-120b": [pytest.mark.ci]}


PUBLISHED = [name for name in (*PRESETS, *LAYERS) if not name.endswith(("tiny", "demo"))]


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=EACH_KIND.get(name, [pytest.mark.slow])) for name in PUBLISHED]
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


@pytest.mark.parametrize(
    ("qtype", "taken", "said_of_ours"),
    [
        ("int8", "● pallas_tpu", "emulated: 8 bits are read from memory, and widened in VMEM to "),
        ("mxfp4", "● pallas_tpu", "emulated: 4 bits are read from memory, and widened in VMEM to "),
    ],
)
def test_explain_says_what_becomes_of_quantised_experts(qtype, taken, said_of_ours, capsys):
    assert explain(shape="T=16,D=32,F=64,E=8,K=2", hardware="tpu7x", experts=qtype) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"rhs:{qtype}[8,64,32] rhs_scale[8,64,1]" in said
    assert taken in said
    assert said_of_ours in said
    assert "widened: a dequantised copy" in said
    assert f"megablox it takes no quantised operands, such as rhs ({qtype})" in said


@pytest.mark.parametrize(
    ("chip", "qtype", "said"),
    [
        ("v6e", "int8", "v6e multiplies int8 natively, 1,836 TFLOP/s beside 918 of bfloat16"),
        ("tpu7x", "float8_e4m3fn", "tpu7x multiplies float8_e4m3fn natively, 4,614 TFLOP/s"),
        ("v5e", "float8_e4m3fn", "v5e does not multiply float8_e4m3fn natively, but int8"),
        ("v5p", "int8", "v5p does not multiply int8 natively: kernels emulate or widen it"),
    ],
)
def test_explain_says_what_a_chip_multiplies(chip, qtype, said, capsys):
    explain(shape="T=16,D=32,F=64,E=8,K=2", hardware=chip, experts=qtype)
    assert said in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_explain_for_an_old_jax_says_that_nothing_runs(capsys):
    explain(jax_version="0.4.30")
    assert "use JAX 0.10.2 or newer" in " ".join(capsys.readouterr().out.split())


def test_explain_refuses_a_kernel_that_the_backend_would_never_call():
    with pytest.raises(ValueError, match=r"grouped_matmul=.* with moe_backend='expert_ffn' it would never be read"):
        explain(("olmoe-tiny", "grouped_matmul=xla"), hardware="cpu", moe_backend="expert_ffn")
