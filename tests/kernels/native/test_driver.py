"""The kernels under sanitizers, called by a program in C++: no race, no leak, no undefined behaviour."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.expert_ffn.cpu_native import NUMBERS
from raggedmoe.kernels.grouped_matmul.api import group_bounds
from raggedmoe.kernels.native import build

DRIVER = sorted(Path(__file__).parent.glob("*.cc"))
# The tile kernels, which instruction sets have of their own, do not know of threads: those are watched with one set,
# and their bounds with every one.
SANITIZERS = {"address,undefined": ("baseline", "avx2", "avx512", "avx512_bf16"), "thread": ("avx2",)}
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


def cases_of_specs():
    """The sizes of the example calls of both matmul operations, as lines that the driver reads."""
    for spec in operation("grouped_matmul").specs:
        if not spec.large:
            example = spec.example("float32")
            lhs, rhs, sizes = (example.arrays[name] for name in ("lhs", "rhs", "group_sizes"))
            bounds = group_bounds(sizes, rhs.shape[0], lhs.shape[0], example.arrays.get("group_offset"))
            yield as_line(spec, lhs, example.cotangent.shape[1], bounds)
    for spec in operation("expert_ffn").specs:
        if not spec.large:
            example = spec.example("float32")
            rows, wi_0 = example.arrays["rows"], example.arrays["wi_0"]
            bounds = group_bounds(example.arrays["group_sizes"], wi_0.shape[0], rows.shape[0])
            kind = NUMBERS[example.options["activation"]]
            gated, biased = example.arrays["wi_1"] is not None, "biases" in example.arrays
            yield as_line(spec, rows, wi_0.shape[1], bounds, kind, gated, biased)


def as_line(spec, rows, hidden, bounds, activation=0, gated=True, biased=False):
    numbers = (*rows.shape, hidden, activation, int(gated), int(biased), len(bounds), *bounds.tolist())
    return f"{' '.join(map(str, numbers))} {spec.name}\n"


@pytest.mark.ci
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_sanitizer_finds_anything(sanitizer, compiler, tmp_path):
    program = compiled(compiler, sanitizer, tmp_path)
    specs = tmp_path / "specs"
    specs.write_text("".join(cases_of_specs()))
    for instruction_set in SANITIZERS[sanitizer]:
        environment = {**os.environ, "RAGGEDMOE_CPU_ISA": instruction_set}
        done = subprocess.run([program, "5", specs], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        assert "0 failures" in done.stdout
