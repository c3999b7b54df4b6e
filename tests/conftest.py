"""Before anything imports JAX: eight host devices, checked annotations, and no certificate but the tests' own.

With QUICK_COMPILE=1, as `make test` sets it for all but the tests marked `as_shipped`, programs compile in half the
time and compute the same: without LLVM's effort, and with two tile sizes where the CPU's kernels have eleven. Without
TEST_SHARE, which `.ci/run` sets, and in its second share annotations are then not checked.
"""

import functools
import gc
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

QUICKLY = os.environ.get("QUICK_COMPILE") == "1"
IN_CI = "TEST_SHARE" in os.environ
_flags = ["--xla_force_host_platform_device_count=8"]
if QUICKLY:
    _flags.append("--xla_backend_optimization_level=0")
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no such flag
        _flags.append("--xla_cpu_use_fusion_emitters=false")
# Each flag once, though a worker inherits those of its parent: a cached program is found by them.
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*os.environ.get("XLA_FLAGS", "").split(), *_flags]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A second run compiles only what has changed since; processes that tests start compile into the same folder.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
_certificates = tempfile.TemporaryDirectory(prefix="raggedmoe-certificates-")
os.environ["RAGGEDMOE_CERTIFICATES"] = _certificates.name

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, AxisType  # noqa: E402

from tests.shares import alternate, covering, share_of  # noqa: E402

# Where shapes are annotated they are checked, at an eighth of the tests' time. Elsewhere it would cost every function
# of a module, and every call, time; and functions inside others, which would be decorated anew whenever they are made,
# some milliseconds each.
SOURCES = Path(__file__).parent.parent / "src"
SHAPED = [path for path in sorted(SOURCES.rglob("*.py")) if "from jaxtyping import" in path.read_text()]
checked = jaxtyping.jaxtyped


def jaxtyped(*, typechecker: Callable) -> Callable:
    """What jaxtyping's import hook decorates with."""
    check = functools.partial(checked, typechecker=typechecker)
    return lambda function: function if "<locals>" in function.__qualname__ else check(function)


if os.environ.get("TEST_SHARE", "").startswith("1/") or not QUICKLY:
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(
        [".".join(path.relative_to(SOURCES).with_suffix("").parts) for path in SHAPED], "beartype.beartype"
    )

if QUICKLY:
    from raggedmoe.kernels.grouped_matmul import cpu

    # Each size is a loop of its own in every matmul, and is compiled. The first is still the whole tiles', and the
    # second the rest's.
    cpu.TILE_SIZES, cpu.TRANSPOSED_TILE_SIZES = (64, 8), (64, 16)

# Every operation of a lowered program would carry the whole stack of Python's frames, pytest's among them. Processes
# that tests start keep them: libtpu names a kernel's regions by them.
jax.config.update("jax_include_full_tracebacks_in_locations", False)

# An operand whose rank grows by itself hides a missing axis.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every new shape is a compilation of about a second: few examples, always the same.
settings.register_profile("raggedmoe", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("raggedmoe")


# The collector goes through all that has been traced so far, again and again: a twelfth of the tests' time.
gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With TEST_SHARE=1/2 leave out every test's cases of the other share, without it most of a quick `product`."""
    divided = [item.nodeid for item in items if is_divided(item)]
    if IN_CI:
        at_one_end = [item.nodeid for item in items if is_for_ci(item) or is_far_from_jax(item)]
        others = set(divided) - share_of(divided, os.environ["TEST_SHARE"])
        others |= set(at_one_end) - alternate(at_one_end, os.environ["TEST_SHARE"])
    else:
        others = set(divided) - covering(divided)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]


def is_for_ci(item: pytest.Item) -> bool:
    """Whether `make test` by itself leaves it out, and `.ci/run` has it at one end of the range of JAX alone."""
    return any(item.get_closest_marker(mark) for mark in ("ci", "tpu"))


# Tests of these folders reach JAX through layers whose own tests run at both ends: one without cases runs at one.
FAR_FROM_JAX = tuple(f"tests/{folder}/" for folder in ("cli", "interop", "launch", "mutants", "train", "verify"))


def is_far_from_jax(item: pytest.Item) -> bool:
    """Whether it is a test without cases of what no version of JAX changes by itself."""
    in_folder = item.nodeid.startswith(FAR_FROM_JAX) and "[" not in item.nodeid
    return IN_CI and in_folder and not item.get_closest_marker("both_ends")


def is_divided(item: pytest.Item) -> bool:
    """Whether only some of its cases run."""
    if is_for_ci(item) or is_far_from_jax(item):
        return False
    if item.get_closest_marker("product"):
        return QUICKLY or IN_CI
    return IN_CI and not item.get_closest_marker("both_ends")


def pytest_collection_finish() -> None:
    """What has been imported and collected stays for good: the collector need not look at it again."""
    gc.freeze()


def pytest_unconfigure() -> None:
    _certificates.cleanup()


# Linux gives a process 65,530 mappings, and a compiled program takes a few, one of eight devices about a thousand: XLA
# aborts when they are used up. A worker that runs a few thousand tests would get there.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 40_000
_new_programs: list[str] = []


def _note_program(event: str, duration: float, **details: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":  # or read from the cache
        _new_programs.append(event)


jax.monitoring.register_event_duration_secs_listener(_note_program)


def pytest_runtest_teardown() -> None:
    """Forget compiled programs before they are too many. To count 40,000 mappings takes 70 ms: not after every test."""
    if len(_new_programs) < 15 or not MAPPINGS.exists():
        return
    _new_programs.clear()
    if MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def compilations():
    """The programs that were compiled so far, as a list that grows."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield compiled
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def abstract_mesh():
    """Makes the mesh of a chip that this machine does not have."""

    def make(platform: str, kind: str) -> AbstractMesh:
        device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
        # JAX 0.12 would make the axis Explicit, for which ragged_dot_general has no rule.
        return AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)

    return make


@pytest.fixture
def only_our_checks():
    """In the tests jaxtyping stands before our own checks; a user has only ours."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def without_native_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As if the kernels in C++ were not built."""
    from raggedmoe.kernels.native import library  # not before its annotations are to be checked

    monkeypatch.setattr(library.building, "library_path", lambda: tmp_path / "none.so")
    library.why_absent.cache_clear()
    yield
    library.why_absent.cache_clear()
