"""The library's compilation: by a compiler that works, fails or is missing, once or twice at a time, for any CPU."""

import os
import re
import shutil
import stat
import subprocess
import sys

import jax
import pytest

from raggedmoe.kernels.native import build


@pytest.fixture
def fake_compiler(tmp_path):
    """Makes a compiler of a shell script, in which $out is the file that it shall write."""

    def make(script):
        path = tmp_path / "c++"
        path.write_text(f'#!/bin/sh\nfor argument; do out="$argument"; done\n{script}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return [str(path)]

    return make


@pytest.fixture
def made(tmp_path):
    """The library's path in a folder of its own."""
    folder = tmp_path / "native"
    folder.mkdir()
    return folder / "cpu-0.so"


def test_the_library_appears_whole(made, fake_compiler):
    assert build.compile_library(fake_compiler('echo "compiled" > "$out"'), "include", made) is None
    assert made.read_text() == "compiled\n"
    assert [*made.parent.iterdir()] == [made]


def test_what_a_failing_compiler_says_is_the_reason(made, fake_compiler):
    command = fake_compiler("echo 'ffi.h: no such file' >&2; exit 3")
    assert build.compile_library(command, "include", made) == f"{command[0]} fails:\nffi.h: no such file\n"
    assert [*made.parent.iterdir()] == []


def test_a_compiler_that_is_not_there_is_a_reason(made, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/c++ -m64")
    assert build.compiler() == ["/no/such/c++", "-m64"]
    assert build.compile_library(build.compiler(), "include", made) == (
        "/no/such/c++ cannot be run: No such file or directory"
    )


def test_a_folder_that_cannot_be_written_is_a_reason(tmp_path, fake_compiler):
    file = tmp_path / "file"
    file.touch()
    reason = build.compile_library(fake_compiler('echo "compiled" > "$out"'), "include", file / "cpu-0.so")
    assert "Not a directory" in reason


def test_two_processes_may_build_at_the_same_time(made, fake_compiler):
    command = fake_compiler('sleep 0.1; echo "half" > "$out"; sleep 0.1; echo "whole" > "$out"')
    load = f"import importlib.util as u; s = u.spec_from_file_location('b', {build.__file__!r})"
    run = f"b = u.module_from_spec(s); s.loader.exec_module(b); print(b.compile_library({command!r}, 'i', p))"
    code = f"import pathlib; p = pathlib.Path({str(made)!r}); {load}; {run}"
    both = [subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["None\n", "None\n"]
    assert made.read_text() == "whole\n"
    assert [*made.parent.iterdir()] == [made]


def test_the_newest_libraries_of_other_sources_stay(tmp_path):
    for number in range(6):
        (tmp_path / f"cpu-{number}.so").touch()
        os.utime(tmp_path / f"cpu-{number}.so", (number, number))
    build.remove_old_libraries(tmp_path / "cpu-0.so")
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-0.so", "cpu-3.so", "cpu-4.so", "cpu-5.so"}


def test_the_name_follows_the_sources(monkeypatch):
    before = build.library_path()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    assert build.library_path().name != before.name


def test_no_flag_asks_for_this_machine():
    assert not [flag for flag in build.flags() if "native" in flag]


def test_no_compiler_is_asked_for_if_the_environment_says_so(monkeypatch):
    monkeypatch.setenv("RAGGEDMOE_BUILD_NATIVE", "0")
    assert build.compiler() is None


# Whatever is called from a namespace of wider instructions (`avx2`, `quantized_avx2`, …), and lies outside it, may be
# shared with code that is not.
WIDE = {
    "avx512_bf16::": r"\Z.",
    "avx512::": r"\Z.",
    "quantized_pairs::": r"\Z.",
    "avx2::": r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])",
    "": r"%zmm|%ymm|\tv[a-z]",
}


def test_only_the_namespaces_of_wider_instructions_have_them():
    """A template of the standard library that is compiled for AVX-512 may be taken wherever it is called."""
    objdump, path = shutil.which("objdump"), build.library_path()
    if objdump is None or not path.exists():
        pytest.skip("it takes the library, and objdump")
    text = subprocess.run([objdump, "-dC", "--no-show-raw-insn", path], capture_output=True, text=True).stdout
    if "x86-64" not in text:
        pytest.skip("it is about the instruction sets of x86-64")
    wrong = {}
    seen = set()
    for block in text.split("\n\n"):
        name = re.match(r"\n?[0-9a-f]+ <(.*)>:", block)
        if name is None:
            continue
        space = next(space for space in WIDE if space in name[1])
        seen.add(space)
        found = re.search(WIDE[space], block)
        if found:
            wrong[name[1]] = found[0]
    assert wrong == {}
    assert seen == {*WIDE}


@pytest.mark.ci
def test_what_is_compiled_here_is_a_library_that_jax_loads(made, compiler):
    """In a process of its own: this one has loaded another."""
    assert build.compile_library(compiler, jax.ffi.include_dir(), made) is None
    code = (
        "import pathlib; from raggedmoe.kernels.native import library; "
        f"library.building.library_path = lambda: pathlib.Path({str(made)!r}); print(library.why_absent())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "None\n"


@pytest.mark.ci
@pytest.mark.parametrize("instruction_set", ["baseline", "avx2", "avx512"])
def test_the_contract_holds_with_each_instruction_set(instruction_set):
    """The best that this CPU has, all other tests run with."""
    if not build.library_path().exists():
        pytest.skip("the library is not built")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "cpu_native"]
    tests = ["tests/kernels/test_contract.py", "-m", "not slow and not as_shipped"]
    environment = {**os.environ, "RAGGEDMOE_CPU_ISA": instruction_set, "PYTEST_ADDOPTS": ""}
    environment = {
        name: value for name, value in environment.items() if name not in ("TEST_SHARE", "PYTEST_XDIST_WORKER")
    }
    done = subprocess.run([*command, *tests], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
