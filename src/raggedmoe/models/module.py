"""`Decoder`: a whole model as a flax nnx module."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from raggedmoe.models.cache import Cache
from raggedmoe.models.companions import Companions
from raggedmoe.models.config import ModelConfig, check_execution
from raggedmoe.models.decoder import DEFAULT_EXECUTION, DecoderOutput, decode, logits
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.mtp import mtp_forward
from raggedmoe.models.parameters import check_lora, check_model_params, empty_amax_histories, param_specs
from raggedmoe.moe.config import strategy_name
from raggedmoe.moe.dispatch import check_has_mesh
from raggedmoe.moe.module import KINDS, AmaxHistory
from raggedmoe.params import Params
from raggedmoe.sharding.axes import AnyMesh, MeshAxes, logical_mesh
from raggedmoe.sharding.rules import make_params


class Decoder(nnx.Module):
    """A Mixture-of-Experts language model.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from raggedmoe import Decoder, model_preset
    >>> model = Decoder(model_preset("mixtral-tiny"), rngs=nnx.Rngs(0))
    >>> model(jnp.arange(12).reshape(2, 6)).shape
    (2, 6, 256)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs | None = None,
        params: Mapping[str, jax.Array] | None = None,
        execution: ModelExecution = DEFAULT_EXECUTION,
        mesh: AnyMesh | None = None,
        mesh_axes: MeshAxes | None = None,
        companions: Companions | None = None,
        amax_history: Params | None = None,
    ) -> None:
        """Make a model with new parameters or with given ones.

        Args:
          config: what the model is.
          rngs: whose key new parameters are drawn from.
          params: given parameters, by the names of `raggedmoe.models.parameters.param_specs`.
          execution: how it runs, unless a call says otherwise.
          mesh: devices over which sequences, weights and experts are split; None: all on one device. New parameters are
            drawn in their places; given ones stay where they are, best as `raggedmoe.Plan.shardings` has them,
            which takes ``mesh_axes`` too.
          mesh_axes: for a mesh with other axes, which of them are "data", "fsdp", "expert" and "tensor", as for `MoE`.
          companions: the tokenizer and whatever else belongs to its checkpoint, for `raggedmoe.interop.save`.
          amax_history: for an execution with delayed scales what they are made of, such as `TrainState.amax_history`;
            empty histories by default. No checkpoint has them.
        """
        check_execution(config, execution)
        check_lora(config)
        check_has_mesh(strategy_name(config.moe, execution.moe), mesh)
        self.mesh, specs = logical_mesh(mesh, mesh_axes), param_specs(config)
        params = make_params(specs, params, rngs, replace(self.mesh, tensor_split=execution.moe.tensor_split))
        check_model_params(specs, params)
        self.config, self.execution, self.companions = config, execution, companions
        if amax_history is None:
            amax_history = empty_amax_histories(config, execution.moe.quantization, mtp_layers=config.mtp_layers)
        self.amax_history = nnx.Dict({name: AmaxHistory(value) for name, value in amax_history.items()})
        # Axes are kept beside the values: sharding and checkpoints go by them.
        self.variables = nnx.Dict(
            {name: KINDS[spec.updated_by](params[name], axes=spec.axes) for name, spec in specs.items()}
        )

    @property
    def params(self) -> Params:
        """The parameters as the functions of `raggedmoe.models.decoder` take them."""
        return {name: variable.get_value() for name, variable in self.variables.items()}

    @property
    def layer_inputs(self) -> Params:
        """The parameters, and the histories of delayed scales."""
        return {**self.params, **{name: history.get_value() for name, history in self.amax_history.items()}}

    def __call__(
        self,
        ids: Integer[Array, "B S"],
        *,
        key: jax.Array | None = None,
        execution: ModelExecution | None = None,
    ) -> Float[Array, "B S V"]:
        """Compute the logits of the token after each, in float32 at least.

        ``key`` is for random routing and jitter; ``execution`` says how to run this call, if not as the model was made
        to.
        """
        out = self.hidden(ids, key=key, execution=execution)
        return logits(self.params, out.hidden, self.config)

    def hidden(
        self,
        ids: Integer[Array, "B S"],
        *,
        mask: Bool[Array, "B S"] | None = None,
        segments: Integer[Array, "B S"] | None = None,
        cache: Cache | None = None,
        key: jax.Array | None = None,
        execution: ModelExecution | None = None,
    ) -> DecoderOutput:
        """Compute hidden states, what the experts did, and the cache: see `raggedmoe.models.decoder.decode`."""
        self._check_ids(ids)
        return decode(
            self.layer_inputs,
            ids,
            self.config,
            execution or self.execution,
            mask=mask,
            segments=segments,
            cache=cache,
            key=key,
            mesh=self.mesh,
        )

    def mtp_logits(self, ids: Integer[Array, "B S"]) -> list[Float[Array, "B S V"]]:
        """Compute, for each module of multi-token prediction, the logits of one token further than the last."""
        params, hidden = self.layer_inputs, self.hidden(ids).hidden
        states, _ = mtp_forward(params, hidden, ids, self.config, self.execution, mesh=self.mesh)
        return [logits(params, further, self.config) for further in states]

    def _check_ids(self, ids: jax.Array) -> None:
        if not hasattr(ids, "dtype"):
            raise TypeError(f"expected ids [B S] as an array, got {type(ids).__name__}; use jnp.asarray(ids)")
        if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"expected ids [B S] of an integer type, got {ids.dtype}{list(ids.shape)}")
        if isinstance(ids, jax.core.Tracer) or not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"expected ids from 0 to {self.config.vocab_size - 1}, the vocabulary's last, got {low} to {high}; "
                "is this the model's tokenizer?"
            )
