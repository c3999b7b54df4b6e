"""`expert_ffn` on a TPU's TensorCore: up, activation and down in one Pallas kernel (see `pallas_tpu_kernel`)."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from raggedmoe.hardware import MIB, Hardware
from raggedmoe.kernels.arrays import structs
from raggedmoe.kernels.expert_ffn import matmuls
from raggedmoe.kernels.grouped_matmul import pallas_tpu as grouped_matmul
from raggedmoe.kernels.placement import placement_why_not
from raggedmoe.kernels.proof import INTERPRETED_KERNEL
from raggedmoe.kernels.registry import BACKWARD, Call, Implementation

LANES = 128
WIDTH = 512  # of D, in the down projection: the schedule is the same for 256 to 7168


@dataclass(frozen=True, kw_only=True)
class FfnTiles:
    """The tiles into which the kernel divides its work."""

    rows: int  # of one group, in VMEM while its weights pass by; a multiple of the largest chunk
    chunks: tuple[int, ...]  # rows multiplied at once, largest first: a static choice, so each is compiled
    hidden: int  # of F: whole, or a multiple of the lanes
    width: int  # of D, in the down projection
    slots: int  # tiles whose rows or results are in VMEM: one computed, the others copied
    pack: int  # rows that share a sublane's words: copies start and end at a multiple
    cores: int  # TensorCores that share the tiles: 2 where a device has two


# The chips whose MXU is 256 wide; the others' is 128.
WIDE_MXU = ("v6e", "tpu7x")

# A pass over the weights loads them into the MXU, and that alone takes as long as multiplying about 230 rows on the
# chips with wide MXUs: cycles of one pass over 256 of F at D 7168, bfloat16 (the schedule of libtpu 0.0.50):
#   rows     64      128     256     384     512
#   v6e      4,867   5,012   5,784   8,413   11,080 (97.0 % of the MXU's peak)
#   tpu7x    4,910   5,056   5,826   8,451   11,096 (96.9 %)
#   v5e      5,683   10,971  21,703                 (94.6, 98.0 and 99.1 %)
# So there the rest of a group is one pass of 256, 384 or 512 rows, and elsewhere passes of 128 rows and one of 64.
# Float32 takes six bfloat16 products for each, and six times the code: one size of 256 rows on the wide ones.
NARROW_CHUNKS, WIDE_CHUNKS = (128, 64), {2: (512, 384, 256), 4: (256,)}

# Elements of one part of a matrix, [hidden D]: the code of one chunk, unrolled, is 5,000 to 12,000 bundles with these.
PART = {2: 9 * 2**18, 4: 9 * 2**17}

ROWS = (1024, 512, 384, 256, 128, 64)  # of a tile: the first that VMEM holds


def ffn_tiles_for(call: Call, hardware: Hardware) -> FfnTiles | None:
    """Choose tiles for a call: parts of F that fill the MXU, then as many rows as VMEM holds; None: nothing fits."""
    (num_rows, width), (_, num_hidden, _) = call.arrays["rows"].shape, call.arrays["wi_0"].shape
    size = call.arrays["rows"].dtype.itemsize
    pack = 32 // size
    wide = hardware.name in WIDE_MXU
    all_rows = _round_up(num_rows, pack)
    row_counts = [rows for rows, fewer in zip(ROWS, (*ROWS[1:], 0)) if fewer < all_rows]
    all_chunks = WIDE_CHUNKS[size] if wide else NARROW_CHUNKS
    candidates = []
    for hidden in _hidden_parts(num_hidden, PART[size] // width, 2 * LANES if wide else LANES):
        for rows in row_counts:
            tiles = FfnTiles(
                rows=rows,
                chunks=tuple(chunk for chunk in all_chunks if chunk <= rows) or (rows,),
                hidden=hidden,
                width=WIDTH,
                slots=2 if hidden < num_hidden else 3,
                pack=pack,
                cores=hardware.tensor_cores // hardware.devices_per_chip,
            )
            if rows % tiles.chunks[0] == 0:
                candidates.append(tiles)
    fitting = [tiles for tiles in candidates if vmem_need(call, tiles, hardware) <= _available(hardware)]
    efficient = (tiles for tiles in fitting if tiles.rows >= min(all_chunks[-1], row_counts[0]))
    return next(efficient, fitting[0] if fitting else None)


def _hidden_parts(num_hidden: int, most: int, unit: int) -> Iterator[int]:
    """Yield sizes of a part of F, best first: multiples of the MXU's width that leave little of the last one unused."""
    most = max(most, unit)
    while most >= LANES:
        if num_hidden <= most:
            yield num_hidden
        else:
            unit = min(unit, most // LANES * LANES)
            parts = -(-num_hidden // (most // unit * unit))
            yield _round_up(-(-num_hidden // parts), unit)
        most //= 2


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _available(hardware: Hardware) -> int:
    return (hardware.vmem_bytes or 0) - MIB  # the compiler keeps some for itself


def vmem_need(call: Call, tiles: FfnTiles, hardware: Hardware) -> int:
    """Count the bytes of VMEM that tiles need: what the kernel declares, and what the compiler keeps of one chunk."""
    size = call.arrays["rows"].dtype.itemsize
    width, hidden = (_round_up(length, LANES) for length in (call.arrays["rows"].shape[1], tiles.hidden))
    matrices = 3 if "wi_1" in call.arrays else 2
    parts = 2 * matrices * _round_up(tiles.hidden, tiles.pack) * width * size
    slots = (tiles.slots * tiles.rows + tiles.pack) * width * size
    sums = tiles.rows * width * 4 if tiles.hidden < call.arrays["wi_0"].shape[1] else 0
    biases = 2 * 8 * (width + 2 * hidden) * 4 if call.options["biases"] else 0
    # The compiler copies a chunk's rows, float32 ones with the three parts that it multiplies; on tpu7x only small ones
    # (8 MiB are copied, 11.5 MiB are not: measured).
    copies = tiles.chunks[0] * width * (2 if size == 2 else 16)
    if hardware.name == "tpu7x" and copies > 12 * MIB:
        copies = 0
    activations = tiles.chunks[0] * hidden * (2 * 4 + size)
    return parts + slots + sums + biases + copies + activations + 2 * MIB


def forward(rows, weights, bounds, *, activation, hardware, tiles=None):
    """Call the kernel, with the tiles for the chip and the shapes unless ``tiles`` are given."""
    from raggedmoe.kernels.expert_ffn import pallas_tpu_kernel

    arrays = structs(rows=rows, wi_0=weights.wi_0, wi_1=weights.wi_1)
    call = Call(operation="expert_ffn", arrays=arrays, options={"biases": weights.biases is not None})
    tiles = tiles or ffn_tiles_for(call, hardware)
    limit = min(vmem_need(call, tiles, hardware) + 4 * MIB, _available(hardware))
    return pallas_tpu_kernel.forward(rows, weights, bounds, activation=activation, tiles=tiles, vmem_limit=limit)


def backward(rows, weights, bounds, cotangent, *, activation, hardware, kept=None):
    """Compute the gradients by our grouped matmuls, those of the three projections again among them."""
    matmul = SimpleNamespace(
        forward=functools.partial(grouped_matmul.forward, hardware=hardware),
        transposed_matmul=functools.partial(grouped_matmul.transposed_matmul, hardware=hardware),
    )
    return matmuls.backward(matmul, rows, weights, bounds, cotangent, activation, kept)


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    dtype = call.arrays["rows"].dtype
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, got {dtype}"
    if call.direction == BACKWARD:
        reason = _matmuls_why_not(call, hardware)
        if reason is not None:
            return reason
    elif ffn_tiles_for(call, hardware) is None:
        width = call.arrays["rows"].shape[1]
        return f"a tile of D {width} in {dtype} does not fit the VMEM of {hardware.name}"
    return placement_why_not(call)


def _matmuls_why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why one of the backward pass's grouped matmuls cannot run."""
    rows, weight = call.arrays["rows"], call.arrays["wi_0"]
    hidden = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[1]), rows.dtype)
    for lhs, transpose_rhs in ((rows, True), (hidden, False)):
        options = {"transpose_rhs": transpose_rhs, "group_offset": False, "out_dtype": "float32"}
        matmul = Call(operation="grouped_matmul", arrays=structs(lhs=lhs, rhs=weight), options=options)
        reason = grouped_matmul.why_not(matmul, hardware)
        if reason is not None:
            return f"its grouped matmuls: {reason}"
    return None


def note(call: Call, hardware: Hardware) -> str | None:
    """Return the cost caveat that `explain` shows."""
    num_rows, pack = call.arrays["rows"].shape[0], 32 // call.arrays["rows"].dtype.itemsize
    if num_rows % pack:
        return f"the rows and the result are copied: {num_rows} is no multiple of {pack}"
    return None


IMPLEMENTATION = Implementation(
    operation="expert_ffn",
    name="pallas_tpu",
    forward=forward,
    backward=backward,
    rank={"tpu": 10},
    proofs=INTERPRETED_KERNEL,
    why_not=why_not,
    note=note,
    takes_hardware=True,
)
