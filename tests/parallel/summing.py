"""A small program of several processes: sums over all devices, step after step. Arguments: steps, seconds of a step.

Prints a line when it has joined, one for the first step and one for the last; `agreed_stop` ends it early, on SIGTERM.
"""

import signal
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from raggedmoe.parallel import processes


def main(steps: int, seconds: float) -> int:
    processes.join()
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    devices = jax.device_count()
    print(f"joined: {jax.process_count()} processes, {devices} devices", flush=True)
    split = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    ones = jax.make_array_from_callback((devices,), split, lambda index: np.ones(devices, np.float32)[index])
    total = jax.jit(lambda x: x.sum())
    for step in range(1, steps + 1):
        time.sleep(seconds)
        found = float(total(ones * step))
        assert found == devices * step, found
        if step == 1:
            print("first step", flush=True)
        if processes.agreed_stop(step, bool(asked)):
            print(f"stopped after step {step}", flush=True)
            return 75
    print(f"sum {found:.0f} after {steps} steps", flush=True)
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]), float(sys.argv[2]))
    processes.leave(code)
    sys.exit(code)
