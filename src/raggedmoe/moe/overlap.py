"""The expert computation in parts, of the tokens or of the model width, so that moving one part can overlap with
computing another.

One part is the ordinary case: there is no other copy of these loops. Parts do not depend on each other, so the compiler
may move one while it computes another, forward and backward.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from raggedmoe.mesh import TENSOR
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.dispatch import Strategy
from raggedmoe.moe.gathering import HeldExperts
from raggedmoe.moe.grid import Grid
from raggedmoe.moe.records import RouteMetadata, RouteOutput
from raggedmoe.moe.stages import Stages


def experts_in_parts(
    x: Float[Array, "T D"],
    held: HeldExperts,
    routing: RouteOutput,
    strategy: Strategy,
    config: MoEConfig,
    grid: Grid,
    *,
    adjust: Callable[[RouteMetadata], RouteMetadata] = lambda metadata: metadata,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """The routed experts' weighted sum of every token, and how many slots were dropped.

    ``adjust`` is applied to the metadata, on one device only.
    """
    num_tokens = x.shape[0] // grid.num_token_shards
    outputs, dropped = [], jnp.zeros((), jnp.int32)
    for tokens in even_parts(num_tokens, config.token_chunks):
        stages = Stages(strategy=strategy, config=config, grid=grid, tokens=tokens)
        metadata, more = stages.prepare(routing)
        metadata = adjust(metadata) if grid.mesh is None else metadata
        dropped = dropped + more
        compute = fused_part_of_tokens if config.backend.fused else split_part_of_tokens
        outputs.append(compute(x, held, routing, metadata, stages))
    return stages.joined(outputs, 0), dropped


def split_part_of_tokens(
    x: Float[Array, "T D"], held: HeldExperts, routing: RouteOutput, metadata: Any, stages: Stages
) -> Float[Array, "part D"]:
    """Dispatch, both projections and unpermute, for each chunk of columns; the activation once, between the loops."""
    config = stages.config
    width = x.shape[1] // (stages.grid.size(TENSOR) if config.tensor_split == "model_dim" else 1)
    chunks = even_parts(width, config.width_chunks)
    sums = None
    for columns in chunks:
        rows = stages.dispatch(x, routing, metadata, columns)
        more = stages.gmm_up(rows, held, metadata, columns)
        sums = more if sums is None else jax.tree.map(jnp.add, sums, more)
    sums = stages.maybe_tp_reduce(sums)
    hidden = stages.activate(sums, held, metadata, x.dtype)
    parts = []
    for columns in chunks:
        out = stages.gmm_down(hidden, held, metadata, columns)
        parts.append(stages.unpermute(out, routing, metadata))
    return stages.joined(parts, 1)


def fused_part_of_tokens(
    x: Float[Array, "T D"], held: HeldExperts, routing: RouteOutput, metadata: Any, stages: Stages
) -> Float[Array, "part D"]:
    """The same with both projections in one operation."""
    rows = stages.dispatch(x, routing, metadata, slice(0, x.shape[1]))
    out = stages.expert_ffn(rows, held, metadata)
    return stages.unpermute(out, routing, metadata)


def even_parts(size: int, num_parts: int) -> list[slice]:
    """So many parts, whose sizes differ by one at most, or fewer where some would be empty."""
    bounds = sorted({size * i // num_parts for i in range(num_parts + 1)})
    return [slice(start, end) for start, end in itertools.pairwise(bounds)] or [slice(0, 0)]
