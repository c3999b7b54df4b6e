"""The stages between the router and the output, each with its place on the grid: one small `shard_map` a stage.

A method of `Stages` takes global arrays and says how they lie; the function beside it is what a device does.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from raggedmoe.kernels.arrays import varying_over
from raggedmoe.kernels.expert_ffn.api import ExpertBiases
from raggedmoe.mesh import TENSOR
from raggedmoe.moe.balance import Axis, total
from raggedmoe.moe.config import MoEConfig
from raggedmoe.moe.dispatch import Strategy
from raggedmoe.moe.experts import activate, fused_experts, gmm_down, gmm_up
from raggedmoe.moe.gathering import HeldExperts, up_place
from raggedmoe.moe.grid import COLUMNS, EACH, EACH_DEVICE, TOKENS, WHOLE, Grid, Place
from raggedmoe.moe.records import RouteMetadata, RouteOutput

Rows = Any  # [R D] of each device; on a mesh a `Spread`, as are metadata and the sums between the projections


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a layer does with some of its tokens, stage by stage."""

    strategy: Strategy
    config: MoEConfig
    grid: Grid
    tokens: slice  # of each device's

    def prepare(self, routing: RouteOutput) -> tuple[Any, Int[Array, ""]]:
        """The metadata, and how many slots all devices drop."""
        stage = functools.partial(prepare_part, strategy=self.strategy, tokens=self.tokens, axis=self.grid.token_axes)
        with jax.named_scope("prepare"):
            return self.grid.run(stage, *routing.parts(), places=(TOKENS, WHOLE), result=(EACH, WHOLE))

    def dispatch(self, x: Float[Array, "T D"], routing: RouteOutput, metadata: Any, columns: slice) -> Rows:
        """The rows of these columns, with their experts."""
        stage = functools.partial(
            dispatch_part, strategy=self.strategy, tokens=self.tokens, columns=columns, on_mesh=self._on_mesh
        )
        with jax.named_scope("dispatch"):
            places = (self.x_place, TOKENS, WHOLE, EACH)
            return self.grid.run(stage, x, *routing.parts(), metadata, places=places, result=EACH_DEVICE)

    def gmm_up(self, rows: Rows, held: HeldExperts, metadata: Any, columns: slice) -> Any:
        """What these columns add to both up projections."""
        stage = functools.partial(up_part, columns=columns, config=self.config)
        return self._computed("gmm_up", stage, (rows, held.matrices, metadata), (EACH_DEVICE, EACH_DEVICE, EACH))

    def maybe_tp_reduce(self, sums: Any) -> Any:
        """The sums over the whole width, where the tensor ranks each have those over their part of it."""
        if self._on_mesh and self._splits_width:
            with jax.named_scope("tp_reduce"):
                sums = self.grid.run(lambda parts: lax.psum(parts, TENSOR), sums, places=(EACH_DEVICE,), result=EACH)
        return jax.tree.map(lambda array: checkpoint_name(array, "moe_up"), sums)

    def activate(self, sums: Any, held: HeldExperts, metadata: Any, dtype: Any) -> Any:
        """The hidden rows."""
        place = up_place(self.config)
        stage = functools.partial(
            activate_part, activation=self.config.experts.activation, dtype=dtype, on_mesh=self._on_mesh
        )
        with jax.named_scope("activate"):
            places = (place, place, EACH)
            return self.grid.run(stage, sums, held.up_biases, metadata, places=places, result=EACH_DEVICE)

    def gmm_down(self, hidden: Any, held: HeldExperts, metadata: Any, columns: slice) -> Rows:
        """These columns of the down projection."""
        stage = functools.partial(down_part, columns=columns, first_adds=self._adds_ranks, config=self.config)
        places = (EACH_DEVICE, EACH_DEVICE, EACH)
        out = self._computed("gmm_down", stage, (hidden, held.matrices, metadata), places)
        return jax.tree.map(lambda array: checkpoint_name(array, "moe_down"), out)

    def expert_ffn(self, rows: Rows, held: HeldExperts, metadata: Any) -> Rows:
        """Both projections and the activation in one operation."""
        stage = functools.partial(fused_part, first_adds=self._adds_ranks, config=self.config)
        places = (EACH_DEVICE, EACH_DEVICE, up_place(self.config), EACH)
        return self._computed("expert_ffn", stage, (rows, held.matrices, held.up_biases, metadata), places)

    def unpermute(self, rows: Rows, routing: RouteOutput, metadata: Any) -> Float[Array, "T columns"]:
        """The weighted sums, with their tokens."""
        stage = functools.partial(
            unpermute_part, strategy=self.strategy, tokens=self.tokens, add_ranks=self._adds_ranks
        )
        with jax.named_scope("unpermute"):
            places = (EACH_DEVICE, TOKENS, WHOLE, EACH)
            return self.grid.run(stage, rows, *routing.parts(), metadata, places=places, result=self.x_place)

    def joined(self, parts: list[Float[Array, "_ _"]], dim: int) -> Float[Array, "_ _"]:
        """Parts of the tokens (dim 0) or of their columns (1), after each other on every device."""
        if len(parts) == 1:
            return parts[0]
        place = self.x_place
        return self.grid.run(
            lambda *parts: jnp.concatenate(parts, axis=dim), *parts, places=(place,) * len(parts), result=place
        )

    @property
    def x_place(self) -> Place:
        """Of the tokens before dispatch and after unpermute."""
        return COLUMNS if self._splits_width else TOKENS

    @property
    def _on_mesh(self) -> bool:
        return self.grid.mesh is not None

    @property
    def _splits_width(self) -> bool:
        return self.config.tensor_split == "model_dim"

    @property
    def _adds_ranks(self) -> bool:
        """The tensor ranks' results are summed; so one rank alone adds the bias of the down projection."""
        return self._on_mesh and not self._splits_width

    def _computed(self, name: str, stage: Callable[..., Any], args: tuple, places: tuple[Place, ...]) -> Any:
        """A stage without communication: unchecked, so that kernels of others can be in it."""
        with jax.named_scope(name):
            return self.grid.run(stage, *args, places=places, result=EACH_DEVICE, checked=False)


