"""The kernels on XLA's threads: the same bits however many there are and whoever else calls, forks and memory too."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raggedmoe import expert_ffn, ragged_gather, ragged_gather_reduce
from raggedmoe.kernels.native.library import why_absent

pytestmark = pytest.mark.skipif(why_absent() is not None, reason="the C++ kernels are not built here")

T, D, F, G, K = 300, 96, 160, 6, 2


def layer(x, wi_0, wi_1, wo, weights, order, inverse, group_sizes):
    """What a layer does between its router and its result, by the kernels in C++."""
    rows = ragged_gather(x, order // K, inverse=inverse, implementation="cpu_native")
    out = expert_ffn(rows, wi_0, wi_1, wo, group_sizes, implementation="cpu_native")
    return ragged_gather_reduce(out, inverse, weights=weights, inverse=order, implementation="cpu_native")


def loss(*arguments):
    return jnp.sum(layer(*arguments) ** 2)


value_and_gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))


def drawn():
    """Sums of many tiles: groups of more than one block, and an empty one."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(T, D)), rng.uniform(size=(T, K))
    matrices = [rng.normal(size=(G, F, D)) / 8 for _ in range(3)]
    group_sizes = np.array([290, 0, 40, 3, 260, 7])
    order = rng.permutation(T * K)
    inverse = np.argsort(order).reshape(T, K)
    floats = [np.asarray(array, np.float32) for array in (x, *matrices, weights)]
    return [*floats, *(np.asarray(array, np.int32) for array in (order, inverse, group_sizes))]


def bits(results):
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in jax.tree.leaves(results))).hexdigest()


def test_four_threads_at_once_get_the_bits_of_one():
    arguments = jax.device_put(drawn())
    expected = bits(value_and_gradients(*arguments))
    with ThreadPoolExecutor(4) as pool:
        found = {*pool.map(lambda _: bits(value_and_gradients(*arguments)), range(24))}
    assert found == {expected}


def test_eight_devices_at_once_get_the_bits_of_one():
    devices = jax.devices("cpu")
    assert len(devices) == 8
    on_each = [jax.device_put(drawn(), device) for device in devices]
    expected = bits(value_and_gradients(*on_each[0]))
    results = [value_and_gradients(*arguments) for _ in range(3) for arguments in on_each]  # none is waited for
    assert {bits(result) for result in results} == {expected}


def run_alone(code, **environment):
    """Run code that has this module's names in a process of its own, with one device and the threads of its cores."""
    variables = {**os.environ, "XLA_FLAGS": "", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from tests.kernels.native.test_threads import *\n{code}"],
        capture_output=True, text=True, env=variables, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


PRINT_BITS = "print(bits(value_and_gradients(*drawn())))"


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not limit a process to cores")
def test_one_core_gives_the_bits_of_all():
    one_core = f"import os; os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})\n{PRINT_BITS}"
    assert run_alone(one_core) == run_alone(PRINT_BITS)


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_data_workers_work_and_leave_the_parent_right():
    """They may be forked during a call, whose threads they do not have; they compute by NumPy, and end."""
    code = """
import threading
arguments = drawn()
print(bits(value_and_gradients(*arguments)))
stop, found = threading.Event(), set()
def call():
    while not stop.is_set():
        found.add(bits(value_and_gradients(*arguments)))
calling = threading.Thread(target=call)
calling.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        os._exit(7 if np.ones((64, 64)).sum() == 4096 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stop.set()
calling.join()
print(*found)
print(bits(value_and_gradients(*arguments)))
"""
    found = run_alone(code)
    assert len(found) == 3
    assert len({*found}) == 1


# Small calls, one of every kind of kernel, each with its gradients: `call` takes `arguments`.
SMALL_CALLS = {
    "expert_ffn": """
sizes = jnp.array([3, 0, 2, 1, 1, 1], jnp.int32)
arguments = [small[0][:8], *(array[:, :16] for array in small[1:4])]
call = lambda x, a, b, c: expert_ffn(x, a, b, c, sizes, implementation="cpu_native")
""",
    "expert_ffn in bfloat16": """
sizes = jnp.array([3, 0, 2, 1, 1, 1], jnp.int32)
arguments = [array.astype(jnp.bfloat16) for array in (small[0][:8], *(array[:, :16] for array in small[1:4]))]
call = lambda x, a, b, c: expert_ffn(x, a, b, c, sizes, implementation="cpu_native")
""",
    "gathers": """
arguments = [small[0][:8], jnp.ones((8, 2))]
order = jnp.arange(16, dtype=jnp.int32)
def call(x, weights):
    rows = ragged_gather(x, order // 2, inverse=order.reshape(8, 2), implementation="cpu_native")
    options = {"inverse": order, "implementation": "cpu_native"}
    return ragged_gather_reduce(rows, order.reshape(8, 2), weights=weights, **options)
""",
    "attention": """
from raggedmoe.kernels.attention.api import attention
arguments = [small[0][:16].reshape(2, 8, 4, 24)[..., :n, :] for n in (4, 2, 2)]
call = lambda q, k, v: attention(q, k, v, implementation="cpu_native")
""",
    "quantised, few rows and many": """
from raggedmoe import QArray, grouped_matmul
codes = jnp.ones((2, 16, 96), jnp.int8)
arguments = [small[0][:40], jnp.ones((2, 16, 1))]
sizes = jnp.array([4, 36], jnp.int32)
def call(x, scale):
    return grouped_matmul(x, QArray(codes, scale), sizes, transpose_rhs=True, implementation="cpu_native")
""",
}


@pytest.mark.ci
@pytest.mark.parametrize("kernel", SMALL_CALLS)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say how large a process is")
def test_ten_thousand_calls_leave_no_memory_behind(kernel):
    code = f"""
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
small = jax.device_put(drawn())
{SMALL_CALLS[kernel]}
both = jax.jit(jax.value_and_grad(lambda *arrays: jnp.sum(call(*arrays) ** 2), range(len(arguments))))
def repeat(times):
    for _ in range(times):
        result = both(*arguments)
    jax.block_until_ready(result)
    return resident()
before = repeat(2000)
print(repeat(10_000) - before)
"""
    assert int(run_alone(code)[0]) < 4 << 20
