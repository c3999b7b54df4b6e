"""The console script, and what compiles C++ here."""

import pytest

from raggedmoe.kernels.native import build
from tests.cli.conftest import raggedmoe as raggedmoe


@pytest.fixture
def compiler() -> list[str]:
    """The command of the C++ compiler, or the test is skipped."""
    command = build.compiler()
    if command is None:
        pytest.skip("there is no C++ compiler here")
    return command
