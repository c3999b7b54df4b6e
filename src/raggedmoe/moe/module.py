"""`MoE`: the layer as a flax nnx module."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from raggedmoe.kernels.qarray import Quantized, check_operand
from raggedmoe.lora import check_adapted
from raggedmoe.moe.amax_history import empty_histories
from raggedmoe.moe.config import MoEConfig, check_execution, strategy_name
from raggedmoe.moe.dispatch import check_has_mesh
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.moe.layer import DEFAULT_EXECUTION, moe_route_and_compute
from raggedmoe.moe.records import MoEOutput
from raggedmoe.params import Params, check_param, check_params
from raggedmoe.sharding.axes import AnyMesh, MeshAxes, logical_mesh
from raggedmoe.sharding.rules import is_routed, make_params


class SelectionBias(nnx.Variable):
    """A bias that only decides who is chosen: no `nnx.Param`, no gradient; `update_selection_bias` moves it."""


class AmaxHistory(nnx.Variable):
    """The largest values that delayed scales are made of. In place of a gradient it has its value after the step."""


class FrozenParam(nnx.Variable):
    """A weight beside which adapters learn: no `nnx.Param`, so no optimizer takes it."""


KINDS: dict[str | None, type[nnx.Variable]] = {"gradient": nnx.Param, "load": SelectionBias, None: FrozenParam}


class MoE(nnx.Module):
    """A Mixture-of-Experts layer.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from raggedmoe import MoE, MoEConfig
    >>> config = MoEConfig(num_experts=8, experts_per_token=2, model_dim=16, expert_dim=32)
    >>> layer = MoE(config, rngs=nnx.Rngs(0))
    >>> out = layer(jnp.ones((2, 5, 16)))
    >>> out.output.shape, int(out.load.sum()), int(out.dropped)
    ((2, 5, 16), 20, 0)
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs | None = None,
        params: Mapping[str, jax.Array | np.ndarray] | None = None,
        axes: Mapping[str, tuple[str, ...]] | None = None,
        execution: MoEExecution = DEFAULT_EXECUTION,
        mesh: AnyMesh | None = None,
        mesh_axes: MeshAxes | None = None,
    ) -> None:
        """Make a layer with new weights or with given ones.

        Args:
          config: what the layer is.
          rngs: whose key new weights are drawn from.
          params: given weights, by the names of ``config.param_specs()``. Those of the experts, shared ones too, may be
            quantised (docs/quantised.md), for inference or frozen beside adapters.
          axes: the names of each given weight's dimensions, as in ``config.param_specs()``. A transposed weight is then
            refused where the sizes agree, too.
          execution: how it runs, unless a call says otherwise.
          mesh: devices to compute on; the tokens are split over them. `raggedmoe.Plan` makes one.
          mesh_axes: for a mesh with other axes, which of them are "data", "fsdp", "expert" and "tensor", such as
            ``{"fsdp": "replica", "expert": ("x", "y")}``. Along an axis that is not named all devices do the same, and
            sum their gradients to agree on them, which a plan does not count.
        """
        check_execution(config, execution)
        check_has_mesh(strategy_name(config, execution), mesh)
        self.config, self.execution, self.mesh = config, execution, logical_mesh(mesh, mesh_axes)
        histories = empty_histories(config, execution.quantization)
        self.amax_history = nnx.Dict({name: AmaxHistory(value) for name, value in histories.items()})
        specs = check_adapted(config.param_specs(), config.lora)
        if axes is not None:
            check_params(specs, params or {}, axes)
        params = make_params(specs, params, rngs, replace(self.mesh, tensor_split=execution.tensor_split))
        for name, spec in specs.items():
            param: Any = params[name] if isinstance(params[name], Quantized) else jnp.asarray(params[name])
            if isinstance(param, Quantized) and is_routed(name, spec):
                param = check_operand("MoE", name, param, "G F D")
            setattr(self, name, KINDS[spec.updated_by](param, axes=spec.axes))

    @property
    def params(self) -> Params:
        """The weights as the functional core takes them, their axes and shapes checked."""
        params = {}
        for name, spec in self.config.param_specs().items():
            variable = getattr(self, name)
            params[name] = variable.get_value()
            check_param(name, spec, params[name], tuple(variable.get_metadata().get("axes", spec.axes)))
        return params

    def __call__(
        self,
        x: Float[Array, "... D"],
        *,
        mask: Bool[Array, "..."] | None = None,
        key: jax.Array | None = None,
        token_ids: Integer[Array, "..."] | None = None,
        replay: Integer[Array, "... K"] | None = None,
        execution: MoEExecution | None = None,
    ) -> MoEOutput:
        """Compute the layer on ``x [..., D]``; the other arguments have its leading dimensions.

        Args:
          x: tokens. The last leading dimension is the sequence, for the sequence-wise loss.
          mask: True for tokens that count; a masked token's output is zero.
          key: for random selection and for jitter.
          token_ids: for hash selection.
          replay: a recorded routing, ``MoEOutput.experts`` of an earlier call, used again.
          execution: how to run this call, if not as the layer was made to.
        """
        width = self.config.model_dim
        if x.ndim < 2 or x.shape[-1] != width:
            raise ValueError(f"expected x [..., D] with D = {width} and at least one more dimension, got {x.shape}")
        lead, flat = x.shape[:-1], {}
        for name, value in (("mask", mask), ("token_ids", token_ids), ("replay", replay)):
            if value is not None:
                choices = value.shape[-1:] if name == "replay" else ()
                if value.shape != (*lead, *choices):
                    raise ValueError(f"expected {name} with the leading dimensions of x, {lead}, got {value.shape}")
                flat[name] = value.reshape(-1, *choices)
        if mask is not None and mask.dtype != jnp.bool_:
            raise TypeError(f"expected a mask of bool, got {mask.dtype}; use mask.astype(bool)")
        tokens, execution = x.reshape(-1, width), execution or self.execution
        parts = max(tokens.shape[0] // lead[-1], 1) if lead[-1] else 1
        inputs = {**self.params, **{name: history.get_value() for name, history in self.amax_history.items()}}
        out = moe_route_and_compute(
            tokens, inputs, self.config, execution, mesh=self.mesh, key=key, num_sequences=parts, **flat
        )
        experts = None if out.experts is None else out.experts.reshape(*lead, out.experts.shape[-1])
        return replace(out, output=out.output.reshape(x.shape), experts=experts)
