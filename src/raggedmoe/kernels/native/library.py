"""The C++ kernels for CPUs: one library, built from the `.cc` files beside the Python files that call it.

`python -m raggedmoe.kernels.native` builds it where there is a C++ compiler, and `make` calls that. It is named
after its sources and the jaxlib whose headers it was built with, so one that is out of date is not found. Nothing else
needs it: without it the kernels in plain JAX are taken, and `explain` says why.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.placement import placement_why_not, pvary_alike
from raggedmoe.kernels.registry import Call

FOLDER = Path(__file__).parent
TARGETS = (  # exported by the library
    "raggedmoe_grouped_matmul",
    "raggedmoe_transposed_matmul",
    "raggedmoe_expert_ffn",
    "raggedmoe_expert_ffn_gradients",
    "raggedmoe_attention",
    "raggedmoe_attention_gradients",
    "raggedmoe_gather",
    "raggedmoe_gather_reduce",
    "raggedmoe_row_dots",
)
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi")
TYPES = ("float32", "bfloat16")
BUILD = "python -m raggedmoe.kernels.native"


def sources() -> list[Path]:
    """List the C++ files: those of the operations, and the matmul that they share."""
    return [FOLDER / "matmul.cc", *sorted(FOLDER.parent.glob("*/cpu_native.cc"))]


def library_path() -> Path:
    """Where the library of these sources and this jaxlib is, once it is built."""
    texts = [path.read_bytes() for path in (*sources(), *sorted(FOLDER.glob("*.h")), *sorted(FOLDER.glob("*.inc")))]
    digest = hashlib.sha256(b"".join([*texts, repr(FLAGS).encode()])).hexdigest()
    return FOLDER / f"cpu-{digest[:12]}.so"


@functools.cache
def why_absent() -> str | None:
    """Load the library and tell XLA of its functions. Return None, or why they are not there."""
    path = library_path()
    if not path.exists():
        return f"its C++ library is not built here; with a C++ compiler, {BUILD} builds it"
    try:
        library = ctypes.cdll.LoadLibrary(str(path))
    except OSError as error:
        return f"its C++ library cannot be loaded: {error}; {BUILD} builds it anew once {path} is removed"
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def build() -> str:
    """Build the library if it is not there. Return what was done, or why it cannot be."""
    path, compiler = library_path(), os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if path.exists():
        return f"the C++ kernels are built: {path}"
    if compiler is None:
        return "no C++ compiler was found (CXX, g++, clang++): the kernels in plain JAX are used"
    includes = ("-isystem", jax.ffi.include_dir(), f"-I{FOLDER}")
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder) / path.name
        command = (compiler, *FLAGS, *includes, *map(str, sources()), "-o", str(made))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"the C++ kernels cannot be built here; the kernels in plain JAX are used:\n{done.stderr[-2000:]}"
        for old in FOLDER.glob("cpu-*.so"):
            if old.stat().st_mtime < min(source.stat().st_mtime for source in sources()):
                old.unlink()
        made.replace(path)  # whole or not there, whoever builds at the same time
    return f"built {path}"


def native_call(name: str, out: Any, *operands: Any, **attributes: Any) -> Any:
    """Call one of the library's functions. ``out``: the shape and type of its result, or a list of them."""
    assert why_absent() is None  # asked before anything is traced; loaded here in a process that only traces again
    operands = pvary_alike(*operands)
    like = jax.typeof(operands[0])

    def aval(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        mesh = like.sharding.mesh
        sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec(*(None,) * len(shape)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)

    results = [aval(*each) for each in out] if isinstance(out, list) else aval(*out)
    return jax.ffi.ffi_call(name, results, vmap_method="sequential")(*operands, **attributes)


def takes(dtype: Any) -> bool:
    """Say whether the kernels are here and compute in a type."""
    return str(jax.numpy.dtype(dtype)) in TYPES and why_absent() is None


def native_why_not(call: Call, hardware: Hardware, *dtypes: Any) -> str | None:
    """Say why a kernel in C++ cannot take a call with operands of these types."""
    if hardware.platform != "cpu":
        return f"it is for CPUs, the target is {hardware.name}"
    others = sorted({str(dtype) for dtype in dtypes} - set(TYPES))
    if others:
        return f"it computes in {' and '.join(TYPES)}, not in {', '.join(others)}"
    return placement_why_not(call) or why_absent()
