import pytest

from tests.train.runs import share_programs


@pytest.fixture
def shared_programs(monkeypatch):
    """Runs inside this process share their compiled programs."""
    share_programs(monkeypatch)
