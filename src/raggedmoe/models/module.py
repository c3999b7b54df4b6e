"""`Decoder`: a whole model as a flax nnx module."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

from raggedmoe.models.cache import Cache
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import DecoderOutput, Params, decode, logits, mtp_forward
from raggedmoe.models.specs import check_model_params, is_trained, param_specs
from raggedmoe.moe.module import SelectionBias
from raggedmoe.params import init_params


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
    ) -> None:
        """New parameters from ``rngs``, or given ones by the names of `raggedmoe.models.specs.param_specs`."""
        specs = param_specs(config)
        if (rngs is None) == (params is None):
            raise ValueError("expected rngs for new parameters or params for given ones, got both or neither")
        if params is None:
            assert rngs is not None
            params = jax.jit(lambda key: init_params(specs, key))(rngs.params())
        check_model_params(specs, params)
        self.config = config
        # Axes are kept beside the values: sharding and checkpoints go by them.
        self.variables = nnx.Dict(
            {
                name: (nnx.Param if is_trained(name) else SelectionBias)(params[name], axes=spec.axes)
                for name, spec in specs.items()
            }
        )

    @property
    def params(self) -> Params:
        """The parameters as the functions of `raggedmoe.models.decoder` take them."""
        return {name: variable[...] for name, variable in self.variables.items()}

    def __call__(self, ids: Integer[Array, "B S"], *, key: jax.Array | None = None) -> Float[Array, "B S V"]:
        """Logits of the token after each, in float32 at least. ``key``: for random routing and jitter."""
        self._check_ids(ids)
        params = self.params
        return logits(params, decode(params, ids, self.config, key=key).hidden, self.config)

    def hidden(
        self,
        ids: Integer[Array, "B S"],
        *,
        mask: Bool[Array, "B S"] | None = None,
        segments: Integer[Array, "B S"] | None = None,
        cache: Cache | None = None,
        key: jax.Array | None = None,
    ) -> DecoderOutput:
        """Hidden states, what the experts did, and the cache. `raggedmoe.models.decoder.decode` says of what."""
        self._check_ids(ids)
        return decode(self.params, ids, self.config, mask=mask, segments=segments, cache=cache, key=key)

    def logits_further(self, ids: Integer[Array, "B S"]) -> list[Float[Array, "B S V"]]:
        """Multi-token prediction: for each module, logits of one token further than the last."""
        self._check_ids(ids)
        params = self.params
        hidden = decode(params, ids, self.config).hidden
        found, _ = mtp_forward(params, hidden, ids, self.config)
        return [logits(params, further, self.config) for further in found]

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
