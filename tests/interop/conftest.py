"""Loaded models that several tests share."""

import functools

import pytest

from raggedmoe import interop
from raggedmoe.models.module import Decoder
from tests.interop.folders import GOLDEN


@pytest.fixture(scope="session")
def golden_model():
    """Loads a golden fixture, once."""

    @functools.cache
    def load(name: str) -> Decoder:
        return interop.load(GOLDEN / name)

    return load
