"""`raggedmoe compile` as a user types it."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

from raggedmoe.aot.case import NO_FIT, CompileCase, CompileOutcome
from raggedmoe.aot.subjects import ModelForward, TrainingStep, layer_config
from raggedmoe.cli import compile
from raggedmoe.cli.compile_report import outcome_lines
from raggedmoe.cli.main import main
from raggedmoe.train.settings.words import read_words
from tests.aot.marks import NEEDS_LIBTPU


def run(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of the console script."""
    monkeypatch.setattr(sys, "argv", ["raggedmoe", "compile", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected ragged_gather, .*, layer PRESET or model PRESET; got nothing to compile"),
        (("gather",), "unknown subject 'gather'.*did you mean 'ragged_gather'"),
        (("layer",), "expected layer PRESET, such as layer deepseek-v3, got 'layer'"),
        (
            ("layer", "olmoe-1b-7b", "token_chunk=2"),
            "unknown setting 'token_chunk': did you mean token_chunks",
        ),
        (
            ("layer", "olmoe-1b-7b", "expert_parallelism=4", "--topology", "cpu"),
            "expert_parallelism=4 = 4 devices, but there are 1",
        ),
        (("layer", "deepseek-v4"), "unknown model 'deepseek-v4'.*did you mean 'deepseek-v"),
        (("model",), "expected model PRESET, such as model deepseek-v3-tiny"),
        (("grouped_matmul", "--dtype", "int4"), "unknown dtype 'int4'"),
        (("grouped_matmul", "--direction", "up"), "unknown direction 'up'"),
        (("grouped_matmul", "--shape", "evn"), "unknown example call of grouped_matmul.*did you mean 'even'"),
        (("grouped_matmul", "--shape", "R=3"), "expected a shape like R=8192,I=2048.*number for I, got 'R=3'"),
        (("grouped_matmul", "--shape", "R=8,I=8,O=8,G=2,K=3"), "got K as well, which mean nothing here"),
        (("grouped_matmul", "--shape", "R=8,I=8,O=8,G=2,sizes=9/9"), "2 groups with at most 8 rows together"),
        (("grouped_matmul", "--shape", "even", "--implementation", "cuda"), "unknown implementation of grouped_matmul"),
        (("grouped_matmul", "--shape", "even", "--against", "dens"), "unknown peer of grouped_matmul.*'dense'"),
        (("ragged_gather", "--against", "dense"), "unknown peer of ragged_gather, 'dense'"),
        (("grouped_matmul", "--shape", "even", "--gradient", "rsh"), "unknown differentiable .*did you mean 'rhs'"),
        (("grouped_matmul", "--direction", "forward", "--gradient", "rhs"), "is of the backward pass, got --direction"),
        (("grouped_matmul", "--forward", "--gradient", "rhs"), "is of the backward pass, got --forward"),
        (("grouped_matmul", "--forward", "--direction", "backward"), "--forward and --direction backward contradict"),
        (("layer", "deepseek-v3", "--gradient", "x"), "of an operation's backward pass, got layer deepseek-v3"),
        (("model", "deepseek-v3-tiny", "stps=3"), "unknown setting 'stps'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, *arguments, "--topology", "cpu")
    assert code == 2
    assert error.startswith("raggedmoe: ")
    assert error.count("\n") == 1
    assert re.search(message, error)


@pytest.mark.parametrize("subject", [("grouped_matmul",), ("layer", "deepseek-v3"), ("model", "deepseek-v3-tiny")])
def test_without_libtpu_one_line_says_what_to_install(subject, monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, out, error = run(monkeypatch, capsys, *subject, "--topology", "v6e:2x2")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"raggedmoe: .*pip install 'raggedmoe\[tpu\]'; JAX \S+ needs libtpu==0\.0\.\d+\.\*\n", error)


def test_an_unknown_topology_is_refused_before_anything_else(monkeypatch, capsys):
    code, _, error = run(monkeypatch, capsys, "grouped_matmul", "--topology", "v6:2x2")
    assert code == 2
    assert re.search("unknown topology 'v6:2x2': expected one of v4:2x2x1, .*, cpu; did you mean 'v6e:2x2'", error)


def test_on_the_host_a_call_is_lowered_and_its_products_are_counted(monkeypatch, capsys):
    shape = "R=64,I=32,O=16,G=4"
    code, out, _ = run(
        monkeypatch,
        capsys,
        "grouped_matmul",
        "--shape",
        shape,
        "--topology",
        "cpu",
        "--direction",
        "forward",
        "--implementation",
        "reference",
        "--dtype",
        "f32",
    )
    assert code == 0
    assert "lowered in" in out
    assert "nothing allocated" in out
    assert "kernels: grouped_matmul/reference" in out


@pytest.mark.ci
@pytest.mark.usefixtures("without_native_kernels")  # whose products a lowered program does not show
def test_on_the_host_a_tiny_training_step_is_lowered(monkeypatch, capsys):
    words = ("model", "mixtral-tiny", "per_device_batch_size=2", "max_target_length=32")
    code, out, _ = run(monkeypatch, capsys, *words, "--topology", "cpu", "--layers", "1", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert found["products"]["executed"] >= found["products"]["written"] > 20
    assert found["argument_bytes"] > 0
    assert {"attention", "grouped_matmul"} <= {kernel["operation"] for kernel in found["kernels"]}


TINY = ("deepseek-v3-tiny", "per_device_batch_size=2", "max_target_length=32", "mtp_layers=0", "dtype=float32")


@pytest.mark.parametrize("backend", ["dense", pytest.param("auto", marks=pytest.mark.slow)])
def test_on_the_host_both_programs_of_a_forward_pass_are_written_and_counted(backend, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "new" / "hlo"
    options = ("--layers", "2", "--forward", "--topology", "cpu", "--moe-backend", backend, "--hlo", str(folder))
    code, out, _ = run(monkeypatch, capsys, "model", *TINY, *options)
    assert code == 0
    assert "forward pass of deepseek-v3-tiny" in out
    assert str(folder / "lowered.mlir") in out
    assert str(folder / "optimized.hlo") in out
    lowered, optimized = ((folder / name).read_text() for name in ("lowered.mlir", "optimized.hlo"))
    assert "func.func public @main" in lowered
    written = int(re.search(r"(\d+) dots", out)[1])
    assert lowered.count("stablehlo.dot_general") == written > 0
    assert optimized.startswith("HloModule")
    assert "ENTRY" in optimized
    assert re.search(r"\d+ dots.*; \d+ custom calls.*; \d+ loops", out)
    assert "collectives: none" in out


@pytest.mark.ci
def test_on_the_host_a_forward_pass_is_no_training_step(monkeypatch, capsys):
    def products(*options):
        words = ("model", *TINY, "--layers", "2", "--topology", "cpu", "--moe-backend", "dense", "--json")
        code, out, _ = run(monkeypatch, capsys, *words, *options)
        assert code == 0
        (found,) = json.loads(out)
        return found["products"]

    forward, step = products("--forward"), products()
    assert 2 * forward["flops"] < step["flops"] < 5 * forward["flops"]
    assert forward["written"] < step["written"]


def test_a_layer_of_settings_is_lowered_on_the_host_and_dense_is_the_einsum(monkeypatch, capsys):
    """Every expert on every token, T·E·F·D multiply-adds three times, and the router; the value alone."""
    options = ("--tokens", "16", "--topology", "cpu", "--dtype", "f32", "--forward", "--json")
    code, out, _ = run(monkeypatch, capsys, "layer", "olmoe-tiny", "moe_backend=dense", *options)
    assert code == 0
    (found,) = json.loads(out)
    layer = layer_config("olmoe-tiny")
    experts = 2 * 3 * 16 * layer.num_experts * layer.expert_dim * layer.model_dim
    combine = 2 * 16 * layer.num_experts * layer.model_dim
    router = 2 * 16 * layer.model_dim * layer.num_experts
    assert experts <= found["products"]["flops"] <= experts + combine + router
    assert "grouped_matmul" not in {kernel["operation"] for kernel in found["kernels"]}


def test_sizes_are_taken_by_keys(monkeypatch, capsys):
    """Twice the experts are twice the products of all experts with all tokens; the layer's and the model's alike."""

    def flops(*words):
        options = ("--topology", "cpu", "--dtype", "f32", "--moe-backend", "dense", "--forward", "--json")
        code, out, _ = run(monkeypatch, capsys, *words, *options)
        assert code == 0
        return json.loads(out)[0]["products"]["flops"]

    layer = layer_config("olmoe-tiny")
    more = 2 * layer.num_experts
    of_layer, of_more = (
        flops("layer", "olmoe-tiny", f"num_experts={number}", "--tokens", "16") for number in (layer.num_experts, more)
    )
    assert of_more == 2 * of_layer  # the router's and the combination's double as well
    words = ("model", "olmoe-tiny", "per_device_batch_size=1", "max_target_length=16")
    added = flops(*words, f"num_experts={more}", "--layers", "1") - flops(*words, "--layers", "1")
    assert added == of_layer


def test_the_programs_of_several_cases_are_in_folders_of_their_own(tmp_path):
    first, second = compile._in_folders(cases_of("deepseek-v3", layers=4), tmp_path)
    assert first.hlo != second.hlo
    assert {str(tmp_path)} == {str(Path(case.hlo).parent) for case in (first, second)}
    (alone,) = compile._in_folders([first], tmp_path)
    assert alone.hlo == str(tmp_path)


def cases_of(*words, topology="v6e:4x4", layers=None, forward=False):
    return compile._cases(words, topology, "bfloat16", None, "auto", "both", "auto", 4096, layers, (), forward)


def test_a_forward_pass_tells_nothing_of_a_whole_training_step():
    (case,) = cases_of("deepseek-v3", layers=4, forward=True)
    assert isinstance(case.subject, ModelForward)
    assert case.subject.num_layers == 4


def test_a_model_by_its_bare_name_is_a_training_step_on_all_devices_of_the_topology():
    (case,) = cases_of("deepseek2-16b", "remat=full")
    assert case == cases_of("model", "deepseek2-16b", "remat=full")[0]
    config = case.subject.config
    assert (config.model, config.execution.remat, config.mesh.fsdp_parallelism) == ("deepseek2-16b", ("full",), -1)
    assert case.subject.topology == "v6e:4x4"
    (split,) = cases_of("deepseek2-16b", "ici_expert_parallelism=16")
    assert split.subject.config.mesh.fsdp_parallelism == 1


def test_a_few_layers_are_compiled_with_one_fewer_as_well():
    assert [case.subject.num_layers for case in cases_of("deepseek-v3", layers=4)] == [4, 3]
    assert [case.subject.num_layers for case in cases_of("deepseek-v3", layers=4, topology="cpu")] == [4]


def test_a_layer_with_settings_keeps_the_backend_that_was_asked_for():
    def backend_of(*settings, backend):
        words = ("layer", "olmoe-tiny", *settings)
        (case,) = compile._cases(words, "v6e:2x2", "bfloat16", None, "auto", "both", backend, 64, None, ())
        return case.subject.config.execution.moe_backend

    assert backend_of("expert_parallelism=4", backend="expert_ffn") == "expert_ffn"
    assert backend_of("expert_parallelism=4", "moe_backend=ragged_dot", backend="auto") == "ragged_dot"


@pytest.mark.parametrize(("model", "fewest"), [("deepseek-v3", 4), ("mixtral-8x7b", 3), ("olmoe-1b-7b", 3)])
def test_but_not_where_either_is_no_loop(model, fewest):
    """A dense layer, and a loop of two turns and of three."""
    found = {layers: len(cases_of(model, layers=layers)) for layers in range(1, fewest + 2)}
    assert found == {layers: 2 if layers >= fewest else 1 for layers in found}


def test_help_teaches_by_examples(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0
    for word in ("layer deepseek-v3", "--against", "--topology", "model PRESET", "REGION=N"):
        assert word in out


class TestWithTheCompiler:
    pytestmark = NEEDS_LIBTPU

    def test_a_schedule_is_printed_beside_its_peers(self, monkeypatch, capsys):
        code, out, _ = run(
            monkeypatch, capsys, "grouped_matmul", "--topology", "v6e:2x2", "--direction", "forward", "--schedule",
            "--shape", "R=512,I=256,O=256,G=4,sizes=skewed", "--implementation", "xla", "--against", "dense,ragged_dot",
        )  # fmt: skip
        assert code == 0
        for expected in (
            "compiler-predicted",
            "dense forward",
            "ragged_dot forward",
            "xla forward",
            "HBM: fits",
            "VMEM: ",
        ):
            assert expected in out
        assert re.search(r"loop r\d+ × \d", out)

    def test_one_gradient_stands_alone_beside_its_peers(self, monkeypatch, capsys):
        code, out, _ = run(
            monkeypatch, capsys, "grouped_matmul", "--topology", "v6e:2x2", "--gradient", "rhs", "--schedule",
            "--shape", "R=512,I=256,O=256,G=4", "--implementation", "pallas_tpu", "--against", "dense",
        )  # fmt: skip
        assert code == 0
        assert "pallas_tpu drhs" in out
        assert "dense drhs" in out
        assert re.search(r"raggedmoe_grouped_matmul_transposed\S*: issue", out)
        assert not re.search(r"raggedmoe_grouped_matmul(\.\d+)?: issue", out)  # lhs's gradient

    @pytest.mark.parametrize(
        ("words", "flops", "around", "num_bytes"),
        [
            (
                ("expert_ffn", "--shape", "R=512,D=512,F=1024,G=4", "--implementation", "pallas_tpu"),
                2 * 3 * 512 * 512 * 1024,
                10 * 512 * 512,
                2 * (2 * 512 * 512 + 3 * 4 * 512 * 1024),
            ),
            (
                ("ragged_gather_reduce", "--shape", "T=512,K=4,D=512", "--implementation", "sparsecore"),
                2 * 512 * 4 * 512,
                4 * 512 * 4 * 512,  # rows are packed into words
                2 * (512 * 4 * 512 + 512 * 512),
            ),
        ],
    )
    def test_printed_cost_is_that_of_the_kernel(self, words, flops, around, num_bytes, monkeypatch, capsys):
        code, out, _ = run(monkeypatch, capsys, *words, "--topology", "v6e:2x2", "--direction", "forward", "--json")
        assert code == 0
        (found,) = json.loads(out)
        cost = found["compiled"]["cost"]
        assert flops <= cost["flops"] <= flops + around
        assert cost["bytes_accessed"] >= num_bytes

    def test_both_programs_are_written_and_counted(self, monkeypatch, capsys, tmp_path):
        code, out, _ = run(
            monkeypatch, capsys, "grouped_matmul", "--topology", "v6e:2x2", "--forward", "--hlo", str(tmp_path),
            "--shape", "R=512,I=256,O=256,G=4", "--implementation", "pallas_tpu",
        )  # fmt: skip
        assert code == 0
        assert "1 × tpu_custom_call" in out
        assert "tpu_custom_call" in (tmp_path / "optimized.hlo").read_text()
        assert "tpu_custom_call" in (tmp_path / "lowered.mlir").read_text()

    def test_a_failure_is_exit_code_1_with_its_reason(self, monkeypatch, capsys):
        code, out, _ = run(
            monkeypatch, capsys, "attention", "--shape", "decode", "--implementation", "splash", "--dtype", "f32",
            "--topology", "v6e:2x2", "--direction", "forward",
        )  # fmt: skip
        assert code == 1
        assert "refused attention/splash decode float32 forward" in out
        assert "splash:" in out


def test_a_model_that_does_not_fit_is_told_what_would_help():
    case = CompileCase(title="a step", subject=TrainingStep(config=read_words(("demo",))), topology="v6e:2x2")
    outcome = CompileOutcome(case=case, verdict=NO_FIT, error="too large", needed=60 * 10**9, available=32 * 10**9)
    text = "\n".join(outcome_lines([outcome]))
    assert "does not fit" in text
    assert "remat=full, a smaller per_device_batch_size, or more devices" in text
