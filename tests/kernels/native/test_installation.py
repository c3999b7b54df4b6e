"""What is installed (hatch_build.py): a wheel for this platform with the library, or a pure one, and all sources."""

import importlib.util
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from raggedmoe.kernels.native import build

ROOT = Path(__file__).parents[3]
SOURCES = {f"raggedmoe/{path.relative_to(ROOT / 'src' / 'raggedmoe')}" for path in build.sources()}

pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed"),
    pytest.mark.skipif(not (ROOT / "hatch_build.py").exists(), reason="it takes the checkout"),
]


@pytest.fixture
def built(tmp_path):
    """Builds a distribution with a compiler of that script; gives its file's name, its files and what was printed."""

    def run(kind, script="exit 1", **environment):
        compiler = tmp_path / "c++"
        compiler.write_text(f'#!/bin/sh\nfor argument; do out="$argument"; done\n{script}\n')
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", tmp_path / "dist"]
        variables = {**os.environ, "CXX": str(compiler), **environment}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (path,) = (tmp_path / "dist").iterdir()
        if kind == "wheel":
            with zipfile.ZipFile(path) as archive:
                files = archive.namelist()
        else:
            with tarfile.open(path) as archive:
                files = [name.partition("/src/")[2] or name for name in archive.getnames()]
        return path.name, files, done.stdout + done.stderr

    return run


def libraries(files):
    return [file for file in files if file.endswith(".so")]


def test_a_wheel_with_the_library_is_for_this_platform_and_any_python(built):
    name, files, _ = built("wheel", 'echo "compiled" > "$out"')
    assert "-py3-none-" in name
    assert not name.endswith("-any.whl")
    assert libraries(files) == [f"raggedmoe/kernels/native/{build.library_path().name}"]
    assert {*files} >= SOURCES


@pytest.mark.parametrize(
    ("script", "environment", "reason"),
    [
        ("echo broken >&2; exit 1", {}, "fails:"),
        ("exit 0", {"RAGGEDMOE_BUILD_NATIVE": "0"}, "no C++ compiler was found"),
    ],
    ids=["failing", "none"],
)
def test_without_the_library_a_wheel_is_pure_and_says_why(built, script, environment, reason):
    name, files, said = built("wheel", script, **environment)
    assert name.endswith("-py3-none-any.whl")
    assert libraries(files) == []
    assert {*files} >= SOURCES
    assert "raggedmoe without its C++ kernels for CPUs: " in said
    assert reason in said


def test_the_source_distribution_has_the_sources(built):
    _, files, _ = built("sdist")
    assert {*files} >= SOURCES
    assert any(file.endswith("/hatch_build.py") for file in files)
    assert libraries(files) == []


def test_jaxlib_is_asked_for_where_something_is_compiled_with_its_headers(monkeypatch):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CXX", "c++")
    asked = [line for line in backend.get_requires_for_build_wheel() if "jax" in line]
    assert asked[0].startswith("jaxlib==0.10.2;")
    assert "jax" not in str(backend.get_requires_for_build_editable())
    monkeypatch.setenv("RAGGEDMOE_BUILD_NATIVE", "0")
    assert "jax" not in str(backend.get_requires_for_build_wheel())
