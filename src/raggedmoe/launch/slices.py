"""TPU slices as Google Kubernetes Engine has them: chips on a host, hosts in a slice, and what its nodes are called.

By its public documentation, "Plan TPUs in GKE", machine types are ct4p-hightpu-4t, ct5lp-hightpu-{1,4,8}t,
ct5p-hightpu-4t, ct6e-standard-{1,4,8}t and tpu7x-standard-4t, the digit being the chips of a host. By "About GKE
dynamic slicing", pools of 16 nodes of tpu7x hold a block of 4x4x4 chips each, and larger slices are composed of them
when a run starts.
"""

import math
import re
from dataclasses import dataclass

from raggedmoe.hardware import HARDWARE
from raggedmoe.names import unknown

SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # larger ones: multiples of 4 in each direction
SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
HOST_CHIPS = 4  # chips of each host in a slice of several hosts
LARGEST_HOST = 8  # chips of a host, where chips are laid out in two dimensions
BLOCK_TOPOLOGY = "4x4x4"  # what slices are composed of
COMPOSED_CHIPS = ("tpu7x",)  # whose slices GKE composes


@dataclass(frozen=True, kw_only=True)
class _SliceKind:
    """How GKE names and lays out the slices of one chip."""

    accelerator: str  # the nodes' label cloud.google.com/gke-tpu-accelerator
    num_dims: int  # dimensions of the grid that the chips form


SLICE_KINDS: dict[str, _SliceKind] = {
    "v4": _SliceKind(accelerator="tpu-v4-podslice", num_dims=3),
    "v5e": _SliceKind(accelerator="tpu-v5-lite-podslice", num_dims=2),
    "v5p": _SliceKind(accelerator="tpu-v5p-slice", num_dims=3),
    "v6e": _SliceKind(accelerator="tpu-v6e-slice", num_dims=2),
    "tpu7x": _SliceKind(accelerator="tpu7x", num_dims=3),
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A TPU slice: chips that are connected by their own network."""

    chip: str  # a name in SLICE_KINDS
    topology: str  # chips in each dimension, such as 4x8x8
    chips_per_host: int

    @property
    def name(self) -> str:
        """The chip and its topology, such as tpu7x:4x8x8."""
        return f"{self.chip}:{self.topology}"

    @property
    def accelerator(self) -> str:
        """The nodes' label cloud.google.com/gke-tpu-accelerator."""
        return SLICE_KINDS[self.chip].accelerator

    @property
    def num_chips(self) -> int:
        """Chips of the whole slice."""
        return _num_chips(self.topology)

    @property
    def num_hosts(self) -> int:
        """Hosts of the whole slice."""
        return self.num_chips // self.chips_per_host

    @property
    def num_blocks(self) -> int:
        """Whole blocks of 4x4x4 chips that the slice is made of; 0 if it is smaller than one, or flat."""
        sizes = [int(size) for size in self.topology.split("x")]
        return self.num_chips // _num_chips(BLOCK_TOPOLOGY) if len(sizes) == 3 and min(sizes) >= 4 else 0

    @property
    def block_hosts(self) -> int:
        """Hosts of one block of 4x4x4 chips."""
        return _num_chips(BLOCK_TOPOLOGY) // self.chips_per_host

    @property
    def num_devices(self) -> int:
        """Devices that JAX shows for the slice; a tpu7x chip is two."""
        return self.num_chips * HARDWARE[self.chip].devices_per_chip


def parse_slice(name: str, chips_per_host: int | None = None) -> Slice:
    """Parse the name of a slice, such as tpu7x:4x8x8 or v6e:4x4; by default with the hosts that GKE gives it."""
    chip, _, topology = name.partition(":")
    if chip not in SLICE_KINDS:
        raise unknown("topology", name, [f"{kind}:{_example_topologies(kind)[0]}" for kind in SLICE_KINDS])
    if not _is_valid_topology(chip, topology):
        more = ", or multiples of 4 in each direction, ascending" if SLICE_KINDS[chip].num_dims == 3 else ""
        raise ValueError(
            f"topology {name!r}: expected chips in {SLICE_KINDS[chip].num_dims} directions as {chip} slices have them: "
            f"{', '.join(_example_topologies(chip))}{more}"
        )
    chips = _num_chips(topology)
    one_host = SLICE_KINDS[chip].num_dims == 2 and chips <= LARGEST_HOST
    host_sizes = (chips, HOST_CHIPS) if one_host and chips > HOST_CHIPS else (min(chips, HOST_CHIPS),)
    host_size = host_sizes[0] if chips_per_host is None else chips_per_host
    if host_size not in host_sizes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, host_sizes))} chips per host, got {chips_per_host}")
    return Slice(chip=chip, topology=topology, chips_per_host=host_size)


def _example_topologies(chip: str) -> tuple[str, ...]:
    return SQUARES if SLICE_KINDS[chip].num_dims == 2 else (*SMALL_CUBES, "4x4x4", "4x4x8", "4x8x8")


def _is_valid_topology(chip: str, topology: str) -> bool:
    if SLICE_KINDS[chip].num_dims == 2:
        return topology in SQUARES
    if topology in SMALL_CUBES:
        return True
    sizes = [int(size) for size in topology.split("x")] if re.fullmatch(r"\d+x\d+x\d+", topology) else [0]
    return sizes == sorted(sizes) and all(size >= 4 and size % 4 == 0 for size in sizes)


def _num_chips(topology: str) -> int:
    return math.prod(int(size) for size in topology.split("x"))
