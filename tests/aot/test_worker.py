"""The process that compiles."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.aot.marks import NEEDS_LIBTPU
from tests.launch.running import is_running

pytestmark = NEEDS_LIBTPU

# Compiles what takes minutes, and prints the worker's number first.
BUSY_PARENT = """
from raggedmoe.aot import worker
from raggedmoe.aot.case import CompileCase
from raggedmoe.aot.subjects import TrainingStep
from raggedmoe.train.settings.words import read_words
process = worker._Worker(scheduled=False)
print(process._process.pid, flush=True)
words = ("deepseek2-16b", "fsdp_parallelism=-1", "remat=full")
step = TrainingStep(config=read_words(words), topology="v6e:4x4")
case = CompileCase(title="a large model", subject=step, topology="v6e:4x4")
print(process.outcome(case, timeout=600))
"""


@pytest.mark.slow
def test_a_worker_does_not_outlive_a_parent_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    parent = subprocess.Popen([sys.executable, "-c", BUSY_PARENT], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(20)  # into the compilation
    assert is_running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    ended = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < ended:
        time.sleep(0.2)
    assert not is_running(worker)