def prepare_part(
    of_tokens: dict[str, Any], of_all: dict[str, Any], *, strategy: Strategy, tokens: slice, axis: Axis
) -> tuple[RouteMetadata, Int[Array, ""]]:
    metadata = strategy.prepare(RouteOutput(**of_tokens, **of_all).of(tokens))
    return metadata, total(metadata.dropped, axis) if strategy.may_drop else jnp.zeros((), jnp.int32)


def dispatch_part(
    x: Float[Array, "T D"],
    of_tokens: dict[str, Any],
    of_all: dict[str, Any],
    metadata: RouteMetadata,
    *,
    strategy: Strategy,
    tokens: slice,
    columns: slice,
    on_mesh: bool,
) -> Float[Array, "R columns"]:
    x = x[tokens, columns]
    if on_mesh:
        # Each tensor rank's own from here on: backward their gradients are summed for T tokens, not for R rows.
        x = varying_over(x, (TENSOR,))
    return strategy.dispatch(x, RouteOutput(**of_tokens, **of_all).of(tokens), metadata)


def up_part(
    rows: Float[Array, "R columns"],
    matrices: dict[str, jax.Array],
    metadata: RouteMetadata,
    *,
    columns: slice,
    config: MoEConfig,
) -> tuple[Float[Array, "R F"], Float[Array, "R F"] | None]:
    wi_0, wi_1 = matrices["wi_0"][:, :, columns], matrices.get("wi_1")
    wi_1 = None if wi_1 is None else wi_1[:, :, columns]
    return gmm_up(rows, wi_0, wi_1, metadata.group_sizes, config.kernel_choice, config.hardware, metadata.used)


def activate_part(
    sums: tuple[Float[Array, "R F"], Float[Array, "R F"] | None],
    biases: dict[str, jax.Array],
    metadata: RouteMetadata,
    *,
    activation: str,
    dtype: Any,
    on_mesh: bool,
) -> Float[Array, "R F"]:
    up_biases = (biases.get("bias_wi_0"), biases.get("bias_wi_1"))
    hidden = activate(*sums, *up_biases, metadata.group_sizes, activation, dtype, metadata.used)
    return varying_over(hidden, (TENSOR,)) if on_mesh else hidden  # backward, summed once for all width chunks


def down_part(
    hidden: Float[Array, "R F"],
    matrices: dict[str, jax.Array],
    metadata: RouteMetadata,
    *,
    columns: slice,
    first_adds: bool,
    config: MoEConfig,
) -> Float[Array, "R columns"]:
    bias = _down_bias(matrices, first_adds)
    bias = None if bias is None else bias[:, columns]
    wo = matrices["wo"][:, :, columns]
    return gmm_down(hidden, wo, bias, metadata.group_sizes, config.kernel_choice, config.hardware, metadata.used)


def fused_part(
    rows: Float[Array, "R D"],
    matrices: dict[str, jax.Array],
    up_biases: dict[str, jax.Array],
    metadata: RouteMetadata,
    *,
    first_adds: bool,
    config: MoEConfig,
) -> Float[Array, "R D"]:
    bias, biases = _down_bias(matrices, first_adds), None
    if bias is not None:
        biases = ExpertBiases(up_biases["bias_wi_0"], up_biases.get("bias_wi_1"), bias)
    wi_0, wi_1, wo = matrices["wi_0"], matrices.get("wi_1"), matrices["wo"]
    activation, kernels, groups = config.experts.activation, config.kernel_choice, metadata.group_sizes
    return fused_experts(rows, wi_0, wi_1, wo, biases, groups, activation, kernels, config.hardware, metadata.used)


def unpermute_part(
    rows: Float[Array, "R columns"],
    of_tokens: dict[str, Any],
    of_all: dict[str, Any],
    metadata: RouteMetadata,
    *,
    strategy: Strategy,
    tokens: slice,
    add_ranks: bool,
) -> Float[Array, "T columns"]:
    out = strategy.unpermute(rows, RouteOutput(**of_tokens, **of_all).of(tokens), metadata)
    return lax.psum(out, TENSOR) if add_ranks else out  # for T tokens, not for R rows: the combine is linear


def _down_bias(matrices: dict[str, jax.Array], first_adds: bool) -> jax.Array | None:
    bias = matrices.get("bias_wo")
    return jnp.where(lax.axis_index(TENSOR) == 0, bias, 0) if first_adds and bias is not None else bias
