"""The TPU topologies that the public compiler knows, and what a function traced for one of them sees."""

import contextlib
import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from packaging.requirements import Requirement

from raggedmoe.hardware import HARDWARE, Hardware, hardware_of_device
from raggedmoe.names import unknown

# One host's chips of each kind. Larger ones have more in each direction: tpu7x:4x8x8.
EXAMPLES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
HOST = "cpu"  # this machine: a program is lowered for it, not compiled

# Read by libtpu when it is loaded, hence before the first topology is asked for. It must not look for a TPU machine's
# metadata server (a minute's wait elsewhere), and may be loaded by several processes at once.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A number of chips of one kind, and how they are laid out."""

    name: str
    hardware: Hardware
    devices: tuple[Any, ...]  # as JAX sees them, in the compiler's order
    num_chips: int

    @property
    def device_bytes(self) -> int:
        """HBM of one JAX device: a chip's, shared by as many devices as it shows."""
        assert self.hardware.hbm_bytes is not None
        return self.hardware.hbm_bytes * self.num_chips // len(self.devices)

    @property
    def abstract_device(self) -> AbstractDevice:
        device = self.devices[0]
        return AbstractDevice(device_kind=device.device_kind, num_cores=device.num_cores, platform=device.platform)

    def mesh(self, **axes: int) -> Mesh:
        """Arrange all its devices as a mesh with these axes, ``topology.mesh(data=2, expert=4)``."""
        if math.prod(axes.values()) != len(self.devices):
            raise ValueError(f"expected axes whose sizes multiply to the {len(self.devices)} devices, got {axes}")
        devices = np.array(self.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def check_topology_name(name: str) -> None:
    """Require ``chip:AxB`` or ``chip:AxBxC`` with a chip that the compiler knows."""
    chip, _, layout = name.partition(":")
    known = [example.partition(":")[0] for example in EXAMPLES]
    if chip not in known:
        raise unknown("topology", name, (*EXAMPLES, HOST))
    if not re.fullmatch(r"\d+x\d+(x\d+)?", layout):
        raise ValueError(f"topology {name!r}: expected the chips in each direction, as in {', '.join(EXAMPLES)}")


def check_compiler() -> None:
    """Require the TPU compiler, in the version that this JAX asks for."""
    wanted = _wanted_libtpu()
    install = f"pip install 'libtpu{wanted}'" if wanted else "pip install 'raggedmoe[tpu]'"
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"compiling for a TPU needs its compiler, libtpu, which is not installed: pip install 'raggedmoe[tpu]'; "
            f"JAX {jax.__version__} needs libtpu{wanted}"
        ) from None
    if wanted and not Requirement(f"libtpu{wanted}").specifier.contains(installed, prereleases=True):
        raise ValueError(f"JAX {jax.__version__} needs libtpu{wanted}, found {installed}; {install}")


def _wanted_libtpu() -> str:
    """Read the versions of libtpu that the installed JAX names for its extra `tpu`; empty: none."""
    for line in importlib.metadata.requires("jax") or ():
        requirement = Requirement(line)
        if requirement.name == "libtpu" and requirement.marker and requirement.marker.evaluate({"extra": "tpu"}):
            return str(requirement.specifier)
    return ""


def find_topology(name: str, num_slices: int = 1) -> Topology:
    """Look up a topology, or so many slices of it.

    That loads the compiler into this process; `raggedmoe.aot.worker` uses another.
    """
    check_topology_name(name)
    check_compiler()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=num_slices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology {name!r}: {error}; known are {', '.join(EXAMPLES)}, and larger ones") from None
    devices: tuple[Any, ...] = tuple(description.devices)
    hardware = hardware_of_device(devices[0].platform, devices[0].device_kind)
    num_chips = num_slices * math.prod(int(size) for size in name.partition(":")[2].split("x"))
    return Topology(name=name, hardware=hardware, devices=devices, num_chips=num_chips)


@contextlib.contextmanager
def target_topology(topology: Topology, mesh: Mesh | AbstractMesh | None = None) -> Iterator[None]:
    """Make what is traced inside be for that topology: for one device of it, or for the mesh given.

    `target_hardware` and Pallas's `get_tpu_info` then answer for its chip.
    """
    alone = AbstractMesh((), (), abstract_device=topology.abstract_device)
    with jax.sharding.use_abstract_mesh(alone if mesh is None else mesh.abstract_mesh):
        yield


def find_chip(topology: str) -> Hardware:
    """Look up the chip that a topology's name begins with, without the compiler."""
    check_topology_name(topology)
    return HARDWARE[topology.partition(":")[0]]
