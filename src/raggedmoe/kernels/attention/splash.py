"""`attention` by JAX's own TPU kernel, splash attention: flash attention that skips the blocks that a mask hides.

It takes no scale: the scaled queries are rounded to their type. Its backward pass is called with our statistics, so the
forward pass is not run twice, nor need it be of the same implementation.
"""

import jax
import jax.numpy as jnp

from raggedmoe.hardware import Hardware
from raggedmoe.kernels.arrays import full_precision
from raggedmoe.kernels.attention.operands import Operands
from raggedmoe.kernels.placement import unchecked_why_not
from raggedmoe.kernels.proof import Level, Proof
from raggedmoe.kernels.registry import Call, Implementation

BLOCKS = (512, 256, 128)  # of queries and of slots; the last is the number of lanes


def forward(operands, *, scale, window, interpret=False):
    kernel = _kernel(operands, window, interpret)
    with full_precision(operands.query.dtype):
        out, (logsumexp,) = jax.vmap(lambda *arrays: kernel(*arrays, operands.sinks))(*_inputs(operands, scale))
    length = operands.query.shape[1]
    return jnp.swapaxes(out, 1, 2)[:, :length], logsumexp[:, :, :length]


def backward(operands, out, logsumexp, cotangent, *, scale, window, interpret=False):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    kernel = _kernel(operands, window, interpret)
    options = {**kernel.kwargs, "save_residuals": False}

    def one_sequence(query, key, value, segments, out, logsumexp, cotangent):
        masks = (kernel.dq_mask_info, kernel.dkv_mask_info)
        residuals = (query, key, value, segments, None, out, logsumexp, *masks)
        gradients = splash_attention_kernel._splash_attention_bwd(res=residuals, do=cotangent, **options)
        return gradients[3:6]

    rows = [_heads_first(array) for array in (out, jnp.moveaxis(logsumexp, 1, 2), cotangent)]
    with full_precision(operands.query.dtype):
        gradients = jax.vmap(one_sequence)(*_inputs(operands, scale), *rows)
    length = operands.query.shape[1]
    dquery, dkey, dvalue = (jnp.swapaxes(gradient, 1, 2)[:, :length] for gradient in gradients)
    dsinks = None
    if operands.sinks is not None:
        mean = jnp.einsum("bsnw,bsnw->bns", cotangent.astype(jnp.float32), out.astype(jnp.float32))
        weight = jnp.exp(operands.sinks.astype(jnp.float32)[None, :, None] - logsumexp)
        dsinks = -(weight * mean).sum((0, 2)).astype(operands.sinks.dtype)
    return (dquery * scale).astype(dquery.dtype), dkey, dvalue, dsinks


def _kernel(operands: Operands, window, interpret):
    """Make the kernel for the mask. It computes whole blocks: later slots are hidden, and so is padding."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    _, length, heads, _ = operands.query.shape
    padded, block = _sizes(length)
    before = None if window is None else window - 1
    mask = splash_attention_mask.LocalMask((padded, padded), window_size=(before, 0), offset=0)
    return splash_attention_kernel.make_splash_mha_single_device(
        mask=splash_attention_mask.MultiHeadMask([mask] * heads),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        save_residuals=True,
        interpret=interpret,
    )


def _inputs(operands: Operands, scale):
    """Return scaled queries, keys, values and segments as the kernel takes them, with the batch in front."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    query = (operands.query * scale).astype(operands.query.dtype)
    segments = None
    if operands.segments is not None:
        padded = _pad(operands.segments)
        segments = splash_attention_kernel.SegmentIds(padded, padded)
    return _heads_first(query), _heads_first(operands.key), _heads_first(operands.value), segments


def _heads_first(array):
    """Turn ``[B S N ...]`` into ``[B N S ...]``, padded to whole blocks."""
    return jnp.swapaxes(_pad(array), 1, 2)


def _pad(array):
    spare = _sizes(array.shape[1])[0] - array.shape[1]
    return jnp.pad(array, [(0, 0), (0, spare)] + [(0, 0)] * (array.ndim - 2))


def _sizes(length: int) -> tuple[int, int]:
    """Return the length in whole blocks, and the length of a block: the largest that adds little padding."""
    least = -(-length // BLOCKS[-1]) * BLOCKS[-1]
    for block in BLOCKS:
        padded = -(-length // block) * block
        if padded <= least * 9 / 8:
            return padded, block
    return least, BLOCKS[-1]


def why_not(call: Call, hardware: Hardware) -> str | None:
    """Say why it cannot run; None: it can."""
    dtype = call.arrays["query"].dtype
    if hardware.platform != "tpu":
        return f"a kernel for TPUs, not for {hardware.platform}"
    if "positions" in call.arrays:
        return "its mask is static: it takes no positions"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"takes bfloat16 and float32, got {dtype}"
    return unchecked_why_not(call)


# tests/kernels/attention/test_splash.py interprets it, and libtpu compiled it for each chip, both ways, in bfloat16
# and float32, with heads of 64, 128, 192 / 128 and 256 (docs/log.md): the versions that were tried, and no others.
PROOFS = tuple(
    Proof(
        level=Level.INTERPRETED,
        chips=("v5e", "v5p", "v6e", "tpu7x"),
        first_jax=version,
        last_jax=version,
        shown_by="make test interprets it, and libtpu compiled it (docs/log.md)",
    )
    for version in ("0.10.2", "0.12.0.1")
)

IMPLEMENTATION = Implementation(
    operation="attention",
    name="splash",
    forward=forward,
    backward=backward,
    rank={"tpu": 20},
    proofs=PROOFS,
    why_not=why_not,
)
