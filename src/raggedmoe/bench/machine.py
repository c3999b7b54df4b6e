"""This machine, named by what it is: its CPU, what instructions that has, and the versions of the libraries."""

import contextlib
import importlib
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
PACKAGES = ("jax", "torch", "transformers", "numpy")
OUR_ISA = "RAGGEDMOE_CPU_ISA"
# What restricts each library to an instruction set. Ours reads the last.
_AVX512 = (
    "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4 "  # NumPy's names, old and new
)
# XLA's own code obeys the first flag. Its matmuls by XNNPACK and YNNPACK look at the CPU itself, so nothing goes there;
# what is left are Eigen's, whose tiles are oneDNN's and obey ONEDNN_MAX_CPU_ISA, in XLA as in PyTorch.
_XLA_AVX2 = "--xla_cpu_max_isa=AVX2 --xla_cpu_experimental_xnn_fusion_type= --xla_cpu_experimental_ynn_fusion_type="
ISAS: Mapping[str, Mapping[str, str]] = {
    "avx2": {
        "XLA_FLAGS": _XLA_AVX2,
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": _AVX512.strip(),
        OUR_ISA: "avx2",
    }
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a reader of the figures has to know."""

    cpu: str
    cores: int
    features: tuple[str, ...]
    isa: str | None  # that all contenders were restricted to
    versions: Mapping[str, str]

    @property
    def title(self) -> str:
        """One line."""
        has = ", ".join(self.features) or "no vector instructions known"
        restricted = f", every contender restricted to {self.isa}" if self.isa else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.cpu}, {self.cores} cores ({has}{restricted}); {versions}"


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_features() -> tuple[str, ...]:
    """Return those of `FEATURES` that the CPU has and that no --isa has taken away."""
    flags = set(_field("flags").split()) | set(_field("Features").split())
    if os.environ.get(OUR_ISA) == "avx2":
        flags -= {name for name in FEATURES if name.startswith(("avx512", "amx"))}
    return tuple(name for name in FEATURES if name in flags)


def this_machine(isa: str | None = None) -> Machine:
    """Look."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu = _field("model name") or platform.processor() or platform.machine()
    return Machine(cpu=cpu, cores=num_cores(), features=cpu_features(), isa=isa, versions=versions)


@contextlib.contextmanager
def restrict_isa(isa: str | None) -> Iterator[None]:
    """Let this process as well count only what the instruction set has, where it decides who can run."""
    before = os.environ.get(OUR_ISA)
    if isa is not None:
        os.environ[OUR_ISA] = isa
    try:
        yield
    finally:
        if isa is not None:
            os.environ.pop(OUR_ISA)
            os.environ.update({} if before is None else {OUR_ISA: before})


def isa_environment(isa: str | None) -> dict[str, str]:
    """Return the variables that restrict every library of a child; flags of XLA that are set already stay."""
    if isa is None:
        return {}
    wanted = dict(ISAS[isa])
    wanted["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), wanted["XLA_FLAGS"]])
    wanted["NPY_DISABLE_CPU_FEATURES"] = " ".join(_numpy_features(wanted["NPY_DISABLE_CPU_FEATURES"].split()))
    return wanted


def _numpy_features(names: list[str]) -> list[str]:
    """List those that this NumPy chooses at run time: it warns of the others."""
    try:
        numpy_core: Any = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:
        return []
    features, chosen = numpy_core.__cpu_features__, numpy_core.__cpu_dispatch__
    return [name for name in names if name in chosen and features.get(name)]


def _field(name: str) -> str:
    """Return the first processor's value of a field of /proc/cpuinfo."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
