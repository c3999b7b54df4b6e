"""JAX's TPU interpreter with everything on that it can see: races, uninitialised memory as NaN, reads out of bounds."""

import contextlib
from unittest import mock

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu


class RaceError(AssertionError):
    """Two accesses of one place in memory, one of them a write, of which nothing says which is first."""


@contextlib.contextmanager
def tpu_interpreter():
    """Every TensorCore kernel that is traced inside runs here; one that races raises at the end.

    JAX 0.12 raises where it sees a race. JAX 0.10.2 notes it in a state that each kernel has for itself, so all of them
    are kept until the end.
    """
    states = []

    def kept(*args, **kwargs):
        states.append(make_state(*args, **kwargs))
        return states[-1]

    make_state = interpreter.RaceDetectionState
    params = pltpu.InterpretParams(detect_races=True)
    assert params.uninitialized_memory == "nan"
    assert params.out_of_bounds_reads == "raise"
    try:
        with mock.patch.object(interpreter, "RaceDetectionState", kept), pltpu.force_tpu_interpret_mode(params):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # what a kernel that raised has left
    if any(state.races_found for state in states):
        raise RaceError("the interpreter saw a race; it has printed where")
