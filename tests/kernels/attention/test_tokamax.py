"""Tokamax's attention behind our contract, as far as a CPU can run it."""

import importlib.util

import pytest

from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.attention import tokamax
from raggedmoe.kernels.registry import CannotRunError, select
from tests.kernels.attention.calls import SPECS, both_directions, call_of
from tests.kernels.compare import beyond_rounding

WITH_TOKAMAX = pytest.mark.skipif(importlib.util.find_spec("tokamax") is None, reason="tokamax is not installed")


@WITH_TOKAMAX
@pytest.mark.parametrize("name", ["grouped-heads", "window-1"])
def test_what_tokamax_is_asked_for_agrees_with_numpy(name):
    """Its kernels need their chips; its plain XLA program shows that scale, mask and heads are handed over right."""
    example = SPECS[name].example("float32")
    assert beyond_rounding("attention", example, both_directions(tokamax, example, backend="xla")) == {}


@pytest.mark.parametrize(
    ("name", "installed", "reason"),
    [
        ("several-chunks", False, r"tokamax is not installed; pip install raggedmoe\[tokamax\]"),
        ("several-chunks", True, "takes no segments"),
        ("sinks", True, "takes no sinks"),
        ("decode", True, "takes no positions"),
    ],
)
def test_what_tokamax_cannot_take_is_known_before_tracing(monkeypatch, name, installed, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    with pytest.raises(CannotRunError, match=reason):
        select(call_of(name), "tokamax", HARDWARE["v6e"])
