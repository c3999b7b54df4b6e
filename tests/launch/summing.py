"""A small program of several processes: sums over all devices, step after step. Arguments: steps, seconds of a step.

SUMMING_EVENT="process step what" makes a process at a step kill itself (kill), stop (stop) or raise (raise). With
SUMMING_PIDS=folder, every process that has done a step leaves a file with its number there. SUMMING_LATE=seconds lets
the others wait for process 0.
"""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.launch import processes

EVENTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: int("not a number"),
}


def main(steps: int, seconds: float) -> int:
    processes.join()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    devices = jax.device_count()
    print(f"joined: {jax.process_count()} processes, {devices} devices", flush=True)
    if jax.process_index() == 0:
        time.sleep(float(os.environ.get("SUMMING_LATE", "0")))
    processes.wait_for_all("ready")
    who, when, what = os.environ.get("SUMMING_EVENT", "-1 0 kill").split()
    split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    ones = jax.make_array_from_callback((devices,), split, lambda index: np.ones(devices, np.float32)[index])
    total = jax.jit(lambda x: x.sum())
    for step in range(1, steps + 1):
        time.sleep(seconds)
        if (jax.process_index(), step) == (int(who), int(when)):
            print("at the event", file=sys.stderr, flush=True)
            EVENTS[what]()
        found = float(total(ones * step))
        assert found == devices * step, found
        if step == 1 and "SUMMING_PIDS" in os.environ:
            (Path(os.environ["SUMMING_PIDS"]) / str(os.getpid())).touch()
        if processes.agree_to_stop(step, bool(asked)):
            print(f"stopped after step {step}", file=sys.stderr, flush=True)
            return 75
    print(f"sum {found:.0f} after {steps} steps", flush=True)
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), float(sys.argv[2]))
    processes.leave(code)
    sys.exit(code)
