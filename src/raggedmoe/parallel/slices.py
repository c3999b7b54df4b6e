"""TPU slices as Google Kubernetes Engine has them: chips on a host, hosts in a slice, and what its nodes are called.

From its public documentation, "Plan TPUs in GKE": machine types ct4p-hightpu-4t, ct5lp-hightpu-{1,4,8}t,
ct5p-hightpu-4t, ct6e-standard-{1,4,8}t and tpu7x-standard-4t, the digit being the chips of a host. From "About GKE
dynamic slicing": of tpu7x, pools of 16 nodes hold a block of 4x4x4 chips each, and larger slices are composed of them
when a run starts.
"""

import math
import re
from dataclasses import dataclass

from raggedmoe.hardware import HARDWARE
from raggedmoe.names import unknown

SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")  # larger ones: multiples of 4 in each direction
SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
HOST_CHIPS = 4  # of a slice of several hosts
LARGEST_HOST = 8  # of chips laid out in two directions
BLOCK = "4x4x4"  # what slices are composed of
COMPOSED_CHIPS = ("tpu7x",)  # whose slices GKE composes


@dataclass(frozen=True, kw_only=True)
class _Kind:
    accelerator: str  # the nodes' label cloud.google.com/gke-tpu-accelerator
    directions: int  # in which chips are laid out


KINDS: dict[str, _Kind] = {
    "v4": _Kind(accelerator="tpu-v4-podslice", directions=3),
    "v5e": _Kind(accelerator="tpu-v5-lite-podslice", directions=2),
    "v5p": _Kind(accelerator="tpu-v5p-slice", directions=3),
    "v6e": _Kind(accelerator="tpu-v6e-slice", directions=2),
    "tpu7x": _Kind(accelerator="tpu7x", directions=3),
}


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Chips that are connected to each other."""

    chip: str  # of KINDS
    layout: str  # chips in each direction, such as 4x8x8
    chips_per_host: int

    @property
    def name(self) -> str:
        return f"{self.chip}:{self.layout}"

    @property
    def accelerator(self) -> str:
        return KINDS[self.chip].accelerator

    @property
    def num_chips(self) -> int:
        return _product(self.layout)

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def num_blocks(self) -> int:
        """Whole blocks of 4x4x4 chips that it is made of; 0: it is smaller than one, or flat."""
        sizes = [int(size) for size in self.layout.split("x")]
        return self.num_chips // _product(BLOCK) if len(sizes) == 3 and min(sizes) >= 4 else 0

    @property
    def block_hosts(self) -> int:
        """Hosts of one such block."""
        return _product(BLOCK) // self.chips_per_host

    @property
    def num_devices(self) -> int:
        """As JAX sees them: a tpu7x chip is two."""
        return self.num_chips * HARDWARE[self.chip].devices_per_chip


def slice_named(topology: str, chips_per_host: int | None = None) -> Slice:
    """The slice of a name such as tpu7x:4x8x8 or v6e:4x4, with the hosts that it has by default."""
    chip, _, layout = topology.partition(":")
    if chip not in KINDS:
        raise unknown("topology", topology, [f"{name}:{_examples(name)[0]}" for name in KINDS])
    if not _is_offered(chip, layout):
        more = ", or multiples of 4 in each direction, ascending" if KINDS[chip].directions == 3 else ""
        raise ValueError(
            f"topology {topology!r}: expected chips in {KINDS[chip].directions} directions as {chip} slices have them: "
            f"{', '.join(_examples(chip))}{more}"
        )
    chips = _product(layout)
    one_host = KINDS[chip].directions == 2 and chips <= LARGEST_HOST
    fitting = (chips, HOST_CHIPS) if one_host and chips > HOST_CHIPS else (min(chips, HOST_CHIPS),)
    found = fitting[0] if chips_per_host is None else chips_per_host
    if found not in fitting:
        raise ValueError(f"{topology}: expected {' or '.join(map(str, fitting))} chips per host, got {chips_per_host}")
    return Slice(chip=chip, layout=layout, chips_per_host=found)


def _examples(chip: str) -> tuple[str, ...]:
    return SQUARES if KINDS[chip].directions == 2 else (*SMALL_CUBES, "4x4x4", "4x4x8", "4x8x8")


def _is_offered(chip: str, layout: str) -> bool:
    if KINDS[chip].directions == 2:
        return layout in SQUARES
    if layout in SMALL_CUBES:
        return True
    sizes = [int(size) for size in layout.split("x")] if re.fullmatch(r"\d+x\d+x\d+", layout) else [0]
    return sizes == sorted(sizes) and all(size >= 4 and size % 4 == 0 for size in sizes)


def _product(layout: str) -> int:
    return math.prod(int(size) for size in layout.split("x"))
