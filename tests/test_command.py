"""The `raggedmoe` command before JAX is there: it starts itself again with large pages, and changes nothing else."""

import os
import subprocess
import sys

import pytest

import raggedmoe_command as command
from raggedmoe.cli import main as cli

SCRIPT = """
import os, resource, sys
import raggedmoe_command as command
if "first" in os.environ:
    assert int(os.environ["first"]) == os.getpid()
os.environ["first"] = str(os.getpid())
command.restart_with_large_pages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000, os.environ.get(command.TUNABLES))
print("warned" in sys.warnoptions[0], sys.argv[1:], sys.stdin.read(), "jax" in sys.modules)
sys.exit(75)
"""
needs_large_pages = pytest.mark.skipif(
    not command.are_large_pages_possible(), reason="no glibc of 2.35, or a kernel without large pages"
)


def run(*arguments, script=SCRIPT, **variables):
    environment = {name: value for name, value in os.environ.items() if name != command.TUNABLES}
    return subprocess.run(
        [sys.executable, "-W", "ignore:warned", "-c", script, *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        input="given",
        capture_output=True,
        text=True,
    )


@needs_large_pages
def test_it_starts_again_once_with_large_pages_and_all_else_as_it_was():
    done = run("train", "steps=3", "a b")
    assert done.stdout.splitlines() == [
        "True glibc.malloc.hugetlb=1",
        "True ['train', 'steps=3', 'a b'] given False",
    ]
    assert (done.returncode, done.stderr) == (75, "")


@needs_large_pages
def test_other_tunables_stay_and_a_setting_of_the_user_is_left_alone():
    other, same = "glibc.malloc.trim_threshold=1000000", "glibc.malloc.hugetlb=0"
    assert f"{other}:glibc.malloc.hugetlb=1" in run(**{command.TUNABLES: other}).stdout
    assert run(**{command.TUNABLES: same}).stdout.splitlines()[0] == f"False {same}"


def test_where_jax_is_loaded_or_pages_are_not_to_be_had_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    monkeypatch.delenv(command.TUNABLES, raising=False)
    assert "jax" in sys.modules
    command.restart_with_large_pages()
    monkeypatch.delitem(sys.modules, "jax")
    for text in ("always madvise [never]\n", None):
        monkeypatch.setattr(command, "KERNEL_SETTING", tmp_path / str(text is None))
        if text is not None:
            command.KERNEL_SETTING.write_text(text)
        command.restart_with_large_pages()


@pytest.mark.parametrize("error", [OSError("no such file"), None])
def test_a_command_that_computes_nothing_is_run_as_it_is(error, monkeypatch):
    """And so is one that cannot be started again."""
    calls = []

    def execve(*_):
        calls.append("execve")
        raise error or AssertionError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(command, "with_large_pages", lambda environment: dict(environment))
    monkeypatch.setattr(cli, "main", lambda: calls.append("main"))
    monkeypatch.delitem(sys.modules, "jax")  # after all imports, which would bring it back
    monkeypatch.setattr(sys, "argv", ["raggedmoe", "train" if error else "models"])
    command.main()
    assert calls == (["execve", "main"] if error else ["main"])


def test_every_command_that_starts_again_is_one():
    assert set(command.COMMANDS) <= set(cli.COMMANDS)
