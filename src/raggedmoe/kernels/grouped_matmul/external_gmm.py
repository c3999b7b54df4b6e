"""What others' TPU kernels of `grouped_matmul` share: how our contract is put to them, and their tile sizes.

Their groups start at row 0 and ours at ``bounds[0]``, but they can be told to begin with a later group: the rows before
ours become one more group, the first, which is left out. No row is moved. A kernel that has fewer matrices than groups
makes the rows of no group zero; with that extra group it always has.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from raggedmoe.hardware import MIB, Hardware
from raggedmoe.kernels.arrays import pad_rows
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.registry import Call

LANES = 128
SUBLANES = 16  # of a tile of bfloat16; 8 of float32
MAX_ROWS = 512  # of a tile; 512 by the whole I and O is within 4 % of a dense matmul's cycles (docs/log.md)
MIN_ROWS = 128  # a tile of fewer rows loads matrices into the MXU for longer than it multiplies
MIN_WIDTH = 384  # of a part of a width: the sums are read and written once for each part of I
FIRST_GROUP = 1  # group 0 is the rows before ours

# What a kernel may use of VMEM where it does not ask for more, as megablox and tokamax's first one do not: the limit
# that libtpu names when it refuses a larger one.
SCOPED_VMEM = {"v5e": 16 * MIB, "v5p": 16 * MIB, "v6e": 32 * MIB, "tpu7x": 32 * MIB}
SMALLEST_SCOPED_VMEM = 16 * MIB


class GmmTiles(NamedTuple):
    """The sizes that one step of a kernel takes: of the rows, of lhs's other dimension, and of rhs's."""

    rows: int
    inner: int
    out: int


def shifted_group_sizes(bounds):
    """Make the sizes of the groups that the kernels are given: the rows before ours, then ours."""
    return jnp.concatenate([bounds[:1], bounds[1:] - bounds[:-1]])


def forward_tiles(num_rows: int, inner: int, out: int, groups: int, sizes: tuple[int, int], chip: Hardware) -> GmmTiles:
    """Choose the tiles of ``[R I] x [G I O]`` that fit VMEM and read least. ``sizes``: bytes of an input, an output.

    A step holds two buffers of each tile, as the next is fetched meanwhile, and float32 sums. A float32 operand is
    multiplied as three of bfloat16, which take six bytes more.
    """
    rows = row_tile(num_rows, groups)
    steps = -(-num_rows // rows) + groups
    split = 6 if sizes[0] == 4 else 0

    def vmem(inner_tile: int, out_tile: int) -> int:
        inputs = (rows * inner_tile + inner_tile * out_tile) * (2 * sizes[0] + split)
        return inputs + rows * out_tile * (2 * sizes[1] + 4)

    def traffic(inner_tile: int, out_tile: int) -> int:
        # A matrix that is not split along I stays for all the row tiles of its group.
        matrices = groups if inner_tile >= inner else steps
        return num_rows * inner * -(-out // out_tile) + matrices * inner * out

    return GmmTiles(rows, *_best_split(inner, out, vmem, traffic, chip))


def transposed_tiles(num_rows: int, inner: int, out: int, groups: int, size: int, chip: Hardware) -> GmmTiles:
    """Choose the tiles of ``[R I]ᵀ x [R O]`` in each group that fit in VMEM and read least."""
    rows = row_tile(num_rows, groups)
    split = 10 if size == 4 else 0

    def vmem(inner_tile: int, out_tile: int) -> int:
        # Two buffers of each input, both once more in float32, masked, where the kernel transposes one, and split.
        inputs = rows * (inner_tile + out_tile) * (2 * size + 4 + split)
        return inputs + inner_tile * out_tile * (2 * size + 4)

    def traffic(inner_tile: int, out_tile: int) -> int:
        return num_rows * (inner * -(-out // out_tile) + out * -(-inner // inner_tile))

    return GmmTiles(rows, *_best_split(inner, out, vmem, traffic, chip))


def row_tile(num_rows: int, groups: int) -> int:
    """Choose the rows of a tile, about those of a group: a tile that straddles groups is computed for each of them."""
    of_a_group = 1 << (-(-num_rows // groups) - 1).bit_length()  # the next power of two
    return min(max(MIN_ROWS, min(of_a_group, MAX_ROWS)), -(-num_rows // SUBLANES) * SUBLANES)


def _best_split(
    inner: int, out: int, vmem: Callable[[int, int], int], traffic: Callable[[int, int], int], chip: Hardware
) -> tuple[int, int]:
    """Choose the tiles of two widths that fit and cause the least traffic; of equals, the fewest."""
    limit = SCOPED_VMEM.get(chip.name, SMALLEST_SCOPED_VMEM) * 7 // 8  # the rest: what the compiler spills
    choices = [(i, o) for i in _splits(inner) for o in _splits(out)]
    fitting = [choice for choice in choices if vmem(*choice) <= limit] or choices[-1:]
    return min(fitting, key=lambda choice: (traffic(*choice), -choice[0] * choice[1]))


def _splits(width: int) -> list[int]:
    """List the width whole, and in ever more parts of whole lanes."""
    parts = (-(-width // (count * LANES)) * LANES for count in range(2, -(-width // MIN_WIDTH) + 1))
    return [width, *dict.fromkeys(part for part in parts if part >= MIN_WIDTH)]


def call_gmm(kernel, lhs, rhs, bounds, transpose_rhs: bool, out_dtype, chip: Hardware):
    """Call a library's ``gmm``, whose type of result and precision are bound, with tiles that fit the chip."""
    num_rows, inner = lhs.shape
    out_dim = rhs.shape[1] if transpose_rhs else rhs.shape[2]
    values = jax.tree.leaves(lhs)[0]  # of a quantised one, too
    sizes = (values.dtype.itemsize, jnp.dtype(out_dtype).itemsize)
    tiles = forward_tiles(num_rows, inner, out_dim, rhs.shape[0], sizes, chip)
    out = kernel(
        jax.tree.map(lambda array: pad_rows(array, tiles.rows), lhs),
        rhs,
        shifted_group_sizes(bounds),
        tiling=tuple(tiles),
        group_offset=jnp.int32(FIRST_GROUP),
        transpose_rhs=transpose_rhs,
    )
    return out[:num_rows]


