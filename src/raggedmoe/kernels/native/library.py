"""The C++ kernels for CPUs: one library, built from the `.cc` files beside the Python files that call it.

An installed wheel has it where there was a C++ compiler; elsewhere `python -m raggedmoe.kernels.native` builds it, and
`make` calls that. Nothing else needs it: without it the kernels in plain JAX are taken, and `explain` says why.
"""

import ctypes
import functools
import os
import struct
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.native import build as building
from raggedmoe.kernels.placement import placement_why_not, pvary_alike
from raggedmoe.kernels.proof import Level, Proof
from raggedmoe.kernels.qarray import FORMATS
from raggedmoe.kernels.registry import Call, Implementation
from raggedmoe.names import unknown

TARGETS = (  # exported by the library
    "raggedmoe_grouped_matmul",
    "raggedmoe_transposed_matmul",
    "raggedmoe_quantized_matmul",
    "raggedmoe_expert_ffn",
    "raggedmoe_expert_ffn_gradients",
    "raggedmoe_attention",
    "raggedmoe_attention_gradients",
    "raggedmoe_gather",
    "raggedmoe_gather_reduce",
    "raggedmoe_row_dots",
)
TYPES = ("float32", "bfloat16")
BUILD = "python -m raggedmoe.kernels.native"
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512_bf16")  # as RAGGEDMOE_CPU_ISA names the best one to use


@functools.cache
def why_absent() -> str | None:
    """Load the library and tell XLA of its functions. Return None, or why they are not there."""
    wanted = os.environ.get("RAGGEDMOE_CPU_ISA")
    if wanted and wanted not in INSTRUCTION_SETS:
        raise unknown("RAGGEDMOE_CPU_ISA", wanted, INSTRUCTION_SETS)
    if os.environ.get("RAGGEDMOE_NATIVE") == "0":
        return "RAGGEDMOE_NATIVE=0 leaves it out"
    path = building.library_path()
    if not path.exists():
        return f"its C++ library is not built here: {_how_to_build()}"
    try:
        register(_load(str(path)))
    except OSError as error:
        return f"its C++ library cannot be loaded: {error}; {BUILD} builds it anew"
    except AttributeError as error:
        return f"its C++ library lacks a function: {error}; {BUILD} builds it anew"
    except jax.errors.JaxRuntimeError as error:  # built with the headers of a jaxlib that is newer than this one
        return f"XLA refuses its C++ library, and {BUILD} builds it anew: {error}"
    return None


def _load(path: str) -> ctypes.CDLL:
    if _is_cut_short(path):
        raise OSError(f"{path} is cut short")
    return ctypes.cdll.LoadLibrary(path)


def _is_cut_short(path: str) -> bool:
    """Say whether an ELF file lacks its end, where the table of its sections is: loading it would end the process."""
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, os.SEEK_END)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):  # of 64 bits, little-endian
        return False
    (offset,), (entry_size, num_entries) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return size < offset + entry_size * num_entries


def register(library: ctypes.CDLL) -> None:
    """Tell XLA of the library's functions."""
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


def _how_to_build() -> str:
    if building.compiler() is None:
        return f"no C++ compiler was found; install one ({building.INSTALL_COMPILER}), then `{BUILD}` builds it"
    if not os.access(building.FOLDER, os.W_OK):
        return f"`{BUILD}` builds it, run by a user who may write into {building.FOLDER}"
    return f"`{BUILD}` builds it"


def build() -> str:
    """Build the library if it is not there or cannot be loaded. Return what was done, or why it cannot be."""
    path, compiler = building.library_path(), building.compiler()
    if path.exists() and why_absent() is None:
        return f"the C++ kernels are built: {path}"
    if compiler is None:
        return (
            "the C++ kernels are not built, those in plain JAX are used: no C++ compiler was found (CXX, "
            f"{', '.join(building.COMPILERS)}); install one by {building.INSTALL_COMPILER}"
        )
    reason = building.compile_library(compiler, jax.ffi.include_dir(), path)
    if reason is not None:
        return f"the C++ kernels cannot be built, those in plain JAX are used: {reason}"
    building.remove_old_libraries(path)
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

    results = [aval(*description) for description in out] if isinstance(out, list) else aval(*out)
    return jax.ffi.ffi_call(name, results, vmap_method="sequential")(*operands, **attributes)


def takes(dtype: Any) -> bool:
    """Say whether the kernels are here and compute in a type."""
    return str(jax.numpy.dtype(dtype)) in TYPES and why_absent() is None


def native_why_not(call: Call, hardware: Hardware, *dtypes: Any) -> str | None:
    """Say why a kernel in C++ cannot take a call with operands of these types, where there is the library."""
    if hardware.platform != "cpu":
        return f"it is for CPUs, the target is {hardware.name}"
    others = sorted({str(dtype) for dtype in dtypes} - set(TYPES))
    if others:
        return f"it computes in {' and '.join(TYPES)}, not in {', '.join(others)}"
    return placement_why_not(call)


def native_implementation(operation: str, **functions: Any) -> Implementation:
    """Describe an operation's implementation in C++, the first that `auto` takes on a CPU."""
    proofs = (Proof(level=Level.RUN, platforms=("cpu",), formats=FORMATS, shown_by="make test"),)
    return Implementation(
        operation=operation, name="cpu_native", rank={"cpu": 5}, proofs=proofs, why_absent=why_absent, **functions
    )
