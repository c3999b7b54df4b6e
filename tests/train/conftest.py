import pytest

from tests.object_server import _object_server as _object_server
from tests.object_server import bucket as bucket
from tests.object_server import object_server as object_server
from tests.train.runs import share_programs


@pytest.fixture
def shared_programs(monkeypatch):
    """Runs inside this process share their compiled programs."""
    share_programs(monkeypatch)