def call_tgmm(kernel, lhs, rhs, bounds, chip: Hardware):
    """Call a library's ``tgmm``, ``out[g] = lhs_gᵀ @ rhs_g``, which is bound as in `call_gmm`."""
    groups = bounds.shape[0] - 1
    (num_rows, inner), out_dim = lhs.shape, rhs.shape[1]
    tiles = transposed_tiles(num_rows, inner, out_dim, groups, lhs.dtype.itemsize, chip)
    return kernel(
        pad_rows(lhs, tiles.rows).T,
        pad_rows(rhs, tiles.rows),
        shifted_group_sizes(bounds),
        tiling=tuple(tiles),
        group_offset=jnp.int32(FIRST_GROUP),
        num_actual_groups=groups,
    )


@contextlib.contextmanager
def compile_target(chip: Hardware) -> Iterator[None]:
    """Make Pallas take the chip for the one that is compiled for, where no mesh has named another."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.abstract_device is not None:
        yield
        return
    cores = max(1, chip.tensor_cores // chip.devices_per_chip)
    device = AbstractDevice(device_kind=chip.device_kinds[0], num_cores=cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why none of the TPU kernels can run."""
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    return types_why_not(call) or unchecked_why_not(call)


def types_why_not(call: Call) -> str | None:
    """Say why none of them can run on arrays of these types."""
    dtype = call.arrays["lhs"].dtype
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, got {dtype}"
    if call.options["out_dtype"] not in ("bfloat16", "float32"):
        return f"gives bfloat16 and float32, not {call.options['out_dtype']}"
    return None
