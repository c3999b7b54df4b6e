"""Loaded models that several tests share."""

import functools

import pytest

from raggedmoe import interop
from raggedmoe.models.module import Decoder
from tests.interop.folders import GOLDEN
from tests.object_server import _object_server as _object_server
from tests.object_server import bucket as bucket
from tests.object_server import object_server as object_server

collect_ignore = ["fp8_by_transformers.py"]  # needs torch, and pytest would import it for its doctests


@pytest.fixture(scope="session")
def golden_model():
    """Loads a golden fixture, once."""

    @functools.cache
    def load(name: str) -> Decoder:
        return interop.load(GOLDEN / name)

    return load
