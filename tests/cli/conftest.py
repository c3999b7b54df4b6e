"""The console script as a fixture."""

import sys

import pytest

from raggedmoe.cli.main import main


@pytest.fixture
def raggedmoe(monkeypatch, capsys):
    """Runs the console script: its exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["raggedmoe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, *capsys.readouterr()

    return run
