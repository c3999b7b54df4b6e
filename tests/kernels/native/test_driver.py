"""The kernels under sanitizers, called by a program in C++: no race, no leak, no undefined behaviour."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from raggedmoe.kernels.native import build

DRIVER = sorted(Path(__file__).parent.glob("*.cc"))
# The tile kernels, which instruction sets have of their own, do not know of threads: those are watched with one. Their
# bounds are watched with the narrowest vectors, the widest, and pairs of bfloat16.
SANITIZERS = {"address,undefined": ("baseline", "avx512", "avx512_bf16"), "thread": ("avx2",)}
# A third of the time to compile; an address that is not there, AddressSanitizer finds.
LEFT_OUT = "-fno-sanitize=null,alignment,object-size,vptr"


def compiled(compiler, sanitizer, folder):
    """The driver with the kernels in it, or the test is skipped where there is no such sanitizer."""
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    empty, program = folder / "empty.cc", folder / "driver"
    empty.write_text("int main() {}\n")
    folder.joinpath("empty").mkdir()
    if build.compile_and_link([*compiler, *flags], [empty], folder / "empty" / "program", link=("-pthread",)):
        pytest.skip(f"{compiler[0]} has no -fsanitize={sanitizer} here")
    if subprocess.run([folder / "empty" / "program"], capture_output=True).returncode:
        pytest.skip(f"what is compiled with -fsanitize={sanitizer} does not run here")
    options = [*(flag for flag in build.flags() if flag != "-O3"), "-O1", "-g1", *flags, LEFT_OUT]
    command = [*compiler, *options, f"-I{build.FOLDER}", "-isystem", jax.ffi.include_dir()]
    assert build.compile_and_link(command, [*build.sources(), *DRIVER], program, link=("-pthread",)) is None
    return program


@pytest.mark.ci
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_finds_anything(sanitizer, compiler, tmp_path):
    program = compiled(compiler, sanitizer, tmp_path)
    for instruction_set in SANITIZERS[sanitizer]:
        environment = {**os.environ, "RAGGEDMOE_CPU_ISA": instruction_set}
        done = subprocess.run([program, "5"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        assert "0 failures" in done.stdout
