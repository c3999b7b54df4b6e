"""Saves without end in children that are killed with SIGKILL; each must resume where a predecessor's checkpoint is.

A script of its own, with arguments folder, number of kills and seed: JAX is imported once, and not started before the
forks. Prints how many kills left a half-written checkpoint behind.
"""

import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # about forks: there is no other thread yet

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from raggedmoe.train.checkpoint.checkpoints import Checkpoints  # noqa: E402

ROWS = 50_000


def state_at(step: int) -> dict:
    return {"rows": jnp.asarray(np.arange(ROWS, dtype=np.int32) + step), "step": jnp.asarray(np.int32(step))}


def write_for_ever(folder: Path, ready: int) -> None:
    checkpoints = Checkpoints(folder)
    restored = checkpoints.restore(state_at(0))
    step = 0
    if restored is not None:
        step = restored.step
        assert restored.extra == {"position": step * 7}
        assert int(restored.state["step"]) == step
        np.testing.assert_array_equal(restored.state["rows"], np.arange(ROWS) + step)
    else:
        save(checkpoints, 1)  # one whole save, however slow the machine: the next child has something to resume
        checkpoints.wait()
    os.write(ready, b"%d " % step)
    step = max(step, 1)
    while True:
        step += 1
        save(checkpoints, step)


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state_at(step), {"position": step * 7}, metric=float(step % 5))


def main(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    halves, resumed = 0, [0]
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(folder, write)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(write)
        said = os.read(read, 100)
        os.close(read)
        if not said:
            sys.exit("a child died by itself")
        resumed.append(int(said))
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        halves += any(folder.glob("*.partial"))
    if resumed != sorted(resumed):
        sys.exit(f"went back: {resumed}")
    print(halves, resumed[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
