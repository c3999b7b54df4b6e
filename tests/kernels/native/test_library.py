"""What happens where the C++ library is not there, cannot be loaded or is refused: the next kernel, and a reason."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import grouped_matmul
from raggedmoe.hardware import hardware_by_name
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.native import library
from raggedmoe.kernels.registry import (
    Call,
    CannotRunError,
    implementations,
    record_selections,
    report_absent,
    report_skip,
)
from tests.kernels.compare import beyond_rounding, example_of, run

BUILT = library.building.library_path()
NATIVE = ("ragged_gather", "ragged_gather_reduce", "grouped_matmul", "expert_ffn", "attention")


@pytest.fixture
def library_at(tmp_path, monkeypatch):
    """As if nothing were loaded yet, and the library's place were this path, where there is nothing."""
    for cached in (library.why_absent, report_absent, report_skip):
        cached.cache_clear()
    path = tmp_path / "cpu-0.so"
    monkeypatch.setattr(library.building, "library_path", lambda: path)
    yield path
    for cached in (library.why_absent, report_absent, report_skip):
        cached.cache_clear()


def chosen(name, spec=None):
    example = example_of(name, spec or operation(name).specs[0].name)
    with record_selections() as selections:
        jax.eval_shape(lambda arrays: operation(name).function(**arrays, **example.options), dict(example.arrays))
    return {selection.chosen.name for selection in selections}


@pytest.mark.parametrize("name", NATIVE)
def test_without_the_library_the_next_kernel_computes(name, library_at):
    assert "cpu_native" not in chosen(name)
    example = example_of(name, operation(name).specs[0].name)
    assert beyond_rounding(name, example, run(name, example, "auto")) == {}


@pytest.mark.skipif(library.why_absent() is not None, reason="there is no C++ library here")
@pytest.mark.parametrize("name", ["grouped_matmul", "expert_ffn"])
def test_quantised_operands_are_multiplied_by_it(name):
    specs = [spec.name for spec in operation(name).quantized_specs if not spec.large]
    assert {spec: chosen(name, spec) for spec in specs} == {spec: {"cpu_native"} for spec in specs}


def test_its_absence_is_said_once_for_all_operations(library_at, caplog):
    with caplog.at_level(logging.INFO, logger="raggedmoe"):
        for name in NATIVE:
            chosen(name)
    said = [record for record in caplog.records if "cpu_native" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]
    assert f"not built here: `{library.BUILD}` builds it" in said[0].getMessage()


def test_a_library_can_be_switched_off(library_at, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_NATIVE", "0")
    library_at.write_bytes(b"")
    assert library.why_absent() == "RAGGEDMOE_NATIVE=0 leaves it out"


def test_a_kernel_that_is_named_and_absent_is_an_error(library_at):
    with pytest.raises(CannotRunError, match="cpu_native: its C\\+\\+ library is not built here"):
        grouped_matmul(jnp.ones((2, 4)), jnp.ones((1, 4, 3)), jnp.array([2]), implementation="cpu_native")


def test_explain_says_why_it_is_absent(library_at, raggedmoe, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, out, _ = raggedmoe("explain", "--shape", "T=8,D=16,F=32,E=4,K=2")
    assert code == 0
    assert f"○ cpu_native its C++ library is not built here: `{library.BUILD}` builds it" in out


def test_without_a_compiler_the_reason_says_how_to_get_one(library_at, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_BUILD_NATIVE", "0")
    assert "no C++ compiler was found; install one (`apt install g++`" in library.why_absent()
    assert "no C++ compiler was found" in library.build()


def test_a_damaged_library_is_a_reason(library_at):
    library_at.write_bytes(b"this is not a library")
    assert "cannot be loaded" in library.why_absent()
    assert f"{library.BUILD} builds it anew" in library.why_absent()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999])
def test_a_library_that_was_cut_short_is_a_reason(part, library_at):
    """The system's loader would end the process by SIGBUS."""
    if not BUILT.exists():
        pytest.skip("the library is not built")
    whole = BUILT.read_bytes()
    if not whole.startswith(b"\x7fELF"):
        pytest.skip("it is about ELF files")
    library_at.write_bytes(whole[: int(len(whole) * part)])
    assert "cannot be loaded" in library.why_absent()
    assert "is cut short" in library.why_absent()


def test_a_library_without_its_functions_is_a_reason(library_at, monkeypatch):
    library_at.touch()
    monkeypatch.setattr(library, "_load", lambda path: object())
    assert "lacks a function" in library.why_absent()


def test_a_library_of_a_newer_xla_is_a_reason(library_at, monkeypatch):
    def refuse(loaded):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the handler's API version (0.5) is incompatible")

    library_at.touch()
    monkeypatch.setattr(library, "_load", lambda path: None)
    monkeypatch.setattr(library, "register", refuse)
    assert "XLA refuses its C++ library" in library.why_absent()
    assert "(0.5) is incompatible" in library.why_absent()


def test_a_library_that_cannot_be_loaded_is_built_anew(library_at, monkeypatch):
    library_at.write_bytes(b"this is not a library")
    built = []
    monkeypatch.setattr(library.building, "compiler", lambda: ["c++"])
    monkeypatch.setattr(library.building, "compile_library", lambda *arguments: built.append(arguments))
    assert library.build() == f"built {library_at}"
    assert built == [(["c++"], jax.ffi.include_dir(), library_at)]


def test_a_compiler_that_fails_is_quoted(library_at, monkeypatch):
    monkeypatch.setattr(library.building, "compiler", lambda: ["c++"])
    monkeypatch.setattr(library.building, "compile_library", lambda *arguments: "c++ fails:\nno such header")
    assert "cannot be built, those in plain JAX are used: c++ fails:\nno such header" in library.build()


def test_an_unknown_instruction_set_is_refused(library_at, monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_CPU_ISA", "avx")
    with pytest.raises(
        ValueError, match="RAGGEDMOE_CPU_ISA 'avx': expected one of baseline, avx2, avx512, avx512_bf16; did you mean"
    ):
        chosen("grouped_matmul")


def reasons(dtype, platform="cpu", **options):
    hardware = hardware_by_name(platform)
    found = {}
    for name in NATIVE:
        arrays = {
            argument: jax.ShapeDtypeStruct(array.shape, dtype if array.dtype.kind == "f" else array.dtype)
            for argument, array in example_of(name, operation(name).specs[0].name).arrays.items()
            if isinstance(array, (np.ndarray, jax.Array))
        }
        call = Call(operation=name, arrays=arrays, options={"out_dtype": str(np.dtype(dtype)), **options})
        found[name] = implementations(name)["cpu_native"].why_not(call, hardware)
    return found


def test_what_it_takes():
    assert set(reasons(np.float32).values()) == set(reasons(jnp.bfloat16).values()) == {None}


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_types_are_refused(dtype):
    for reason in reasons(np.dtype(dtype)).values():
        assert f"not in {dtype}" in reason


def test_a_mesh_that_xla_divides_is_refused():
    for name, reason in reasons(np.float32, divided_by_xla=True).items():
        assert reason == f"XLA cannot divide its kernel over a mesh: call {name} in shard_map"


def test_other_hardware_is_refused():
    assert set(reasons(np.float32, "tpu7x").values()) == {"it is for CPUs, the target is tpu7x"}
