"""Every parameter of a decoder, by name: ``embedding``, ``stacks.<stack>.<position>.<part>``, ``mtp.<n>.<part>``, …

The layers of a stack are one array, layer axis first, so that a scan can run over them.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from raggedmoe.kernels.amax import Amax
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.lora import GROUPS, ONE_LINEAR, is_matrix, with_adapters
from raggedmoe.models.config import GroupedQueryConfig, LatentConfig, LayerKind, ModelConfig
from raggedmoe.models.grouped_query import GROUPED_QUERY
from raggedmoe.models.latent import LATENT
from raggedmoe.models.mixer import Mixer
from raggedmoe.moe.amax_history import empty_histories
from raggedmoe.params import Params, ParamSpec, Specs, stack_spec

MIXERS: dict[type, Mixer] = {GroupedQueryConfig: GROUPED_QUERY, LatentConfig: LATENT}


def mixer_of(config: ModelConfig) -> Mixer:
    """Return the kind of attention that the model has."""
    return MIXERS[type(config.attention)]


def layer_specs(config: ModelConfig, kind: LayerKind) -> dict[str, ParamSpec]:
    """Declare the parameters of one layer."""
    width, dtype = config.model_dim, config.param_dtype
    attention = mixer_of(config).specs(config.attention, width, dtype)
    experts, mlp = {}, {}
    if kind.moe:
        experts = {f"moe.{name}": spec for name, spec in config.moe_layer.param_specs().items()}
    else:
        assert config.mlp_dim is not None
        mlp = {
            f"mlp.{name}": ParamSpec(
                shape=(config.mlp_dim, width), dtype=dtype, axes=("mlp_dim", "model_dim"), contracts=contracts
            )
            for name, contracts in (("wi_0", "model_dim"), ("wi_1", "model_dim"), ("wo", "mlp_dim"))
        }
    specs = {
        "attention_norm": _norm(width, dtype),
        **{f"attention.{name}": spec for name, spec in attention.items()},
        "mlp_norm": _norm(width, dtype),
        **mlp,
    }
    return {**with_adapters(specs, config.lora), **experts}


def mtp_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Declare the parameters of one multi-token-prediction module; embedding and head are the model's."""
    width, dtype = config.model_dim, config.param_dtype
    specs = {
        "embedding_norm": _norm(width, dtype),
        "hidden_norm": _norm(width, dtype),
        "projection": ParamSpec(
            shape=(width, 2 * width),
            dtype=dtype,
            axes=("model_dim", "embedding_and_hidden"),
            contracts="embedding_and_hidden",
        ),
    }
    last = with_adapters({"final_norm": _norm(width, dtype)}, config.lora)
    return {**with_adapters(specs, config.lora), **layer_specs(config, config.kind(config.num_layers)), **last}


def param_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Declare all parameters of the model."""
    width, dtype = config.model_dim, config.param_dtype
    matrix = ParamSpec(
        shape=(config.vocab_size, width), dtype=dtype, axes=("vocab", "model_dim"), contracts="model_dim"
    )
    tables = {"embedding": matrix, "final_norm": _norm(width, dtype)}
    if not config.tied_embeddings:
        tables["head"] = matrix
    tables = with_adapters(tables, config.lora)
    specs = {"embedding": tables.pop("embedding")}

    @functools.cache  # there may be many stacks, but few kinds of them
    def layers(kind: LayerKind, repeats: int) -> dict[str, ParamSpec]:
        return {name: stack_spec(spec, repeats) for name, spec in layer_specs(config, kind).items()}

    for s, stack in enumerate(config.stacks):
        for p, kind in enumerate(stack.kinds):
            specs.update({f"stacks.{s}.{p}.{name}": spec for name, spec in layers(kind, stack.repeats).items()})
    specs |= tables
    module = mtp_specs(config) if config.mtp_layers else {}
    for m in range(config.mtp_layers):
        specs.update({f"mtp.{m}.{name}": spec for name, spec in module.items()})
    return specs


def empty_amax_histories(
    config: ModelConfig, quantization: QuantConfig | None, *, mtp_layers: int = 0
) -> dict[str, Amax]:
    """Make the histories of the delayed scales of all layers with experts before the first step, by name.

    ``mtp_layers``: modules of multi-token prediction that are trained.
    """
    of_layer = empty_histories(config.moe_layer, quantization)
    histories: dict[str, Amax] = {}
    for s, stack in enumerate(config.stacks):
        for p in (p for p, kind in enumerate(stack.kinds) if kind.moe):
            for name, history in of_layer.items():
                stacked = jax.tree.map(lambda a, num=stack.repeats: jnp.zeros((num, *a.shape), a.dtype), history)
                histories[f"stacks.{s}.{p}.moe.{name}"] = stacked
    for m in range(mtp_layers if config.kind(config.num_layers).moe else 0):
        histories.update({f"mtp.{m}.moe.{name}": history for name, history in of_layer.items()})
    return histories


def check_lora(config: ModelConfig) -> None:
    """Require that every matrix that LoRA names is one of the model's, and that one has an adapter at all."""
    if config.lora is None:
        return
    plain = replace(config, lora=None)
    kinds = {config.kind(layer) for layer in range(config.num_layers)}
    names = {_of_linear(name) for kind in kinds for name, spec in layer_specs(plain, kind).items() if is_matrix(spec)}
    names -= {"moe.router_kernel"}
    unknown = [target for target in config.lora.targets if target not in GROUPS and target not in names]
    if unknown or not any(config.lora.has_target(name) for name in names):
        raise ValueError(
            f"LoRA's targets: expected {', '.join(GROUPS)}, or out of {', '.join(sorted(names))}, got "
            f"{', '.join(unknown or config.lora.targets)}, which this model has not"
        )


def _of_linear(name: str) -> str:
    part, _, leaf = name.rpartition(".")
    return f"{part}.{ONE_LINEAR.get(leaf, leaf)}"


def under(prefix: str, params: Params) -> dict[str, Any]:
    """Return the parameters whose name starts with a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def check_model_params(specs: Specs, params: Mapping[str, jax.Array]) -> None:
    """Require exactly the declared parameters, with their shapes."""
    missing, extra = sorted(specs.keys() - params.keys()), sorted(params.keys() - specs.keys())
    if missing or extra:
        raise ValueError(f"expected the model's {len(specs)} parameters; missing {missing}, unknown {extra}")
    for name, spec in specs.items():
        if tuple(params[name].shape) != spec.shape:
            raise ValueError(
                f"expected {name} ({', '.join(spec.axes)}) = {spec.shape}, got {tuple(params[name].shape)}; "
                "check the configuration's sizes"
            )


def _norm(width: int, dtype: Any) -> ParamSpec:
    return ParamSpec(shape=(width,), dtype=dtype, axes=("model_dim",), init="ones")
