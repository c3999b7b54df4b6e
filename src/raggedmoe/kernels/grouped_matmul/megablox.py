"""`grouped_matmul` by JAX's own TPU kernels, megablox, with tiles that fit the chip: its own default, 128 of each, is
about 50 times slower (docs/log.md)."""

import functools

from raggedmoe.kernels.arrays import full_precision
from raggedmoe.kernels.grouped_matmul import external_gmm
from raggedmoe.kernels.grouped_matmul.gradients import matmul_gradients
from raggedmoe.kernels.proof import INTERPRETED_KERNEL
from raggedmoe.kernels.registry import Implementation


def forward(lhs, rhs, bounds, *, transpose_rhs, out_dtype, hardware):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    kernel = functools.partial(gmm, preferred_element_type=out_dtype)
    with full_precision(lhs.dtype):
        return external_gmm.call_gmm(kernel, lhs, rhs, bounds, transpose_rhs, out_dtype, hardware)


def transposed_matmul(lhs, rhs, bounds, *, hardware):
    """Compute ``out[g] = lhs_gᵀ @ rhs_g`` over the rows of each group: ``[R I], [R O] -> [G I O]``."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    kernel = functools.partial(tgmm, preferred_element_type=lhs.dtype)
    with full_precision(lhs.dtype):
        return external_gmm.call_tgmm(kernel, lhs, rhs, bounds, hardware)


IMPLEMENTATION = Implementation(
    operation="grouped_matmul",
    name="megablox",
    forward=forward,
    backward=functools.partial(matmul_gradients, forward, transposed_matmul),
    transposed=transposed_matmul,
    # Before XLA's own (20): with its metadata, some 38 small XLA operations, 125,222 issue cycles by the compiler's
    # schedule at R 8192, I 2048, O 1408, G 16 on a v6e, where XLA's masks, rolls and ragged dot are 264,951.
    rank={"tpu": 16},
    proofs=INTERPRETED_KERNEL,
    why_not=external_gmm.why_not,
    takes_hardware=True,
)
